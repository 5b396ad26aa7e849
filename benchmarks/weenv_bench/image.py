"""The image that is started: six layers like those of a coding-agent environment, built from Debian, PyPI and npm.

Debian, build tools, a scientific Python venv, a git checkout of a large library with its history, an agent CLI, an
evaluator. Each layer is what one ``RUN`` line changed: the step runs in a chroot on an overlay mount, the layer is a tar of its
upper directory. The same six tars are then compressed with gzip and with zstd -3, so that every contender unpacks the
same bytes. Everything is cached below :func:`cache_root`; a finished step is never done twice.

``quick`` is the same thing at a tenth of the size, for work on the benchmark itself.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import Any

MEDIA_CONFIG = "application/vnd.oci.image.config.v1+json"
MEDIA_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
MEDIA_INDEX = "application/vnd.oci.image.index.v1+json"
MEDIA_LAYER = "application/vnd.oci.image.layer.v1.tar"

ENV = "PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

DEBIAN_TOOLS = (
    "build-essential", "cmake", "git", "gdb", "python3-dev", "python3-venv", "ripgrep", "clang", "strace", "less", "procps",
    "file", "unzip", "zip", "curl", "wget", "rsync", "jq", "sqlite3", "libssl-dev", "libffi-dev", "zlib1g-dev",
    "libxml2-dev", "gfortran", "pkg-config",
)  # fmt: skip
DEBIAN_TOOLS_QUICK = ["git", "python3-venv"]
SCIENCE = (
    "numpy", "pandas", "scipy", "sympy", "matplotlib", "scikit-learn", "pillow", "networkx", "pytest", "hypothesis",
)  # fmt: skip
SCIENCE_QUICK = ["numpy", "pandas", "sympy", "pytest", "hypothesis"]
HISTORY = ("1.6.2", "1.7.1", "1.8", "1.9", "1.10.1", "1.11.1", "1.12", "1.13.3")
HISTORY_QUICK = ("1.12", "1.13.3")
AGENT = (
    "@anthropic-ai/claude-code-linux-x64@2.1.132", "typescript", "eslint", "prettier", "esbuild", "playwright-core",
    "caniuse-lite", "@img/sharp-libvips-linux-x64", "@biomejs/cli-linux-x64", "@swc/core-linux-x64-gnu",
)  # fmt: skip
"""The first is one binary of about 240 MB in that version; only its ``--version`` is run."""
AGENT_QUICK = ("esbuild", "prettier")
EVALUATOR = ("pytest", "swebench", "datasets", "pytest-xdist", "pytest-timeout")
EVALUATOR_QUICK = ["pytest", "inspect-ai"]


COMPILE = (
    """printf '#include <stdio.h>\\nint main(void){puts("hi");return 0;}' >/tmp/a.c && gcc -O2 -o /tmp/a /tmp/a.c && /tmp/a"""
)


class BenchError(Exception):
    """The benchmark cannot go on; the message says why and what to do."""


def say(message: str) -> None:
    """Progress, to stderr: stdout is the report's."""
    print(message, file=sys.stderr, flush=True)


def cache_root() -> str:
    """Where built images and tools live between runs."""
    return os.path.join(os.environ.get("WEENV_TOOLS", "/var/cache/weenv-tools"), "bench")


@dataclass(frozen=True)
class Layer:
    """One layer: its tar on disk, the tar's digest and length (bytes)."""

    path: str
    diff_id: str
    size: int


@dataclass(frozen=True)
class Image:
    """A built image: the tars, the OCI layout directory that holds both compressions, and what is in it."""

    name: str
    layers: list[Layer]
    layout: str
    files: int
    unpacked: int
    sizes: dict[str, int]
    """Compressed size in bytes of all layers, by tag: ``gzip``, ``zstd``."""

    @property
    def base(self) -> str:
        """The directory of everything made from this image."""
        return os.path.dirname(self.layout)


def run(*command: str, **keywords: object) -> None:
    """Run a command, its output to our stderr. Raises BenchError."""
    done = subprocess.run(command, stdout=sys.stderr, check=False, **keywords)  # type: ignore[call-overload]
    if done.returncode:
        raise BenchError(f"{' '.join(command)[:200]} failed with exit code {done.returncode}")


# --- steps -----------------------------------------------------------------------------------------------------------


def debian_mirror() -> tuple[str, str]:
    """(suite, URI) of this machine's own Debian source, from apt itself."""
    lines = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(CODENAME)|$(REPO_URI)|$(COMPONENT)", "Created-By: Packages"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for line in lines:
        origin, codename, uri, component = line.split("|")
        if origin == "Debian" and component == "main" and "-" not in codename:
            return codename, uri
    raise BenchError("apt knows no Debian main archive: run apt-get update first")


@contextmanager
def mounted(root: str, lowers: list[str], upper: str, work: str) -> Iterator[None]:
    """An overlay at ``root`` with what a chroot needs in it: proc, dev, name service, certificates, apt's and npm's sources."""
    options = f"lowerdir={':'.join(reversed(lowers))},upperdir={upper},workdir={work},index=off,metacopy=off,redirect_dir=off"
    run("mount", "-t", "overlay", "overlay", "-o", options, root)
    try:
        for source in ("/proc", "/dev", "/etc/resolv.conf", "/etc/hosts"):
            target = root + source
            if not os.path.isdir(source) and not os.path.exists(target):
                with open(target, "w"):
                    pass
            run("mount", "--bind", source, target)
        yield
    finally:
        run("umount", "-R", "-l", root)


def inside(root: str, *command: str, environ: dict[str, str] | None = None) -> None:
    """Run a command in the chroot with a plain environment."""
    keep = {k: v for k, v in os.environ.items() if k.lower() in ("http_proxy", "https_proxy", "no_proxy")}
    env = {
        **keep,
        "PATH": ENV[5:],
        "HOME": "/root",
        "LC_ALL": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        **(environ or {}),
    }
    run("chroot", root, *command, env=env)


@contextmanager
def host_certificates(root: str) -> Iterator[dict[str, str]]:
    """Lend the chroot this machine's certificate bundle: it may know a local authority. Leaves nothing behind."""
    bundle = "/etc/ssl/certs/ca-certificates.crt"
    target = root + "/tmp/lent-certificates.crt"
    if os.path.exists(bundle):
        shutil.copy(bundle, target)
    try:
        path = "/tmp/lent-certificates.crt"
        yield {"PIP_CERT": path, "SSL_CERT_FILE": path, "NODE_EXTRA_CA_CERTS": path, "REQUESTS_CA_BUNDLE": path}
    finally:
        if os.path.exists(target):
            os.unlink(target)


def pip(root: str, venv: str, *arguments: str) -> None:
    """pip in a venv of the chroot, with the index that this machine's pip uses."""
    # Only an explicitly configured index is passed on; the wheel folders of this machine are not in the chroot.
    found = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    ).stdout.strip()
    index = {"PIP_INDEX_URL": os.environ.get("PIP_INDEX_URL", found)} if found or "PIP_INDEX_URL" in os.environ else {}
    with host_certificates(root) as certificates:
        quiet = {
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_CACHE_DIR": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
            "PIP_PROGRESS_BAR": "off",
        }
        inside(
            root,
            f"{venv}/bin/python",
            "-m",
            "pip",
            *arguments,
            environ={**certificates, **quiet, **index, "PIP_DEFAULT_TIMEOUT": "180"},
        )


def debian(root: str) -> None:
    """Layer 1."""
    suite, uri = debian_mirror()
    run("debootstrap", "--variant=minbase", "--include=ca-certificates", suite, root, uri)
    shutil.rmtree(root + "/var/cache/apt/archives", ignore_errors=True)
    os.makedirs(root + "/var/cache/apt/archives/partial")


def packages(names: Sequence[str]) -> Callable[[str], None]:
    """Layer 2."""

    def step(root: str) -> None:
        inside(root, "apt-get", "update", "-qq")
        inside(root, "apt-get", "install", "-y", "-qq", "--no-install-recommends", *names)
        inside(root, "apt-get", "clean")
        for name in os.listdir(root + "/var/lib/apt/lists"):
            path = f"{root}/var/lib/apt/lists/{name}"
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)

    return step


def venv(path: str, names: Sequence[str]) -> Callable[[str], None]:
    """Layers 3 and 6."""

    def step(root: str) -> None:
        inside(root, "python3", "-m", "venv", path)
        pip(root, path, "install", *names)

    return step


def checkout(versions: tuple[str, ...]) -> Callable[[str], None]:
    """Layer 4: a work tree whose history is one commit per release, so that its pack holds real deltas."""

    def step(root: str) -> None:
        git = {"GIT_AUTHOR_NAME": "bench", "GIT_AUTHOR_EMAIL": "bench@example.org", "GIT_COMMITTER_NAME": "bench",
               "GIT_COMMITTER_EMAIL": "bench@example.org"}  # fmt: skip
        inside(root, "python3", "-m", "venv", "/tmp/dl")
        inside(root, "git", "init", "-q", "/repo/sympy")
        for number, version in enumerate(versions):
            pip(root, "/tmp/dl", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", "/tmp/sdist", f"sympy=={version}")
            (archive,) = os.listdir(root + "/tmp/sdist")
            for name in os.listdir(root + "/repo/sympy"):
                if name != ".git":
                    path = f"{root}/repo/sympy/{name}"
                    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
            inside(root, "tar", "-xf", f"/tmp/sdist/{archive}", "-C", "/repo/sympy", "--strip-components=1", "--no-same-owner")
            date = {
                "GIT_AUTHOR_DATE": f"2020-01-{number + 1:02}T00:00:00Z",
                "GIT_COMMITTER_DATE": f"2020-01-{number + 1:02}T00:00:00Z",
            }
            inside(root, "git", "-C", "/repo/sympy", "add", "-A", environ=git)
            inside(root, "git", "-C", "/repo/sympy", "commit", "-q", "-m", f"sympy {version}", environ={**git, **date})
            shutil.rmtree(root + "/tmp/sdist")
        shutil.rmtree(root + "/tmp/dl")

    return step


def agent(names: Sequence[str]) -> Callable[[str], None]:
    """Layer 5: npm packages, one of which is a single large binary; npm of this machine, no install scripts."""

    def step(root: str) -> None:
        os.makedirs(root + "/opt/agent")
        run(
            "npm", "install", "--prefix", root + "/opt/agent", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", *names
        )

    return step


@dataclass(frozen=True)
class Recipe:
    """What an image is made of, and the commands' parts that depend on it."""

    steps: tuple[tuple[str, Callable[[str], None]], ...]
    agent: str
    evaluator_import: str
    tests: str
    short_tests: str
    compile: str


def recipe(quick: bool) -> Recipe:
    """The full image or its small sibling."""
    return Recipe(
        steps=(
            ("debian", debian),
            ("tools", packages(DEBIAN_TOOLS_QUICK if quick else DEBIAN_TOOLS)),
            ("science", venv("/opt/venv", SCIENCE_QUICK if quick else SCIENCE)),
            ("checkout", checkout(HISTORY_QUICK if quick else HISTORY)),
            ("agent", agent(AGENT_QUICK if quick else AGENT)),
            ("evaluator", venv("/opt/eval", EVALUATOR_QUICK if quick else EVALUATOR)),
        ),
        agent="/opt/agent/node_modules/@esbuild/linux-x64/bin/esbuild" if quick
        else "/opt/agent/node_modules/@anthropic-ai/claude-code-linux-x64/claude",
        evaluator_import="import inspect_ai" if quick else "import datasets, swebench.harness.run_evaluation",
        tests="sympy/core/tests/test_basic.py sympy/core/tests/test_expr.py",
        short_tests="sympy/core/tests/test_basic.py",
        compile="" if quick else COMPILE,
    )  # fmt: skip


# --- layers ----------------------------------------------------------------------------------------------------------


def write_layer(upper: str, out: str) -> Layer:
    """Tar an overlay's upper directory as an OCI layer: names sorted, whiteouts as ``.wh.`` members."""
    hasher = hashlib.sha256()

    class Hashing:
        def __init__(self, file: object) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            hasher.update(data)
            return self.file.write(data)  # type: ignore[attr-defined, no-any-return]

    with open(out + ".tmp", "wb", buffering=1 << 20) as file:
        sink: Any = Hashing(file)
        with tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar:
            for folder, names, files in os.walk(upper):
                names.sort()
                relative = os.path.relpath(folder, upper)
                if relative != "." and _xattr(folder, "trusted.overlay.opaque") == b"y":
                    tar.addfile(tarfile.TarInfo(f"{relative}/.wh..wh..opq"))
                for name in sorted(names + files):
                    path = os.path.join(folder, name)
                    member = os.path.normpath(os.path.join(relative, name))
                    status = os.lstat(path)
                    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                        tar.addfile(tarfile.TarInfo(os.path.normpath(os.path.join(relative, ".wh." + name))))
                        continue
                    if stat.S_ISSOCK(status.st_mode):
                        continue
                    info = tar.gettarinfo(path, member)
                    capability = _xattr(path, "security.capability")
                    if capability:
                        info.pax_headers = {"SCHILY.xattr.security.capability": capability.decode("utf-8", "surrogateescape")}
                    if info.isreg():
                        with open(path, "rb") as source:
                            tar.addfile(info, source)
                    else:
                        tar.addfile(info)
    os.rename(out + ".tmp", out)
    return Layer(out, "sha256:" + hasher.hexdigest(), os.path.getsize(out))


def _xattr(path: str, name: str) -> bytes:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError:
        return b""


def file_digest(path: str) -> str:
    """sha256 of a file, as a digest."""
    with open(path, "rb") as file:
        return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()


def compress(layer: Layer, blobs: str, kind: str) -> tuple[str, int]:
    """Compress a layer as ``gzip`` (level 6, what docker push does) or ``zstd`` (level 3) into ``blobs``; (digest, size)."""
    with tempfile.NamedTemporaryFile(dir=blobs, delete=False) as out:
        tool = ["gzip", "-6", "-n", "-c"] if kind == "gzip" else ["zstd", "-3", "-T0", "-q", "-c"]
        run_to = subprocess.run([*tool, layer.path], stdout=out, check=False)
    if run_to.returncode:
        raise BenchError(f"{tool[0]} failed on {layer.path}")
    digest = file_digest(out.name)
    os.chmod(out.name, 0o644)
    os.rename(out.name, os.path.join(blobs, digest[7:]))
    return digest, os.path.getsize(os.path.join(blobs, digest[7:]))


def put_blob(blobs: str, data: bytes) -> dict[str, object]:
    """Store bytes in a layout's blob folder; returns a descriptor without its media type."""
    digest = hashlib.sha256(data).hexdigest()
    with open(os.path.join(blobs, digest), "wb") as file:
        file.write(data)
    return {"digest": "sha256:" + digest, "size": len(data)}


def count(layers: list[Layer]) -> tuple[int, int]:
    """(files, bytes of regular files) over all layers."""
    files = size = 0
    for layer in layers:
        with tarfile.open(layer.path, "r|") as tar:
            for member in tar:
                files += 1
                size += member.size if member.isreg() else 0
                tar.members = []  # type: ignore[attr-defined]
    return files, size


def build(quick: bool = False) -> Image:
    """Build the image, or find it built. Needs root, debootstrap, npm and the registries. Raises BenchError."""
    name = "quick" if quick else "full"
    base = os.path.join(cache_root(), "image2-" + name)
    summary = os.path.join(base, "image.json")
    if os.path.exists(summary):
        with open(summary) as file:
            raw = json.load(file)
        return Image(**{**raw, "layers": [Layer(**layer) for layer in raw["layers"]]})
    missing = [tool for tool in ("debootstrap", "npm", "zstd", "gzip") if shutil.which(tool) is None]
    if missing:
        say(f"installing {', '.join(missing)}")
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        run("apt-get", "-qq", "update", env=quiet)
        run("apt-get", "-qq", "-y", "--no-install-recommends", "install", *missing, env=quiet)
    os.makedirs(base, exist_ok=True)
    lowers: list[str] = []
    layers: list[Layer] = []
    for number, (step_name, step) in enumerate(recipe(quick).steps, 1):
        done = os.path.join(base, f"{number}-{step_name}")
        tar = os.path.join(base, f"{number}-{step_name}.tar")
        if not os.path.exists(done):
            say(f"image {name}: layer {number}, {step_name}")
            _make(base, done, lowers, step)
        if not os.path.exists(tar + ".json"):
            layer = write_layer(done, tar)
            with open(tar + ".json", "w") as file:
                json.dump(layer.__dict__, file)
        with open(tar + ".json") as file:
            layers.append(Layer(**json.load(file)))
        lowers.append(done)
    image = _layout(name, base, layers)
    with open(summary + ".tmp", "w") as file:
        json.dump({**image.__dict__, "layers": [layer.__dict__ for layer in layers]}, file, indent=1)
    os.rename(summary + ".tmp", summary)
    for path in lowers:
        shutil.rmtree(path)
    return image


def _make(base: str, done: str, lowers: list[str], step: Callable[[str], None]) -> None:
    upper, work, root = (os.path.join(base, name) for name in ("upper", "work", "root"))
    for path in (upper, work, root):
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
    if lowers:
        with mounted(root, lowers, upper, work):
            step(root)
    else:
        step(upper)
    os.rename(upper, done)
    shutil.rmtree(work)
    os.rmdir(root)


def _layout(name: str, base: str, layers: list[Layer]) -> Image:
    layout = os.path.join(base, "layout")
    blobs = os.path.join(layout, "blobs", "sha256")
    shutil.rmtree(layout, ignore_errors=True)
    os.makedirs(blobs)
    config = put_blob(blobs, json.dumps({
        "architecture": "amd64", "os": "linux", "config": {"Env": [ENV], "Cmd": ["/bin/sh"], "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }).encode())  # fmt: skip
    manifests = []
    sizes = {}
    for kind in ("gzip", "zstd"):
        say(f"image {name}: {kind}")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            parts = list(pool.map(compress, layers, repeat(blobs), repeat(kind)))
        sizes[kind] = sum(size for _, size in parts)
        manifest = put_blob(blobs, json.dumps({
            "schemaVersion": 2, "mediaType": MEDIA_MANIFEST, "config": {"mediaType": MEDIA_CONFIG, **config},
            "layers": [{"mediaType": f"{MEDIA_LAYER}+{kind}", "digest": digest, "size": size} for digest, size in parts],
        }).encode())  # fmt: skip
        manifests.append({"mediaType": MEDIA_MANIFEST, **manifest, "annotations": {"org.opencontainers.image.ref.name": kind}})
    with open(os.path.join(layout, "index.json"), "w") as file:
        json.dump({"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": manifests}, file)
    with open(os.path.join(layout, "oci-layout"), "w") as file:
        file.write('{"imageLayoutVersion": "1.0.0"}')
    files, unpacked = count(layers)
    return Image(name, layers, layout, files, unpacked, sizes)


if __name__ == "__main__":
    print(build("--quick" in sys.argv))
