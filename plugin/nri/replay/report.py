"""What came of a replay: one summary for each strategy, and the curves behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weenv.plugin.nri.replay.simulate import TICK, End, Node, Result, is_task


@dataclass(frozen=True, slots=True)
class Summary:
    """One strategy. Times in seconds, shares of one."""

    strategy: str
    environments: int
    done: int
    oom_kills: int
    """Killed by the kernel at their memory limit."""
    ended: int
    """Ended by the policy for memory, cause recorded."""
    refused: int
    """Not admitted within the deadline (or after a task that was not done)."""
    unfinished: int
    """Still there when the longest time that is simulated was over."""
    total: float
    """Time of all that were done, from admission to the end, added up."""
    slowest: float
    stretch: float
    """The same divided by the time that nothing but their own demand would have taken."""
    stretch_p99: float
    throttled: float
    """Time lost because a CPU quota was too small, of all environments."""
    throttled_share: float
    """... of the time they ran."""
    contended: float
    """Time lost because a node had no more CPU."""
    braked: float
    """Time lost above memory.high."""
    waited: int
    """Environments that had to wait for admission at all."""
    wait_mean: float
    wait_p99: float
    wait_evaluation_p99: float
    cpu_used: float
    """Share of the nodes' cores in use from the first arrival to the last end."""
    cpu_promised: float
    memory_used: float
    makespan: float
    changes: int
    """Limits changed."""
    looks: int
    """Samples taken; 0 where the strategy takes none."""


def _quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share)) if values else 0.0


def summarise(strategy: str, results: list[Result], nodes: list[Node]) -> Summary:
    """Add up what came of one strategy."""
    done = [result for result in results if result.end is End.DONE]
    ran = [result for result in results if result.admitted is not None]
    admitted = [result.wait for result in ran]
    evaluation = [result.wait for result in ran if not is_task(result)]
    stretches = [result.took / max(TICK, result.trace.seconds) for result in done]
    running = sum(result.took for result in ran)
    throttled = sum(result.lost_quota for result in results)
    first = min((result.arrived for result in results), default=0.0)
    makespan = max((result.ended or 0.0 for result in results), default=0.0) - first
    cores = sum(node.capacity.cpu for node in nodes)
    memory = sum(node.capacity.memory for node in nodes)
    # A curve has one element a second.
    seconds = max(1.0, makespan)
    count = Counter(result.end for result in results)
    return Summary(
        strategy=strategy,
        environments=len(results),
        done=count[End.DONE],
        oom_kills=count[End.OOM],
        ended=count[End.ENDED],
        refused=count[End.REFUSED],
        unfinished=count[End.UNFINISHED],
        total=sum(result.took for result in done),
        slowest=max((result.took for result in done), default=0.0),
        stretch=sum(result.took for result in done) / max(TICK, sum(result.trace.seconds for result in done)),
        stretch_p99=_quantile(stretches, 0.99),
        throttled=throttled,
        throttled_share=throttled / running if running else 0.0,
        contended=sum(result.lost_node for result in results),
        braked=sum(result.lost_memory for result in results),
        waited=sum(wait > 0 for wait in admitted),
        wait_mean=float(np.mean(admitted)) if admitted else 0.0,
        wait_p99=_quantile(admitted, 0.99),
        wait_evaluation_p99=_quantile(evaluation, 0.99),
        cpu_used=sum(sum(node.use.used) for node in nodes) / seconds / cores,
        cpu_promised=sum(sum(node.use.promised) for node in nodes) / seconds / cores,
        memory_used=sum(sum(node.use.memory) for node in nodes) / seconds / memory,
        makespan=makespan,
        changes=sum(result.changes for result in results),
        looks=sum(getattr(node.strategy, "looks", 0) for node in nodes),
    )


@dataclass(frozen=True, slots=True)
class Curves:
    """What is drawn of one strategy."""

    took: list[float]
    """Times of the tasks that were done, ascending."""
    when: list[float]
    used: list[float]
    """Cores in use on all nodes, once a second."""
    promised: list[float]


def curves(results: list[Result], nodes: list[Node]) -> Curves:
    """The curves of one strategy; nodes that were idle at a second count nothing."""
    last = int(max((node.use.when[-1] for node in nodes if node.use.when), default=0.0)) + 1
    used, promised = np.zeros(last), np.zeros(last)
    for node in nodes:
        at = np.array(node.use.when, dtype=int)
        keep = at < last
        np.add.at(used, at[keep], np.array(node.use.used)[keep])
        np.add.at(promised, at[keep], np.array(node.use.promised)[keep])
    took = sorted(result.took for result in results if result.end is End.DONE and is_task(result))
    return Curves(took, list(map(float, range(last))), used.tolist(), promised.tolist())
