"""``weenv elastic replay``: recorded or generated demand through policy and admission, against other ways to set quotas."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from weenv.cli import figure, render
from weenv.cli.daemons import CONFIG
from weenv.core.settings import read_tables

if TYPE_CHECKING:
    from weenv.plugin.nri.replay.report import Curves, Summary
    from weenv.plugin.nri.replay.traces import Trace

GIB = 1 << 30


def _traces(name: str) -> tuple[list[Trace], int]:
    """The traces of a file or a named set, and the number of nodes they are meant for."""
    from weenv.core.errors import WeenvError
    from weenv.plugin.nri.replay import generate, traces

    if not name.startswith("@"):
        try:
            return traces.read(name), 1
        except OSError as error:
            raise WeenvError(f"cannot read {name}: {error.strerror}", hint="name a file, or @mixed and its like") from error
    found = generate.SETS.get(name[1:])
    if found is None:
        raise WeenvError(f"there is no set {name[:80]}", hint="there are " + ", ".join(f"@{known}" for known in generate.SETS))
    return found.make(), found.nodes


@click.command()
@click.argument("name", metavar="TRACES")
@CONFIG
@click.option("--strategy", "chosen", multiple=True, metavar="NAME", help="Only this one; may be repeated.  [default: all]")
@click.option("--nodes", type=click.IntRange(1, 10_000), help="Nodes.  [default: what the set is meant for, or 1]")
@click.option("--cores", type=click.FloatRange(0.1, 1e5), default=128.0, show_default=True, help="Of each node.")
@click.option("--memory-gib", type=click.FloatRange(0.1, 1e6), default=1024.0, show_default=True, help="Of each node.")
@click.option("--no-brake", is_flag=True, help="As on cgroup v1, which has no memory.high.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--plot", metavar="FILE", type=click.Path(dir_okay=False), help="Draw it: .png, .svg or .pdf (needs matplotlib).")
@click.option("--write", metavar="FILE", type=click.Path(dir_okay=False), help="Only write the traces of a set to a file.")
def replay(
    name: str, config_path: str, chosen: tuple[str, ...], nodes: int | None, cores: float, memory_gib: float, no_brake: bool,
    as_json: bool, plot: str | None, write: str | None,
) -> None:  # fmt: skip
    """Run demand through policy and admission without a container, and compare with other ways to set quotas.

    TRACES is a trace file, a decision log of weenv elastic serve, or a set of generated demand: @mixed, @bursts,
    @published, @published-small (docs/elastic.md). Thresholds are those of the configuration.

    \b
    Examples:
      weenv elastic replay @mixed
      weenv elastic replay @published --nodes 10 --strategy elastic --strategy oracle --json
      weenv elastic replay /var/lib/weenv/elastic/decisions.jsonl --cores 64 --plot curves.svg
    """
    from weenv.core.errors import WeenvError
    from weenv.plugin.nri.config import from_tables, without_brake
    from weenv.plugin.nri.model import Resources
    from weenv.plugin.nri.replay import report, simulate, strategies, traces

    config = from_tables(read_tables(config_path))
    config = without_brake(config) if no_brake else config
    found, meant = _traces(name)
    if write:
        traces.write(write, found)
        click.echo(write)
        return
    known = strategies.named(config, cores)
    for strategy in chosen:
        if strategy not in known:
            raise WeenvError(f"there is no strategy {strategy[:80]}", hint="there are " + ", ".join(known))
    if plot:
        figure.new("", 1, 1)  # rather now than after the work
    capacity, count = Resources(cores, int(memory_gib * GIB)), nodes or meant
    summaries: list[Summary] = []
    drawn: dict[str, Curves] = {}
    for strategy in chosen or known:
        results, made = simulate.fleet(found, count, capacity, [known[strategy]() for _ in range(count)])
        summaries.append(report.summarise(strategy, results, made))
        drawn[strategy] = report.curves(results, made)
    where = f"{render.counted(len(found), 'environment')} on {render.counted(count, 'node')} of {cores:g} cores"
    if as_json:
        about = {"traces": name, "nodes": count, "cores": cores, "memory": capacity.memory}
        render.print_json({**about, "strategies": [dataclasses.asdict(summary) for summary in summaries]})
    else:
        _table(summaries, where)
    if plot:
        draw(drawn, f"{name.removeprefix('@')}: {where}", plot)


def _table(summaries: list[Summary], where: str) -> None:
    """The report for people."""
    render.table(
        ["strategy", "done", "OOM", "ended", "refused", "total s", "slowest s", "stretch", "lost s", "node full s",
         "wait s", "wait p99", "CPU used", "promised", "makespan s"],
        [
            (s.strategy, str(s.done), str(s.oom_kills), str(s.ended), str(s.refused), f"{s.total:.0f}", f"{s.slowest:.0f}",
             f"{s.stretch:.2f}", f"{s.throttled:.0f}", f"{s.contended:.0f}", f"{s.wait_mean:.1f}", f"{s.wait_p99:.0f}",
             f"{s.cpu_used:.0%}", f"{s.cpu_promised:.0%}", f"{s.makespan:.0f}")
            for s in summaries
        ],
        title=where, right=range(1, 15), drop=(13, 14, 9, 10, 3, 7),
    )  # fmt: skip


def draw(drawn: dict[str, Curves], title: str, target: str) -> None:
    """Two panels: how long tasks took, and what the nodes did. Raises WeenvError."""
    made = figure.new(render.plain(title), 9, 6)
    tasks, nodes = made.subplots(2, 1)
    for name, found in drawn.items():
        if not found.took:
            continue
        count = len(found.took)
        tasks.step(found.took, [(number + 1) / count for number in range(count)], where="post", label=name)
        nodes.plot(found.when, found.used, label=name, linewidth=1)
    tasks.set_xscale("log")
    tasks.set_xlabel("seconds from admission to the end")
    tasks.set_ylabel("share of the tasks that were done")
    nodes.set_xlabel("seconds")
    nodes.set_ylabel("cores in use, all nodes")
    for panel in (tasks, nodes):
        panel.grid(alpha=0.3)
        panel.legend(loc="best", fontsize="small")
    figure.save(made, target)
