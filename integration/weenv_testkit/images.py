"""Images for the tests: OCI layouts from tar streams, directories, debootstrap and hand-made members.

A layer is made of an uncompressed tar file; :class:`Layout` compresses it (gzip, zstd or not at all), writes config,
manifest and index, and pushes. Nothing here uses the project's own converter, registry or layer code.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weenv_testkit import tools
from weenv_testkit.fetch_tools import TOOLS
from weenv_testkit.procs import mounts_under, run
from weenv_testkit.registry import Registry

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
MTIME = 1_700_000_000


@dataclass(frozen=True)
class Member:
    """A tar member by hand. ``kind`` is a tarfile type (``tarfile.REGTYPE`` ...); ``pax`` goes into its own header."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: float = MTIME
    link: str = ""
    device: tuple[int, int] = (0, 0)
    pax: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def directory(cls, name: str, mode: int = 0o755, **more: Any) -> Member:
        """A directory."""
        return cls(name, kind=tarfile.DIRTYPE, mode=mode, **more)

    @classmethod
    def symlink(cls, name: str, target: str, **more: Any) -> Member:
        """A symbolic link."""
        return cls(name, kind=tarfile.SYMTYPE, link=target, mode=0o777, **more)

    @classmethod
    def hardlink(cls, name: str, target: str, **more: Any) -> Member:
        """A hard link to a member of the same layer."""
        return cls(name, kind=tarfile.LNKTYPE, link=target, **more)


def xattr(name: str, value: str) -> dict[str, str]:
    """PAX record for an extended attribute, in the form that containerd and GNU tar read."""
    return {f"SCHILY.xattr.{name}": value}


def write_tar(path: str, members: Iterable[Member]) -> str:
    """Write members as they are, in their order, as a PAX tar; ``path``."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape") as archive:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.mode, info.uid, info.gid = member.kind, member.mode, member.uid, member.gid
            info.mtime, info.linkname, info.size = member.mtime, member.link, len(member.data)
            info.devmajor, info.devminor = member.device
            info.pax_headers = dict(member.pax)
            archive.addfile(info, io.BytesIO(member.data))
    return path


@dataclass(frozen=True)
class Layer:
    """A layer blob in a layout."""

    digest: str
    size: int
    diff_id: str
    media_type: str


@dataclass(frozen=True)
class Image:
    """A manifest in a layout: its digest, its size, its config's digest and its layers, the lowest first."""

    digest: str
    size: int
    config: str
    layers: tuple[Layer, ...]


class Layout:
    """An OCI image layout in ``directory``; images are tagged in its index.json."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.blobs = os.path.join(directory, "blobs", "sha256")
        os.makedirs(self.blobs, exist_ok=True)
        with open(os.path.join(directory, "oci-layout"), "w") as file:
            file.write('{"imageLayoutVersion":"1.0.0"}')
        self._index: list[dict[str, Any]] = []
        self._layers: dict[tuple[str, str], Layer] = {}

    def path(self, digest: str) -> str:
        """Where a blob is."""
        return os.path.join(self.blobs, digest.removeprefix("sha256:"))

    def put(self, data: bytes) -> tuple[str, int]:
        """Store bytes as a blob; digest and size."""
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        with open(self.path(digest), "wb") as file:
            file.write(data)
        return digest, len(data)

    def layer(self, tar: str, compression: str = "gzip", *, level: int = 1) -> Layer:
        """Store a tar file as a layer; ``compression`` is ``gzip`` (of ``level``), ``zstd`` or ``none``."""
        known = self._layers.get((tar, compression))
        if known is not None:
            return known
        temporary = os.path.join(self.blobs, f".layer-{os.getpid()}")
        if compression == "gzip":
            with (
                open(tar, "rb") as source,
                open(temporary, "wb") as sink,
                gzip.GzipFile("", "wb", compresslevel=level, fileobj=sink, mtime=0) as packed,
            ):
                shutil.copyfileobj(source, packed, 1 << 20)
        elif compression == "zstd":
            run("zstd", "-q", "-f", "-3", "-T0", "-o", temporary, tar)
        else:
            shutil.copyfile(tar, temporary)
        digest = "sha256:" + file_digest(temporary)
        size = os.path.getsize(temporary)
        os.rename(temporary, self.path(digest))
        suffix = {"gzip": "+gzip", "zstd": "+zstd", "none": ""}[compression]
        layer = Layer(digest, size, "sha256:" + file_digest(tar), LAYER + suffix)
        self._layers[tar, compression] = layer
        return layer

    def image(self, layers: Sequence[Layer], tag: str | None = None, **config: Any) -> Image:
        """Write config and manifest of an image; ``config`` adds to its run configuration (``Env``, ``Cmd``, ...)."""
        machine = "arm64" if os.uname().machine == "aarch64" else "amd64"
        body = {
            "architecture": machine,
            "os": "linux",
            "created": "2024-01-01T00:00:00Z",
            "config": {"Env": ["PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"], "Cmd": ["/bin/sh"], **config},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
            "history": [{"created": "2024-01-01T00:00:00Z", "created_by": f"layer {n}"} for n in range(len(layers))],
        }
        config_digest, config_size = self.put(json.dumps(body).encode())
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": config_digest, "size": config_size},
            "layers": [{"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size} for layer in layers],
        }
        digest, size = self.put(json.dumps(manifest).encode())
        if tag is not None:
            self.tag(digest, size, MANIFEST, tag, {"architecture": machine, "os": "linux"})
        return Image(digest, size, config_digest, tuple(layers))

    def index(self, images: Mapping[str, Image], tag: str) -> str:
        """Write an image index, ``{"linux/amd64": image}``; its digest."""
        entries = []
        for platform, image in images.items():
            system, _, machine = platform.partition("/")
            where = {"os": system, "architecture": machine}
            entries.append({"mediaType": MANIFEST, "digest": image.digest, "size": image.size, "platform": where})
        body = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
        digest, size = self.put(json.dumps(body).encode())
        self.tag(digest, size, INDEX, tag, None)
        return digest

    def tag(self, digest: str, size: int, media_type: str, tag: str, platform: dict[str, str] | None) -> None:
        """Name a manifest in index.json."""
        entry: dict[str, Any] = {"mediaType": media_type, "digest": digest, "size": size}
        entry["annotations"] = {"org.opencontainers.image.ref.name": tag}
        if platform is not None:
            entry["platform"] = platform
        self._index = [known for known in self._index if known["annotations"] != entry["annotations"]] + [entry]
        body = {"schemaVersion": 2, "mediaType": INDEX, "manifests": self._index}
        with open(os.path.join(self.directory, "index.json"), "w") as file:
            json.dump(body, file)

    def push(self, tag: str, registry: Registry, repository: str, target: str | None = None) -> str:
        """Push a tagged image or index; ``host/repository:tag``."""
        entry = next(item for item in self._index if item["annotations"]["org.opencontainers.image.ref.name"] == tag)
        self._push(entry["digest"], entry["mediaType"], registry, repository, target or tag)
        return f"{registry.host}/{repository}:{target or tag}"

    def _push(self, digest: str, media_type: str, registry: Registry, repository: str, reference: str) -> None:
        with open(self.path(digest), "rb") as file:
            data = file.read()
        body = json.loads(data)
        for child in body.get("manifests", []):
            self._push(child["digest"], child["mediaType"], registry, repository, child["digest"])
        for blob in [*body.get("layers", []), *([body["config"]] if "config" in body else [])]:
            registry.push_blob(repository, blob["digest"], self.path(blob["digest"]))
        registry.push_manifest(repository, reference, data, media_type)


def file_digest(path: str) -> str:
    """sha256 of a file, in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pause(layout: Layout, scratch: str) -> Image:
    """An image with nothing but busybox that sleeps: what CRI starts first in every pod. Tagged ``1``."""
    with open(tools.busybox(), "rb") as file:
        program = file.read()
    members = [Member.directory("bin"), Member("bin/busybox", program, mode=0o755), Member.symlink("bin/sleep", "busybox")]
    tar = write_tar(os.path.join(scratch, "pause.tar"), members)
    return layout.image([layout.layer(tar)], "1", Entrypoint=["/bin/sleep", "1000000"], Cmd=None)


def busybox_members() -> list[Member]:
    """Directories and applets of a tiny root file system in which a shell works."""
    with open(tools.busybox(), "rb") as file:
        program = file.read()
    applets = run(tools.busybox(), "--list").split()
    members = [Member.directory(name) for name in ("bin", "dev", "etc", "proc", "sys", "root", "usr", "usr/bin", "var")]
    members.append(Member.directory("tmp", 0o1777))
    members.append(Member("bin/busybox", program, mode=0o755))
    members += [Member.symlink(f"bin/{name}", "busybox") for name in applets if name != "busybox"]
    members.append(Member("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n"))
    return members


def debian_tar(include: Sequence[str] = (), suite: str = "") -> str:
    """Path of a tar of a debootstrapped minimal Debian of the machine's own suite, or ``suite``, with more packages; cached.

    Owners, modes, capabilities and device nodes are as debootstrap leaves them; package lists and downloads are left out.
    """
    source = tools.sources()
    suite = suite or source["codename"]
    name = hashlib.sha256(json.dumps([suite, sorted(include), 2]).encode()).hexdigest()[:12]
    final = TOOLS / "images" / f"debian-{suite}-{name}.tar"
    if final.exists():
        return str(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    work = final.with_name(f".new-{name}-{os.getpid()}")
    try:
        root = str(work / "root")
        options = ["--variant=minbase", f"--keyring={source['keyring']}"]
        if include:
            options.append("--include=" + ",".join(include))
        work.mkdir()
        run("debootstrap", *options, suite, root, source["mirror"], timeout=900)
        assert not mounts_under(root), f"debootstrap left mounts under {root}"
        excluded = ("./var/cache/apt/*", "./var/lib/apt/lists/*", "./proc/*", "./sys/*", "./var/log/bootstrap.log")
        tar_to(str(work / "tar"), root, [f"--exclude={pattern}" for pattern in excluded])
        os.rename(work / "tar", final)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return str(final)


def tar_to(path: str, directory: str, options: Sequence[str] = ()) -> str:
    """GNU tar of a directory as an image layer has it: all xattrs, numbers for owners, names in order; ``path``."""
    argv = ["tar", "--create", "--file", path, "--format=posix", "--xattrs", "--xattrs-include=*", "--numeric-owner"]
    argv += ["--sort=name", "--pax-option=delete=atime,delete=ctime", *options, "--directory", directory, "."]
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return path
