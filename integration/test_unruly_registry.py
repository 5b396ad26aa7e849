"""A mounted layer whose registry refuses, cuts, corrupts and goes away: what is read is right, and nobody sees an error.

The long run is a soak test (``make soak``); a short one of the same is in the gate.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from weenv.plugin.snapshotter.layerdir import Origin
from weenv_testkit.blobfsproc import Blobfs, running
from weenv_testkit.synthetic import SyntheticLayer, make_layer, payload
from weenv_testkit.unruly import UnrulyRegistry

SECONDS = float(os.environ.get("WEENV_SOAK_SECONDS", "300"))
READERS = 8

pytestmark = pytest.mark.root


@dataclass
class Seen:
    """What readers have seen."""

    reads: int = 0
    bytes: int = 0
    wrong: int = 0
    errors: list[str] = field(default_factory=list)
    longest: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


def add(registry: UnrulyRegistry, blobfs: Blobfs, layer: SyntheticLayer) -> str:
    """Make a layer known at the registry and to blobfs; returns where its stream appears."""
    Path(registry.directory, layer.name).write_bytes(layer.blob)
    layer.install(blobfs.path, Origin("registry", host=registry.host, repository="soak/env"))
    return f"{blobfs.config.mountpoint}/{layer.name}"


def read_all(path: str, stream: bytes, seed: int, until: float, seen: Seen) -> None:
    """Read pieces of a stream at random and compare them, until a moment or until most of it must have been read."""
    dice = random.Random(seed)
    file = os.open(path, os.O_RDONLY)
    try:
        for _ in range(2 * len(stream) // (READERS * (128 << 10))):
            if time.monotonic() > until:
                return
            offset = dice.randrange(len(stream))
            size = dice.choice((1, 4096, 60_000, 300_000))
            began = time.monotonic()
            try:
                data = os.pread(file, size, offset)
            except OSError as error:
                with seen.lock:
                    seen.errors.append(f"{error} after {time.monotonic() - began:.1f} s")
                continue
            waited = time.monotonic() - began
            with seen.lock:
                seen.reads += 1
                seen.bytes += len(data)
                seen.wrong += data != stream[offset : offset + size]
                seen.longest = max(seen.longest, waited)
    finally:
        os.close(file)


def run(
    path: str, seconds: float, downs: list[tuple[float, float]], shares: tuple[float, float, float]
) -> tuple[Seen, dict[str, int], dict[str, Any]]:
    """Read for so long, layer after layer, while the registry is down at ``(when, how long)``; what was seen and done.

    Of its answers, ``shares`` are refused, cut, wrong. Each frame is a ranged read of its own, so that there are many.
    """
    seen = Seen()
    seed = int(time.time())
    made = make_layer([("file", payload(12 << 20, seed))], target=256 << 10)
    refused, cut, wrong = shares
    unruly = UnrulyRegistry(f"{path}/registry", seed=seed, refused=refused, cut=cut, wrong=wrong)
    with unruly as registry, running(f"{path}/node", range_max=4096) as blobfs:
        began = time.monotonic()
        stop = threading.Event()

        def outages() -> None:
            for when, length in downs:
                if stop.wait(max(0.0, began + when - time.monotonic())):
                    return
                registry.tell("down")
                time.sleep(length)
                registry.tell("up")

        breaker = threading.Thread(target=outages)
        breaker.start()
        number = 0
        while time.monotonic() < began + seconds or breaker.is_alive():
            layer = made if not number else make_layer([("file", payload(12 << 20, seed + number))], target=256 << 10)
            number += 1
            where = add(registry, blobfs, layer)
            until = max(began + seconds, time.monotonic() + 1)
            readers = [
                threading.Thread(target=read_all, args=(where, layer.stream, seed + number * 100 + each, until, seen))
                for each in range(READERS)
            ]
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
        stop.set()
        breaker.join()
        counts, status = registry.tell("counts"), blobfs.status()
        shutil.rmtree(registry.directory)
        log = blobfs.log()
    assert "Traceback" not in log, log[-5000:]
    about = {"layers": number, "errors": status["errors"], "ranges": status["ranges"]}
    return seen, counts, {**about, "said": [line for line in log.splitlines() if " ERROR " in line]}


def check(seen: Seen, counts: dict[str, int], about: dict[str, Any]) -> None:
    print(json.dumps({"reads": seen.reads, "bytes": seen.bytes, "longest wait": round(seen.longest, 1), **counts, **about}))
    assert seen.wrong == 0
    assert seen.errors == []
    assert about["said"] == [], "the kernel's own read-ahead, whose errors no reader sees, had none either"
    assert counts["cut"] + counts["wrong"] > 0 and counts["downs"]


def test_nobody_notices(home: str) -> None:
    """A few seconds of it, with the registry away for two."""
    path = f"{home}/unruly"
    os.makedirs(f"{path}/node")
    seen, counts, about = run(path, 6.0, [(1.5, 2.0)], (0.03, 0.3, 0.1))
    check(seen, counts, about)
    assert seen.longest > 1.0, "somebody had to wait for the registry to come back"


@pytest.mark.soak
@pytest.mark.timeout(SECONDS * 3 + 600)
def test_nobody_notices_for_long(home: str) -> None:
    """The issue's figures: a tenth refused, a tenth cut, a hundredth corrupted, and away for a minute, twice."""
    path = f"{home}/unruly-long"
    os.makedirs(f"{path}/node")
    seen, counts, about = run(path, SECONDS, [(20.0, 60.0), (SECONDS * 0.6, 60.0)], (0.1, 0.1, 0.01))
    check(seen, counts, about)
    assert seen.longest > 50.0
    assert counts["wrong"] or counts["answers"] < 1000
