"""The network between registry and node: 1 Gbit/s and 2 ms, without netem.

A child process owns two TUN devices: ``wbnear<pid>`` in this network namespace, ``wbfar`` in a namespace of its own where the
registry runs. It hands packets across, each no sooner than the rate allows (one clock per direction) and one way's delay
later. Both devices carry the kernel's segmentation offload (``IFF_VNET_HDR``, ``TUNSETOFFLOAD``: linux/if_tun.h,
linux/virtio_net.h), so TCP sees an ordinary 1500-byte link with an ordinary initial window while this process moves up to
64 KiB at a time: some thousand packets a second at full speed. A full queue is not read from, so the sender's own socket
holds the rest: no loss. Everything vanishes with the process: devices, namespace and what listens in it.

The addresses are from 198.18.0.0/15, which RFC 2544 sets aside for benchmarks.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from types import TracebackType

NEAR, FAR = "198.18.77.1", "198.18.77.2"
MASK = "255.255.255.252"

IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6 = 1, 2, 4
SIOCSIFADDR, SIOCSIFNETMASK, SIOCSIFFLAGS, SIOCGIFFLAGS, SIOCSIFTXQLEN = 0x8916, 0x891C, 0x8914, 0x8913, 0x8943
IFF_UP, IFF_RUNNING = 0x1, 0x40
CLONE_NEWNET = 0x40000000
PR_SET_TIMERSLACK, PR_SET_PDEATHSIG = 29, 1
VNET_HEADER = 10
QUEUE_LIMIT = 1 << 20
"""Bytes waiting in one direction before its device is no longer read: 8 ms at full rate, a small switch's buffer."""

COUNTERS = struct.Struct("<4Q")
"""The shared counters: bytes to the node, packets to it, bytes from it, packets from it (IP, headers included)."""


def _device(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(fd, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6)
    return fd


def _configure(name: str, address: str | None) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        if address is not None:
            for request, value in ((SIOCSIFADDR, address), (SIOCSIFNETMASK, MASK)):
                packed = struct.pack("16sHH4s8x", name.encode(), socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(control, request, packed)
            fcntl.ioctl(control, SIOCSIFTXQLEN, struct.pack("16si20x", name.encode(), 1000))
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), IFF_UP | IFF_RUNNING))


def _unshare_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET)")


def serve(counters_path: str, rate: float, delay: float, near_name: str) -> None:
    """The child: make both devices, say ``ready``, carry packets until killed. ``rate`` in bytes/s, ``delay`` in s one way."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    os.setpriority(os.PRIO_PROCESS, 0, -20)  # the wire is not part of what is measured: it must not be late
    near = _device(near_name)
    _configure(near_name, NEAR)
    _unshare_network()
    far = _device("wbfar")
    _configure("wbfar", FAR)
    _configure("lo", None)
    with open(counters_path, "r+b") as file:
        shared = mmap.mmap(file.fileno(), 4096)
    print("ready", flush=True)
    _carry(near, far, shared, rate, delay)


def _carry(near: int, far: int, shared: mmap.mmap, rate: float, delay: float) -> None:
    clock, read, write = time.monotonic, os.read, os.write
    # Per direction: source, target, packets with their due time, bytes queued, when the wire is free, bytes and packets sent.
    fds = ((far, near), (near, far))
    queues: tuple[deque[tuple[float, bytes]], ...] = (deque(), deque())
    queued, free, sent, packets = [0, 0], [0.0, 0.0], [0, 0], [0, 0]
    while True:
        now = clock()
        wait = 1.0
        for way in (0, 1):
            queue = queues[way]
            target = fds[way][1]
            moved = False
            while queue and queue[0][0] <= now:
                _, data = queue.popleft()
                size = len(data) - VNET_HEADER
                queued[way] -= size
                try:
                    write(target, data)
                except OSError:  # a packet the other side will not take (its device is going down) is lost, as on a wire
                    continue
                sent[way] += size
                packets[way] += 1
                moved = True
            if moved:
                COUNTERS.pack_into(shared, 0, sent[0], packets[0], sent[1], packets[1])
            if queue:
                wait = min(wait, queue[0][0] - now)
        sources = [fds[way][0] for way in (0, 1) if queued[way] < QUEUE_LIMIT]
        readable, _, _ = select.select(sources, (), (), max(0.0, wait))
        if not readable:
            continue
        now = clock()
        for way in (0, 1):
            if fds[way][0] not in readable:
                continue
            for _ in range(16):
                if queued[way] >= QUEUE_LIMIT:
                    break
                try:
                    data = read(fds[way][0], 65536 + VNET_HEADER)
                except BlockingIOError:
                    break
                size = len(data) - VNET_HEADER
                queued[way] += size
                start = free[way] if free[way] > now else now
                free[way] = start + size / rate
                queues[way].append((free[way] + delay, data))


@dataclass(frozen=True)
class Counters:
    """What crossed the link: IP bytes and packets, ``down`` to the node, ``up`` from it."""

    down: int
    down_packets: int
    up: int
    up_packets: int


class Link:
    """A running link. Use as a context manager; ``far(...)`` turns a command into one that runs at the registry's end."""

    def __init__(self, mbit: float = 1000, round_trip_ms: float = 2.0) -> None:
        self.mbit = mbit
        self.round_trip_ms = round_trip_ms
        self.address = FAR
        # Both ends' addresses are fixed, so there is one link on a machine at a time.
        self._lock = open(os.path.join(tempfile.gettempdir(), "weenv-bench.lock"), "w")  # noqa: SIM115 - held while it runs
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise OSError("another benchmark is running on this machine: wait for its end") from None
        self._dir = tempfile.mkdtemp(prefix="weenv-bench-link-")
        path = os.path.join(self._dir, "counters")
        with open(path, "wb") as file:
            file.write(bytes(4096))
        # Packet data only is paced; 985 of 1000 leaves what framing takes on a wire.
        arguments = [path, str(mbit * 0.985e6 / 8), str(round_trip_ms / 2000), f"wbnear{os.getpid() % 100000}"]
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "serve", *arguments], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            raise OSError("the link did not come up: /dev/net/tun and root are needed")
        self._file = open(path, "rb")  # noqa: SIM115 - lives as long as the link
        self._map = mmap.mmap(self._file.fileno(), 4096, access=mmap.ACCESS_READ)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def far(self, *command: str) -> list[str]:
        """The command line that runs ``command`` in the far network namespace (mount namespace unchanged)."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net", *command]

    def counters(self) -> Counters:
        """The counters now."""
        return Counters(*COUNTERS.unpack_from(self._map, 0))

    def cpu_seconds(self) -> float:
        """CPU time of the link so far: it is the measurement's own cost, reported with it."""
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Take the link down."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._lock.close()
        self._map.close()
        self._file.close()
        os.unlink(os.path.join(self._dir, "counters"))
        os.rmdir(self._dir)

    def __enter__(self) -> Link:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check(self, megabytes: int = 250) -> dict[str, float]:
        """Measure the link with sockets of our own: Mbit/s of one TCP stream, ms of round trip, CPU share of the link."""
        server = subprocess.Popen(
            self.far(sys.executable, os.path.abspath(__file__), "source", str(megabytes)), stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            with socket.create_connection((FAR, port), 20) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                times = []
                for _ in range(100):
                    start = time.perf_counter()
                    connection.sendall(b"p")
                    connection.recv(1)
                    times.append(time.perf_counter() - start)
                buffer = bytearray(1 << 20)
                start, cpu, total = time.perf_counter(), self.cpu_seconds(), 0
                connection.sendall(b"g")
                while size := connection.recv_into(buffer):
                    total += size
                seconds = time.perf_counter() - start
                cpu = self.cpu_seconds() - cpu
        finally:
            server.kill()
            server.wait()
            if server.stdout is not None:
                server.stdout.close()
        return {
            "mbit_per_s": round(total * 8 / seconds / 1e6, 1),
            "round_trip_ms": round(sorted(times)[50] * 1000, 3),
            "round_trip_p95_ms": round(sorted(times)[95] * 1000, 3),
            "cpu_share": round(cpu / seconds, 3),
        }


def _source(megabytes: int) -> None:
    """The far end of :meth:`Link.check`: echoes single bytes, then sends at full speed."""
    with socket.create_server((FAR, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1) == b"p":
                connection.sendall(b"p")
            block = bytes(1 << 20)
            for _ in range(megabytes):
                connection.sendall(block)


def main(arguments: list[str]) -> None:
    """``serve``, ``source`` (both internal) or ``check``."""
    if arguments[0] == "serve":
        serve(arguments[1], float(arguments[2]), float(arguments[3]), arguments[4])
    elif arguments[0] == "source":
        _source(int(arguments[1]))
    else:
        with Link() as link:
            for _ in range(3):
                print(json.dumps(link.check()))


if __name__ == "__main__":
    main(sys.argv[1:])
