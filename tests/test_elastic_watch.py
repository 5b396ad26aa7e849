"""Which containers are managed, and with what bounds; what labels and annotations may say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.plugin.containerd.runtime import Container
from weenv.plugin.nri import labels
from weenv.plugin.nri.annotations import own_limits, parse, plan_ceiling
from weenv.plugin.nri.config import MIB, ElasticConfig
from weenv.plugin.nri.creation import RECORD
from weenv.plugin.nri.model import EnvKey, Quota, Role
from weenv.plugin.nri.watch import Found, Watcher, wanted

CONFIG = ElasticConfig()
GIB = 1 << 30


def container(said: dict[str, str], spec: dict[str, Any] | None = None) -> Container:
    return Container("c1", "image", spec or {}, "overlayfs", "c1", said)


def limited(cpu: float, memory: int) -> dict[str, Any]:
    return {"linux": {"resources": {"cpu": {"quota": int(cpu * 100_000), "period": 100_000}, "memory": {"limit": memory}}}}


def test_only_those_are_managed_that_say_so() -> None:
    none = frozenset[str]()
    assert wanted(container({}), "default", none, CONFIG) is None
    assert wanted(container({labels.ENVIRONMENT: "image"}), "default", none, CONFIG) is None, "no plan, or none with resources"
    assert wanted(container({labels.ELASTIC: "true"}), "default", none, CONFIG) is not None
    assert wanted(container({labels.CPU_START: "1"}), "default", none, CONFIG) is not None
    assert wanted(container({labels.CEILING: "8,0"}), "default", none, CONFIG) is not None
    assert wanted(container({labels.CEILING: "8,0", labels.ELASTIC: "false"}), "default", none, CONFIG) is None
    assert wanted(container({}), "moby", frozenset({"moby"}), CONFIG) is not None
    assert wanted(container({labels.ELASTIC: "false"}), "moby", frozenset({"moby"}), CONFIG) is None
    pause = {"io.cri-containerd.kind": "sandbox"}
    assert wanted(container(pause), "k8s.io", frozenset({"k8s.io"}), CONFIG) is None, "holds a pod's namespaces, no task"


def test_an_environment_of_ours_starts_with_its_limits_and_grows_to_its_plans_ceiling() -> None:
    found = wanted(container({labels.CEILING: "8,0", labels.ROLE: "evaluation"}, limited(0.5, GIB)), "d", frozenset(), CONFIG)
    assert found is not None and found.role is Role.EVALUATION
    assert found.bounds.start == Quota(0.5, GIB) and found.bounds.ceiling == Quota(8.0, CONFIG.ceiling_memory)


def test_anothers_own_limits_are_its_ceiling() -> None:
    found = wanted(container({labels.CPU_START: "500m", labels.CPU_MAX: "100"}, limited(4, GIB)), "d", frozenset(), CONFIG)
    assert found is not None
    assert found.bounds.start == Quota(0.5, CONFIG.start_memory) and found.bounds.ceiling == Quota(4.0, GIB)
    assert any("cut" in line for line in found.complaints)


def test_annotations_count_as_labels_do_and_ours_say_what_the_limits_were() -> None:
    spec = limited(0.5, 256 * MIB) | {"annotations": {labels.CPU_START: "0.5", RECORD: f"4.000000,{GIB}"}}
    found = wanted(container({}, spec), "k8s.io", frozenset(), CONFIG)
    assert found is not None and found.bounds.ceiling == Quota(4.0, GIB)


def test_nonsense_is_named_and_ignored() -> None:
    said = {
        labels.CPU_START: "lots", labels.CPU_MAX: "-1", labels.MEMORY_START: "1Zi", labels.MEMORY_MAX: "", labels.ROLE: "king",
        labels.ELASTIC: "perhaps",
    }  # fmt: skip
    found = parse(said)
    assert (found.start_cpu, found.max_cpu, found.start_memory, found.max_memory, found.role, found.elastic) == (
        0, 0, 0, 0, Role.TASK, None,
    )  # fmt: skip
    assert len(found.complaints) == 6
    assert parse({labels.CPU_START: "4", labels.CPU_MAX: "2"}).complaints == (
        "weenv.dev/cpu.start is above weenv.dev/cpu.max; it is cut to that",
    )


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([labels.CPU_START, labels.MEMORY_MAX, labels.ROLE, labels.ELASTIC, labels.CEILING]), st.text()
    )
)
def test_no_text_does_harm(said: dict[str, str]) -> None:
    found = wanted(container(said), "default", frozenset({"default"}), CONFIG)
    if found is not None:
        bounds = found.bounds
        for start, ceiling, most in (
            (bounds.start.cpu, bounds.ceiling.cpu, CONFIG.ceiling_cpu),
            (bounds.start.memory, bounds.ceiling.memory, CONFIG.ceiling_memory),
        ):
            assert 0 < start <= ceiling <= most
        assert all(line.isprintable() for line in found.complaints)


@pytest.mark.parametrize(
    "spec",
    [
        {}, {"linux": None}, {"linux": {"resources": []}}, {"linux": {"resources": {"cpu": 5, "memory": "x"}}},
        {"linux": {"resources": {"cpu": {"quota": "1"}, "memory": {"limit": -1}}}},
        {"linux": {"resources": {"cpu": {"quota": -1, "period": 100_000}, "memory": {"limit": 1 << 62}}}},
        {"linux": {"resources": {"cpu": {"quota": 1, "period": 0}, "memory": {"limit": None}}}},
        {"linux": "x", "annotations": 7},
        {"linux": {"resources": {"cpu": {"quota": 10**400, "period": 1}, "memory": {"limit": 10**400}}}},
        {"linux": {"resources": {"cpu": {"quota": 1, "period": 10**400}, "pids": {"limit": 10**400}}}},
        {"linux": {"resources": {"cpu": {"quota": 1.5, "period": 1e300}, "memory": {"limit": 1e300}}}},
    ],
)  # fmt: skip
def test_a_spec_that_limits_nothing_or_is_malformed(spec: dict[str, Any]) -> None:
    assert own_limits(spec) == (0.0, 0)
    assert wanted(container({labels.ELASTIC: "true"}, spec), "d", frozenset(), CONFIG) is not None


def test_ceilings_of_plans() -> None:
    assert plan_ceiling("8,1073741824") == (8.0, GIB)
    assert plan_ceiling("0,0") == (0.0, 0) == plan_ceiling("") == plan_ceiling("x,y,z")


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []

    def started(self, found: Found) -> None:
        self.told.append(("started", found.pid))

    def ended(self, key: EnvKey, status: int | None) -> None:
        self.told.append(("ended", status))

    def killed_for_memory(self, key: EnvKey) -> None:
        """Not here."""


def test_what_nobody_can_make_sense_of_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    class Absurd(dict[str, Any]):
        def get(self, *_: object) -> object:
            raise OverflowError

    listener = Listener()
    watcher = Watcher(None, listener, CONFIG)  # type: ignore[arg-type]
    said = {labels.ELASTIC: "true"}
    for _ in range(2):
        watcher._offer(EnvKey("default", "bad"), 7, container(said, Absurd(x=1)))
        watcher._offer(EnvKey("default", "c1"), 8, container(said))
    assert listener.told == [("started", 8)]
    assert caplog.text.count("default/bad: not managed") == 1


def test_a_listing_that_is_older_than_an_end_brings_nobody_back(caplog: pytest.LogCaptureFixture) -> None:
    listener = Listener()
    watcher = Watcher(None, listener, CONFIG)  # type: ignore[arg-type]
    key = EnvKey("default", "c1")
    record = container({labels.ELASTIC: "true", labels.ROLE: "king"})
    watcher._offer(key, 7, record)
    watcher._gone(key, 3)
    watcher._offer(key, 7, record)
    assert listener.told == [("started", 7), ("ended", 3)] and caplog.text.count("king") == 1
    watcher._offer(key, 8, record)  # the same name again
    assert listener.told[2:] == [("started", 8)]
