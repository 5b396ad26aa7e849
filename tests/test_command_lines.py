"""Every ``weenv ...`` that a page, a help text or a unit shows is one that the command takes: names, options, arguments."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from weenv.cli.main import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNITS = sorted((ROOT / "systemd/units").glob("*.service"))
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
ALTERNATIVES = re.compile(r"(weenv (?:[\w-]+ )*)([\w-]+(?:\|[\w-]+)+)")
BEFORE = {"sudo", "exec", "until", "while", "if", "do", "then", "!", "xargs", "-r"}
"""What may stand before a command's name."""


def of_shell(line: str) -> Iterator[list[str]]:
    """The arguments of each ``weenv`` that a line of a shell runs."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    command: list[str] = []
    for word in [*lexer, ";"]:
        if word.strip("();<>|&"):
            if command or not (word in BEFORE or re.match(r"\w+=", word)):
                command.append(word)
        elif command:
            if Path(command[0]).name == "weenv":
                yield command[1:-1] if word.startswith(">") and command[-1] in ("1", "2") else command[1:]
            command = ["file"] if word[0] in "<>" else []


def lines_of(block: str, language: str) -> Iterator[str]:
    """The commands of a fenced block: after the prompts of a console, all of a script but its here documents."""
    end = waiting = ""
    for line in block.splitlines():
        if end:
            end = "" if line == end else end
            continue
        if language == "console":
            prompt, _, line = line.strip().partition(" ")
            if prompt not in ("$", "#"):
                continue
        if match := re.search(r"<<'?(\w+)", line):
            end = match[1]
        waiting += line
        if waiting.endswith("\\") or waiting.count("'") % 2:
            waiting = waiting.removesuffix("\\") + "\n"
            continue
        yield waiting
        waiting = ""


def of_page(text: str) -> Iterator[tuple[list[str], bool]]:
    """The arguments of what a page shows; True: as they are, False: in a line of prose, where they may be told in part."""
    for language, block in FENCE.findall(text):
        if language in ("console", "sh", "bash"):
            for line in lines_of(block, language):
                yield from ((found, True) for found in of_shell(line))
    for span in SPAN.findall(FENCE.sub("", text)):
        if re.search(r"\bweenv [a-z]", span) is None:
            continue
        told = " ".join(re.sub(r"[\[\]]", " ", span).split())
        several = ALTERNATIVES.match(told)
        for one in [several[1] + name for name in several[2].split("|")] if several else [told]:
            yield from ((found, False) for found in of_shell(one))


def check(arguments: list[str], whole: bool) -> None:
    """Raises click.UsageError for what the command does not take; where ``whole``, also for what is missing."""
    command: click.Command = cli
    context = click.Context(cli, info_name="weenv", **cli.context_settings)
    while True:
        given, rest, _ = command.make_parser(context).parse_args(list(arguments))
        if not isinstance(command, click.Group):
            break
        if not rest:
            if whole and not any(given.values()):
                raise click.UsageError(f"{command.name} needs a command")
            return
        found = command.get_command(context, rest[0])
        if found is None:
            raise click.UsageError(f"no command {rest[0]} of {command.name}")
        command, arguments = found, rest[1:]
        context = click.Context(found, parent=context, info_name=rest[0], **found.context_settings)
    if rest and whole and not context.allow_extra_args:
        raise click.UsageError(f"too much for {command.name}: {rest}")
    for param in command.params if whole else ():
        value = given.get(str(param.name))
        if param.value_is_missing(value) or value is None:
            if isinstance(param, click.Argument) and param.required:
                raise click.UsageError(f"{command.name} lacks {param.make_metavar(context)}")
        elif not isinstance(param.type, click.Path | click.File):
            param.type_cast_value(context, value)


def shown() -> list[tuple[str, list[str], bool]]:
    """Everything: where it is, its arguments, whether they are whole."""
    found = [(str(page.relative_to(ROOT)), *each) for page in PAGES for each in of_page(page.read_text())]
    for unit in UNITS:
        lines = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
        found += [(unit.name, line.split()[1:], True) for line in lines]
    for name, command in tree(cli, "weenv"):
        text = f"{command.help or ''}\n{command.epilog or ''}".partition("Example")[2]
        examples = [line.strip() for line in text.splitlines() if line.strip().startswith("weenv ")]
        found += [(f"{name} --help", arguments, True) for line in examples for arguments in of_shell(line)]
    return found


def tree(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """All commands, by the names that users type."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            yield from tree(found, f"{name} {below}")


def test_what_is_shown_is_what_the_command_takes() -> None:
    wrong = []
    found = shown()
    for where, arguments, whole in found:
        try:
            check(arguments, whole)
        except click.UsageError as error:
            wrong.append(f"{where}: weenv {shlex.join(arguments)}: {error.format_message()}")
    assert not wrong, "\n".join(wrong)
    places = {where for where, _, _ in found}
    assert places > {"README.md", "docs/example.md", "weenv-blobfs.service", "weenv cache prune --help"}
    assert len(found) > 200


def test_every_command_shows_an_example() -> None:
    commands = [(name, command) for name, command in tree(cli, "weenv") if not isinstance(command, click.Group)]
    assert [name for name, command in commands if "weenv " not in (command.help or "").partition("Example")[2]] == []


@pytest.mark.parametrize(
    "arguments",
    ["prune", "cache prun", "cache prune --untill 5h", "cache prune --to", "run", "layer mount x", "layer mount x y z",
     "ps --jsn", "serve --log-format xml"],
)  # fmt: skip
def test_what_is_wrong_is_found(arguments: str) -> None:
    with pytest.raises(click.UsageError):
        check(arguments.split(), True)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("A=1 sudo /opt/weenv/bin/weenv doctor && ls; weenv ps --all 2>/dev/null | cat", [["doctor"], ["ps", "--all"]]),
        ("until weenv group ls h 2>/dev/null; do sleep 1; done", [["group", "ls", "h"]]),
        ("ctr run --snapshotter weenv image; echo weenv ps   # weenv rm", []),
        ("weenv run -d x -- sh -c 'weenv ps' > weenv", [["run", "-d", "x", "--", "sh", "-c", "weenv ps"]]),
        ("findmnt -rn | xargs -r umount; weenv blobfs stop", [["blobfs", "stop"]]),
    ],
)
def test_commands_in_a_line(line: str, found: list[list[str]]) -> None:
    assert list(of_shell(line)) == found
