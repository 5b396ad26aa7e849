"""Limits of processes that may grow: what is read, what is decided, what becomes of it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator.cgroup import Cgroup

from weenv.core.aio import Background
from weenv.plugin.nri import pids
from weenv.plugin.nri.actuate import EnvGone, Refused
from weenv.plugin.nri.annotations import MOST_PIDS, own_pids, parse
from weenv.plugin.nri.cgroups import CgroupGone, CgroupUnreadable, Reader
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.creation import asked, recorded
from weenv.plugin.nri.journal import Journal, read
from weenv.plugin.nri.managed import Env
from weenv.plugin.nri.metrics import Metrics
from weenv.plugin.nri.model import EnvKey, Pids, PidsBounds, Role
from weenv.plugin.nri.pids import Keeper, wanted
from weenv.plugin.nri.policy import begin
from weenv.plugin.nri.record import Record
from weenv.plugin.nri.watch import Found

KEY = EnvKey("default", "a")
CONFIG = ElasticConfig()


@pytest.mark.parametrize(
    ("said", "bounds"),
    [
        ({}, None),
        ({"start": "10"}, PidsBounds(10, 10)),
        ({"max": "100"}, PidsBounds(100, 100)),
        ({"start": "10", "max": "100"}, PidsBounds(10, 100)),
        ({"start": "100", "max": "10"}, PidsBounds(10, 10)),
        ({"start": "lots", "max": "100"}, PidsBounds(100, 100)),
        ({"max": "0"}, None),
        ({"max": "-1"}, None),
        ({"max": str(MOST_PIDS + 1)}, None),
        ({"max": "9" * 5000}, None),
        ({"max": "१०"}, None),
    ],
)
def test_what_a_container_says(said: dict[str, str], bounds: PidsBounds | None) -> None:
    labels = {f"weenv.dev/pids.{name}": value for name, value in said.items()}
    found = parse(labels)
    assert found.pids(0) == bounds
    sensible = all(value.isascii() and value.isdigit() and 0 < int(value[:9]) <= MOST_PIDS for value in said.values())
    assert bool(found.complaints) == (not sensible or (bounds == PidsBounds(10, 10) and "max" in said))
    assert all(len(line) < 200 and "it is" in line for line in found.complaints)
    of_pod = asked(labels, 1.0, 1 << 30, CONFIG)
    assert of_pod.managed == bool(said) and of_pod.bounds.pids == bounds
    if bounds is not None:  # what is recorded on the container says it again
        again = asked(recorded(of_pod), 0.0, 0, CONFIG).bounds.pids
        assert again == bounds


LIMITS = st.integers(0, 1 << 22)


@settings(deadline=None)
@given(LIMITS, LIMITS, st.integers(0, 9), st.integers(0, 9), st.tuples(LIMITS, LIMITS), st.floats(0.01, 1.0))
def test_it_is_raised_in_bounds_and_never_lowered_but_to_them(
    current: int, limit: int, refused: int, before: int, pair: tuple[int, int], use: float
) -> None:
    bounds = PidsBounds(max(1, min(pair)), max(*pair, 1))
    new = wanted(Pids(current, limit, refused), before, bounds, use)
    in_force = new if new is not None else limit
    assert 0 < in_force <= bounds.ceiling
    if new is not None and 0 < limit <= bounds.ceiling:
        assert new > limit
        assert new == min(2 * limit, bounds.ceiling)
    elif new is not None:
        assert new == bounds.start
    if new is not None:  # it comes to rest
        assert wanted(Pids(0, new, refused), refused, bounds, use) is None


def test_it_is_raised_when_used_or_refused() -> None:
    bounds = PidsBounds(10, 100)
    assert wanted(Pids(29, 40, 0), 0, bounds, 0.75) is None
    assert wanted(Pids(30, 40, 0), 0, bounds, 0.75) == 80
    assert wanted(Pids(1, 40, 3), 2, bounds, 0.75) == 80
    assert wanted(Pids(80, 80, 0), 0, bounds, 0.75) == 100
    assert wanted(Pids(100, 100, 9), 0, bounds, 0.75) is None
    assert wanted(Pids(1, 0, 0), 0, bounds, 0.75) == 10, "no limit is above the ceiling"
    assert wanted(Pids(1, 5, 0), 0, bounds, 0.75) is None, "its owner may have lowered it"


@pytest.mark.parametrize("own", [{}, {"limit": 0}, {"limit": -1}, {"limit": "7"}, [], None, {"limit": MOST_PIDS + 1}])
def test_specifications_that_limit_nothing(own: Any) -> None:
    assert own_pids({"linux": {"resources": {"pids": own}}}) == own_pids({"linux": own}) == own_pids({}) == 0


def test_nothing_that_is_said_lifts_the_limit_of_the_containers_owner() -> None:
    own = own_pids({"linux": {"resources": {"pids": {"limit": 50}}}})
    said = {"weenv.dev/pids.max": "4000", "weenv.dev/pids.start": "60"}
    found = asked(said, 0.0, 0, CONFIG, own_pids=own)
    assert found.bounds.pids == PidsBounds(50, 50)
    assert found.complaints == ("weenv.dev/pids.max is above the container's own limit, 50; it is cut to that",)
    assert asked({"weenv.dev/pids.start": "10"}, 0.0, 0, CONFIG, own_pids=own).bounds.pids == PidsBounds(10, 50)


class Group:
    """A group whose files are written by hand, and an actuator that writes them."""

    def __init__(self, home: Path) -> None:
        self.cgroup = Cgroup(str(home / "c"), 2)
        self.home = home / "c"
        self.write(1, "8", 0)
        self.fail: Exception | None = None
        self.deaf = False
        self.asked: list[int] = []

    def write(self, current: int, limit: str, refused: int) -> None:
        for name, text in (("current", str(current)), ("max", limit), ("events", f"max {refused}")):
            (self.home / f"pids.{name}").write_text(f"{text}\n")

    async def apply(self, key: EnvKey, limit: int) -> None:
        self.asked.append(limit)
        if self.fail is not None:
            raise self.fail
        if not self.deaf:
            (self.home / "pids.max").write_text(f"{limit}\n")


class Case:
    """A keeper with one environment."""

    def __init__(self, home: Path, bounds: PidsBounds) -> None:
        self.group = Group(home)
        self.events = str(home / "events")
        self.record = Record(Journal(self.events, 1 << 20), Journal(str(home / "d"), 1 << 20), Metrics(), None)
        self.background = Background()
        self.bounds = bounds
        reader = Reader(self.group.cgroup.paths)
        found = CONFIG.bounds()
        self.env = Env(Found(KEY, 1, found), reader, begin(found, Role.TASK, found.start, triggers=False), 0.0)
        self.keeper = Keeper(self.group.apply, self.record, self.background, 0.75)

    async def look(self, now: float) -> list[dict[str, Any]]:
        """One look, and what has been told so far."""
        self.keeper.look(self.env, self.bounds, now)
        while len(self.background):
            await asyncio.sleep(0.001)
        return [{k: v for k, v in event.items() if k not in ("t", "env")} for event in read(self.events)]


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path, PidsBounds(8, 20))
    yield made
    made.env.close()


async def test_a_raise_is_carried_out_read_back_and_told(case: Case) -> None:
    assert await case.look(0.0) == [] and case.env.row(0.0)["pids"] == [1, 8]
    case.group.write(6, "8", 0)
    assert await case.look(0.5) == [], "once a second is enough"
    told = await case.look(1.0)
    assert told == [{"kind": "pids", "before": 8, "limit": 16, "current": 6, "refused": 0}]
    case.group.write(6, "16", 2)  # refused meanwhile
    assert (await case.look(1.1))[-1]["limit"] == 20, "after a change it is looked at again at once"
    case.group.write(20, "20", 9)
    assert len(await case.look(2.5)) == 2 and case.group.asked == [16, 20]


async def test_what_the_kernel_tells_of_is_looked_at_at_once_but_not_over_and_over(case: Case) -> None:
    assert await case.look(0.0) == []
    case.group.write(8, "8", 1)
    Keeper.told(case.env, 0.3)
    case.group.deaf = True
    assert (await case.look(0.3))[-1]["kind"] == "refused"
    Keeper.told(case.env, 0.4)
    await case.look(0.4)
    assert case.group.asked == [16], "what was refused is tried again later"


async def test_a_look_a_little_early_is_not_put_off_by_a_whole_pause(case: Case) -> None:
    await case.look(0.0)
    case.group.write(6, "8", 0)
    assert (await case.look(pids.EVERY - 0.02))[-1]["limit"] == 16


async def test_forks_refused_before_the_first_look_are_none_of_ours(case: Case) -> None:
    case.group.write(1, "8", 5)
    assert await case.look(0.0) == [] and case.group.asked == []


@pytest.mark.parametrize(("deaf", "text"), [(True, "the cgroup has 8 instead of 16 processes"), (False, "no, thanks")])
async def test_what_is_refused_is_told_and_tried_again_later(case: Case, deaf: bool, text: str) -> None:
    case.group.write(8, "8", 0)
    case.group.deaf, case.group.fail = deaf, None if deaf else Refused("no, thanks")
    assert await case.look(0.0) == [{"kind": "refused", "message": text, "pids": 16}]
    await case.look(5.0)
    assert case.group.asked == [16]
    case.group.deaf, case.group.fail = False, None
    assert (await case.look(10.5))[-1]["kind"] == "pids"


async def test_one_that_ends_meanwhile_is_no_fault(case: Case) -> None:
    case.group.write(8, "8", 0)
    case.group.fail = EnvGone("a has ended")
    assert await case.look(0.0) == []
    case.group.fail = None
    case.env.gone = True
    assert await case.look(20.0) == [] and case.group.asked == [16, 16]
    shutil.rmtree(case.group.home)
    with pytest.raises(CgroupGone):
        case.keeper.look(case.env, case.bounds, 40.0)


@pytest.mark.parametrize("text", ["", "many", "-"])
async def test_a_machine_that_does_not_count_them_is_said_once(case: Case, text: str) -> None:
    (case.group.home / "pids.current").write_text(text)
    (told,) = await case.look(0.0)
    assert told["kind"] == "refused" and "cannot read the number of processes" in told["message"]
    assert len(await case.look(100.0)) == 1
    with pytest.raises(CgroupUnreadable):
        pids.read(str(case.group.home))
