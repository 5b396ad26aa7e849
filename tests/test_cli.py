"""cli/: exit codes, one-line errors, help with examples, completion, JSON for machines."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import click
import pytest

from weenv.cli import render
from weenv.cli.doctor import START
from weenv.cli.main import COMMANDS, cli, main
from weenv.core.errors import FormatError, WeenvError
from weenv.environment.record import check_id
from weenv.environment.runconfig import load

Captured = pytest.CaptureFixture[str]


def run(*argv: str) -> int:
    """Exit code of the command, run in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return int(ended.value.code or 0)


def tar_bytes() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in (("etc/hello", b"hello\n"), ("big", os.urandom(900_000))):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture
def layer(tmp_path: object) -> str:
    with open(f"{tmp_path}/in.tar", "wb") as file:
        file.write(tar_bytes())
    assert run("layer", "convert", f"{tmp_path}/in.tar", f"{tmp_path}/out.tar.zst") == 0
    return f"{tmp_path}/out.tar.zst"


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        found += leaves(command, (*path, name)) if isinstance(command, click.Group) else [(*path, name)]
    return found


@pytest.mark.parametrize("path", leaves(cli), ids=" ".join)
def test_every_command_has_help_with_an_example(path: tuple[str, ...], capsys: Captured) -> None:
    assert run(*path, "--help") == 0
    text = capsys.readouterr().out
    assert f"weenv {' '.join(path)}" in text.split("Example", 1)[1]


def test_help_lists_every_command_and_imports_none(capsys: Captured) -> None:
    script = "import sys; from weenv.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    script += "assert not {'numpy', 'grpc', 'aiohttp', 'oras', 'rich'} & set(sys.modules), 'help is to answer at once'"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    for name in COMMANDS:
        assert f"\n  {name} " in out


def test_converting_a_layer_imports_nothing_that_speaks_to_registries(tmp_path: Path) -> None:
    (tmp_path / "in.tar").write_bytes(tar_bytes())
    script = "import sys; from weenv.cli.entry import main\nsys.argv = ['weenv', 'layer', 'convert', *sys.argv[1:]]\n"
    script += "try: main()\nexcept SystemExit as ended: assert not ended.code\n"
    script += "loaded = {'aiohttp', 'asyncio', 'grpc', 'oras', 'rich', 'ssl'} & set(sys.modules)\n"
    script += "assert not loaded, f'a tenth of the time of a small layer: {loaded}'"
    subprocess.run([sys.executable, "-c", script, tmp_path / "in.tar", tmp_path / "out"], check=True, capture_output=True)
    assert (tmp_path / "out").stat().st_size > 900_000


@pytest.mark.parametrize(
    "argv",
    [
        ["nonsense"],
        ["layer", "inspect"],
        ["convert", "a"],
        ["convert", "a", "b", "--target", "1"],
        ["convert", "a", "b", "--target", "100000"],
        ["convert", "a", "b", "--target", "1G"],
        ["convert", "a", "b", "--level", "99"],
        ["convert", "a", "b", "--jobs", "0"],
        ["group", "build", "oci:x:1", "--from", ".", "--target", "wide"],
        ["layer", "convert", "/nonexistent", "x"],
        ["rm"],
        ["rm", "--force"],
        ["rm", "--sweep", "x"],
        ["rm", "--all", "--sweep"],
    ],
)
def test_usage_errors_exit_with_2(argv: list[str], capsys: Captured) -> None:
    assert run(*argv) == 2
    assert "Usage:" in capsys.readouterr().err


def test_a_users_fault_is_one_line_and_exit_code_1(tmp_path: object, capsys: Captured) -> None:
    with open(f"{tmp_path}/not-a-layer", "wb") as file:
        file.write(b"x" * 1000)
    assert run("layer", "inspect", f"{tmp_path}/not-a-layer") == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("weenv: ")
    assert len(said) <= 2
    assert "weenv layer convert" in said[-1]
    with open(f"{tmp_path}/not-a-layer", "ab") as file:
        file.write(b"y" * 1000)
    for verb in (["inspect"], ["verify"], ["mount"]):
        assert run("layer", *verb, f"{tmp_path}/not-a-layer", *([str(tmp_path)] if verb == ["mount"] else [])) == 1
        said = capsys.readouterr().err.splitlines()
        assert said[0] == f"weenv: {tmp_path}/not-a-layer: not in the lazy format (no seek table at its end)", verb
    assert run("layer", "convert", f"{tmp_path}/not-a-layer", f"{tmp_path}/out") == 1
    assert capsys.readouterr().err.startswith(f"weenv: {tmp_path}/not-a-layer: malformed tar header: ")


def test_what_is_no_tar_is_said_with_its_name(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "bug.patch").write_text("--- a/x\n+++ b/x\n")
    said = f"weenv: {tmp_path}/bug.patch: is no tar: it ends within a header"
    assert run("layer", "convert", f"{tmp_path}/bug.patch", f"{tmp_path}/out") == 1
    assert capsys.readouterr().err.splitlines()[0] == said
    assert run("group", "build", f"oci:{tmp_path}/g:1", "--from", f"{tmp_path}/bug.patch") == 1
    assert capsys.readouterr().err.splitlines()[0] == said


@pytest.mark.parametrize("place", ["{0}", "./d", "docker-archive:/x.tar"])
def test_a_directory_is_named_as_a_layout(place: str, tmp_path: Path, capsys: Captured) -> None:
    assert run("convert", place.format(tmp_path), f"oci:{tmp_path}/x:1") == 1
    assert "oci:DIR[:TAG]" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_not_looked_for_at_docker_hub(tmp_path: Path, capsys: Captured) -> None:
    for argv in (["layer", "inspect", "rootfs"], ["layer", "mount", "rootfs", str(tmp_path)]):
        assert run(*argv) == 1
        first, hint = capsys.readouterr().err.splitlines()
        assert first == "weenv: no such file: rootfs" and "docker.io/library/rootfs" in hint


@pytest.mark.parametrize("path", leaves(cli), ids=" ".join)
def test_every_option_has_help(path: tuple[str, ...]) -> None:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), name)
        assert found is not None
        command = found
    assert not [param.opts for param in command.params if isinstance(param, click.Option) and not param.help]


@pytest.mark.parametrize("text", ["UPPER/case", "host/x:bad tag", "oci:/nonexistent/layout", "127.0.0.1:1/nothing/here:1"])
def test_what_cannot_be_found_is_said_in_a_line(text: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("layer", "inspect", text) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("weenv: ")
    assert len(said) <= 2


def test_a_layout_is_not_made_below_nothing(layer: str, tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "tree").mkdir()
    assert run("group", "build", f"oci:{tmp_path}/a:1", "--from", f"{tmp_path}/tree") == 0
    capsys.readouterr()
    assert run("convert", f"oci:{tmp_path}/a:1", f"oci:{tmp_path}/missing/dir/x:1") == 1
    said = capsys.readouterr().err.splitlines()[0]
    assert said == f"weenv: cannot make {tmp_path}/missing/dir/x: there is no directory {tmp_path}/missing/dir"
    assert not (tmp_path / "missing").exists()
    assert run("convert", f"oci:{tmp_path}/a:1", f"oci:{tmp_path}/b:1") == 0


def test_a_gateway_needs_the_directories_that_it_is_given(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "c.toml").write_text(f'[snapshotter]\nroot = "{tmp_path}"\n')
    assert run("gateway", "serve", "--config", f"{tmp_path}/c.toml", "--plans", f"{tmp_path}/missing") == 1
    assert f"weenv: --plans: there is no directory {tmp_path}/missing" in capsys.readouterr().err


def test_runtimes_that_cannot_be(tmp_path: Path, capsys: Captured) -> None:
    for runtime, said in (("nosuch", "is no runtime of containerd's: 'nosuch'"), ("/no/such", "there is no program /no/such")):
        assert run("run", "--rm", "--runtime", runtime, "p.yaml") == 1
        first, hint = capsys.readouterr().err.splitlines()
        assert said in first
        assert "io.containerd.runc.v2" in hint


@pytest.mark.parametrize("name", ["Bad Name", "-a", "a..b", "a/b", "a" * 77, "ä"])
def test_names_that_no_environment_can_have(name: str) -> None:
    with pytest.raises(WeenvError, match="no name for an environment"):
        check_id(name)
    assert check_id("Task-17.x_y") == "Task-17.x_y"


def test_debug_shows_the_traceback(tmp_path: object) -> None:
    with open(f"{tmp_path}/not-a-layer", "wb") as file:
        file.write(b"x" * 1000)
    with pytest.raises(FormatError):
        main(["--debug", "layer", "inspect", f"{tmp_path}/not-a-layer"])


def test_inspect_counts_kinds_in_words() -> None:
    from weenv.cli.layer import _counts

    assert _counts({"file": 1, "directory": 1, "symlink": 0}) == "1 file, 1 directory"
    assert _counts({"file": 3, "directory": 3, "char": 2}) == "3 files, 3 directories, 2 char"


def test_inspect_and_verify_agree_with_the_tar(layer: str, capsys: Captured) -> None:
    capsys.readouterr()
    assert run("layer", "inspect", layer, "--json", "--entries") == 0
    seen = json.loads(capsys.readouterr().out)
    assert {entry["path"]: entry["size"] for entry in seen["entries"] if entry["kind"] == "file"} == {
        "/big": 900_000,
        "/etc/hello": 6,
    }
    assert seen["counts"]["directory"] == 2
    assert seen["frames"]["count"] >= 2
    assert run("layer", "inspect", layer) == 0
    assert run("layer", "verify", layer, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out.split("\n[", 1)[1].join(["[", ""]))
    assert row["diffId"] == seen["diffId"]
    assert row["trusted"] is False


def test_verify_finds_one_changed_byte(layer: str, capsys: Captured) -> None:
    with open(layer, "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))
    assert run("layer", "verify", layer) == 1
    assert "frame" in capsys.readouterr().err


def test_what_a_command_logs_is_a_line_of_this_program(tmp_path: Path) -> None:
    (tmp_path / "127.0.0.1:1").mkdir()
    (tmp_path / "127.0.0.1:1" / "hosts.toml").write_text("a = [")
    (tmp_path / "c.toml").write_text(f'[registry]\nconfig_path = "{tmp_path}"\nattempts = 1\n')
    script = "import sys; from weenv.cli.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", script, "layer", "inspect", "127.0.0.1:1/x/y:1", "--config", f"{tmp_path}/c.toml"]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()
    assert told[0].startswith(f"weenv: {tmp_path}/127.0.0.1:1/hosts.toml cannot be used: not TOML")
    assert all(line.startswith(("weenv: ", "  ")) for line in told), told


def test_names_from_a_registry_cannot_drive_the_terminal() -> None:
    assert "\x1b" not in render.escape("a\x1b[2Jb")
    assert render.escape("[red]x") == "\\[red]x"


@pytest.mark.parametrize(
    "error",
    [FormatError("b\x1b[2Jad\nx", hint="do\x1b[2J\nthis"), OSError(2, "no", "a\x1b[2J\n"), KeyError("\x1b\n")],
)
def test_errors_cannot_drive_the_terminal(error: Exception, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_more: object) -> None:
        raise error

    monkeypatch.setattr(cli, "main", fail)
    assert run("doctor") == 1
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert all(line.startswith(("weenv: ", "  ")) for line in said.splitlines())


def test_names_that_a_user_typed_are_shown_harmless(layer: str, tmp_path: Path, capsys: Captured) -> None:
    name = tmp_path / "a\x1b[2J\nb"
    os.link(layer, name)
    assert run("layer", "verify", str(name)) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (872 << 20, "872 MiB"), (3 << 40, "3 TiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert render.size(count) == text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: Captured) -> None:
    assert run("completion", shell) == 0
    assert "_WEENV_COMPLETE" in capsys.readouterr().out


def test_bash_completes_commands_files_and_environments(tmp_path: Path) -> None:
    def complete(words: str) -> list[str]:
        known = {"_WEENV_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
        script = "import sys; sys.argv = ['weenv']; from weenv.cli.main import main; main()"
        out = subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, **known}, capture_output=True, text=True, check=False
        )
        return out.stdout.split()

    assert complete("weenv sna") == ["plain,snapshotter"]
    for words in ("weenv run ta", "weenv group sign --key ta", "weenv plan check --config ta"):
        assert complete(words) == ["file,ta"], words
    (tmp_path / "c.toml").write_text(f'[snapshotter]\nroot = "{tmp_path}"\n')
    os.makedirs(load(f"{tmp_path}/c.toml").home("task-17"))
    assert complete(f"weenv exec --config {tmp_path}/c.toml t") == ["plain,task-17"]


def test_doctor_names_what_is_missing(tmp_path: object, capsys: Captured) -> None:
    with open(f"{tmp_path}/c.toml", "w") as file:
        file.write(f'[snapshotter]\nroot = "{tmp_path}/r"\nsocket = "{tmp_path}/s"\nblobs = "{tmp_path}/b"\n')
    assert run("doctor", "--config", f"{tmp_path}/c.toml", "--containerd-config", f"{tmp_path}/none", "--json") == 1
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["snapshotter"]["state"] == found["blobfs"]["state"] == found["containerd config"]["state"] == "fail"
    assert found["blobfs"]["remedy"] == found["snapshotter"]["remedy"] == START
    assert "weenv install" in START and "weenv serve" in START
    assert "weenv install" in found["containerd config"]["remedy"]


def test_status_of_a_node_that_never_ran(tmp_path: object, capsys: Captured) -> None:
    with open(f"{tmp_path}/c.toml", "w") as file:
        file.write(f'[snapshotter]\nroot = "{tmp_path}/r"\n[blobfs]\nstatus_socket = "{tmp_path}/x"\n')
    assert run("status", "--config", f"{tmp_path}/c.toml", "--json") == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["running"], seen["layers"], seen["blobfs"]) == (False, [], None)


def test_status_of_a_snapshotter_whose_root_was_deleted(tmp_path: Path, capsys: Captured) -> None:
    config = tmp_path / "c.toml"
    text = '[snapshotter]\nroot = "{0}/r"\nsocket = "{0}/s"\n[blobfs]\nstatus_socket = "{0}/x"\n'
    config.write_text(text.format(tmp_path))
    assert run("status", "--config", str(config)) == 0
    assert "problem" not in capsys.readouterr().out
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/s")
        listening.listen()
        assert run("status", "--config", str(config)) == 0
        assert f"the root {tmp_path}/r is not the one it began with" in capsys.readouterr().out
        assert run("status", "--config", str(config), "--json") == 0
        assert "deleted or replaced" in json.loads(capsys.readouterr().out)["problems"][0]
