"""After a machine stopped without warning: nothing that only the page cache had is believed, whatever the disk shows there.

The stop is simulated on the disk: the map of what is present gets another boot's id (as after any reboot), and what had not
been synced is lost in one of the ways in which file systems lose it. The server under test runs on the real kernel.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import zlib
from pathlib import Path

import pytest

from weenv.plugin.snapshotter.cache.present import is_complete
from weenv_testkit.blobfsproc import Blobfs, drop_caches, read, read_until_complete
from weenv_testkit.node import Node
from weenv_testkit.procs import mounts_under, unmount_under, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store
from weenv_testkit.synthetic import make_layer, payload

pytestmark = pytest.mark.root

LAYER = make_layer([("first", payload(6 << 20, 21)), ("second", payload(6 << 20, 22))], target=256 << 10)
VOLATILE, DURABLE = 0x35, 0xCA
HEADER = 64
HARM = ("kept", "zeros", "garbage", "hole", "other", "short", "gone", "no map")


def reboot(layer: Path) -> None:
    """Make the layer's map one of another boot, as the format in cache/present.py says."""
    with (layer / "present").open("r+b") as file:
        content = bytearray(file.read())
        frames = struct.unpack_from("<Q", content, 16)[0]
        content[32:48] = bytes(16)
        content[12:16] = bytes(4)
        checked = bytes(content[HEADER : HEADER + 4 * frames])
        struct.pack_into("<I", content, 12, zlib.crc32(checked, zlib.crc32(content[:HEADER])))
        file.seek(0)
        file.write(content)


def states(layer: Path) -> list[tuple[int, int, int]]:
    """State, begin and end of each frame."""
    content = (layer / "present").read_bytes()
    frames = struct.unpack_from("<Q", content, 16)[0]
    sizes = struct.unpack_from(f"<{frames}I", content, HEADER)
    begins = [sum(sizes[:number]) for number in range(frames)]
    marks = content[HEADER + 4 * frames :]
    return [(mark, begin, begin + size) for mark, begin, size in zip(marks, begins, sizes, strict=True)]


def lose(layer: Path, harm: str) -> int:
    """What was not synced is lost in one way; returns how many frames nobody may believe in any more."""
    data = layer / "data"
    frames = states(layer)
    durable = [(begin, end) for mark, begin, end in frames if mark == DURABLE]
    lost = [(begin, end) for mark, begin, end in frames if mark == VOLATILE]
    if harm == "no map":
        os.truncate(layer / "present", 0)
        return len(frames)
    if harm == "gone":
        data.unlink()
        return len(frames)
    content = data.read_bytes()
    with data.open("r+b") as file:
        match harm:
            case "short":
                file.truncate(lost[0][0])
                return len(frames) - sum(end <= lost[0][0] for _, end in durable)
            case "hole":
                file.truncate(0)
                file.truncate(len(content))
                for begin, end in durable:
                    os.pwrite(file.fileno(), content[begin:end], begin)
            case "zeros" | "garbage" | "other":
                for begin, end in lost:
                    size = end - begin
                    wrong = {"zeros": bytes(size), "garbage": random.Random(begin).randbytes(size), "other": content[:size]}
                    os.pwrite(file.fileno(), wrong[harm], begin)
    return len(frames) - len(durable)


@pytest.mark.parametrize("harm", HARM)
def test_what_was_not_synced_is_fetched_again_and_the_rest_is_not(blobfs: Blobfs, harm: str) -> None:
    path = blobfs.add(LAYER)
    layer = Path(blobfs.directory(LAYER))
    with open(path, "rb", buffering=0) as file:
        assert os.pread(file.fileno(), 3 << 20, 0) == LAYER.stream[: 3 << 20]
    blobfs.end(signal.SIGTERM)  # which syncs
    blobfs.start()
    assert read(path) == LAYER.stream
    wait_until("the map to have every frame", lambda: all(mark for mark, _, _ in states(layer)))
    blobfs.end(signal.SIGKILL)
    marks = [mark for mark, _, _ in states(layer)]
    assert marks.count(DURABLE) > 4 and marks.count(VOLATILE) > 4
    lost = lose(layer, harm)
    if harm != "no map":
        reboot(layer)
    assert not is_complete(str(layer))
    blobfs.start()
    drop_caches()
    assert read(path) == LAYER.stream
    assert sum(blobfs.status()["frames"].values()) == lost
    read_until_complete(path, LAYER.stream, str(layer))
    assert (layer / "data").read_bytes() == LAYER.stream
    assert "Traceback" not in blobfs.log()


def test_a_layer_found_good_is_not_after_a_reboot_that_lost_of_it(blobfs: Blobfs) -> None:
    """Complete, and checked against its diffID, before anything was synced: the plain file must not be mounted."""
    path = blobfs.add(LAYER)
    layer = Path(blobfs.directory(LAYER))
    read_until_complete(path, LAYER.stream, str(layer))
    blobfs.end(signal.SIGKILL)
    assert is_complete(str(layer))
    assert lose(layer, "garbage") > 4
    reboot(layer)
    assert not is_complete(str(layer))
    blobfs.start()
    drop_caches()
    assert read(path) == LAYER.stream
    read_until_complete(path, LAYER.stream, str(layer))


def test_a_node_after_it(node: Node, store: Store, registry: Registry) -> None:
    """Every layer of a real image loses what was not synced; containers read what the image holds, and nothing else."""
    ref = store.lazy("debian")
    namespace = node.pull(ref)
    script = "cat /opt/weenv/many/* /usr/lib/python3*/*.py /usr/bin/perl | sha256sum"
    first = node.shell(ref, script, namespace)
    node.kill()
    unmount_under(node.home)
    assert not mounts_under(node.home)
    lost = 0
    for digest in node.layers():
        layer = Path(node.root) / "layers" / "sha256" / digest.removeprefix("sha256:")
        if (layer / "present").exists():
            lost += sum(mark == VOLATILE for mark, _, _ in states(layer))
            lose(layer, "garbage")
            reboot(layer)
    assert lost > 10
    mark = registry.mark()
    node.start()
    drop_caches()
    assert node.shell(ref, script, namespace) == first
    assert sum(registry.blob_bytes(mark).values()) > 0
    node.remove_image(ref, namespace)
