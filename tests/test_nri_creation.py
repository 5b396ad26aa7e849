"""What a container of CRI starts with: annotations, own limits, nonsense."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.creation import RECORD, Asked, asked, record_of, recorded, said_by
from weenv.plugin.nri.model import Quota, Role

GIB = 1 << 30
CONFIG = ElasticConfig()


def ask(own_cpu: float = 0.0, own_memory: int = 0, *, always: bool = False, record: str = "", **said: str) -> Asked:
    keys = {"weenv.dev/" + name.replace("_", "."): value for name, value in said.items()}
    return asked(keys, own_cpu, own_memory, CONFIG, always=always, record=record)


def test_nothing_said_is_not_ours() -> None:
    found = ask(4.0, GIB)
    assert not found.managed and not found.complaints and found.role is Role.TASK
    assert ask(always=True).managed and ask(elastic="true").managed
    assert not ask(always=True, elastic="false").managed and not ask(cpu_start="1", elastic="false").managed
    assert not ask(role="service").managed


def test_start_and_ceiling_as_said() -> None:
    found = ask(cpu_start="500m", cpu_max="8", memory_start="512Mi", memory_max="4Gi", role="evaluation")
    assert found.managed and not found.complaints and found.role is Role.EVALUATION
    assert found.bounds.start == found.bounds.floor == Quota(0.5, 512 << 20)
    assert found.bounds.ceiling == Quota(8.0, 4 * GIB)


def test_own_limits_are_ceilings() -> None:
    found = ask(2.0, GIB, cpu_start="1")
    assert found.bounds.ceiling == Quota(2.0, GIB) and not found.complaints
    assert found.bounds.start == Quota(1.0, CONFIG.start_memory)
    lower = ask(2.0, GIB, cpu_max="1", memory_max="768Mi")
    assert lower.bounds.ceiling == Quota(1.0, 768 << 20) and not lower.complaints
    above = ask(2.0, GIB, cpu_max="4", memory_max="2Gi")
    assert above.bounds.ceiling == Quota(2.0, GIB)
    assert above.complaints == (
        "weenv.dev/cpu.max is above the container's own limit, 2 CPUs; it is cut to that",
        "weenv.dev/memory.max is above the container's own limit, 1 GiB; it is cut to that",
    )
    tiny = ask(0.1, 64 << 20, elastic="true")
    assert tiny.bounds.start == tiny.bounds.ceiling == Quota(0.1, 64 << 20) and not tiny.complaints


def test_the_node_has_a_ceiling_too() -> None:
    found = ask(100.0, 64 * GIB, cpu_max="90", memory_start="40Gi")
    assert found.bounds.ceiling == Quota(64.0, 32 * GIB) and found.bounds.start.memory == 32 * GIB
    assert [text.split(",")[0] for text in found.complaints] == [
        "weenv.dev/cpu.max is above the ceiling of this node",
        "weenv.dev/memory.start is above the ceiling",
    ]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"cpu_start": "many"}, "cpu.start"),
        ({"cpu_start": "-1"}, "cpu.start"),
        ({"cpu_max": "1e9"}, "cpu.max"),
        ({"cpu_max": "nan"}, "cpu.max"),
        ({"cpu_start": "0"}, "cpu.start"),
        ({"cpu_start": "1m"}, "cpu.start"),
        ({"memory_start": "1"}, "memory.start"),
        ({"memory_max": "5Mi"}, "memory.max"),
        ({"memory_max": "9" * 40}, "memory.max"),
        ({"memory_max": "٣Gi"}, "memory.max"),
        ({"role": "boss"}, "role"),
        ({"elastic": "maybe"}, "elastic"),
    ],
)
def test_nonsense_is_named_and_its_default_holds(said: dict[str, str], name: str) -> None:
    found = ask(4.0, GIB, **said)
    assert found.bounds == ask(4.0, GIB).bounds and found.role is Role.TASK
    (complaint,) = found.complaints
    assert complaint.startswith(f"weenv.dev/{name} ") and "\n" not in complaint and len(complaint) < 200


def test_a_record_counts_instead_of_limits_that_are_ours() -> None:
    first = ask(4.0, 2 * GIB, cpu_start="1", memory_start="256Mi")
    text = record_of(first.bounds)
    assert text == "4.000000,2147483648"
    again = ask(1.0, 256 << 20, record=text, cpu_start="1", memory_start="256Mi")
    assert again.bounds == first.bounds and not again.complaints
    # What was cut at creation is not complained about again, and a lower max still holds.
    capped = ask(4.0, 2 * GIB, cpu_max="8")
    assert ask(0.5, GIB, record=record_of(capped.bounds), cpu_max="8").bounds == capped.bounds
    for nonsense in ("x", "1", "0,0", "4.0,-1", "1," + "9" * 50):
        found = ask(1.0, GIB, record=nonsense)
        assert found.complaints and RECORD in found.complaints[-1]


@given(
    said=st.dictionaries(
        st.sampled_from(["cpu_start", "cpu_max", "memory_start", "memory_max", "role", "elastic", "ceiling"]),
        st.one_of(st.text(max_size=12), st.sampled_from(["1", "0.5", "100", "500m", "1Gi", "64Gi", "8Mi", "true", "service"])),
    ),
    own_cpu=st.sampled_from([0.0, 0.01, 0.5, 3.0, 200.0]),
    own_memory=st.sampled_from([0, 8 << 20, GIB, 100 * GIB]),
    record=st.one_of(st.just(""), st.text(max_size=20), st.sampled_from(["1,1073741824", "64.000000,34359738368"])),
)
def test_bounds_always_hold(said: dict[str, str], own_cpu: float, own_memory: int, record: str) -> None:
    found = ask(own_cpu, own_memory, record=record, **said)
    bounds = found.bounds
    assert 0 < bounds.floor.cpu <= bounds.start.cpu <= bounds.ceiling.cpu <= CONFIG.ceiling_cpu
    assert 0 < bounds.floor.memory <= bounds.start.memory <= bounds.ceiling.memory <= CONFIG.ceiling_memory
    if not record:
        assert not own_cpu or bounds.ceiling.cpu <= own_cpu
        assert not own_memory or bounds.ceiling.memory <= own_memory


def test_what_is_recorded_says_it_all() -> None:
    first = ask(4.0, 2 * GIB, cpu_start="333m", memory_start="256Mi", memory_max="1Gi", role="evaluation")
    notes = recorded(first)
    again = asked(said_by(notes, {"weenv.dev/elastic": "false"}), 0.333, 256 << 20, CONFIG, record=notes[RECORD])
    assert again == first


def test_the_container_speaks_before_its_pod_and_its_image() -> None:
    own, pod, image = {"weenv.dev/cpu.start": "1"}, {"weenv.dev/cpu.start": "2", "x": "y"}, {"weenv.dev/role": "service"}
    assert said_by(own, pod, image) == {"weenv.dev/cpu.start": "1", "weenv.dev/role": "service"}
