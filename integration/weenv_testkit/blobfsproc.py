"""A blobfs of a test's own: a server process that may be killed and started again, and its mount."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weenv.plugin.snapshotter.blobfs import daemon, holder
from weenv.plugin.snapshotter.blobfs.config import BlobfsConfig, from_table
from weenv.plugin.snapshotter.cache.present import is_complete
from weenv.plugin.snapshotter.layerdir import LayerDirs, Origin
from weenv_testkit.synthetic import SyntheticLayer

CODE = """
import asyncio, json, logging, sys
from weenv.core import log
from weenv.plugin.snapshotter.blobfs import config, daemon
log.configure("info")
asyncio.run(daemon.serve(config.from_table(json.loads(sys.argv[1])), ready=lambda: print("ready", flush=True)))
"""


class Blobfs:
    """A blobfs of its own: its directory, and the server's process, which may be killed and started again."""

    def __init__(self, path: str, **settings: Any) -> None:
        self.path = path
        self.table = {
            "root": path, "mountpoint": f"{path}/mnt", "holder_socket": f"{path}/holder.sock",
            "status_socket": f"{path}/status.sock", "fill": {"enabled": False}, **settings,
        }  # fmt: skip
        self.config: BlobfsConfig = from_table(self.table)
        self.process: subprocess.Popen[str] | None = None

    def add(self, layer: SyntheticLayer, blob: bytes | None = None) -> str:
        """Make a layer known; returns where its stream appears."""
        origin = f"{self.path}/{layer.name}.blob"
        Path(origin).write_bytes(layer.blob if blob is None else blob)
        layer.install(self.path, Origin("file", path=origin))
        return f"{self.config.mountpoint}/{layer.name}"

    def start(self, stderr: int = 0) -> None:
        """Start a server and wait until it answers. ``stderr`` is a descriptor that its log goes to, instead of a file."""
        with open(f"{self.path}/log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CODE, json.dumps(self.table)], stdout=subprocess.PIPE, stderr=stderr or log, text=True
            )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n", self.log()

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send the server a signal and wait until it is gone."""
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return code

    def log(self) -> str:
        """What the servers have logged."""
        return Path(f"{self.path}/log").read_text()

    def status(self) -> dict[str, Any]:
        """What ``weenv status`` reads."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self.config.status_socket)
            client.sendall(b'{"op": "status"}\n')
            data = b""
            while part := client.recv(1 << 16):
                data += part
        return dict(json.loads(data))

    def holder_pid(self) -> int:
        """The holder's process."""
        answer = holder.ask(self.config.holder_socket, {"op": "status"})
        assert answer is not None
        return int(answer["pid"])

    def directory(self, layer: SyntheticLayer) -> str:
        """The layer's directory."""
        return LayerDirs(self.path).path(layer.digest)


@contextlib.contextmanager
def running(path: str, **settings: Any) -> Iterator[Blobfs]:
    """A blobfs with its root at ``path`` and these settings, for the length of the block; nothing of it is left."""
    blobfs = Blobfs(path, **settings)
    blobfs.start()
    try:
        yield blobfs
    finally:
        daemon.stop(blobfs.config, force=True)
        if blobfs.process is not None:
            assert blobfs.process.wait(60) == 0, blobfs.log()
            assert blobfs.process.stdout is not None
            blobfs.process.stdout.close()
    assert not os.path.ismount(blobfs.config.mountpoint)
    deadline = time.monotonic() + 60
    while os.path.exists(blobfs.config.holder_socket) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(blobfs.config.holder_socket)


def completes(layer_dir: str) -> bool:
    """True once every frame is stored: readers are answered before the disk has it."""
    deadline = time.monotonic() + 60
    while not is_complete(layer_dir) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_complete(layer_dir)


def read_until_complete(path: str, content: bytes, layer_dir: str) -> None:
    """Read a file again and again, from the server, until every frame is stored.

    drop_caches leaves pages that sit in a CPU's own list, and the server is not asked for those.
    """
    for _ in range(20):
        drop_caches()
        assert read(path) == content
        time.sleep(0.1)
        if is_complete(layer_dir):
            return
    assert is_complete(layer_dir)


def drop_caches() -> None:
    """Make the kernel ask again: FUSE's own pages are dropped with everybody else's."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def read(path: str) -> bytes:
    """A whole file, in reads of 1 MiB."""
    with open(path, "rb", buffering=0) as file:
        return b"".join(iter(lambda: file.read(1 << 20), b""))
