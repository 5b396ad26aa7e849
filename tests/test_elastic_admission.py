"""The ledger: what must hold after any sequence of requests, raises, endings and takings back, and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weenv.plugin.nri.admission import SLACK, Events, Ledger, NotAdmitted, Request, TakeBack
from weenv.plugin.nri.config import GIB, AdmissionRules, ElasticConfig
from weenv.plugin.nri.model import Bounds, Quota, Resources, Role

RULES = AdmissionRules(cpu=20, memory=40 * GIB, reserve_cpu=0.2, reserve_memory=0.2, evaluation_share=0.5, starts_share=0.7)
"""Reserve: 4 cores and 8 GiB, half of it only for evaluation; tasks may start with 14 cores and 28 GiB together."""


def bounds(cpu: float = 1.0, gib: float = 1.0) -> Bounds:
    start = Quota(cpu, int(gib * GIB))
    return Bounds(start, Quota(64.0, 64 * GIB), start)


def task(name: str, cpu: float = 1.0, gib: float = 1.0) -> Request:
    return Request(name, bounds(cpu, gib))


def evaluation(name: str, cpu: float = 1.0, gib: float = 1.0) -> Request:
    return Request(name, bounds(cpu, gib), Role.EVALUATION)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(Resources(64, 256 * GIB), RULES)


def boost(ledger: Ledger, name: str, cpu: float, gib: float, pressed_at: float) -> None:
    """A raise, as the controller makes it."""
    quota = Quota(cpu, int(gib * GIB))
    assert ledger.promise(name, quota)
    ledger.settle(name, quota)
    ledger.observe(name, Quota(0, 0), pressed_at)


# --- rules ----------------------------------------------------------------------------------------------------------------


def test_the_node_is_what_it_has_less_what_kernel_and_daemons_need() -> None:
    view = Ledger(Resources(128, 1000 * GIB), ElasticConfig().admission).view()
    assert (view.cpu, view.memory) == (128, 950 * GIB)
    assert view.free_cpu == pytest.approx(115.2)


def test_admitted_at_once_at_its_start(ledger: Ledger) -> None:
    assert ledger.ask(task("a", 2, 3), 0)
    assert ledger.promised == Quota(2, 3 * GIB)
    assert "a" in ledger


def test_starts_of_tasks_leave_room_for_raises(ledger: Ledger) -> None:
    assert all(ledger.ask(task(str(number)), 0) for number in range(14))
    assert not ledger.ask(task("one more"), 0)
    assert ledger.ask(evaluation("e", 4), 0)


def test_a_raise_never_touches_the_reserve(ledger: Ledger) -> None:
    ledger.ask(task("a"), 0)
    assert not ledger.promise("a", Quota(16.1, GIB))
    assert not ledger.promise("a", Quota(1, 33 * GIB))
    assert ledger.promised == Quota(1, GIB)
    assert ledger.promise("a", Quota(16, 32 * GIB))
    assert ledger.view().free_cpu == 0


def test_tasks_start_from_half_of_the_reserve_and_evaluation_from_all_of_it(ledger: Ledger) -> None:
    ledger.ask(task("a"), 0)
    boost(ledger, "a", 16, 2, 0)
    assert ledger.ask(task("b", 2), 0)
    assert not ledger.ask(task("c", 1), 0)
    assert ledger.ask(evaluation("e", 2), 0)


def test_who_waits_is_admitted_when_room_is_made_in_order(ledger: Ledger) -> None:
    assert ledger.ask(task("a", 13), 0)
    assert not ledger.ask(task("large", 10), 1)
    assert not ledger.ask(task("small", 1), 2)  # would fit, but does not overtake
    assert ledger.step(3) == Events()
    ledger.remove("a")
    assert ledger.step(4).admitted == ("large", "small")
    assert ledger.waiting == 0


def test_evaluation_comes_before_tasks_that_waited_longer(ledger: Ledger) -> None:
    ledger.ask(task("a", 13), 0)
    ledger.ask(task("t", 10), 1)
    ledger.ask(evaluation("e", 18), 2)
    ledger.remove("a")
    assert ledger.step(3).admitted == ("e",)


def test_a_deadline_is_kept(ledger: Ledger) -> None:
    ledger.ask(task("a", 13), 0)
    ledger.ask(task("b", 10), 10, deadline=5)
    assert ledger.wake_at() == 15
    assert ledger._waiting["b"].since == 10
    assert ledger.step(14.9).expired == ()
    assert ledger.step(15).expired == ("b",)
    assert ledger.wake_at() is None


def test_no_time_to_wait_is_told_at_once(ledger: Ledger) -> None:
    ledger.ask(task("a", 13), 0)
    with pytest.raises(NotAdmitted, match="no room now"):
        ledger.ask(task("b", 10), 0, deadline=0)
    assert ledger.waiting == 0


def test_what_never_fits_is_told_at_once(ledger: Ledger) -> None:
    with pytest.raises(NotAdmitted, match="never"):
        ledger.ask(task("a", 14.1), 0)
    with pytest.raises(NotAdmitted, match="never"):
        ledger.ask(evaluation("a", 1, 41), 0)
    assert ledger.ask(evaluation("a", 20, 40), 0)


def test_too_many_waiting_are_refused() -> None:
    ledger = Ledger(Resources(1, 1 << 40), AdmissionRules(waiting=1, starts_share=1, reserve_cpu=0))
    ledger.ask(task("a"), 0)
    assert not ledger.ask(task("b"), 0)
    with pytest.raises(NotAdmitted, match="wait for room already"):
        ledger.ask(task("c"), 0)


def test_the_same_key_twice_is_refused(ledger: Ledger) -> None:
    ledger.ask(task("a"), 0)
    with pytest.raises(NotAdmitted, match="already"):
        ledger.ask(task("a"), 0)


def test_boosted_quota_is_taken_back_least_recently_pressed_first(ledger: Ledger) -> None:
    for name in "abc":
        ledger.ask(task(name), 0)
    boost(ledger, "a", 6, 1, pressed_at=30)
    boost(ledger, "b", 6, 1, pressed_at=10)
    boost(ledger, "c", 4, 1, pressed_at=20)
    assert not ledger.ask(evaluation("e", 10), 40)
    events = ledger.step(40)
    assert events.take_back == (TakeBack("b", Quota(1, GIB)), TakeBack("c", Quota(1, GIB)))
    assert ledger.step(40).take_back == ()  # on its way
    assert not ledger.promise("b", Quota(6, 2 * GIB))  # there is memory, but it is on its way down
    ledger.settle("b", Quota(1, GIB))
    assert ledger.step(41).admitted == ()
    ledger.settle("c", Quota(1, GIB))
    assert ledger.step(42).admitted == ("e",)
    assert ledger._entries["a"].promised.cpu == 6


def test_what_is_on_its_way_back_is_counted(ledger: Ledger) -> None:
    for name in "ab":
        ledger.ask(task(name), 0)
        boost(ledger, name, 8, 1, 0)
    ledger.ask(evaluation("e", 6), 1)
    assert [back.key for back in ledger.step(1).take_back] == ["a"]
    assert ledger.step(2).take_back == ()


def test_tasks_do_not_take_what_an_evaluation_waits_for(ledger: Ledger) -> None:
    for name, cpu in (("a", 8), ("b", 4)):
        ledger.ask(task(name, cpu), 0)
    assert not ledger.ask(evaluation("e", 10), 1)
    assert not ledger.ask(task("t"), 2)
    assert ledger.step(3) == Events()
    ledger.remove("b")
    assert ledger.step(4).admitted == ("e",)


def test_nothing_is_taken_where_it_would_not_make_room(ledger: Ledger) -> None:
    for number in range(10):
        ledger.ask(task(str(number)), 0)
    boost(ledger, "0", 7, 1, 0)
    ledger.ask(evaluation("e", 11), 1)
    assert ledger.step(1) == Events()


def test_tasks_take_nothing_back(ledger: Ledger) -> None:
    ledger.ask(task("a"), 0)
    boost(ledger, "a", 16, 1, 0)
    ledger.ask(task("b", 5), 1)
    assert ledger.step(1) == Events()


def test_memory_is_taken_down_to_what_is_in_use_only(ledger: Ledger) -> None:
    ledger.ask(task("a"), 0)
    boost(ledger, "a", 1, 32, 0)
    ledger.observe("a", Quota(0, 20 * GIB), None)
    ledger.ask(evaluation("e", 1, 15), 1)
    assert ledger.step(1).take_back == (TakeBack("a", Quota(1, 20 * GIB)),)


def test_a_refused_taking_back_is_tried_elsewhere_and_not_for_ever(ledger: Ledger) -> None:
    ledger.ask(task("a"), 0)
    ledger.ask(task("b"), 0)
    boost(ledger, "a", 8, 1, 0)
    boost(ledger, "b", 8, 1, 5)
    ledger.ask(evaluation("e", 8), 10)
    seen = []
    for number in range(6):
        for back in ledger.step(10 + number).take_back:
            seen.append(back.key)
            ledger.settle(back.key, ledger._entries[back.key].promised)
    assert seen == ["a"] * 3 + ["b"] * 3


def test_who_waits_comes_before_raises(ledger: Ledger) -> None:
    for name in "ab":
        ledger.ask(task(name, 4), 0)
    boost(ledger, "a", 12, 4, 0)
    assert not ledger.ask(evaluation("e", 5), 1)
    ledger.settle("a", Quota(9, 4 * GIB))
    assert ledger.view().free_cpu == 3  # room for it now
    ledger.settle("a", Quota(11.5, 4 * GIB))
    assert ledger.view().free_cpu == 0  # half a core is left beside the reserve, and kept


def test_what_runs_already_is_adopted_though_the_node_is_full(ledger: Ledger) -> None:
    ledger.adopt(task("a"), Quota(30, GIB))
    ledger.adopt(task("b"), Quota(0.5, GIB // 2))
    assert ledger.promised == Quota(31, 2 * GIB)  # never less than a start
    assert ledger.view().free_cpu == 0
    ledger.adopt(task("a"), Quota(2, GIB))  # found again
    assert ledger.promised == Quota(3, 2 * GIB)
    assert len(ledger) == 2


def test_what_ended_meanwhile_is_no_error(ledger: Ledger) -> None:
    ledger.settle("gone", Quota(1, 1))
    ledger.observe("gone", Quota(1, 1), 0)
    ledger.remove("gone")
    assert not ledger.promise("gone", Quota(1, 1))
    assert ledger.promised == Quota(0, 0)


# --- whatever happens ------------------------------------------------------------------------------------------------------

roles = st.sampled_from(Role)
cores = st.floats(0.01, 24, allow_nan=False)
sizes = st.integers(1, 48 * GIB)


class Anything(RuleBasedStateMachine):
    """All calls in any order; limits in force kept beside, as a runtime would."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Resources(64, 256 * GIB), RULES)
        self.now = 0.0
        self.count = 0
        self.force: dict[str, Quota] = {}
        self.starts: dict[str, Request] = {}
        self.waits: dict[str, float] = {}
        self.taking: dict[str, Quota] = {}

    def enter(self, name: str) -> None:
        request = self.starts[name]
        self.force[name] = request.bounds.start
        self.waits.pop(name, None)
        promised = self.ledger.promised
        assert promised.cpu <= 20 + SLACK
        assert promised.memory <= 40 * GIB
        if request.role is not Role.EVALUATION:
            assert promised.cpu <= 18 + SLACK
            assert promised.memory <= 36 * GIB
            mine = [key for key in self.force if self.starts[key].role is not Role.EVALUATION]
            assert sum(self.starts[key].bounds.start.cpu for key in mine) <= 14 + SLACK

    @rule(cpu=cores, memory=sizes, role=roles, deadline=st.floats(0, 30))
    def ask(self, cpu: float, memory: int, role: Role, deadline: float) -> None:
        self.count += 1
        name = f"e{self.count}"
        start = Quota(cpu, memory)
        self.starts[name] = Request(name, Bounds(start, Quota(64.0, 64 * GIB), start), role)
        try:
            if self.ledger.ask(self.starts[name], self.now, deadline):
                self.enter(name)
            else:
                self.waits[name] = self.now + deadline
        except NotAdmitted:
            assert name not in self.ledger

    @rule(data=st.data(), cpu=cores, memory=sizes, works=st.booleans())
    def move(self, data: st.DataObject, cpu: float, memory: int, works: bool) -> None:
        if not self.force:
            return
        name = data.draw(st.sampled_from(sorted(self.force)))
        if name in self.taking:
            return
        quota, view, before = Quota(cpu, memory), self.ledger.view(), self.ledger.promised
        if self.ledger.promise(name, quota):
            after = self.ledger.promised
            assert after.cpu - before.cpu <= view.free_cpu + 2 * SLACK
            assert after.memory - before.memory <= view.free_memory
            if after.cpu > before.cpu:
                assert after.cpu <= 16 + 2 * SLACK
            if works:
                self.force[name] = quota
        else:
            assert self.ledger.promised == before
        self.ledger.settle(name, self.force[name])

    @rule(data=st.data(), memory=sizes, at=st.floats(0, 1000))
    def observe(self, data: st.DataObject, memory: int, at: float) -> None:
        if self.force:
            self.ledger.observe(data.draw(st.sampled_from(sorted(self.force))), Quota(0.0, memory), at)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        names = sorted({*self.force, *self.waits})
        if names:
            name = data.draw(st.sampled_from(names))
            self.ledger.remove(name)
            for known in (self.force, self.waits, self.taking):
                known.pop(name, None)

    @rule(data=st.data(), works=st.booleans())
    def taken(self, data: st.DataObject, works: bool) -> None:
        if self.taking:
            name = data.draw(st.sampled_from(sorted(self.taking)))
            quota = self.taking.pop(name)
            if works:
                self.force[name] = quota
            self.ledger.settle(name, self.force[name])

    @rule(seconds=st.floats(0, 10))
    def step(self, seconds: float) -> None:
        self.now += seconds
        events = self.ledger.step(self.now)
        for key in events.expired:
            assert isinstance(key, str)
            assert self.waits.pop(key) <= self.now
        assert all(until > self.now for until in self.waits.values())
        for key in events.admitted:
            assert isinstance(key, str)
            self.enter(key)
        for back in events.take_back:
            assert isinstance(back.key, str)
            start = self.starts[back.key].bounds.start
            assert back.quota.cpu >= start.cpu
            assert back.quota.memory >= start.memory
            assert back.key not in self.taking
            assert any(self.starts[name].role is Role.EVALUATION for name in self.waits)
            self.taking[back.key] = back.quota

    @invariant()
    def promises_cover_limits_and_starts(self) -> None:
        cpu = sum(max(quota.cpu, self.starts[name].bounds.start.cpu) for name, quota in self.force.items())
        memory = sum(max(quota.memory, self.starts[name].bounds.start.memory) for name, quota in self.force.items())
        assert self.ledger.promised.cpu == pytest.approx(cpu, abs=1e-6)
        assert self.ledger.promised.memory == memory
        assert self.ledger.promised.cpu <= 20 + 1e-5
        assert self.ledger.promised.memory <= 40 * GIB
        assert len(self.ledger) == len(self.force)
        assert self.ledger.waiting == len(self.waits)


Anything.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnything = Anything.TestCase
