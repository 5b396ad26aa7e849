"""Recording and prefetching under a real kernel's mount, with a server that is killed meanwhile."""

from __future__ import annotations

import os
import random
import signal

import pytest

from weenv.layer.profile import encode
from weenv.plugin.snapshotter.blobfs.ask import ask
from weenv.plugin.snapshotter.cache import reads
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv_testkit.blobfsproc import Blobfs, drop_caches, read
from weenv_testkit.procs import wait_until
from weenv_testkit.synthetic import SyntheticLayer, make_layer, payload

pytestmark = pytest.mark.root

LAYER = make_layer([("big", payload(24 << 20, 11))], target=256 << 10)
OTHER = make_layer([("other", payload(8 << 20, 12))], target=256 << 10)
CONTENTS = [int(offset) for offset in LAYER.frames.content_offsets]
COUNT = len(LAYER.frames)


def recorded(blobfs: Blobfs, layer: SyntheticLayer = LAYER) -> list[int]:
    """The frames that the layer's record names."""
    return [frame for _, frame in reads.load(blobfs.directory(layer), len(layer.frames))]


def read_frame(path: str, frame: int) -> None:
    """Read one page in the middle of a frame, and have the kernel read nothing else."""
    offset = (CONTENTS[frame] + CONTENTS[frame + 1]) // 2 & ~4095
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        assert os.pread(fd, 4096, offset) == LAYER.stream[offset : offset + 4096]
    finally:
        os.close(fd)


def start(blobfs: Blobfs, *layers: SyntheticLayer) -> dict[str, object]:
    """What the snapshotter says when a container begins."""
    answer = ask(blobfs.config.status_socket, {"op": "start", "layers": [layer.digest for layer in layers]})
    assert answer is not None
    return answer


def idle(blobfs: Blobfs) -> bool:
    """Nothing is fetched ahead any more."""
    return not blobfs.status()["prefetching"]


def test_what_is_read_is_recorded_in_order_and_nothing_else(blobfs: Blobfs) -> None:
    path = blobfs.add(LAYER)
    wanted = random.Random(5).sample(range(1, COUNT - 1), 12)
    for frame in wanted:
        read_frame(path, frame)
    assert recorded(blobfs) == wanted, "guesses fetched others, which nobody read"
    drop_caches()
    for frame in reversed(wanted):
        read_frame(path, frame)
    assert recorded(blobfs) == wanted, "once each"
    assert blobfs.end(signal.SIGKILL) == -signal.SIGKILL
    assert recorded(blobfs) == wanted, "killed, it has lost nothing"
    blobfs.start()
    more = next(frame for frame in range(2, COUNT) if frame not in wanted)
    drop_caches()
    read_frame(path, wanted[0])
    read_frame(path, more)
    assert recorded(blobfs) == [*wanted, more]


def test_what_a_profile_brings_is_recorded_when_it_is_read(blobfs: Blobfs) -> None:
    path = blobfs.add(LAYER)
    other = blobfs.add(OTHER)
    dirs = LayerDirs(blobfs.path)
    wanted = [50, 51, 52, 7, 30]
    dirs.set_prefetch(LAYER.digest, encode(list(enumerate(wanted))).value)
    assert start(blobfs, LAYER, OTHER) == {"layers": 1, "frames": 5}
    wait_until("the profile to be fetched", lambda: idle(blobfs))
    before = blobfs.status()
    assert (before["frames"]["prefetch"], before["frames"]["demand"], before["prefetch_used"]) == (5, 0, 0)
    assert recorded(blobfs) == []
    for frame in (7, 50):
        read_frame(path, frame)
    after = blobfs.status()
    assert recorded(blobfs) == [7, 50], "those that were not read are left out of the next profile"
    assert after["prefetch_used"] == 2
    assert after["frames"] == before["frames"], "nothing was fetched for these reads"
    assert read(other) == OTHER.stream, "a layer without a profile is as ever"
    assert blobfs.status()["frames"]["prefetch"] == 5


@pytest.mark.parametrize("rounds", [pytest.param(2, id="few"), pytest.param(60, id="many", marks=pytest.mark.soak)])
def test_killed_while_it_fetches_ahead_nothing_is_wrong_and_the_rest_comes_when_read(blobfs: Blobfs, rounds: int) -> None:
    path = blobfs.add(LAYER)
    value = encode((frame, frame) for frame in range(COUNT)).value
    LayerDirs(blobfs.path).set_prefetch(LAYER.digest, value)
    for number in range(rounds):
        assert start(blobfs, LAYER)["frames"] == COUNT
        if number % 2:  # the first frame's mark is on the disk: it is in the middle of it, or done
            wait_until("the first frame", lambda: sum(blobfs.status()["frames"].values()) > 0)
        assert blobfs.end(signal.SIGKILL) == -signal.SIGKILL
        blobfs.start()
        drop_caches()
        frame = random.Random(number).randrange(COUNT)
        read_frame(path, frame)
    assert read(path) == LAYER.stream
    assert sorted(recorded(blobfs)) == list(range(COUNT))
