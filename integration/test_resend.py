"""What the kernel says of requests that it has had no answer to, which decides whether the next server may go on."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from weenv.plugin.snapshotter.blobfs.resend import control, readers_wait, under_way
from weenv_testkit.blobfsproc import read, running
from weenv_testkit.procs import wait_until
from weenv_testkit.synthetic import make_layer, payload

pytestmark = pytest.mark.root

LAYER = make_layer([("f", payload(300_000, 1))], target=64 << 10)


def test_whether_anybody_waits_for_an_answer(home: str) -> None:
    path = os.path.join(home, "resend")
    os.mkdir(path)
    got: list[bytes] = []
    with running(path) as blobfs:
        stream = blobfs.add(LAYER)
        mountpoint = blobfs.config.mountpoint
        wait_until("the mount to be at rest", lambda: not readers_wait(mountpoint))
        assert blobfs.process is not None
        reader = threading.Thread(target=lambda: got.append(read(stream)))
        blobfs.process.send_signal(signal.SIGSTOP)
        try:
            reader.start()
            wait_until("the reader to be seen", lambda: readers_wait(mountpoint))
            assert not got
        finally:
            blobfs.process.send_signal(signal.SIGCONT)
        reader.join(60)
        assert got == [LAYER.stream]
        wait_until("nobody to wait", lambda: not readers_wait(mountpoint))
    assert readers_wait(mountpoint), "where nothing is mounted, that cannot be told"


def test_the_kernels_directory_of_connections_is_mounted_nowhere() -> None:
    with open("/proc/self/mountinfo") as file:
        before = file.read()
    with control() as connections:
        with pytest.raises(FileNotFoundError):
            under_way(connections, "0:999999999")
        with open("/proc/self/mountinfo") as file:
            assert file.read() == before
