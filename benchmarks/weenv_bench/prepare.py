"""How long Prepare takes with many callers at once: a client that costs next to nothing, in a process of its own.

50 callers are 50 streams of one HTTP/2 connection (that is how containerd calls a proxy plugin) or 50 connections. Their
requests are encoded before the clock starts and leave in one write per connection; a caller's time runs from before the
first write to the moment at which the bytes that end its answer were there to be read. Everything else is done when the
burst is over: answers are parsed, every snapshot is asked for with Stat and compared, then removed. The process keeps to
the machine's last CPU, so that it does not sit on the one the server runs on.

Header blocks are what grpc-go sends: the first request of a connection puts its headers into the HPACK table, all others
refer to it (RFC 7541). Frames are RFC 7540's; messages gRPC's (PROTOCOL-HTTP2.md), containerd's types.
"""

from __future__ import annotations

import gc
import json
import os
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from weenv.plugin.containerd.schema import SCHEMA, SNAPSHOTS_SERVICE
from weenv.plugin.containerd.types import Kind
from weenv.plugin.snapshotter.http2.connection import PREFACE
from weenv_bench.image import BenchError

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_WINDOW = 1 << 30
_PAUSE = 0.1
"""Seconds between bursts: 50 every 0.1 s is ten times as many containers as a node starts."""


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _text(value: str) -> bytes:
    raw = value.encode()
    if len(raw) >= 127:
        raise ValueError("a header longer than this client writes")
    return bytes((len(raw),)) + raw


class Channel:
    """One connection: queues requests, writes them at once, hands out answers by stream number."""

    def __init__(self, address: str, namespace: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(address)
        self._stream = 1
        self._buffer = bytearray()
        self._taken = 0
        self.bodies: dict[int, bytearray] = {}
        self._paths: dict[str, int] = {}
        self._entries = 0
        self._common = (
            (":authority", "localhost"), ("content-type", "application/grpc"), ("te", "trailers"),
            ("user-agent", "weenv-bench"), ("containerd-namespace", namespace), ("containerd-snapshotter", "weenv"),
        )  # fmt: skip
        self._indexed: dict[tuple[str, str], int] = {}
        settings = struct.pack(">HI", 2, 0) + struct.pack(">HI", 4, _WINDOW)
        self.socket.sendall(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW)))

    def close(self) -> None:
        """Close it."""
        self.socket.close()

    def _header(self, name: str, value: str) -> bytes:
        """A header: a reference to the dynamic table, or a literal that goes into it (RFC 7541, sections 6.1 and 6.2.1)."""
        known = self._indexed.get((name, value))
        if known is not None:
            return bytes((0x80 | 62 + self._entries - known,))
        self._entries += 1
        self._indexed[name, value] = self._entries
        return b"\x40" + _text(name) + _text(value)

    def encode(self, method: str, message: bytes) -> tuple[int, bytes]:
        """The stream and the bytes of one request."""
        block = b"\x83\x86" + self._header(":path", f"/{SNAPSHOTS_SERVICE}/{method}")
        block += b"".join(self._header(name, value) for name, value in self._common)
        stream, self._stream = self._stream, self._stream + 2
        body = struct.pack(">BI", 0, len(message)) + message
        return stream, frame(HEADERS, _END_HEADERS, stream, block) + frame(DATA, _END_STREAM, stream, body)

    def take(self, data: bytes) -> list[int]:
        """Take what arrived; gives the streams that ended. Bodies are kept in :attr:`bodies`."""
        buffer = self._buffer
        buffer += data
        ended: list[int] = []
        at = 0
        while len(buffer) - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            end = at + 9 + size
            if len(buffer) < end:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            if kind == DATA:
                stream = int.from_bytes(buffer[at + 5 : at + 9], "big")
                self._taken += size
                self.bodies.setdefault(stream, bytearray()).extend(buffer[at + 9 : end])
                if flags & _END_STREAM:
                    ended.append(stream)
            elif kind == HEADERS:
                if flags & _END_STREAM:
                    ended.append(int.from_bytes(buffer[at + 5 : at + 9], "big"))
            elif kind == SETTINGS and not flags & _ACK:
                self.socket.sendall(frame(SETTINGS, _ACK, 0))
            elif kind == PING and not flags & _ACK:
                self.socket.sendall(frame(PING, _ACK, 0, bytes(buffer[at + 9 : end])))
            elif kind in (RST_STREAM, GOAWAY):
                raise BenchError(f"the server ended a stream: frame {kind}, {bytes(buffer[at + 9 : end])!r}")
            at = end
        del buffer[:at]
        return ended

    def refill(self) -> None:
        """Give back the window that answers took."""
        if self._taken:
            self.socket.sendall(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._taken)))
            self._taken = 0


@dataclass
class Burst:
    """How one burst went: milliseconds and message of each request, in their order (empty for a refusal)."""

    times: list[float] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)


class Client:
    """``connections`` channels, over which requests are dealt out in turn."""

    def __init__(self, address: str, connections: int = 1, namespace: str = "default") -> None:
        self.channels = [Channel(address, namespace) for _ in range(connections)]
        self._poll = select.epoll()
        self._by_fd = {channel.socket.fileno(): channel for channel in self.channels}
        for number in self._by_fd:
            self._poll.register(number, select.EPOLLIN)

    def close(self) -> None:
        """Close all."""
        self._poll.close()
        for channel in self.channels:
            channel.close()

    def burst(self, method: str, messages: list[bytes]) -> Burst:
        """Send all at once and wait for all answers."""
        writes: dict[Channel, list[bytes]] = {}
        places: dict[tuple[int, int], int] = {}
        for number, message in enumerate(messages):
            channel = self.channels[number % len(self.channels)]
            stream, data = channel.encode(method, message)
            places[channel.socket.fileno(), stream] = number
            writes.setdefault(channel, []).append(data)
        ready = [(channel.socket, b"".join(parts)) for channel, parts in writes.items()]
        result = Burst([0.0] * len(messages), [b""] * len(messages))
        clock, poll, by_fd = time.perf_counter, self._poll.poll, self._by_fd
        left = len(messages)
        begin = clock()
        for connection, data in ready:
            connection.sendall(data)
        while left:
            for fd, _ in poll(30) or _late(left):
                now = clock()
                data = by_fd[fd].socket.recv(1 << 18)
                if not data:
                    raise BenchError("the server closed the connection")
                for stream in by_fd[fd].take(data):
                    result.times[places[fd, stream]] = (now - begin) * 1000
                    left -= 1
        for (fd, stream), number in places.items():
            body = bytes(by_fd[fd].bodies.pop(stream, b""))
            result.answers[number] = body[5:] if len(body) >= 5 else b""
        for channel in self.channels:
            channel.refill()
        return result


def _late(left: int) -> Any:
    raise BenchError(f"{left} answers did not come within 30 seconds")


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process that are alive, to the nanosecond (/proc/PID/task/TID/schedstat)."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
                total += int(file.read().split()[0])
        except OSError:  # it ended
            continue
    return total / 1e9


def _encoded(name: str, /, **values: Any) -> bytes:
    data: bytes = SCHEMA[name](**values).SerializeToString()
    return data


class Prepares:
    """Bursts of Prepare on one parent, each checked with Stat and then removed.

    ``keep`` labels the snapshots as roots of containerd's garbage collector, which else takes them before they are checked.
    """

    def __init__(
        self, address: str, snapshotter: str, parent: str, connections: int, pid: int = 0, keep: bool = False
    ) -> None:
        self._client = Client(address, connections)
        self._common = {"snapshotter": snapshotter}
        self._labels = {"containerd.io/gc.root": "bench"} if keep else {}
        self._parent = parent
        self._pid = pid
        self._round = 0
        self.cpu: list[float] = []
        """Seconds of the server's CPU per call, one figure a burst; empty without ``pid``."""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def burst(self, at_once: int) -> list[float]:
        """Milliseconds of each of ``at_once`` calls. Raises BenchError where an answer is not right."""
        self._round += 1
        keys = [f"bench-{os.getpid()}-{id(self)}-{self._round}-{caller}" for caller in range(at_once)]
        more = {"parent": self._parent, "labels": self._labels, **self._common}
        messages = [_encoded("PrepareSnapshotRequest", key=key, **more) for key in keys]
        before = cpu_seconds(self._pid) if self._pid else 0.0
        done = self._client.burst("Prepare", messages)
        if self._pid:
            self.cpu.append((cpu_seconds(self._pid) - before) / at_once)
        uppers = set()
        for key, answer in zip(keys, done.answers, strict=True):
            mounts = SCHEMA["PrepareSnapshotResponse"].FromString(answer).mounts
            if len(mounts) != 1:
                raise BenchError(f"Prepare of {key} was refused")
            uppers.add(next((option for option in mounts[0].options if option.startswith("upperdir=")), mounts[0].source))
        if len(uppers) != at_once:
            raise BenchError("two snapshots were given one directory")
        stats = self._client.burst("Stat", [_encoded("StatSnapshotRequest", key=key, **self._common) for key in keys])
        for key, answer in zip(keys, stats.answers, strict=True):
            info = SCHEMA["StatSnapshotResponse"].FromString(answer).info
            if (info.name, info.parent, info.kind) != (key, self._parent, Kind.ACTIVE):
                raise BenchError(f"Stat of {key} says {info}")
        self._client.burst("Remove", [_encoded("RemoveSnapshotRequest", key=key, **self._common) for key in keys])
        return done.times


def measure(
    address: str, snapshotter: str, parent: str, callers: int, rounds: int, pid: int = 0, keep: bool = False
) -> dict[str, float]:
    """Percentiles in ms: one caller ``alone``, ``callers`` streams of one connection (``together``) and as many connections."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    gc.disable()
    result: dict[str, float] = {}
    for name, at_once, connections, repeats in (
        ("alone", 1, 1, rounds * 4), ("together", callers, 1, rounds), ("connections", callers, callers, rounds),
    ):  # fmt: skip
        prepares = Prepares(address, snapshotter, parent, connections, pid, keep)
        times: list[float] = []
        for number in range(repeats + 1):
            took = prepares.burst(at_once)
            if number:  # the first fills header tables
                times.extend(took)
            if at_once > 1:
                time.sleep(_PAUSE)
        prepares.close()
        result[f"{name}_p50_ms"] = percentile(times, 0.5)
        result[f"{name}_p99_ms"] = percentile(times, 0.99)
        if pid:
            result[f"{name}_cpu_ms"] = percentile(prepares.cpu[1:], 0.5) * 1000
    result["grpc_alone_p50_ms"] = _grpc_alone(address, snapshotter, parent, rounds * 4)
    return result


def _grpc_alone(address: str, snapshotter: str, parent: str, repeats: int) -> float:
    """Median milliseconds of one caller that is grpc's own blocking client: what ours must not be far below."""
    import grpc

    header = (("containerd-namespace", "default"),)
    times: list[float] = []
    with grpc.insecure_channel(f"unix:{address}") as channel:
        prepare = channel.unary_unary(f"/{SNAPSHOTS_SERVICE}/Prepare")
        remove = channel.unary_unary(f"/{SNAPSHOTS_SERVICE}/Remove")
        for number in range(repeats + 1):
            key = f"bench-{os.getpid()}-grpc-{number}"
            message = _encoded("PrepareSnapshotRequest", key=key, parent=parent, snapshotter=snapshotter)
            begin = time.perf_counter()
            prepare(message, metadata=header)
            if number:
                times.append((time.perf_counter() - begin) * 1000)
            remove(_encoded("RemoveSnapshotRequest", key=key, snapshotter=snapshotter), metadata=header)
    return percentile(times, 0.5)


def tops(address: str, snapshotter: str) -> list[str]:
    """Names of committed snapshots that no committed one sits on."""
    client = Client(address)
    channel = client.channels[0]
    answer = bytearray()
    stream, data = channel.encode("List", _encoded("ListSnapshotsRequest", snapshotter=snapshotter))
    channel.socket.sendall(data)
    while stream not in channel.take(channel.socket.recv(1 << 18)):
        pass
    answer = channel.bodies.pop(stream, bytearray())
    client.close()
    infos: list[Any] = []
    while answer:
        size = int.from_bytes(answer[1:5], "big")
        infos.extend(SCHEMA["ListSnapshotsResponse"].FromString(bytes(answer[5 : 5 + size])).info)
        del answer[: 5 + size]
    committed = [info for info in infos if info.kind == Kind.COMMITTED]
    parents = {info.parent for info in committed}
    return [info.name for info in committed if info.name not in parents]


def main(arguments: list[str]) -> int:
    """The client process: ADDRESS SNAPSHOTTER CALLERS ROUNDS SERVER-PID [keep], figures as JSON on stdout."""
    address, snapshotter, callers, rounds, pid = arguments[:5]
    keep = "keep" in arguments[5:]
    names = tops(address, snapshotter)
    if not names:
        print(f"no committed snapshot in {snapshotter}", file=sys.stderr)
        return 1
    print(json.dumps(measure(address, snapshotter, names[0], int(callers), int(rounds), int(pid), keep)))
    return 0
