"""``weenv run``, ``exec``, ``ps``, ``logs``, ``stop`` and ``rm``: environments from the command line.

What they need is imported when it is needed: starting an environment takes about as long as starting Python.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from weenv.cli.progress import bar
from weenv.core.log import printable
from weenv.core.settings import DEFAULT_CONFIG

if TYPE_CHECKING:
    from weenv.environment.node import Node

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def node_options(command: F) -> F:
    """The options that say which node."""
    for option in (
        click.option("--config", "config_path", default=DEFAULT_CONFIG, show_default=True, help="WeEnv's configuration."),
        click.option("--containerd", "address", metavar="SOCK", help="containerd's socket.  [default: run.address]"),
        click.option("-n", "--namespace", help="containerd namespace.  [default: run.namespace]"),
        click.option("--snapshotter", help="Snapshotter of the image.  [default: run.snapshotter]"),
    ):
        command = option(command)
    return command


def say(line: str) -> None:
    """A line about what is not lazy, on standard error; with a carriage return for a terminal that is in raw mode."""
    click.echo(f"weenv: {printable(line)}" + "\r" * sys.stderr.isatty(), err=True)


def on_node(options: dict[str, Any], work: Callable[[Node], Awaitable[T]], **more: Any) -> T:
    """Run ``work(node)``."""
    gc.disable()  # while importing: nothing becomes garbage
    from weenv.environment import attended  # noqa: F401 - with the others
    from weenv.environment.node import Node, load

    gc.enable()

    gc.freeze()  # what has been imported so far stays for good
    config = load(
        options["config_path"],
        address=options["address"],
        namespace=options["namespace"],
        snapshotter=options["snapshotter"],
        **more,
    )

    async def run() -> T:
        async with Node(config) as node:
            node.say = say
            node.show = bar
            return await work(node)

    return asyncio.run(run())


def _leave(status: int) -> NoReturn:
    """End this process at once: everything is done and closed, and taking the interpreter down would take longer than
    removing an environment does."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


_TIMEOUT = "Kill it and all it started after so long; exit status 124."


def _seconds(_ctx: click.Context, _param: click.Parameter, value: float | None) -> float | None:
    """Seconds, none of which are negative or no number."""
    if value is not None and not value >= 0:
        raise click.BadParameter(f"{value:g} is no time to wait for")
    return value


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--rm", "remove", is_flag=True, help="Remove it when it ends, or when this command does.")
@click.option("-d", "--detach", is_flag=True, help="Leave it running; print its name.")
@click.option("-i", "--interactive", is_flag=True, help="Give it this command's input.")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal.")
@click.option("-e", "--env", multiple=True, metavar="NAME[=VALUE]", help="Set a variable; without value: as it is here.")
@click.option("-v", "--volume", multiple=True, metavar="SRC:DST[:ro]", help="Show a directory or file of this machine.")
@click.option("-w", "--workdir", default="", metavar="DIR", help="Working directory.")
@click.option("-u", "--user", default="", metavar="USER[:GROUP]", help="Who to run as.")
@click.option("--entrypoint", metavar="PROGRAM", help="Replace the image's entrypoint.")
@click.option("--cpus", type=float, default=0.0, metavar="N", help="At most so many cores.")
@click.option("--memory", metavar="SIZE", help="At most so much memory, such as 512m.")
@click.option("--pids", type=int, default=0, metavar="N", help="At most so many processes.")
@click.option("--network", type=click.Choice(["none", "host"]), help="none: loopback only.  [default: run.network]")
@click.option("--hostname", default="", help="Its name to itself.")
@click.option("--read-only", is_flag=True, help="Mount its root read-only.")
@click.option("--no-new-privileges", is_flag=True, help="Let no program gain privileges.")
@click.option("--timeout", type=float, callback=_seconds, metavar="SECONDS", help=_TIMEOUT)
@click.option("--init", is_flag=True, help="Run the command beside a first process that reaps orphans.")
@click.option("--idle", is_flag=True, help="With -d: only wait for weenv exec, whatever the image's command is.")
@click.option("--runtime", metavar="NAME|PATH", help="containerd runtime, or OCI runtime program.  [default: run.runtime]")
@click.option("--role", type=click.Choice(["task", "evaluation", "service"]), help="What it is for, where the node is elastic.")
@click.option("--name", default="", help="Its name.  [default: made from the plan's]")
@node_options
@click.argument("target", metavar="PLAN|IMAGE")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def run(target: str, command: tuple[str, ...], **o: Any) -> None:
    """Start an environment from a plan (a file) or an image, and run a command in it.

    Groups that are not in the lazy format are converted on the node first, once, and named on standard error.
    The exit status is the command's, 128 + n where signal n ended it. With -d, what it writes is kept for weenv logs;
    without any command of its own it then waits to be used by weenv exec. SIGINT and SIGTERM go to the command; the second
    one, or 10 seconds, kill it (a first process that handles neither gets neither: --init puts one before it that does).

    \b
    Examples:
      weenv run --rm --timeout 1800 task.yaml -- pytest -q
      weenv run -d --idle --name task-17 --cpus 2 --memory 4g task.yaml
      weenv run --rm -it registry.example/team/env:1-lazy -- bash
    """
    from weenv.environment.requested import options_of

    if o["detach"] and (o["interactive"] or o["tty"]):
        raise click.UsageError("-d leaves nobody to read the input: use it without -i and -t")
    if o["detach"] and o["timeout"] is not None:
        raise click.UsageError("-d leaves nobody to watch the time: use --timeout without -d, or with weenv exec")
    if o["idle"] and (command or not o["detach"]):
        raise click.UsageError("--idle needs -d and no command")
    if o["init"] and o["detach"]:
        raise click.UsageError("--init is for a command that is waited for; with -d: --idle, then weenv exec")

    async def work(node: Node) -> int:
        from weenv.environment import attended

        options = options_of(o, command, node.run.network)
        wanted = attended.Wanted(target, options, o["name"], o["remove"], o["interactive"], o["init"], o["idle"], o["timeout"])
        if o["detach"]:
            click.echo(await attended.detached(node, wanted))
            return 0
        return await attended.attached(node, wanted)

    _leave(on_node(o, work, runtime=o["runtime"]))


@click.command("exec", context_settings={"allow_interspersed_args": False})
@click.option("-i", "--interactive", is_flag=True, help="Give it this command's input.")
@click.option("-t", "--tty", is_flag=True, help="Give it a terminal.")
@click.option("-e", "--env", multiple=True, metavar="NAME[=VALUE]", help="Set a variable; without value: as it is here.")
@click.option("-w", "--workdir", default="", metavar="DIR", help="Working directory.")
@click.option("-u", "--user", default="", metavar="USER[:GROUP]", help="Who to run as.")
@click.option("--timeout", type=float, callback=_seconds, metavar="SECONDS", help=_TIMEOUT)
@node_options
@click.argument("environment")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="[--] COMMAND...")
def exec_(environment: str, command: tuple[str, ...], **o: Any) -> None:
    """Run a command in a running environment. The exit status is the command's.

    \b
    Examples:
      weenv exec task-17 -- pytest -q tests/test_fix.py
      tar c src | weenv exec -i task-17 -- tar x -C /testbed
    """
    if command[0] == "--":
        command = command[1:]

    async def work(node: Node) -> int:
        from weenv.environment import attended, requested

        return await attended.executed(
            node, environment, command, env=requested.variables(o["env"]), cwd=o["workdir"], user=o["user"],
            timeout=o["timeout"], interactive=o["interactive"], terminal=o["tty"],
        )  # fmt: skip

    _leave(on_node(o, work))


@click.command()
@click.option("-a", "--all", "everything", is_flag=True, help="Also those that have ended.")
@click.option("-q", "--quiet", is_flag=True, help="Names only.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@node_options
def ps(everything: bool, quiet: bool, as_json: bool, **o: Any) -> None:
    """List environments, without those that a command or program which was killed has left: they are removed first.

    \b
    Examples:
      weenv ps
      weenv ps --all --json | jq -r '.[] | select(.status == "stopped") | .name'
    """

    async def work(node: Node) -> list[dict[str, Any]]:
        from weenv.environment import lifecycle, listing

        await lifecycle.tidy(node)
        return await listing.rows(node, everything=everything)

    rows = on_node(o, work)
    if as_json:
        from weenv.cli import render

        render.print_json(rows)
    elif quiet:
        for row in rows:
            click.echo(row["name"])
    else:
        from weenv.cli import render

        told = any(row["not_lazy"] for row in rows)
        table = [
            (row["name"], render.escape(row["plan"]), render.escape(row["image"]), *([_lazy(row)] if told else []),
             _status(row), str(row["pid"] or "-"), render.seconds(row["age"]), render.escape(" ".join(row["command"])[:60]))
            for row in rows
        ]  # fmt: skip
        head = ["name", "plan", "image", *(["layers"] if told else []), "status", "pid", "age", "command"]
        render.table(head, table, right=[4 + told, 5 + told])


def _lazy(row: dict[str, Any]) -> str:
    from weenv.environment.notlazy import LABEL, from_label, short

    text = short(from_label(row["labels"].get(LABEL, "")))
    return text if text == "lazy" else f"[yellow]{text}[/]"


def _status(row: dict[str, Any]) -> str:
    if row["status"] != "stopped":
        return str(row["status"])
    why = "" if row["reason"] in ("completed", "failed") else f", {row['reason']}"
    from weenv.cli import render

    return render.escape(f"{row['status']} ({row['exit_status']}{why})")


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on until the environment ends.")
@node_options
@click.argument("environment")
def logs(environment: str, follow: bool, **o: Any) -> None:
    """Print what a detached environment has written: its standard output and error, each to its own.

    \b
    Example:
      weenv logs -f task-17
    """

    async def work(node: Node) -> None:
        from weenv.environment import listing

        await listing.logs(node, environment, follow=follow)

    on_node(o, work)


@click.command()
@click.option("-t", "--time", "grace", type=float, default=10.0, show_default=True, help="Seconds from SIGTERM to SIGKILL.")
@node_options
@click.argument("environments", nargs=-1, required=True)
def stop(environments: tuple[str, ...], grace: float, **o: Any) -> None:
    """End environments: SIGTERM, and SIGKILL for what is left after a while.

    \b
    Example:
      weenv stop -t 2 task-17
    """

    async def work(node: Node) -> None:
        from weenv.environment import lifecycle

        for name in environments:
            container = await lifecycle.find(node, name)
            await lifecycle.stop(node, container.id, grace=grace)
            click.echo(container.id)

    on_node(o, work)


@click.command()
@click.option("-f", "--force", is_flag=True, help="Also what runs: it is killed.")
@click.option("-a", "--all", "everything", is_flag=True, help="All environments of the namespace.")
@click.option("--sweep", is_flag=True, help="Only what killed commands left behind; weenv run, ps and rm remove that, too.")
@node_options
@click.argument("environments", nargs=-1)
def rm(environments: tuple[str, ...], force: bool, everything: bool, sweep: bool, **o: Any) -> None:
    """Remove environments, and those that a command which was killed has left behind.

    \b
    Examples:
      weenv rm -f task-17
      weenv rm --all
      weenv rm --sweep
    """
    if bool(environments) + everything + sweep != 1:
        raise click.UsageError("name environments, or use one of --all and --sweep")

    async def work(node: Node) -> int:
        from weenv.environment import lifecycle, listing

        swept = await lifecycle.sweep(node)
        for name in swept:
            click.echo(name)
        names = [name for name in environments if name not in swept]
        return await listing.remove(node, names, force=force, everything=everything, said=click.echo, refused=say)

    sys.exit(on_node(o, work))
