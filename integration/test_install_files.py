"""What ``weenv install`` puts where, judged by systemd's own tools and by containerd's own reading of its configuration."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from weenv.cli.main import cli, explain
from weenv.core.errors import WeenvError
from weenv.systemd.install.containerd import DROP_IN, MAIN, TRANSFER
from weenv_testkit import kernels, tools
from weenv_testkit.installguest import PACKAGES, SUITES, suite_to_boot
from weenv_testkit.procs import run
from weenv_testkit.trees import contents

PROGRAM = "/opt/weenv/bin/weenv"
EXPOSURE = {"blobfs": 5.1, "snapshotter": 6.1, "elastic": 3.3, "gateway": 2.1, "nri": 1.6}
"""``systemd-analyze security``, at most: 10 is a service without any sandboxing."""
DOCKER_CE = 'disabled_plugins = ["cri"]\n\n#root = "/var/lib/containerd"\n#[grpc]\n'


def weenv(*arguments: str, status: int = 0) -> str:
    """The command in this process: starting one takes as long as all that it does."""
    done = CliRunner().invoke(cli, arguments)
    text = done.output + (explain(done.exception) if isinstance(done.exception, WeenvError) else "")
    assert done.exit_code == status and (done.exception is None or isinstance(done.exception, WeenvError)), text
    return text


def output(argv: list[str], status: int) -> str:
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == status, done.stdout
    return done.stdout


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A system with nothing in it but the command."""
    root = tmp_path / "image"
    (root / "etc").mkdir(parents=True)
    (root / "usr/bin").mkdir(parents=True)
    (root / PROGRAM[1:]).parent.mkdir(parents=True)
    (root / PROGRAM[1:]).write_text("#!/bin/sh\n")
    (root / PROGRAM[1:]).chmod(0o755)
    return root


@pytest.fixture(params=["1.7", "2.1"])
def with_containerd(request: pytest.FixtureRequest, image: Path) -> Iterator[tuple[str, Path]]:
    line = str(request.param)
    shutil.copy(Path(tools.containerd_bin(line), "containerd").resolve(), image / "usr/bin/containerd")
    yield line, image
    (image / "usr/bin/containerd").unlink()


def install(image: Path, *arguments: str, status: int = 0) -> str:
    return weenv("install", "--root", str(image), "--program", PROGRAM, *arguments, status=status)


def dump(image: Path) -> dict[str, Any]:
    """The whole configuration as the image's containerd understands it."""
    inside = f'mount --bind "$1/etc" /etc && exec "$1/usr/bin/containerd" --config {MAIN} config dump'
    return tomllib.loads(run("unshare", "--mount", "sh", "-ec", inside, "sh", str(image)))


def main_file(name: str, image: Path) -> str | None:
    """What is in containerd's main file beforehand."""
    if name == "none":
        return None
    if name == "debian":
        return (Path(tools.containerd_bin("2.1")).parent / "root" / MAIN[1:]).read_text()
    return DOCKER_CE if name == "docker" else run(str(image / "usr/bin/containerd"), "config", "default")


@pytest.mark.parametrize("cri", [False, True], ids=["ctr", "cri"])
@pytest.mark.parametrize("name", ["none", "debian", "default", "docker"])
def test_containerd_reads_it_as_it_is_meant(with_containerd: tuple[str, Path], name: str, cri: bool) -> None:
    line, image = with_containerd
    text = main_file(name, image)
    if text is not None:
        (image / "etc/containerd").mkdir()
        (image / MAIN[1:]).write_text(text)
    before = contents(str(image))
    if cri and name == "docker":
        assert "CRI is disabled" in install(image, "--cri", status=1) and contents(str(image)) == before
        return
    install(image, *(["--cri"] if cri else []))
    assert "nothing was changed" in install(image)
    found = dump(image)
    proxy = found["proxy_plugins"]["weenv"]
    assert (proxy["type"], proxy["address"]) == ("snapshot", "/run/weenv/snapshotter.sock")
    assert proxy["capabilities"] == ["remap-ids"]
    assert proxy["exports"]["root"] == "/var/lib/weenv" and proxy["exports"]["enable_remote_snapshot_annotations"] == "true"
    plugins = found["plugins"]
    if name != "docker":
        assert [entry["snapshotter"] for entry in plugins[TRANSFER]["unpack_config"]] == ["overlayfs", "weenv"]
        wanted = "weenv" if cri else "overlayfs"
        if line == "1.7":
            old = plugins["io.containerd.grpc.v1.cri"]["containerd"]
            assert (old["snapshotter"], old["disable_snapshot_annotations"]) == (wanted, not cri)
        else:
            assert plugins["io.containerd.cri.v1.images"]["snapshotter"] == wanted
    if name == "debian":
        cni = plugins["io.containerd.cri.v1.runtime" if line != "1.7" else "io.containerd.grpc.v1.cri"]["cni"]
        assert "/usr/lib/cni" in (cni["bin_dir"], *cni.get("bin_dirs", ())), "what was configured before still is"
    weenv("uninstall", "--root", str(image))
    assert contents(str(image)) == before


def test_docker_and_all_daemons_in_an_image(image: Path) -> None:
    (image / "etc/docker").mkdir()
    daemon = image / "etc/docker/daemon.json"
    daemon.write_text('{\n    "log-driver": "local",\n    "storage-driver": "overlay2"\n}\n')
    before = contents(str(image))
    shown = install(image, "--with", "elastic", "--with", "gateway", "--docker", "--dry-run")
    assert '-    "storage-driver": "overlay2"' in shown and "+User=weenv-gateway" in shown and contents(str(image)) == before
    install(image, "--with", "elastic", "--with", "gateway", "--docker")
    assert json.loads(daemon.read_text()) == {
        "log-driver": "local", "storage-driver": "weenv", "features": {"containerd-snapshotter": True},
    }  # fmt: skip
    assert (image / "etc/systemd/system/weenv.target.wants/weenv-elastic.service").is_symlink()
    assert "nothing was changed" in install(image), "what was chosen stays chosen"
    assert not (image / DROP_IN).exists() and not (image / "etc/containerd").exists(), "there is no containerd"
    assert "would remove" in weenv("uninstall", "--root", str(image), "--dry-run")
    weenv("uninstall", "--root", str(image))
    assert "not installed" in weenv("uninstall", "--root", str(image))
    users = {"passwd", "group", "shadow", "gshadow", ".pwd.lock"}
    assert {path: what for path, what in contents(str(image)).items() if os.path.basename(path) not in users} == before


def test_what_cannot_be_installed_is_said_and_nothing_is_changed(image: Path, tmp_path: Path) -> None:
    before = contents(str(image))
    for arguments, said in (
        (["--program", "/nowhere/weenv"], "no program /nowhere/weenv in"),
        (["--program", "weenv"], "absolute path"),
        (["--config", "/etc/none.toml"], "no file /etc/none.toml"),
        (["--with", "elastic", "--with", "nri"], "elastic includes nri"),
        (["--containerd-version", "new"], "--containerd-version: 'new'"),
    ):
        assert said in install(image, *arguments, status=1)
    assert "there is no directory" in weenv("install", "--root", str(tmp_path / "none"), status=1)
    (image / "opt").chmod(0o750)
    assert "/opt lets nobody else pass" in install(image, "--with", "gateway", status=1)
    (image / "opt").chmod(0o755)
    assert contents(str(image)) == before
    (image / "etc/weenv").mkdir()
    (image / "etc/weenv/config.toml").write_text("[snapshotter]\nroot = '/data'\n")
    assert "blobfs.root is snapshotter.root" in install(image, status=1)
    (image / "etc/weenv/config.toml").write_text("[snapshotter]\nroot = '/data'\n[blobfs]\nroot = '/data'\n")
    unit = image / "usr/local/lib/systemd/system/weenv-blobfs.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\n")
    assert "weenv-blobfs.service" in install(image, status=1) and unit.read_text() == "[Service]\n"
    install(image, "--force")
    assert "RequiresMountsFor=/data\n" in unit.read_text()


def test_without_systemd_it_works_half(image: Path, tmp_path: Path) -> None:
    """In a mount namespace in which /etc and its like are the image's: what is done to the machine itself."""
    for name in ("usr/local", "var/lib"):
        (image / name).mkdir(parents=True)
    binds = "".join(f'mount --bind "$1/{name}" /{name}\n' for name in ("etc", "usr/local", "var/lib"))
    inside = f"{binds}mount -t tmpfs tmpfs /run\nshift\nexec \"$@\""

    def here(*arguments: str, status: int = 0) -> str:
        argv = ["unshare", "--mount", "sh", "-ec", inside, "sh", str(image), *tools.weenv(), *arguments]
        return output(argv, status)

    before = contents(str(image))
    assert "systemd is not the first process here" in here("install")
    assert (image / "etc/systemd/system/weenv.target.wants/weenv-blobfs.service").is_symlink()
    assert "nothing was changed" in here("install")
    (image / "var/lib/weenv/layers").mkdir(parents=True)
    (image / "etc/weenv/config.toml").write_text("# mine\n")
    text = here("uninstall")
    assert "left /etc/weenv/config.toml" in text and "layers and snapshots stay" in text
    assert (image / "var/lib/weenv/layers").is_dir()
    here("install")
    here("uninstall", "--purge")
    assert contents(str(image)) == before


@pytest.mark.parametrize("suite", ["", *(pytest.param(suite, marks=pytest.mark.soak) for suite in SUITES)])
def test_systemd_understands_the_units(suite: str, image: Path) -> None:
    root = kernels.system(*PACKAGES, suite=suite or suite_to_boot())
    install(image, "--with", "elastic", "--with", "gateway", "--no-containerd")
    units = image / "usr/local/lib/systemd/system"
    shutil.copy(Path(__file__).parents[1] / "systemd/units/weenv-nri.service", units)
    for unit in units.glob("*.service"):
        unit.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE))
    inside = """
    mount --bind "$1" "$2/mnt"
    mount -t tmpfs tmpfs "$2/run"
    mount -t proc proc "$2/proc"
    exec chroot "$2" sh -c 'cd /mnt/usr/local/lib/systemd/system
    SYSTEMD_UNIT_PATH=$PWD: systemd-analyze verify --man=no * 2>&1
    echo verified $?
    for name in *.service; do systemd-analyze security --offline=yes --no-pager $PWD/$name 2>&1 | tail -1; done
    systemd-tmpfiles --root=/mnt --create weenv.conf
    systemd-sysusers --root=/mnt weenv.conf 2>&1'
    """
    text = run("unshare", "--mount", "sh", "-ec", inside, "sh", str(image), root)
    complaints = [line for line in text.partition("verified 0")[0].splitlines() if "FileDescriptorStorePreserve" not in line]
    assert "verified 0" in text and not complaints, text
    found = {name: float(level) for name, level in re.findall(r"weenv-(\w+)\.service: ([\d.]+)", text)}
    assert found.keys() == EXPOSURE.keys() and all(found[name] <= EXPOSURE[name] for name in EXPOSURE), found
    assert (image / "var/lib/weenv").stat().st_mode & 0o777 == 0o711
    assert "weenv-gateway:" in (image / "etc/passwd").read_text()
