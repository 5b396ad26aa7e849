"""weenv cache: what it asks for, what it says, and that it works without a daemon."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weenv.cli.main import cli
from weenv.core.errors import InvalidRequest, WeenvError
from weenv.plugin.snapshotter.blobfs.control import prune_request
from weenv.plugin.snapshotter.blobfs.daemon import read_tail
from weenv.plugin.snapshotter.blobfs.layers import LayerTable
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv_testkit.synthetic import make_layer, payload

LAYER = make_layer([("f", payload(300 << 10, 5))], target=64 << 10)
Captured = pytest.CaptureFixture[str]


def run(*arguments: str) -> int:
    """The exit code of the command."""
    try:
        return int(cli.main(list(arguments), standalone_mode=True) or 0)
    except SystemExit as error:
        return int(error.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A node's configuration; one layer is on its disk, and no daemon runs."""
    path = tmp_path / "c.toml"
    path.write_text(f'[blobfs]\nroot = "{tmp_path}"\nstatus_socket = "{tmp_path}/s"\n[blobfs.cache]\nhigh = 2000000000\n')
    LAYER.install(str(tmp_path))
    table = LayerTable(LayerDirs(str(tmp_path)), read_tail, lambda *_: [])
    node = table.lookup(LAYER.name.encode())
    assert node is not None and node.layer is not None
    node.layer.store.write(0, LAYER.stream)
    for frame in range(len(node.layer.presence)):
        node.layer.presence.mark(frame)
    node.layer = None
    return str(path)


def test_ls(config: str, capsys: Captured) -> None:
    assert run("cache", "ls", "--config", config) == 0
    out = capsys.readouterr().out
    assert LAYER.name[:12] in out and "100.0%" in out and "evicted from 1.86 GiB on, down to 1.68 GiB" in out
    assert run("cache", "ls", "--config", config, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["layers"][0]["digest"] == LAYER.digest
    assert answer["cache"]["high"] == 2_000_000_000


def test_prune(config: str, capsys: Captured) -> None:
    assert run("cache", "prune", "--config", config, "--all", "--dry-run") == 0
    assert capsys.readouterr().out.startswith("would take out ")
    assert run("cache", "prune", "--config", config, "--until", "1h") == 0
    assert capsys.readouterr().out.startswith("took out 0 frames")
    assert run("cache", "prune", "--config", config, "--to", "100Ki", "--json") == 0
    assert json.loads(capsys.readouterr().out)["data_after"] <= 100 << 10
    assert run("cache", "prune", "--config", config, "--layer", f"sha256:{LAYER.name[:10].upper()}") == 0
    assert capsys.readouterr().out.endswith("; 0 B left\n")


def test_what_stays_is_told(config: str, tmp_path: Path, capsys: Captured) -> None:
    with open(f"{LayerDirs(str(tmp_path)).path(LAYER.digest)}/data", "rb"):
        assert run("cache", "prune", "--config", config, "--all") == 0
    captured = capsys.readouterr()
    assert captured.err == f"layer {LAYER.name[:12]} stays: something has its file open that is none of ours\n"


def test_what_may_stay_is_a_whole_sentence(config: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"digest": LAYER.digest, "frames": 3, "bytes": 5, "why": "mounted"}]
    answer = {"layers": rows, "frames": 3, "bytes": 5, "data_after": 0, "dry_run": True}
    monkeypatch.setattr("weenv.cli.cache._ask", lambda *_: answer)
    assert run("cache", "prune", "--config", config, "--all", "--dry-run") == 0
    assert capsys.readouterr().err == f"layer {LAYER.name[:12]} goes unless a container that runs has it from the kernel\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["--until", "soon"], ["--until", ""], ["--to", "much"], ["--to", "-5"], ["--to", "20"], ["--until", "5y"]],
)
def test_what_is_not_understood_is_a_fault_of_usage(config: str, arguments: list[str], capsys: Captured) -> None:
    assert run("cache", "prune", "--config", config, *arguments) == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    "raw",
    [
        {"layers": "a"}, {"layers": [""]}, {"layers": ["A"]}, {"layers": ["../x"]}, {"layers": ["a"] * 2000}, {"layers": [5]},
        {"to": -1}, {"to": 1.5}, {"to": True}, {"to": 1 << 62}, {"before": "x"}, {"before": -1}, {"before": True},
    ],
)  # fmt: skip
def test_requests_that_are_refused(raw: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest):
        prune_request(raw)


def test_requests() -> None:
    which, to, dry = prune_request({"layers": ["ab"], "before": 5, "to": 7, "dry_run": True})
    assert (which.prefixes, which.before, to, dry) == (("ab",), 5.0, 7, True)
    which, to, dry = prune_request({})
    assert (which.prefixes, which.before, to, dry) == ((), 0.0, None, False)


def test_a_root_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'[blobfs]\nroot = "{tmp_path}/none"\nstatus_socket = "{tmp_path}/s"\n')
    with pytest.raises(WeenvError, match="cannot be looked at") as caught:
        run("cache", "ls", "--config", f"{tmp_path}/c.toml")
    assert caught.value.hint == "is [blobfs] root right?"
