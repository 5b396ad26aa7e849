"""NRI's messages against protobuf itself; limits as runtimes mean them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.nriruntime import SCHEMA, container

from weenv.core.errors import FormatError
from weenv.plugin.nri.wire import messages
from weenv.plugin.nri.wire.messages import Limits, Update, container_of, decode, limits_of, pod_of

int64 = st.integers(-(2**63), 2**63 - 1)


def test_a_container_as_the_runtime_sends_it() -> None:
    sent = container("abc", cpu=1.5, memory=1 << 30, swap=1 << 31, cpu_start="2")
    sent.labels["a"] = "b"
    sent.linux.cgroups_path = "/k8s/abc"
    found = container_of(decode("Container", sent.SerializeToString()))
    assert (found.id, found.pod_id, found.name, found.state, found.pid) == ("abc", "p1", "main", 3, 77)
    assert found.annotations == {"weenv.dev/cpu.start": "2"} and found.labels == {"a": "b"}
    assert found.limits == Limits(1.5, 1 << 30, 100_000, 1 << 31) and found.cgroups_path == "/k8s/abc"
    pod = SCHEMA["PodSandbox"](id="p", name="n", uid="u", namespace="x", annotations={"k": "v"})
    read = pod_of(decode("PodSandbox", pod.SerializeToString()))
    assert (read.id, read.name, read.uid, read.namespace, read.annotations) == ("p", "n", "u", "x", {"k": "v"})
    assert container_of({}).limits == Limits()


@given(quota=int64, period=st.integers(0, 2**64 - 1), memory=int64, swap=int64)
def test_any_numbers_make_limits_or_none(quota: int, period: int, memory: int, swap: int) -> None:
    sent = SCHEMA["LinuxResources"]()
    sent.cpu.quota.value, sent.cpu.period.value = quota, period
    sent.memory.limit.value, sent.memory.swap.value = memory, swap
    found = limits_of(decode("LinuxResources", sent.SerializeToString()))
    assert found.cpu is None or found.cpu > 0
    assert found.memory is None or 0 < found.memory < 1 << 62
    assert 0 < found.period <= 1_000_000
    if quota == -1 or memory <= 0:
        assert (found.cpu is None) >= (quota == -1) and (found.memory is None) >= (memory <= 0)


def test_a_creation_answered() -> None:
    limits = Limits(2.0, 1 << 30, 50_000, 1 << 30)
    data = messages.created((0.5, 1 << 28), {"weenv.dev/ceiling": "2,1"}, [Update("other", 1.0, None)], limits)
    answer = SCHEMA["CreateContainerResponse"].FromString(data)
    found = answer.adjust.linux.resources
    assert (found.cpu.quota.value, found.cpu.period.value) == (25_000, 50_000)
    assert found.memory.limit.value == found.memory.swap.value == 1 << 28
    assert answer.adjust.annotations == {"weenv.dev/ceiling": "2,1"}
    (update,) = answer.update
    assert update.container_id == "other" and update.ignore_failure
    assert update.linux.resources.cpu.quota.value == 100_000 and not update.linux.resources.HasField("memory")
    free = SCHEMA["CreateContainerResponse"].FromString(messages.created((0.001, 1), {}, [], Limits()))
    assert free.adjust.linux.resources.cpu.quota.value == messages.MIN_QUOTA
    assert not free.adjust.linux.resources.memory.HasField("swap")
    bounded = SCHEMA["CreateContainerResponse"].FromString(messages.created((1.0, 5 << 20), {}, [], Limits(), swap=True))
    assert bounded.adjust.linux.resources.memory.swap.value == 5 << 20
    assert messages.created(None, {}, [], limits) == b""


def test_masks_and_refusals() -> None:
    assert messages.events_mask(4, 7, 8, 10, 11, 11) == 0b110_1100_1000
    assert (messages.EVENTS_0_6, messages.EVENTS_0_10) == (0x7FF, 0x3FFF)
    with pytest.raises(FormatError, match="NRI's Container"):
        decode("Container", b"\x0a\x05ab")
    register = SCHEMA["RegisterPluginRequest"].FromString(messages.register("weenv", "10"))
    assert (register.plugin_name, register.plugin_idx) == ("weenv", "10")
