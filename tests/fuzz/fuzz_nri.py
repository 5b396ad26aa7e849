"""Fuzz target: what a runtime may send over NRI's socket, from the trunk's bytes up to the bounds of a container.

``make fuzz`` runs all targets; weenv_testkit/fuzzing.py says how to run one. tests/test_fuzz_nri.py runs a short pass.

Whatever the bytes are, and however they arrive: FormatError and its kinds or calls, every call can be answered, what is
kept meanwhile is bounded, and bounds made of a container's text are in order.
"""

from __future__ import annotations

import random
import struct
from typing import Any

from weenv.core.errors import FormatError
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.creation import RECORD, asked, said_by
from weenv.plugin.nri.wire import messages, mux, ttrpc
from weenv.plugin.nri.wire.messages import Pod, container_of, decode, encode, limits_of, pod_of
from weenv.plugin.nri.wire.session import MAX_STREAMS, Call, Session
from weenv_testkit import fuzzing

CONFIG = ElasticConfig()
REQUESTS = {
    "Configure": "ConfigureRequest",
    "Synchronize": "SynchronizeRequest",
    "CreateContainer": "CreateContainerRequest",
    "UpdateContainer": "UpdateContainerRequest",
    "StopContainer": "StopContainerRequest",
    "StateChange": "StateChangeEvent",
}
_PLENTY = 8 * mux.MAX_PAYLOAD


def one_input(data: bytes) -> bool:
    """The first byte says how the rest is cut on its way; true where a message was read to its end."""
    if not data:
        return False
    step = (1, 3, 8, 18, 64, 4096, 1 << 20)[data[0] % 7]
    trunk = data[1:]
    session = Session()
    for _ in range(3):
        session.request("s", "UpdateContainers", b"")
    session.take()
    read = False
    for at in range(0, len(trunk), step):
        try:
            events = session.feed(trunk[at : at + step])
        except FormatError as error:
            assert "\n" not in str(error)
            assert len(str(error)) < 500
            return read
        assert session.calls <= MAX_STREAMS
        for event in events:
            if isinstance(event, Call):
                read |= served(event)
                session.answer(event, event.payload[: ttrpc.MAX_DATA // 2])
            else:
                read = True
        assert len(session.take()) <= _PLENTY
    return read


def served(call: Call) -> bool:
    """As the plugin reads a call; true where it can."""
    table = REQUESTS.get(call.method)
    if table is None:
        return False
    try:
        fields = decode(table, call.payload)
    except FormatError:
        return False
    pod = pod_of(fields.get("pod", {}))
    for item in [*fields.get("containers", []), fields.get("container", {})]:
        container = container_of(item)
        said = said_by(container.annotations, pod.annotations, container.labels)
        limits = container.limits
        for record in ("", container.annotations.get(RECORD, "")):
            found = asked(said, limits.cpu or 0.0, limits.memory or 0, CONFIG, record=record)
            bounds = found.bounds
            assert 0 < bounds.start.cpu <= bounds.ceiling.cpu
            assert 0 < bounds.start.memory <= bounds.ceiling.memory
            assert all("\n" not in text for text in found.complaints)
        answer = messages.created((bounds.start.cpu, bounds.start.memory), {}, [], limits)
        assert decode("CreateContainerResponse", answer)
    limits_of(fields.get("linux_resources", {}))
    assert isinstance(pod, Pod)
    return True


def seeds() -> list[tuple[str, bytes]]:
    """Sound requests: method and payload."""
    resources = messages.resources(2.0, 1 << 30, memory_swap=1 << 30)
    container = {
        "id": "c" * 64, "pod_sandbox_id": "p", "name": "main", "state": 3, "pid": 7,
        "labels": {"io.kubernetes.container.name": "main"},
        "annotations": {"weenv.dev/cpu.start": "500m", "weenv.dev/memory.max": "2Gi", RECORD: "4.0,1073741824"},
        "linux": {"resources": resources, "cgroups_path": "/a"},
    }  # fmt: skip
    pod = {"id": "p", "name": "n", "namespace": "default", "annotations": {"weenv.dev/role": "service"}}
    both = {"pod": pod, "container": container}
    bodies: dict[str, dict[str, Any]] = {
        "Configure": {"runtime_name": "containerd", "runtime_version": "2.1.9", "request_timeout": 2000},
        "Synchronize": {"pods": [pod], "containers": [container, container]},
        "CreateContainer": both,
        "UpdateContainer": {**both, "linux_resources": resources},
        "StopContainer": both,
        "StateChange": {"event": 7, **both},
    }
    return [(method, encode(REQUESTS[method], body)) for method, body in bodies.items()]


SEEDS = seeds()


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Change bytes in a few places."""
    out = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
        at = dice.randrange(len(out) + 1)
        action = dice.randrange(5)
        if action == 0 and at < len(out):
            out[at] ^= 1 << dice.randrange(8)
        elif action == 1:
            out[at : at + 1] = bytes([dice.choice((0, 1, 0x0A, 0x12, 0x7F, 0x80, 0xFF))])
        elif action == 2:
            out[at : at + 4] = struct.pack(">I", dice.choice((0, 1, 10, 0xFFFF, mux.MAX_PAYLOAD, 0xFFFFFFFF)))
        elif action == 3:
            del out[at : at + dice.randrange(9)]
        else:
            out[at:at] = dice.randbytes(dice.randrange(9))
    return bytes(out)


def made(dice: random.Random) -> bytes:
    """An input: a few calls and a reply, damaged at one of three depths."""
    depth = dice.randrange(4)
    trunk = b""
    for number in range(dice.randrange(1, 4)):
        method, payload = dice.choice(SEEDS)
        if depth == 0:
            payload = mutate(payload, dice)
        request = ttrpc.request(messages.PLUGIN_SERVICE, method, payload, 2.0)
        if depth == 1:
            request = mutate(request, dice)
        trunk += ttrpc.encode(mux.PLUGIN, 2 * number + 1, ttrpc.Kind.REQUEST, request[: ttrpc.MAX_DATA])
    trunk += ttrpc.encode(mux.RUNTIME, dice.choice((1, 3, 9)), ttrpc.Kind.RESPONSE, ttrpc.response(b"x"))
    if depth == 2:
        trunk = mutate(trunk, dice)
    return bytes([dice.randrange(256)]) + trunk


def run(count: int, seed: int) -> str:
    """``count`` mutations of sound conversations."""
    dice = random.Random(seed)
    accepted = 0
    for method, payload in SEEDS:
        assert served(Call(1, messages.PLUGIN_SERVICE, method, payload, 2.0)), method
    for _ in range(count):
        data = made(dice)
        try:
            accepted += one_input(data)
        except BaseException:
            print(repr(data))
            raise
    return f"{accepted} of them sound"


def mutator(atheris: Any, data: bytes, max_size: int, seed: int) -> bytes:
    """Half of atheris' own mutations, half of ours, which get past the framing."""
    if seed % 2:
        return bytes(atheris.Mutate(data, max_size))
    return made(random.Random(seed))[:max_size]


if __name__ == "__main__":
    fuzzing.main(__doc__, one_input, run, mutator)
