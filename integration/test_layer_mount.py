"""``weenv layer mount`` and ``umount``: a layer file, and a layer in a registry, looked at without containerd."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from weenv_testkit import tools
from weenv_testkit.images import Member, write_tar
from weenv_testkit.procs import mounts_under, processes_of
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store


def weenv(*argv: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*tools.weenv(), *argv], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def leftovers() -> set[str]:
    return {name for name in os.listdir("/var/tmp") if name.startswith("weenv-mount-")}


@pytest.fixture
def point(home: str) -> str:
    path = os.path.join(home, "point")
    os.makedirs(path, exist_ok=True)
    return path


@pytest.fixture(scope="module")
def layer(home: str) -> str:
    members = [
        Member.directory("etc"), Member("etc/hello", b"hello\n"), Member("big", os.urandom(3 << 20)),
        Member.symlink("link", "etc/hello"), Member.hardlink("hard", "etc/hello"),
    ]  # fmt: skip
    tar = write_tar(os.path.join(home, "l.tar"), members)
    weenv("layer", "convert", tar, os.path.join(home, "l.tar.zst"))
    os.mkdir(os.path.join(home, "expected"))
    subprocess.run(["tar", "-C", os.path.join(home, "expected"), "-xf", tar], check=True)
    return os.path.join(home, "l.tar.zst")


def test_a_file_is_mounted_and_unmounted(layer: str, point: str, home: str) -> None:
    before = leftovers()
    weenv("layer", "mount", layer, point)
    try:
        assert subprocess.run(["diff", "-r", os.path.join(home, "expected"), point], check=False).returncode == 0
        assert os.stat(f"{point}/hard").st_ino == os.stat(f"{point}/etc/hello").st_ino
        with pytest.raises(OSError, match="Read-only"):
            Path(point, "new").write_text("x")
        with open(f"{point}/big", "rb"):
            busy = weenv("layer", "umount", point, code=1)
        assert busy.stderr.startswith(f"weenv: {point} is in use")
        again = weenv("layer", "mount", layer, point, code=1)
        assert again.stderr == f"weenv: a layer is mounted at {point} already\n  weenv layer umount {point}\n"
        assert os.path.exists(f"{point}/big"), "refusing has changed nothing"
    finally:
        weenv("layer", "umount", point)
    assert leftovers() == before
    assert not mounts_under(home)
    assert not processes_of("weenv-mount-")


def test_a_layer_in_a_registry_fetches_what_is_read(store: Store, registry: Registry, point: str) -> None:
    ref = store.lazy("debian")
    manifest, _ = registry.manifest("test/debian", "lazy")
    base = manifest["layers"][0]  # type: ignore[index]
    many = weenv("layer", "mount", ref, point, code=1)
    assert "an image of 3 layers; name one of them" in many.stderr
    assert base["digest"] in many.stderr
    mark = registry.mark()
    weenv("layer", "mount", f"{registry.host}/test/debian@{base['digest']}", point)
    try:
        assert b"ELF" in Path(point, "usr/bin/perl").read_bytes()[:4]
        assert sum(registry.blob_bytes(mark).values()) < 0.4 * base["size"]
    finally:
        weenv("layer", "umount", point)


def test_the_configuration_says_where_it_is(store: Store, registry: Registry, point: str, tmp_path: Path) -> None:
    """Both for what is looked up and, in the mount's own data server, for what is read."""
    store.lazy("small")
    manifest, _ = registry.manifest("test/small", "lazy")
    name = f"mirrored.example/test/small@{manifest['layers'][0]['digest']}"  # type: ignore[index]
    folder, config = tmp_path / "certs.d/mirrored.example", tmp_path / "weenv.toml"
    folder.mkdir(parents=True)
    (folder / "hosts.toml").write_text(f'server = "http://127.0.0.1:1"\n[host."http://{registry.host}"]\n')
    config.write_text(f'[registry]\nconfig_path = "{tmp_path}/certs.d"\nattempts = 1\n')
    mark = registry.mark()
    weenv("layer", "mount", "--config", str(config), name, point)
    try:
        files = [path for path in Path(point).rglob("*") if path.is_file() and not path.is_symlink()]
        assert sum(len(path.read_bytes()) for path in files) > 100_000
        assert all(request.path.endswith("?ns=mirrored.example") for request in registry.requests(mark))
        assert sum(registry.blob_bytes(mark).values()) > 10_000
    finally:
        weenv("layer", "umount", point)


def test_what_cannot_be_mounted_leaves_nothing(layer: str, point: str, home: str, tmp_path: Path) -> None:
    before = leftovers()
    damaged = tmp_path / "damaged"
    data = bytearray(Path(layer).read_bytes())
    data[-300] ^= 1  # within the tail
    damaged.write_bytes(data)
    for source in (str(damaged), os.path.join(home, "l.tar")):
        said = weenv("layer", "mount", source, point, code=1).stderr
        assert said.startswith("weenv: ")
        assert len(said.splitlines()) <= 2
    assert "nothing that weenv layer mount made" in weenv("layer", "umount", point, code=1).stderr
    assert leftovers() == before
    assert not mounts_under(home)
