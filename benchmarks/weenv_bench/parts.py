"""What needs no container: conversion against zstd, EROFS metadata against mkfs.erofs, sizes and memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weenv_bench.image import BenchError, Image, cache_root, say
from weenv_testkit import tools

BLOCK = 512


@dataclass(frozen=True)
class Ran:
    """How a command went: seconds, peak resident memory of its whole process tree in bytes, CPU seconds (user and system)."""

    seconds: float
    peak: int
    output: str
    cpu: float


def _tree(pid: int) -> list[int]:
    found, todo = [], [pid]
    while todo:
        current = todo.pop()
        found.append(current)
        try:
            for thread in os.listdir(f"/proc/{current}/task"):
                with open(f"/proc/{current}/task/{thread}/children") as file:
                    todo.extend(int(child) for child in file.read().split())
        except OSError:
            continue
    return found


def proportional_memory(pids: list[int]) -> int:
    """Bytes of memory of some processes together, shared pages counted once (Pss of smaps_rollup)."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


def tree_memory(pid: int) -> int:
    """Memory of a process and its descendants, in bytes."""
    return proportional_memory(_tree(pid))


def measure(argv: list[str], environment: dict[str, str] | None = None) -> Ran:
    """Run a command to its end. Its peak memory: the larger of one process's own peak and what sampling saw of the tree."""
    start = time.perf_counter()
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
    sampled = [0]
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.25):
            sampled[0] = max(sampled[0], tree_memory(child.pid))

    watcher = threading.Thread(target=sample)
    watcher.start()
    out = child.stdout.read() if child.stdout else b""
    assert child.stderr is not None
    errors = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    stop.set()
    watcher.join()
    child.stderr.close()
    if child.stdout:
        child.stdout.close()
    if child.returncode:
        raise BenchError(f"{' '.join(argv)[:300]} failed: {errors.decode(errors='replace')[-1500:]}")
    peak = max(usage.ru_maxrss * 1024, sampled[0])
    return Ran(seconds, peak, out.decode(errors="replace"), usage.ru_utime + usage.ru_stime)


@contextmanager
def scratch(name: str) -> Iterator[str]:
    """A path in the benchmark's cache that is gone afterwards."""
    path = os.path.join(cache_root(), f"{name}.{os.getpid()}")
    try:
        yield path
    finally:
        if os.path.exists(path):
            os.unlink(path)


def flat_tar(image: Image) -> str:
    """All layers as one tar: members of upper layers win, whiteouts and what they hide are left out. Cached."""
    path = os.path.join(image.base, "flat.tar")
    if os.path.exists(path):
        return path
    say("one tar of all layers")
    taken: set[str] = set()
    with open(path + ".tmp", "wb") as out:
        kept = []
        for layer in reversed(image.layers):
            mine = set()
            members = []
            with tarfile.open(layer.path, "r:") as tar:
                for member in tar:
                    if os.path.basename(member.name).startswith(".wh.") or member.name in taken:
                        continue
                    if member.islnk() and member.linkname in taken:
                        continue
                    mine.add(member.name)
                    payload = (member.size + BLOCK - 1) // BLOCK * BLOCK if member.isreg() else 0
                    members.append((member.offset, member.offset_data + payload))
                    tar.members = []  # type: ignore[attr-defined]
            taken |= mine
            kept.append((layer.path, members))
        for source_path, members in reversed(kept):
            with open(source_path, "rb") as source:
                for start, end in members:
                    source.seek(start)
                    while start < end:
                        block = source.read(min(1 << 20, end - start))
                        out.write(block)
                        start += len(block)
        out.write(bytes(2 * BLOCK))
    os.rename(path + ".tmp", path)
    return path


def grow_tar(source: str, target: str, size: int) -> int:
    """Write a tar of at least ``size`` bytes: the members of ``source`` again and again, each time in another directory."""
    copies = -(-size // os.path.getsize(source))
    with (
        open(target, "wb", buffering=1 << 20) as out,
        tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT, bufsize=1 << 20) as tar,
    ):
        for number in range(copies):
            with tarfile.open(source, "r:") as original:
                for member in original:
                    data = original.extractfile(member) if member.isreg() else None
                    member.name = f"copy{number}/{member.name}"
                    member.pax_headers = {k: v for k, v in member.pax_headers.items() if k not in ("path", "linkpath")}
                    if member.islnk():
                        member.linkname = f"copy{number}/{member.linkname}"
                    tar.addfile(member, data)
                    tar.members = []  # type: ignore[attr-defined]
                    original.members = []  # type: ignore[attr-defined]
    return os.path.getsize(target)


def conversion(image: Image, rounds: int) -> dict[str, Any]:
    """``weenv layer convert`` against ``zstd -3 -T0`` of the same tar: seconds each round, sizes, peak memory of ours.

    CPU seconds are told beside: they say the same on a machine that others use, too.
    """
    tar = flat_tar(image)
    ours: list[Ran] = []
    theirs: list[Ran] = []
    with scratch("ours") as mine, scratch("theirs") as other:
        for _ in range(rounds):
            _warm(tar)
            for path in (mine, other):
                if os.path.exists(path):
                    os.unlink(path)
            os.sync()
            theirs.append(measure(["zstd", "-3", "-T0", "-q", tar, "-o", other]))
            os.sync()  # what zstd left to be written would be written while ours runs
            ours.append(measure([*tools.weenv(), "layer", "convert", tar, mine]))
        sizes = os.path.getsize(mine), os.path.getsize(other)
    return {
        "tar_bytes": os.path.getsize(tar), "weenv_s": [ran.seconds for ran in ours], "zstd_s": [ran.seconds for ran in theirs],
        "weenv_cpu_s": [ran.cpu for ran in ours], "zstd_cpu_s": [ran.cpu for ran in theirs],
        "throughput_ratio": statistics.median(ran.seconds for ran in theirs) / statistics.median(ran.seconds for ran in ours),
        "weenv_bytes": sizes[0], "zstd_bytes": sizes[1], "size_ratio": sizes[0] / sizes[1],
        "peak_bytes": max(ran.peak for ran in ours),
    }  # fmt: skip


def conversion_memory(image: Image, size: int) -> dict[str, Any]:
    """Peak memory of converting one layer of ``size`` bytes."""
    with scratch("large.tar") as tar, scratch("large.out") as out:
        say(f"a tar of {size / 1e9:.0f} GB")
        length = grow_tar(flat_tar(image), tar, size)
        done = measure([*tools.weenv(), "layer", "convert", tar, out])
    return {"tar_bytes": length, "seconds": done.seconds, "peak_bytes": done.peak}


def _warm(path: str) -> None:
    with open(path, "rb") as file:
        while file.read(1 << 22):
            pass


_EROFS_BUILD = """
import json, resource, sys, time
from weenv.layer import erofs
from weenv.layer.tail import parse_tail
from weenv_bench.reads import read_tail
tail, where, size = read_tail(sys.argv[1])
start = time.perf_counter()
toc = parse_tail(tail, layer_size=size, toc_offset=where.offset)
parsed = time.perf_counter()
image = erofs.build(toc)
with open(sys.argv[2], "wb") as file:
    file.write(image)
end = time.perf_counter()
print(json.dumps({"entries": len(toc.entries), "parse_s": parsed - start, "build_s": end - parsed,
    "image_bytes": len(image), "tail_bytes": len(tail),
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def erofs_metadata(image: Image, rounds: int) -> dict[str, Any]:
    """TOC to EROFS metadata in a file against ``mkfs.erofs --tar=i`` of the same tar; interleaved, medians.

    ``ratio`` is of building and writing the metadata, ``ratio_with_parse`` includes decoding and checking the tail.
    """
    tar = flat_tar(image)
    ours: list[float] = []
    whole: list[float] = []
    theirs: list[float] = []
    details: dict[str, Any] = {}
    mkfs_peak = 0
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__)))}
    with scratch("toc.blob") as blob, scratch("ours.erofs") as mine, scratch("theirs.erofs") as other:
        measure([*tools.weenv(), "layer", "convert", tar, blob])
        _warm(tar)
        for _ in range(rounds):
            for path in (mine, other):
                if os.path.exists(path):
                    os.unlink(path)
            done = measure([tools.erofs("mkfs.erofs"), "--quiet", "--tar=i", other, tar])
            theirs.append(done.seconds)
            mkfs_peak = max(mkfs_peak, done.peak)
            details = json.loads(measure([sys.executable, "-c", _EROFS_BUILD, blob, mine], environment).output)
            ours.append(details["build_s"])
            whole.append(details["build_s"] + details["parse_s"])
    median = statistics.median(theirs)
    return {
        **details,
        "weenv_s": ours,
        "mkfs_s": theirs,
        "ratio": statistics.median(ours) / median,
        "ratio_with_parse": statistics.median(whole) / median,
        "mkfs_peak_bytes": mkfs_peak,
    }
