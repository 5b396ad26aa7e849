"""``weenv admit``: ask this node for room before something is started."""

from __future__ import annotations

import os
import subprocess
import sys

import click

from weenv.cli.daemons import CONFIG
from weenv.cli.render import print_json
from weenv.core.errors import WeenvError
from weenv.core.settings import read_tables
from weenv.core.units import parse_bytes, parse_cores


def _cores(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> float:
    value = parse_cores(text) if text else 0.0
    if value is None:
        raise click.BadParameter("write a number of CPUs such as 2, 0.5 or 500m")
    return value


def _size(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> int:
    value = parse_bytes(text) if text else 0
    if value is None:
        raise click.BadParameter("write a size such as 512Mi or 2Gi")
    return value


def _waiting() -> None:
    click.echo("this node has no room yet, waiting", err=True)


@click.command(context_settings={"allow_interspersed_args": False})
@CONFIG
@click.option("--cpu", callback=_cores, metavar="CORES", help="To start with.  [default: elastic.start_cpu]")
@click.option("--memory", callback=_size, metavar="SIZE", help="To start with.  [default: elastic.start_memory]")
@click.option("--cpu-max", callback=_cores, metavar="CORES", help="At most.  [default: elastic.ceiling_cpu]")
@click.option("--memory-max", callback=_size, metavar="SIZE", help="At most.  [default: elastic.ceiling_memory]")
@click.option(
    "--role", type=click.Choice(["task", "evaluation", "service"]), default="task", show_default=True,
    help="What it is for (docs/elastic.md).",
)  # fmt: skip
@click.option("--deadline", type=click.FloatRange(0, 1e6), help="Seconds to wait.  [default: elastic.admission.deadline]")
@click.option("--for", "target", metavar="NAMESPACE/ID", help="The container that will start; it has a minute to do so.")
@click.option("--json", "as_json", is_flag=True, help="With --for: print what was granted, for machines.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND...]")
def admit(
    config_path: str, cpu: float, memory: int, cpu_max: float, memory_max: int, role: str, deadline: float | None,
    target: str | None, as_json: bool, command: tuple[str, ...],
) -> None:  # fmt: skip
    """Wait until this node has room, and keep it for a container that is about to start, or while a command runs.

    weenv run asks by itself. For an evaluation, quota that others have beyond their start is taken back. Exit status 1:
    there was no room within the deadline; otherwise the command's.

    \b
    Examples:
      weenv admit --cpu 2 --memory 4Gi --for default/job-1 && ctr run -d IMAGE job-1
      weenv admit --role evaluation --cpu 4 --memory 8Gi --deadline 60 -- pytest -q
    """
    from weenv.plugin.nri.ask import Asker
    from weenv.plugin.nri.serveconfig import from_tables

    words = list(command[1:] if command[:1] == ("--",) else command)
    if bool(words) == bool(target):
        raise click.UsageError("say either what will start (--for NAMESPACE/ID) or a command to run (-- COMMAND)")
    namespace, _, name = (target or f"weenv-admit/pid-{os.getpid()}").partition("/")
    if not namespace or not name:
        raise click.UsageError("--for takes NAMESPACE/ID, as in default/job-1")
    with Asker(from_tables(read_tables(config_path)).socket) as asker:
        answer = asker.ask(
            "admit", waiting=_waiting, namespace=namespace, id=name, cpu=cpu, memory=memory, cpu_max=cpu_max,
            memory_max=memory_max, role=role, deadline=deadline, hold=bool(words), exact=True,
        )  # fmt: skip
        if as_json and not words:
            print_json({"environment": f"{namespace}/{name}", **answer})
            return
        if not words:
            click.echo(f"{namespace}/{name} is admitted after {answer['waited']:.1f} s", err=True)
            return
        try:
            status = subprocess.run(words, check=False).returncode
        except OSError as error:
            raise WeenvError(f"cannot run {words[0]}: {error.strerror}") from error
    sys.exit(128 - status if status < 0 else status)
