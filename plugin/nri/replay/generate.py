"""Demand like that of published jobs, from a seed.

Published: peak CPU of an environment is 1 core at the median and 68.3 cores at the 99th percentile, peak memory 0.15 GiB and
7.0 GiB; one task rose to 47 times its demand within a second. Two log-normal distributions go through these two points each;
peaks of CPU and memory are correlated, since what computes much mostly holds much.

What lies between is ours, and simple: an agent's environment is idle while the model thinks, then runs a command, some dozen
times. Most commands are small (an editor, grep, a file or two); two of them (build, test suite, solver) go up to the peak of
that environment or near it. Names of sets with their seeds are in :data:`SETS`. Random numbers are those of
``random.Random.random``, which Python keeps the same in every version, so that a set is the same everywhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

from weenv.plugin.nri.model import Role
from weenv.plugin.nri.replay.traces import Phase, Trace

GIB = 1 << 30
MIB = 1 << 20

MEDIAN_CPU, P99_CPU = 1.0, 68.3
MEDIAN_MEMORY, P99_MEMORY = 0.15 * GIB, 7.0 * GIB
BURST = 47.0
"""Times its demand, within a second."""
CORRELATION = 0.5
"""Of the logarithms of peak CPU and peak memory. Ours: nothing is published."""
_NORMAL = NormalDist()
_Z99 = _NORMAL.inv_cdf(0.99)
SIGMA_CPU = math.log(P99_CPU / MEDIAN_CPU) / _Z99
SIGMA_MEMORY = math.log(P99_MEMORY / MEDIAN_MEMORY) / _Z99
MOST_CPU, MOST_MEMORY = 128.0, 64.0 * GIB
"""The tails of the distributions end at what a large machine has."""
IDLE_CPU = 0.01
"""Cores of an environment whose agent thinks."""
GROWTH = 1.5 * GIB
"""Bytes a second that a program's memory grows at most: what one or two threads that touch fresh pages reach."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most one environment wants."""

    cpu: float
    memory: float


def peaks(u_cpu: float, u_other: float) -> Peaks:
    """Peaks at two uniform numbers in (0, 1): the quantile of CPU, and what memory adds to that by itself."""
    z = _NORMAL.inv_cdf(u_cpu)
    other = _NORMAL.inv_cdf(u_other)
    z_memory = CORRELATION * z + math.sqrt(1 - CORRELATION**2) * other
    cpu, memory = MEDIAN_CPU * math.exp(SIGMA_CPU * z), MEDIAN_MEMORY * math.exp(SIGMA_MEMORY * z_memory)
    return Peaks(min(cpu, MOST_CPU), min(memory, MOST_MEMORY))


def task(name: str, arrive: float, peak: Peaks, rng: random.Random, *, burst: bool = False) -> Trace:
    """One environment of an agent: thinking and commands in turn, up to its peaks in at least one command."""

    def between(low: float, high: float) -> float:
        return low + (high - low) * rng.random()

    base = max(8 * MIB, min(peak.memory / 4, 200 * MIB))
    if burst:
        base = min(base, peak.memory / BURST)
    rounds = 8 + int(rng.random() * 7)
    heavy = {int(rng.random() * rounds) for _ in range(2)}
    top = min(heavy)
    phases = [Phase(between(0.5, 1.5), min(peak.cpu, 0.5), int(base))]
    for number in range(rounds):
        phases.append(Phase(between(1.5, 5.0), IDLE_CPU, int(base)))
        if number not in heavy:
            phases.append(Phase(between(0.3, 2.0), min(peak.cpu, 1.0) * between(0.2, 1.0), int(base * between(1.0, 1.3))))
            continue
        share = 1.0 if number == top else between(0.3, 1.0)
        cpu, memory = peak.cpu * share, max(base, peak.memory * share)
        if burst and number == top:
            phases += [Phase(1.0, cpu / BURST, int(base))]
            phases += [
                Phase(0.2, cpu / BURST ** (1 - step / 5), int(base * (memory / base) ** (step / 5))) for step in range(1, 6)
            ]
        else:
            rise = max(0.5, (memory - base) / GROWTH)
            phases.append(Phase(rise, min(cpu, max(1.0, cpu * between(0.3, 1.0))), int(memory)))
        phases.append(Phase(between(4.0, 10.0), cpu, int(memory)))
        phases.append(Phase(0.2, min(cpu, 1.0), int(base)))
    return Trace(name, arrive, tuple(phases))


def evaluation(name: str, after: Trace, rng: random.Random) -> Trace:
    """A clean environment that scores a task: begins at once, runs the tests, ends."""
    peak = after.peak
    cpu, memory = min(peak.cpu, 4.0), min(peak.memory, 2 * GIB)
    seconds = 4.0 + 8.0 * rng.random()
    rise = max(0.5, memory / GROWTH)
    phases = (Phase(1.0, 0.5, 32 * MIB), Phase(rise, min(cpu, 1.0), memory), Phase(seconds, cpu, memory))
    return Trace(name, 0.0, phases, Role.EVALUATION, after.name)


def _rng(seed: int) -> random.Random:
    """The generator of a set: reproducible, which is all that is asked of it."""
    return random.Random(seed)  # noqa: S311


def _stratified(count: int, rng: random.Random) -> list[float]:
    """Uniform numbers, one from each of ``count`` equal parts, in random order: quantiles of a set are those of the source."""
    values = [(number + rng.random()) / count for number in range(count)]
    for number in range(count - 1, 0, -1):  # not random.shuffle, whose use of the generator may change
        other = int(rng.random() * (number + 1))
        values[number], values[other] = values[other], values[number]
    return values


def published(seed: int, count: int, *, spread: float = 300.0, bursts: float = 0.02, evaluations: bool = True) -> list[Trace]:
    """``count`` tasks that arrive over ``spread`` seconds, each followed by its evaluation; ``bursts`` of them rise 47x."""
    rng = _rng(seed)
    u_cpu, u_memory = _stratified(count, rng), _stratified(count, rng)
    made = []
    for number in range(count):
        trace = task(
            f"t{number:05}", spread * rng.random(), peaks(u_cpu[number], u_memory[number]), rng, burst=rng.random() < bursts
        )
        made.append(trace)
        if evaluations:
            made.append(evaluation(f"e{number:05}", trace, rng))
    return made


def burst_only(seed: int, count: int) -> list[Trace]:
    """Tasks of the upper half that all rise 47 times within a second."""
    rng = _rng(seed)
    u_cpu, u_memory = _stratified(count, rng), _stratified(count, rng)
    return [
        task(f"b{number:05}", 120.0 * rng.random(), peaks(0.5 + u_cpu[number] / 2, u_memory[number]), rng, burst=True)
        for number in range(count)
    ]


def mixed(seed: int, count: int, *, heavy: float = 0.1) -> list[Trace]:
    """``heavy`` of the tasks from the upper tenth of the distribution, the others of at most the median's one core.

    Memory ends at the published 99th percentile, so that a fixed quota of that kills nobody and times can be compared.
    """
    rng = _rng(seed)
    number_heavy = round(count * heavy)
    u_light = _stratified(count - number_heavy, rng)
    u_memory = _stratified(count, rng)
    made = []
    for number in range(count):
        # The heavy ones lie at the middles of ten equal parts, so that the slowest does not hang on one random number.
        u = 1 - heavy * (number + 0.5) / number_heavy if number < number_heavy else u_light[number - number_heavy] * 0.5
        peak = peaks(u, u_memory[number])
        peak = Peaks(peak.cpu, min(peak.memory, 0.99 * P99_MEMORY))
        made.append(task(f"m{number:05}", 30.0 * rng.random(), peak, rng))
    return made


@dataclass(frozen=True, slots=True)
class NamedSet:
    """Demand that anybody can make again."""

    about: str
    nodes: int
    """Nodes of 128 cores and 1 TiB that it is meant for."""
    make: Callable[[], list[Trace]]


SETS: dict[str, NamedSet] = {
    "mixed": NamedSet(
        "100 tasks, ten of them from the upper tenth of the distribution, the others of at most one core", 1,
        lambda: mixed(8968, 100),
    ),
    "bursts": NamedSet("400 tasks over 120 s, all of which rise 47x within a second", 4, lambda: burst_only(47, 400)),
    "published": NamedSet(
        "2 000 tasks over 300 s and their evaluations: the published quantiles, 2 % rise 47x within a second", 8,
        lambda: published(20261129, 2000),
    ),
    "published-small": NamedSet("200 tasks over 60 s and their evaluations", 1, lambda: published(7, 200, spread=60.0)),
}  # fmt: skip
"""Named sets, for ``weenv elastic replay @NAME``."""
