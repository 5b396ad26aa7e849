"""``weenv elastic replay``: tables, JSON, files of traces, decision logs, what is said of wrong input."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from weenv.cli.main import main
from weenv.plugin.nri.config import MIB
from weenv.plugin.nri.replay import traces
from weenv.plugin.nri.replay.traces import Phase, Trace

Captured = pytest.CaptureFixture[str]


def run(*argv: str) -> int:
    """Exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(["elastic", "replay", *argv])
    return int(ended.value.code or 0)


@pytest.fixture
def some(tmp_path: Path) -> str:
    """Two environments: one that needs two cores for ten seconds, one that sleeps."""
    path = str(tmp_path / "traces.jsonl")
    traces.write(path, [Trace("busy", 0.0, (Phase(10.0, 2.0, 64 * MIB),)), Trace("idle", 1.0, (Phase(5.0, 0.0, MIB),))])
    return path


def test_machines_get_every_figure(some: str, capsys: Captured) -> None:
    assert run(some, "--json", "--cores", "8", "--memory-gib", "64", "--nodes", "2") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["nodes"], found["cores"]) == (2, 8.0)
    by_name = {summary["strategy"]: summary for summary in found["strategies"]}
    assert list(by_name) == ["fixed-median", "fixed-p99", "vpa-like", "elastic", "elastic-x2", "oracle"]
    assert by_name["fixed-median"]["slowest"] == pytest.approx(20, abs=0.3)
    assert by_name["oracle"]["slowest"] == pytest.approx(10, abs=0.3)
    assert by_name["elastic"]["slowest"] == pytest.approx(10, abs=1.0)
    assert by_name["fixed-p99"]["refused"] == 2  # 64 cores do not fit on 8


def test_people_get_a_table(some: str, capsys: Captured) -> None:
    assert run(some, "--strategy", "elastic") == 0
    out = capsys.readouterr().out
    assert "2 environments on 1 node of 128 cores" in out
    assert "elastic" in out
    assert "oracle" not in out


def test_a_set_can_be_written_and_read_back(tmp_path: Path, capsys: Captured) -> None:
    path = str(tmp_path / "mixed.jsonl")
    assert run("@mixed", "--write", path) == 0
    assert len(traces.read(path)) == 100
    capsys.readouterr()
    assert run(path, "--strategy", "oracle", "--json") == 0
    assert json.loads(capsys.readouterr().out)["strategies"][0]["done"] == 100


def test_thresholds_come_from_the_configuration(some: str, tmp_path: Path, capsys: Captured) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[elastic]\nstart_cpu = 0.1\nceiling_cpu = 0.1\n")
    assert run(some, "--strategy", "elastic", "--json", "--config", str(config)) == 0
    assert json.loads(capsys.readouterr().out)["strategies"][0]["slowest"] == pytest.approx(200, abs=1)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["@nonsense"], "there is no set @nonsense"),
        (["/nonexistent"], "cannot read /nonexistent"),
        (["@mixed", "--strategy", "best"], "there is no strategy best"),
    ],
)
def test_what_is_not_there_is_named(argv: list[str], said: str, capsys: Captured) -> None:
    assert run(*argv) == 1
    assert said in capsys.readouterr().err


def test_a_file_at_fault_is_named_with_its_line(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "traces"
    path.write_text("nonsense\n")
    assert run(str(path)) == 1
    error = capsys.readouterr().err
    assert f"{path}:1" in error
    assert "Traceback" not in error


def test_wrong_numbers_are_wrong_usage(some: str) -> None:
    assert run(some, "--nodes", "0") == 2
    assert run(some, "--cores", "-1") == 2


def test_drawing_without_matplotlib_says_what_to_install(
    some: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(some, "--plot", str(tmp_path / "out.png")) == 1
    assert "-m pip install matplotlib" in capsys.readouterr().err


def test_drawing(some: str, tmp_path: Path) -> None:
    target = tmp_path / "out.svg"
    assert run(some, "--plot", str(target)) == 0
    assert b"<svg" in target.read_bytes()
    assert run(some, "--plot", str(tmp_path / "out.nonsense")) == 1
