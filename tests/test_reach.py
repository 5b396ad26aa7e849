"""cli/reach.py: every command that talks to registries heeds the ``[registry]`` table of the configuration it is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from simulator.pushable import PushableRegistry

from weenv.cli.main import cli
from weenv.cli.reach import Reach
from weenv.core.errors import ConfigError, WeenvError

NAME = "registry.example"
"""A registry that nobody reaches but by the configuration."""


def commands(group: click.Group, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(click.Context(group)):
        command = group.get_command(click.Context(group), name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}".strip(), command


def test_who_takes_one_takes_the_other() -> None:
    found = dict(commands(cli))
    options = {name: {option for item in command.params for option in item.opts} for name, command in found.items()}
    plain = {name for name, given in options.items() if "--plain-http" in given}
    assert plain >= {"convert", "layer inspect", "layer verify", "layer mount", "group build", "group copy", "group verify"}
    assert not {name for name in plain if "--config" not in options[name]}


def test_the_settings(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('[registry]\nplain_http = ["a.example"]\nrace_after = 3\n')
    made = Reach(str(tmp_path / "c.toml"), ("b.example:5000",)).registry()
    assert made.plain_http == {"a.example", "b.example:5000"}
    assert made.race_after == 3.0
    with pytest.raises(ConfigError, match="no such file"):
        Reach(str(tmp_path / "none.toml")).registry()
    (tmp_path / "c.toml").write_text("[registry]\nplain_htpp = []\n")
    with pytest.raises(ConfigError, match=r"unknown setting registry\.plain_htpp"):
        Reach(str(tmp_path / "c.toml")).registry()


async def test_all_commands(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f").write_text("x")
    config, here = tmp_path / "c.toml", f"oci:{tmp_path}/layout"

    async def weenv(*argv: str, given: bool = True) -> Any:
        argv = (*argv, *(("--config", str(config)) if given else ()))
        done = await asyncio.to_thread(CliRunner().invoke, cli, argv)
        if isinstance(done.exception, WeenvError):
            raise done.exception
        assert done.exit_code == 0, (argv, done.output, done.exception)
        return json.loads(done.stdout) if "--json" in argv else done.stdout

    async with PushableRegistry(delete_tags=True) as sim:
        config.write_text(f'[registry]\nconfig_path = "{tmp_path}/certs.d"\nattempts = 1\ndeadline = 5\n')
        (tmp_path / f"certs.d/{NAME}").mkdir(parents=True)
        (tmp_path / f"certs.d/{NAME}/hosts.toml").write_text(f'server = "http://{sim.host}"\n')
        one = f"{NAME}/a/one:1"
        digest = (await weenv("group", "build", one, "--from", f"{tmp_path}/tree", "--json"))["descriptor"]["digest"]
        assert sim.repositories["a/one"].tags == {"1": digest}
        assert (await weenv("group", "show", one, "--json"))["digest"] == digest
        assert await weenv("group", "tags", f"{NAME}/a/one", "--json") == ["1"]
        assert await weenv("group", "ls", NAME, "--json") == ["a/one"]
        assert (await weenv("group", "resolve", "--cache", ":memory:", one, "--json"))[0]["digest"] == digest
        assert not (await weenv("group", "diff", one, one, "--files", "--json"))["files"]["changed"]
        await weenv("group", "pull", one, here)
        await weenv("group", "push", here, f"{NAME}/a/two:1")
        await weenv("group", "copy", one, f"{NAME}/a/three:1")
        await weenv("group", "tag", one, "2")
        assert {sim.repositories[f"a/{name}"].tags["1"] for name in ("one", "two", "three")} == {digest}
        assert sim.repositories["a/one"].tags == {"1": digest, "2": digest}
        await weenv("group", "delete", f"{NAME}/a/one:2")
        assert sim.repositories["a/one"].tags == {"1": digest}
        await weenv("group", "keygen", f"{tmp_path}/k", given=False)
        assert (await weenv("group", "sign", "--key", f"{tmp_path}/k.key", one, "--json"))["identity"] == f"{NAME}/a/one"
        assert (await weenv("group", "verify", "--key", f"{tmp_path}/k.pub", one, "--json"))["accepted"]
        assert (await weenv("convert", one, f"{NAME}/a/four:1", "--json"))["lazy"]
        assert (await weenv("layer", "inspect", f"{NAME}/a/four:1", "--json"))["counts"]["file"] == 1
        assert (await weenv("layer", "verify", f"{NAME}/a/four:1", "--json"))[0]["trusted"]
        config.write_text(config.read_text() + f'[policy]\nrules = [{{match = "{NAME}/**", keys = ["{tmp_path}/k.pub"]}}]\n')
        assert (await weenv("group", "verify", one, "--json"))["accepted"], "policy and registry of one file"
        with pytest.raises(WeenvError, match="is not signed"):
            await weenv("group", "verify", f"{NAME}/a/two:1")
