"""Entry point: the command tree, how errors are shown, exit codes.

Exit codes: 0 done; 1 something is wrong with input, network or machine (one line says what to do); 2 the command line
itself is wrong; 130 interrupted. Sub-commands are imported when they are called, so that ``weenv --help`` and completion
answer at once.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

import click

from weenv import __version__
from weenv.core.errors import WeenvError
from weenv.core.log import printable
from weenv.core.rights import remedy

_COMPLETE = "_WEENV_COMPLETE"
"""Variable that the scripts of ``weenv completion`` set when they ask."""


class LazyGroup(click.Group):
    """A group whose commands are ``module:attribute`` strings until they are needed."""

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of the table, then those that were added directly."""
        return [*self.lazy, *(name for name in super().list_commands(ctx) if name not in self.lazy)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or None where there is none of that name."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, attribute = self.lazy[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        if _COMPLETE in os.environ:
            from weenv.cli.completing import equip

            equip(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their one-line help, importing none of them."""
        rows = [(name, help_line) for name, (_, help_line) in self.lazy.items()]
        for name in super().list_commands(ctx):
            command = super().get_command(ctx, name)
            if command is not None and not command.hidden:
                rows.append((name, command.get_short_help_str(limit=100)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


COMMANDS: dict[str, tuple[str, str]] = {
    "convert": ("weenv.cli.convert:convert", "Convert an image into lazily loadable layers."),
    "group": ("weenv.cli.group:group", "Build, publish, compare and sign layer groups."),
    "layer": ("weenv.cli.layer:layer", "Convert, inspect, verify or mount a single layer."),
    "run": ("weenv.cli.run:run", "Start an environment from a plan or image and run a command in it."),
    "exec": ("weenv.cli.run:exec_", "Run a command in a running environment."),
    "ps": ("weenv.cli.run:ps", "List environments."),
    "inspect": ("weenv.cli.inspect:inspect", "Print all that is known of an environment, and why it ended."),
    "logs": ("weenv.cli.run:logs", "Print what a detached environment has written."),
    "stop": ("weenv.cli.run:stop", "End environments."),
    "rm": ("weenv.cli.run:rm", "Remove environments."),
    "elastic": ("weenv.cli.elastic:elastic", "Live CPU and memory quotas: the daemon, traces, replays."),
    "admit": ("weenv.cli.admit:admit", "Wait until this node has room for an environment or a command."),
    "top": ("weenv.cli.top:top", "Show managed environments live: quota, use, pressure, last decision."),
    "events": ("weenv.cli.top:events", "Print what happened to environments, and why they ended."),
    "serve": ("weenv.cli.daemons:serve", "Run both daemons of a node, and start again what ends."),
    "snapshotter": ("weenv.cli.daemons:snapshotter", "The containerd proxy snapshotter daemon."),
    "blobfs": ("weenv.cli.daemons:blobfs", "The daemon that serves layer bytes on demand."),
    "plan": ("weenv.cli.plan:plan", "Check, pin, draw, publish and compose environment plans."),
    "image": ("weenv.cli.image:image", "What containerd has of images: their blobs for docker save and push, what plans left."),
    "profile": ("weenv.cli.profile:profile", "What an image's containers read first: record, publish, show."),
    "gateway": ("weenv.cli.gateway:gateway", "A registry on the node that answers plans and stacks as images."),
    "nri": ("weenv.cli.nri:nri", "The plugin that gives containers of CRI their starting quotas."),
    "install": ("weenv.cli.install:install", "Make the daemons services of this node, and tell containerd of them."),
    "uninstall": ("weenv.cli.uninstall:uninstall", "Take away what weenv install put on this node."),
    "status": ("weenv.cli.status:status", "Show the layers on this node and how much of each is local."),
    "cache": ("weenv.cli.cache:cache", "Show and limit what is kept of layers on this node's disk."),
    "doctor": ("weenv.cli.doctor:doctor", "Check kernel, containerd, sockets, disk and registry; say what to mend."),
}

_EPILOG = """\b
Examples:
  weenv convert registry.example/team/env:1 registry.example/team/env:1-lazy
  weenv layer inspect layer.tar.zst
  weenv install --dry-run
  weenv doctor
"""


@click.group(
    cls=LazyGroup,
    lazy=COMMANDS,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="weenv")
@click.option("--debug", is_flag=True, envvar="WEENV_DEBUG", help="Log at debug level and show tracebacks.")
@click.pass_context
def cli(ctx: click.Context, debug: bool) -> None:
    """Lazy, composable, elastic software environments on containerd."""
    ctx.ensure_object(dict)
    ctx.obj["debug"] = debug
    if debug:
        from weenv.core.log import configure

        configure("debug")


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    Example:
      weenv completion bash > /etc/bash_completion.d/weenv
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None
    click.echo(found(cli, {}, "weenv", _COMPLETE).source())


def _lines(error: WeenvError) -> list[str]:
    text = " ".join(error.message.split()) or type(error).__name__
    if not error.message and str(error):
        text = str(error)
    return [printable(f"weenv: {text}"), *(printable(f"  {line.strip()}") for line in error.hint.splitlines())]


def explain(error: BaseException) -> str:
    """One line (two with a hint) for an expected error, and for each that was found with it."""
    if isinstance(error, WeenvError):
        return "\n".join(line for one in (error, *error.also) for line in _lines(one))
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        hint = remedy(error)
        return printable(f"weenv: {where}{error.strerror or error}") + (f"\n  {hint}" if hint else "")
    return printable(f"weenv: internal error: {type(error).__name__}: {error} (run again with --debug and report it)")


class _Prefixed(logging.Formatter):
    """What the parts of a command log, such as a file that cannot be used, as lines of this program."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the hint in another."""
        hint = getattr(record, "hint", "")
        return printable(f"weenv: {record.getMessage()}") + (f"\n  {printable(str(hint))}" if hint else "")


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit the process."""
    if logging.lastResort is not None:  # what is used where nobody has set up anything else
        logging.lastResort.setFormatter(_Prefixed())
    arguments = sys.argv[1:] if argv is None else argv
    debug = "--debug" in arguments
    try:
        code = cli.main(args=arguments, prog_name="weenv", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        click.echo("weenv: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        click.echo("weenv: interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except ExceptionGroup as group:
        if debug:
            raise
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        click.echo(explain(first), err=True)
        sys.exit(1)
    except Exception as error:
        if debug:
            raise
        logging.getLogger(__name__).debug("failed", exc_info=error)
        click.echo(explain(error), err=True)
        sys.exit(error.exit_code if isinstance(error, WeenvError) else 1)
