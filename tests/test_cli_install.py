"""``weenv install``, ``weenv uninstall`` and ``weenv blobfs stop`` where no systemd is: what still runs is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest
from click.testing import CliRunner

from weenv.cli import install
from weenv.cli import uninstall as removing
from weenv.cli.main import cli
from weenv.core.digest import sha256
from weenv.core.errors import ConfigError
from weenv.core.process import only_instance
from weenv.plugin.snapshotter.blobfs import daemon, holder
from weenv.plugin.snapshotter.blobfs.config import BlobfsConfig
from weenv.systemd.install import docker, files, record
from weenv.systemd.install.tree import Tree
from weenv.systemd.unit import Service

DROP_IN = "/etc/containerd/conf.d/weenv.toml"
Say = Callable[..., str]


class Live(Tree):
    """A directory that counts as this machine."""

    live = True


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A node's configuration, in its tree: all its paths are below ``tmp_path``."""
    path = tmp_path / "etc/weenv/config.toml"
    path.parent.mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "data").mkdir()
    path.write_text(
        f'[snapshotter]\nroot = "{tmp_path}/data"\nsocket = "{tmp_path}/run/s"\nblobs = "{tmp_path}/run/blobs"\n'
        f'[blobfs]\nroot = "{tmp_path}/data"\nmountpoint = "{tmp_path}/run/blobs"\n'
        f'holder_socket = "{tmp_path}/run/h"\nstatus_socket = "{tmp_path}/run/b"\n'
        f'[elastic.serve]\nroot = "{tmp_path}/elastic"\n'
    )
    return str(path)


@pytest.fixture
def swept() -> list[str]:
    return []


@pytest.fixture
def uninstall(config: str, tmp_path: Path, swept: list[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """The command on a node where ``told`` are the files that were put there."""
    tree = Live(str(tmp_path))
    monkeypatch.setattr(removing, "tree_of", lambda *_a, **_k: tree)
    monkeypatch.setattr(removing, "booted", lambda: False)
    monkeypatch.setattr(removing, "_sweep", lambda settings, _lower: swept.append(settings.root))
    (tmp_path / f".{tmp_path}/data").mkdir(parents=True)  # as the tree sees it

    def say(*arguments: str, told: tuple[str, ...] = (DROP_IN,), chosen: tuple[str, ...] = ()) -> str:
        known = record.Record(options={"with": list(chosen)}, files={path: [sha256(b"x")] for path in told})
        for path in told:
            tree.write(path, b"x")
        tree.write(record.PATH, known.dump())
        done = CliRunner().invoke(cli, ["uninstall", *arguments])
        if isinstance(done.exception, ConfigError):
            return f"{done.exception.message}\n{done.exception.hint}"
        assert done.exit_code == 0 and done.exception is None, done.output
        return done.output

    return say


def test_what_serves_is_said(uninstall: Say, tmp_path: Path, swept: list[str]) -> None:
    with only_instance(f"{tmp_path}/run", "weenv serve", "serve.lock"), only_instance(f"{tmp_path}/data", "snapshotter"):
        text = uninstall(told=(DROP_IN, docker.DAEMON), chosen=("gateway",))
    ends = f"end weenv serve (pid {os.getpid()}), end weenv gateway where it runs, restart containerd and docker"
    assert f"systemd is not the first process here, so nothing was stopped: {ends}\n" in text
    assert "rm -r after that deletes them" in text and not swept, "what a running daemon locks stays"


def test_daemons_one_by_one_and_mounts(uninstall: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from weenv.plugin.snapshotter import mounts

    found = {f"{tmp_path}/run": [f"{tmp_path}/run/blobs"], f"{tmp_path}/data": [f"{tmp_path}/data/m/1"]}
    monkeypatch.setattr(mounts, "mounts_below", lambda path: dict.fromkeys(found.get(path, [])))
    with ExitStack() as stack:
        for name in ("data", "elastic"):
            stack.enter_context(only_instance(f"{tmp_path}/{name}", name))
        shown, text = uninstall("--dry-run", told=()), uninstall(told=())
    steps = (
        f"end weenv snapshotter (pid {os.getpid()}), end weenv elastic (pid {os.getpid()}), "
        f"unmount what is mounted below {tmp_path}/data, run weenv blobfs stop\n"
    )
    assert f"would leave to you: {steps}" in shown and f"nothing was stopped: {steps}" in text


def test_where_nothing_runs_only_containerd_is_to_be_restarted(uninstall: Say, swept: list[str]) -> None:
    assert "nothing was stopped: restart containerd\n" in uninstall()
    text = uninstall(told=())
    assert "nothing was stopped" not in text and "rm -r deletes them" in text and len(swept) == 2


def test_nothing_is_deleted_under_weenv_serve(uninstall: Say, config: str, tmp_path: Path) -> None:
    with only_instance(f"{tmp_path}/run", "weenv serve", "serve.lock"):
        said = uninstall("--purge")
    assert said == f"{tmp_path}/data is still served\nfirst: end weenv serve (pid {os.getpid()})"
    assert os.path.exists(config) and os.path.exists(f"{tmp_path}{DROP_IN}")


def test_blobfs_is_not_stopped_below_weenv_serve(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def stop(_config: BlobfsConfig, *, force: bool = False) -> bool:
        asked.append(force)
        return True

    monkeypatch.setattr(daemon, "stop", stop)
    monkeypatch.setattr("weenv.cli.daemons._ENDING", 0.1)
    argv = ["blobfs", "stop", "--config", config]
    with only_instance(f"{tmp_path}/run", "weenv serve", "serve.lock"):
        refused = CliRunner().invoke(cli, argv)
        forced = CliRunner().invoke(cli, [*argv, "--force"])
    assert isinstance(refused.exception, ConfigError) and asked == [True]
    assert refused.exception.message == f"weenv serve (pid {os.getpid()}) starts blobfs again at once"
    assert f"weenv serve (pid {os.getpid()}) starts it again" in forced.output and "is gone" not in forced.output
    assert "its mount is gone" in CliRunner().invoke(cli, argv).output and asked == [True, False]


def test_how_a_service_is_ended_is_said(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What integration/test_install.py has from a real systemd."""
    monkeypatch.setattr("weenv.cli.daemons._ENDING", 0.1)
    monkeypatch.setattr("weenv.systemd.unit.service_of", {os.getpid(): Service("mine.service")}.get)
    with only_instance(f"{tmp_path}/run", "weenv serve", "serve.lock"):
        refused = CliRunner().invoke(cli, ["blobfs", "stop", "--config", config]).exception
    assert isinstance(refused, ConfigError) and "weenv serve" in refused.message
    assert refused.hint == "end that first, which stops no container: systemctl stop mine.service"
    monkeypatch.setattr(holder, "ask", lambda *_: {"pid": 1, "server": os.getpid(), "mountpoint": "/m"})
    refused = CliRunner().invoke(cli, ["blobfs", "stop", "--config", config]).exception
    assert isinstance(refused, ConfigError) and refused.message == "mine.service starts blobfs again at once"


def test_a_weenv_serve_that_is_ending_is_waited_for(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``kill``, which returns at once."""
    monkeypatch.setattr(daemon, "stop", lambda *_a, **_k: True)
    with ExitStack() as stack:
        stack.enter_context(only_instance(f"{tmp_path}/run", "weenv serve", "serve.lock"))
        timer = Timer(0.3, stack.pop_all().close)
        timer.start()
        done = CliRunner().invoke(cli, ["blobfs", "stop", "--config", config])
        timer.join()
    assert done.output == "blobfs has ended and its mount is gone\n"


@pytest.mark.parametrize(("plane", "remap"), [("fuse", False), ("auto", True)])
def test_no_mapped_ids_are_promised_on_the_fuse_plane(plane: str, remap: bool, tmp_path: Path) -> None:
    options = {"containerd": "/etc/containerd/config.toml", "cri": False, "docker": False}
    (drop_in,), _ = install._amends(Tree(str(tmp_path)), files.Settings("/usr/bin/weenv", plane=plane), options, 2)
    assert (b"remap-ids" in drop_in.data) is remap


def test_without_systemd_what_is_left_to_do_is_said(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Live(str(tmp_path))
    program = tmp_path / "usr/bin/weenv"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setattr(install, "tree_of", lambda *_a, **_k: tree)
    monkeypatch.setattr(install, "booted", lambda: False)
    monkeypatch.setattr(install, "_tool", lambda *_a: None)
    base = ["install", "--containerd-version", "2.1", "--program", "/usr/bin/weenv", "--config", "/etc/weenv/config.toml"]

    def say(*more: str) -> str:
        done = CliRunner().invoke(cli, [*base, *more])
        assert done.exit_code == 0 and done.exception is None, done.output
        return done.output

    planned = json.loads(say("--docker", "--dry-run", "--json"))
    assert {DROP_IN, docker.DAEMON} <= {row["path"] for row in planned["write"]} and not (tmp_path / DROP_IN[1:]).exists()
    with only_instance(f"{tmp_path}/run", "weenv serve", "serve.lock"):
        assert "nothing was started: restart containerd, and restart docker" in say("--docker")
        assert "nothing was started" not in say("--docker")
    assert "nothing was started: run weenv serve\n" in say("--docker")


@pytest.mark.parametrize("version", ["1.6", "1.6.20~ds1", "v1.4.3"])
def test_a_containerd_that_knows_no_lazy_layers_is_refused(version: str, tmp_path: Path) -> None:
    """Debian 12 has 1.6."""
    with pytest.raises(ConfigError, match="too old"):
        install._containerd_line(Tree(str(tmp_path)), version, "/etc/containerd/config.toml")
    program = tmp_path / "usr/bin/containerd"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho containerd github.com/containerd/containerd {version} abc\n")
    program.chmod(0o755)
    with pytest.raises(ConfigError, match="too old"):
        install._containerd_line(Tree(str(tmp_path)), None, "/etc/containerd/config.toml")


@pytest.mark.parametrize(("number", "words"), [(1, "1 container uses layers"), (2, "2 containers use layers")])
def test_who_uses_layers_is_counted(number: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removing, "_using", lambda _root: ["/run/c"] * number)
    with pytest.raises(ConfigError, match=words):
        removing._refuse_while_used("/data")
