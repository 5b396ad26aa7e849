"""Every ``weenv ...`` that a page, a help text or a unit shows is one that the command takes: names, options, arguments."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from weenv.cli.main import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNITS = sorted((ROOT / "systemd/units").glob("*.service"))
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
ALTERNATIVES = re.compile(r"(weenv (?:[\w-]+ )*)([\w-]+(?:\|[\w-]+)+)")
SHELLS = ("console", "sh", "bash")
BEFORE = {"sudo", "exec", "until", "while", "if", "elif", "else", "do", "then", "!", "{", "time", "nohup", "env", "xargs", "-r"}
"""What may stand before a command's name."""
TOKEN = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.|(?P<comment>(?:^|(?<=[\s;&|(]))\#[^\n]*)|(?P<open>['"]|\\\Z)|.""", re.DOTALL
)
"""The pieces of a shell's line: what is quoted, a comment, what needs another line to be whole, any other character."""
MENTION = re.compile(r"(?<![\w./@-])(?<!from )weenv((?: (?:--)?[a-z][a-z-]*(?![\w/@=:*]))+)")
"""A command that is told of outside of a shell's code, with what follows: options, or just words."""
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
SHOWN = re.compile(r"\s*(?:(?:sudo|exec|until|if) )*weenv ([a-z]\S*)")
"""A line that runs weenv, to look at it."""
ONE_OF = {
    "weenv cache prune": ("everything", "until", "layers", "size"),
    "weenv image fetch": ("images", "everything"),
    "weenv rm": ("environments", "everything", "sweep"),
    "weenv group build": ("sources", "image"),
    "weenv admit": ("target", "command"),
}
"""Parameters of which a command wants one, as its own code says."""


def pieces(text: str) -> tuple[str, str, bool]:
    """What a shell is given: the code, the comments, whether it is whole."""
    code = comment = ""
    whole = True
    for token in TOKEN.finditer(text):
        whole = whole and token.lastgroup != "open"
        if token.lastgroup == "comment":
            comment += token[0] + "\n"
        else:
            code += token[0]
    return code, comment, whole


def of_shell(line: str) -> Iterator[list[str]]:
    """The arguments of each ``weenv`` that a line of a shell runs."""
    code = re.sub(r"`([^`]*)`", r"$(\1)", pieces(line)[0])
    lexer = shlex.shlex(code, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    command: list[str] = []
    for word in [*lexer, ";"]:
        for inner in re.findall(r"\$\(([^()]*)\)", word):
            yield from of_shell(inner)
        if word.strip("();<>|&"):
            if command or not (word in BEFORE or re.match(r"\w+=", word)):
                command.append(word)
        elif command:
            if Path(command[0]).name == "weenv":
                yield command[1:-1] if word.startswith(">") and command[-1] in ("1", "2") else command[1:]
            command = ["file"] if word[0] in "<>" else []


def lines_of(block: str, language: str) -> Iterator[tuple[str, str]]:
    """The commands of a fenced block, each with what is said beside it: after the prompts of a console, all of a script but
    its here documents. What a console answers is beside an empty command."""
    end = waiting = ""
    for line in block.splitlines():
        if end:
            end = "" if line.removeprefix("> ") == end else end
            continue
        if language == "console":
            text = line.strip()
            if waiting:
                line = text.removeprefix("> ")
            elif text.startswith(("$ ", "# ")):
                line = text[2:]
            else:
                yield "", line
                continue
        waiting += line
        code, comment, whole = pieces(waiting)
        if not whole:
            waiting = waiting.removesuffix("\\") + "\n"
            continue
        if match := re.search(r"<<-?'?(\w+)", code):
            end = match[1]
        yield code, comment
        waiting = ""
    assert not waiting, f"this is no whole command: {waiting}"


def commands_of(block: str, language: str) -> list[list[str]]:
    """The arguments of each ``weenv`` that a fenced block runs."""
    return [found for code, _ in lines_of(block, language) for found in of_shell(code)] if language in SHELLS else []


def of_prose(text: str) -> Iterator[list[str]]:
    """The arguments of what a comment, an answer or a figure names."""
    for match in MENTION.finditer(text):
        yield match[1].split()


def of_page(text: str) -> Iterator[tuple[list[str], bool]]:
    """The arguments of what a page shows; True: as they are, False: in a line of prose, where they may be told in part."""
    for language, block in FENCE.findall(text):
        for code, beside in lines_of(block, language) if language in SHELLS else [("", block)]:
            ran, named = list(of_shell(code)), list(of_prose(beside))
            yield from ((found, True) for found in ran)
            yield from ((found, False) for found in named)
            for option in OPTION.findall(beside) if ran and not named else ():
                yield [*path_of(ran[-1]), option], False
    for span in SPAN.findall(FENCE.sub("", text)):
        if re.search(r"\bweenv [a-z]", span) is None:
            continue
        told = " ".join(re.sub(r"[\[\]]", " ", span).split())
        several = ALTERNATIVES.match(told)
        for one in [several[1] + name for name in several[2].split("|")] if several else [told]:
            yield from ((found, False) for found in of_shell(one))


def unseen(text: str) -> list[str]:
    """The lines of a page's fences that run weenv, as everybody sees, and that :func:`of_page` has not found there."""
    lines: list[str] = []
    for language, block in FENCE.findall(text):
        if language == "text":  # a figure, or what a command says
            continue
        found = Counter(arguments[0] for arguments in commands_of(block, language) if arguments)
        for line in block.splitlines():
            prompt, shown = re.match(r"\s*([$#>] )?", line), line
            assert prompt is not None
            if language in ("console", ""):
                shown = line[prompt.end() :]
            match = SHOWN.match(shown)
            if match is None or (language == "console" and not prompt[1]):
                continue
            if not found[match[1]]:
                lines.append(f"```{language}: {line}")
            found[match[1]] -= 1
    return lines


def path_of(arguments: list[str]) -> list[str]:
    """The names of the command among the arguments that it is given."""
    command: click.Command | None = cli
    for number, word in enumerate(arguments):
        if not isinstance(command, click.Group):
            return arguments[:number]
        command = command.get_command(click.Context(command), word)
    return arguments


def check(arguments: list[str], whole: bool) -> None:
    """Raises click.UsageError for what the command does not take; where ``whole``, also for what is missing."""
    command: click.Command = cli
    context = click.Context(cli, info_name="weenv", **cli.context_settings)
    while True:
        try:
            given, rest, _ = command.make_parser(context).parse_args(list(arguments))
        except click.BadOptionUsage:
            if whole:
                raise
            given, rest, _ = command.make_parser(context).parse_args([*arguments, "x"])  # an option told without its value
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
    told = set()
    for param in command.params if whole else ():
        value = given.get(str(param.name))
        if param.value_is_missing(value) or value is None:
            if isinstance(param, click.Argument) and param.required:
                raise click.UsageError(f"{command.name} lacks {param.human_readable_name}")
            continue
        told.add(str(param.name))
        if not isinstance(param.type, click.Path | click.File):
            value = param.type_cast_value(context, value)
            if param.callback is not None and not param.is_eager:
                param.callback(context, param, value)
    wanted = ONE_OF.get(context.command_path) if whole else None
    if wanted and not told.intersection(wanted):
        raise click.UsageError(f"{context.command_path} needs one of {wanted}")


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_line_of_a_page_that_runs_it_was_looked_at(page: Path) -> None:
    assert not unseen(page.read_text()), "its fence has to say console or sh"


@pytest.mark.parametrize(
    "text",
    ["```\nweenv ps\n```\n", "```\n$ weenv ps\n```\n", "```json\nsudo weenv ps\n```\n",
     "```sh\ncat <<END\nweenv ps\nEND\n```\n",
     "```console\n$ sh <<END\n> weenv ps\n> END\n```\n"],
)  # fmt: skip
def test_a_line_that_was_not_looked_at_is_found(text: str) -> None:
    assert unseen(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```console\n$ weenv ps   # any node's\n$ weenv rm x\n```\n", [["ps"], ["rm", "x"]]),
        ("```console\n$ weenv run \\\n    x\n$ weenv exec x \\\n> -- 'a\n> b'\n```\n",
         [["run", "x"], ["exec", "x", "--", "a\nb"]]),
        ('```sh\nweenv rm "$(weenv ps -q)"; A=`weenv top`\nB=$(weenv run -d x)\n```\n',
         [["ps", "-q"], ["rm", "$(weenv ps -q)"], ["top"], ["run", "-d", "x"]]),
        ("```console\n$ weenv run x\nhint: weenv convert makes it\n```\n", [["run", "x"], ["convert", "makes", "it"]]),
        ("```console\n# weenv rm a  # or: weenv rm --all\n# weenv ps  # --json, --all\n```\n",
         [["rm", "a"], ["rm", "--all"], ["ps"], ["ps", "--json"], ["ps", "--all"]]),
        ("```yaml\na: b   # as weenv plan lock writes it\n```\n", [["plan", "lock", "writes", "it"]]),
        ("```python\nfrom weenv import Environment\n```\n", []),
    ],
)  # fmt: skip
def test_commands_of_a_page(text: str, found: list[list[str]]) -> None:
    assert [arguments for arguments, _ in of_page(text)] == found
    assert not unseen(text)


def test_a_block_that_ends_within_a_command_is_wrong() -> None:
    with pytest.raises(AssertionError, match="no whole command"):
        list(of_page("```sh\nweenv run 'x\n```\n"))


@pytest.mark.parametrize("command", ONE_OF)
def test_commands_that_want_one_of_their_parameters(command: str) -> None:
    answer = CliRunner().invoke(cli, command.split()[1:])
    assert answer.exit_code == 2, "what this file says of it is what it does"


def test_every_command_shows_an_example() -> None:
    commands = [(name, command) for name, command in tree(cli, "weenv") if not isinstance(command, click.Group)]
    assert [name for name, command in commands if "weenv " not in (command.help or "").partition("Example")[2]] == []


@pytest.mark.parametrize(
    "arguments",
    ["prune", "cache prun", "cache prune --untill 5h", "cache prune --to", "run", "layer mount x", "layer mount x y z",
     "ps --jsn", "serve --log-format xml", "cache prune", "cache prune --until 5x", "cache prune --to 5x", "rm",
     "admit --cpu x -- a", "image fetch --namespace moby", "top --since never"],
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
