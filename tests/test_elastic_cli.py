"""``weenv top``, ``events``, ``elastic trace`` and ``admit`` without a daemon, and on journals that somebody wrote."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from weenv.cli.inspect import limits
from weenv.cli.main import cli
from weenv.cli.top import line
from weenv.cli.trace import points
from weenv.core.errors import ConfigError, WeenvError
from weenv.core.settings import read_tables
from weenv.plugin.nri import config as elastic_config
from weenv.plugin.nri import serveconfig


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.toml"
    path.write_text(f'[elastic.serve]\nroot = "{tmp_path}"\nsocket = "{tmp_path}/e.sock"\n')
    return str(path)


def call(*arguments: str) -> Any:
    return CliRunner().invoke(cli, list(arguments))


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def look(name: str, second: float, usage: float, quota: float = 0.25, **more: Any) -> dict[str, Any]:
    return {
        "t": time.time() - 100 + second, "env": f"default/{name}", "m": 5 + second, "usage_s": usage, "memory": 1 << 20,
        "unreclaimable": 1 << 19, "quota": [quota, 1 << 26], "reason": "steady", "tier": 0, **more,
    }  # fmt: skip


def test_without_a_daemon_it_is_said_how_to_have_one(config: str) -> None:
    for arguments in (("top",), ("top", "--json"), ("admit", "--", "true")):
        done = call(arguments[0], "--config", config, *arguments[1:])
        assert isinstance(done.exception, WeenvError) and done.exception.hint == "weenv elastic serve"


def test_usage_of_admit(config: str) -> None:
    for arguments in ((), ("--for", "default/a", "--", "true"), ("--for", "nowhere"), ("--cpu", "lots", "--", "true"),
                      ("--memory", "-1", "--", "true"), ("--role", "king", "--", "true")):  # fmt: skip
        assert call("admit", "--config", config, *arguments).exit_code == 2, arguments


def test_events_are_filtered_and_printed_for_both(config: str, tmp_path: Path) -> None:
    now = time.time()
    write(tmp_path / "events.jsonl", [
        {"t": now - 4000, "kind": "ended", "env": "default/old", "cause": "failed"},
        {"t": now, "kind": "quota", "env": "default/job-1", "quota": [1.0, 1 << 30], "before": [None, None]},
        {"t": now, "kind": "ended", "env": "other/job-2", "cause": "oom-kernel", "name": "\x1b[31mred"},
    ])  # fmt: skip

    def kinds(*more: str) -> list[str]:
        output = call("events", "--config", config, "--json", *more).output
        return [json.loads(text)["env"] for text in output.splitlines()]

    assert kinds() == ["default/old", "default/job-1", "other/job-2"]
    assert kinds("--since", "1h") == ["default/job-1", "other/job-2"]
    assert kinds("--env", "job") == ["default/job-1", "other/job-2"] and kinds("--env", "default/job") == ["default/job-1"]
    assert kinds("--kind", "ended") == ["default/old", "other/job-2"]
    text = call("events", "--config", config).output
    assert "quota=1.0/1 GiB" in text and "before=no limit/no limit" in text and "\x1b" not in text
    assert call("events", "--config", config, "--since", "soon").exit_code == 2


def test_bytes_are_shown_as_such_and_processes_are_not() -> None:
    text = line({"t": 0, "kind": "oom-emergency", "memory": 1 << 20, "limit": 512 << 20, "ceiling": 1 << 30})
    assert text.endswith("memory=1 MiB limit=512 MiB ceiling=1 GiB")
    assert line({"t": 0, "kind": "pids", "before": 512, "limit": 1024}).endswith("before=512 limit=1024")


def test_an_amount_that_nobody_names_is_null() -> None:
    assert limits((0.0, 1 << 20)) == [None, 1 << 20] and limits((0.5, 0)) == [0.5, None]


def test_strange_records_are_printed_as_they_are() -> None:
    assert line({"t": 0, "kind": 5, "quota": "x", "memory": {"a": 1}}).count("\n") == 0


def test_a_trace_is_quota_against_use(config: str, tmp_path: Path) -> None:
    write(tmp_path / "decisions.jsonl", [
        look("a", 0, 0.0), look("a", 1, 0.25), look("b", 1, 9.0), look("a", 2, 0.5, asked=[0.5, 1 << 26]),
        look("a", 3, 1.0, 0.5),
    ])  # fmt: skip
    found = json.loads(call("elastic", "trace", "--config", config, "--json", "default/a").output)
    assert [point["cpu"] for point in found] == pytest.approx([0.0, 0.25, 0.25, 0.5])
    assert [point["quota_cpu"] for point in found] == [0.25, 0.25, 0.25, 0.5]
    assert "0.5 cores, 64 MiB" in call("elastic", "trace", "--config", config, "a").output
    for name, text in (("nobody", "nothing is known"), ("", "begins the names of 2")):
        done = call("elastic", "trace", "--config", config, name)
        assert isinstance(done.exception, WeenvError) and text in done.exception.message
    (tmp_path / "decisions.jsonl").unlink()
    done = call("elastic", "trace", "--config", config, "a")
    assert isinstance(done.exception, WeenvError) and done.exception.hint == "weenv elastic serve writes it"
    assert done.exception.message == f"no decisions: {tmp_path}/decisions.jsonl does not exist"


def test_a_trace_can_be_drawn(config: str, tmp_path: Path) -> None:
    write(tmp_path / "decisions.jsonl", [look("$a_^1$", 0, 0.0), look("$a_^1$", 1, 0.25), look("$a_^1$", 2, 1.0, 0.5)])
    draw = lambda name: call("elastic", "trace", "--config", config, "$a_^1$", "--plot", str(tmp_path / name))  # noqa: E731
    done = draw("out.png")
    assert done.exit_code == 0 and done.output == f"{tmp_path / 'out.png'}\n"
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert draw("out.svg").exit_code == 0
    text = (tmp_path / "out.svg").read_text()
    assert text.count("<!-- ") >= 10 and all(
        f"<!-- {label} -->" in text for label in ("CPU cores", "memory, GiB", "quota", "used")
    )
    done = draw("out.nonsense")
    assert isinstance(done.exception, WeenvError) and ".svg" in done.exception.hint


def test_points_survive_bad_lines() -> None:
    bad = [{"t": 1.0}, look("a", 1, float("nan")), look("a", 1, 1.0, quota=None), {**look("a", 1, 1.0), "quota": [1.0]},
           look("a", 2, 1.0), look("a", 2, 0.5), look("a", 1, 9.0), look("a", 3, 9.5, asked="x")]  # fmt: skip
    assert all(point.cpu >= 0 for point in points(bad))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[elastic.serve]\nsocket = "relative"\n', "elastic.serve.socket"),
        ("[elastic.serve]\nlog_bytes = 1\n", "elastic.serve.log_bytes"),
        ('[elastic.serve]\ncri_updates = "magic"\n', "elastic.serve.cri_updates"),
        ('[elastic.serve]\naddress = "somewhere"\n', "elastic.serve.address"),
        ("[elastic.serve]\nsockets = 1\n", "elastic.serve.sockets"),
        ("[elastic]\nserve = 1\n", "[elastic.serve] must be a table"),
        ("[elastic]\ninterval = 0\n", "elastic.interval"),
        ("[elastic.cpu]\nstep = 2\n", "elastic.cpu.step"),
    ],
)
def test_serve_names_what_it_cannot_use(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    tables = read_tables(str(path))
    with pytest.raises(ConfigError) as failed:
        serveconfig.from_tables(tables, address=None, socket=None)
        elastic_config.from_tables(tables)
    assert named in failed.value.message


def test_containerds_socket_is_that_of_run_where_none_is_named(tmp_path: Path) -> None:
    assert serveconfig.from_tables({}).address == serveconfig.DEFAULT_ADDRESS
    assert serveconfig.from_tables({"run": {"address": "/a"}}, address=None).address == "/a"
    assert serveconfig.from_tables({"run": {"address": "/a"}}, address="/b").address == "/b"
