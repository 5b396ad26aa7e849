"""cli/plan.py: every fault of a plan, names that are what composing makes, and one answer for a file that is not there."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from simulator.registry import SimulatedRegistry

from weenv.cli.main import main
from weenv.environment.build import compose
from weenv.environment.plan import load_plan
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.groupref.resolve import Resolver
from weenv.registry.manifest import OCI_CONFIG, OCI_MANIFEST

Captured = pytest.CaptureFixture[str]
HEAD = "apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\nmetadata: {name: task}\n"


def run(*argv: str) -> int:
    """Exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return int(ended.value.code or 0)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """A node with nothing on it, and no containerd."""
    path = tmp_path / "config.toml"
    path.write_text(f'[snapshotter]\nroot = "{tmp_path}/root"\n[run]\naddress = "{tmp_path}/none.sock"\n')
    return str(path)


@pytest.fixture
def group(tmp_path: Path) -> str:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "a").write_text("a\n")
    reference = f"oci:{tmp_path}/layout:1"
    assert run("group", "build", reference, "--from", f"{tmp_path}/tree") == 0
    return reference


COMMANDS = (["plan", "check"], ["plan", "lock"], ["plan", "show"], ["plan", "compose"], ["plan", "push"], ["run", "--rm"])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_plan_that_is_not_there_is_one_line(command: list[str], config: str, tmp_path: Path, capsys: Captured) -> None:
    if command[0] == "run":  # its own process: it leaves without ado
        command = [*command, "--config", config]
    more = [f"oci:{tmp_path}/out:1"] if command[1] == "push" else []
    assert run(*command, f"{tmp_path}/missing.yaml", *more) == 1
    said, hint = capsys.readouterr().err.splitlines()
    assert said == f"weenv: {tmp_path}/missing.yaml: cannot be read: No such file or directory"
    assert hint.startswith("  name the plan's file")


async def test_a_lock_wants_an_answer_of_its_registry(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "root").mkdir()
    config, plan, locked = tmp_path / "config.toml", tmp_path / "plan.yaml", tmp_path / "locked.yaml"
    async with SimulatedRegistry() as sim:
        groups = [f"{sim.host}/team/{name}:1" for name in ("a", "b")]
        config.write_text(
            f'[snapshotter]\nroot = "{tmp_path}/root"\n[registry]\nplain_http = ["{sim.host}"]\nattempts = 1\n'
        )
        plan.write_text(HEAD + f"groups: {json.dumps(groups)}\n")
        image = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": []}}).encode()
        described = {"mediaType": OCI_CONFIG, "digest": sim.add_blob(image), "size": len(image)}
        manifest = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": described, "layers": []}
        sim.add_manifest(json.dumps(manifest).encode(), OCI_MANIFEST, "1")
        lock = ["plan", "lock", str(plan), "--config", str(config), "-o", str(locked)]
        assert await asyncio.to_thread(run, *lock) == 0
        pinned = locked.read_text()
        locked.unlink()
    capsys.readouterr()
    assert await asyncio.to_thread(run, *lock) == 1 and not locked.exists()
    said, hint = capsys.readouterr().err.splitlines()
    assert said.startswith(f"weenv: {sim.host} cannot serve ") and "--stale-ok" in hint
    assert await asyncio.to_thread(run, *lock, "--stale-ok") == 0 and locked.read_text() == pinned
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"weenv: {sim.host} cannot serve ") and "; using what was seen " in said
    assert run(*lock, "--in-place") == 2


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_fault_has_a_line(command: list[str], config: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(HEAD + "groups: [a, A]\ngrups: []\nplatform: windows\n")
    if command[0] == "run":
        command = [*command, "--config", config]
    more = [f"oci:{tmp_path}/out:1"] if command[1] == "push" else []
    assert run(*command, str(path), *more) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("  ")]
    assert [line.partition(" ")[2].partition(": ")[0] for line in said] == [f"{path}:4:13", f"{path}:5:1", f"{path}:6:11"]


def test_faults_for_machines(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(HEAD + "groups: [a]\ngrups: []\nplatform: windows\n")
    assert run("plan", "check", "--json", str(path)) == 1
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert [(fault["line"], fault["column"]) for fault in faults] == [(5, 1), (6, 11)]
    assert "unknown field 'grups'" in faults[0]["message"]
    path.write_text(HEAD + "groups: [a]\n")
    assert run("plan", "check", "--json", str(path)) == 0
    assert json.loads(capsys.readouterr().out)["faults"] == []


def test_what_is_not_pinned_for_machines(group: str, config: str, tmp_path: Path, capsys: Captured) -> None:
    loose, locked = tmp_path / "p.yaml", tmp_path / "locked.yaml"
    loose.write_text(HEAD + f"groups: ['{group}']\n")
    assert run("plan", "lock", str(loose), "-o", str(locked), "--config", config) == 0
    capsys.readouterr()

    def check(path: Path) -> tuple[int, dict[str, list[Any]]]:
        code = run("plan", "lock", "--check", "--json", str(path), "--config", config)
        return code, json.loads(capsys.readouterr().out)

    assert check(loose) == (1, {"moved": [], "not_pinned": [group]})
    assert check(locked) == (0, {"moved": [], "not_pinned": []})
    assert run("plan", "lock", "--json", str(locked)) == 2


def test_no_conflict_is_one_of_groups(group: str, config: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(HEAD + f"groups: ['{group}']\nmutations: [{{files: {{/a: b}}}}]\n")
    assert run("plan", "show", "--conflicts", "--config", config, str(path)) == 0
    assert capsys.readouterr().out.endswith("\nNo file is in more than one group.\n"), "the mutation has one of the group's"


def test_the_name_shown_is_the_name_composed(group: str, config: str, tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "p.yaml"

    def shown(mutations: str) -> dict[str, object]:
        path.write_text(HEAD + f"groups: ['{group}']\nmutations: {mutations}\n")
        capsys.readouterr()
        assert run("plan", "show", "--json", "--config", config, str(path)) == 0
        made: dict[str, object] = json.loads(capsys.readouterr().out)
        return made

    async def composed() -> str:
        async with RegistryClient(RegistryConfig()) as client:
            return (await compose(load_plan(str(path)), resolver=Resolver(client), root=f"{tmp_path}/root")).name

    only_run = shown("[{run: make}]")
    assert only_run["name"] == asyncio.run(composed()), "a run mutation is in no image"
    assert only_run["not_run"] == [{"line": 5, "command": ["/bin/sh", "-c", "make"], "directory": "/"}]
    before = shown("[{files: {/b: b}}]")
    assert (before["name"], before["digest"]) == (None, None)
    assert run("plan", "show", "--config", config, str(path)) == 0
    text = capsys.readouterr().out
    assert "weenv.local/" not in text
    assert "weenv plan compose" in text
    assert not (tmp_path / "root").exists(), "looking makes nothing"
    (tmp_path / "root").mkdir()
    name = asyncio.run(composed())
    after = shown("[{files: {/b: b}}]")
    assert after["name"] == name
    assert run("plan", "show", "--config", config, str(path)) == 0
    assert f"{name}: 2 layers" in capsys.readouterr().out
