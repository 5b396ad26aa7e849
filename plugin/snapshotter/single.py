"""One layer mounted at a directory, without containerd: for looking at it.

Everything that the mount needs lies in a private directory below ``/var/tmp`` (mode 0700): a layer directory, a blobfs
of its own with its holder, their sockets and the log. The kernel's mount table leads back to it, so nothing else has to
be remembered; unmounting ends the blobfs and removes the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

from weenv.core import digest as digests
from weenv.core import settings
from weenv.core.errors import MountError, StorageError
from weenv.layer.foreign.formats import ForeignLayer
from weenv.layer.verify import LayerDescriptor, verify_tail_bytes
from weenv.plugin.snapshotter import builder, mounts
from weenv.plugin.snapshotter.blobfs.config import BlobfsConfig, from_table
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource, Origin
from weenv.registry.config import RegistryConfig

PREFIX = "weenv-mount-"
PLACE = "/var/tmp"  # noqa: S108 (what was fetched may be gigabytes, and /tmp may be memory)
_PATIENCE = 20.0
"""Seconds for the data server to come up."""


def mount_layer(
    descriptor: LayerDescriptor, tail: bytes, origin: Origin, directory: str, *,
    registry: RegistryConfig, foreign: ForeignLayer | None = None,
) -> None:  # fmt: skip
    """Mount a layer read-only at ``directory`` (absolute). ``descriptor.digest`` may be 64 zeros where nobody knows it.

    ``foreign``: the layer is in another format, and ``tail`` was made for it.
    Raises FormatError for a tail that is not what it should be, MountError, StorageError; nothing is left mounted then.
    """
    if os.geteuid() != 0:
        raise MountError("mounting needs root", hint="run it with sudo")
    if _ours(directory):
        raise MountError(f"a layer is mounted at {directory} already", hint=f"weenv layer umount {directory}")
    verify_tail_bytes(tail, descriptor)
    try:
        private = tempfile.mkdtemp(prefix=PREFIX, dir=PLACE)
    except OSError as error:
        raise StorageError(f"cannot write to {PLACE}: {error.strerror}", errno=error.errno or 0) from error
    try:
        dirs = LayerDirs(private)
        source = LayerSource(
            descriptor.digest, descriptor.size if foreign is None else foreign.size, descriptor.toc_offset,
            descriptor.toc_length, descriptor.toc_digest, [origin], foreign,
        )  # fmt: skip
        layer = dirs.create(source, tail)
        builder.build(layer, "", "[]")
        with open(f"{private}/registry.json", "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(registry), file, default=sorted)  # its sets
        _start_server(private)
        with mounts.open_erofs(f"{layer}/{builder.META}", f"{private}/blobs/{digests.hex_of(descriptor.digest)}") as mount:
            mount.attach(directory)
    except BaseException:
        _clear(private)
        raise


def umount_layer(directory: str) -> None:
    """Unmount what :func:`mount_layer` mounted at ``directory``, and end its server. Raises MountError."""
    if not (private := _ours(directory)):
        raise MountError(f"nothing that weenv layer mount made is mounted at {directory}", hint="see: findmnt -t erofs")
    try:
        mounts.unmount(directory)
    except MountError as error:
        raise MountError(f"{directory} is in use", errno=error.errno, hint="leave it first; see: fuser -vm") from error
    _clear(private)


def _ours(directory: str) -> str:
    """The private directory of what :func:`mount_layer` mounted at ``directory``; empty where that is something else."""
    entry = mounts.mounts_below(os.path.dirname(directory)).get(directory)
    private = os.path.dirname(entry.source).partition("/layers/")[0] if entry is not None else ""
    return private if entry is not None and entry.fstype == "erofs" and private.startswith(f"{PLACE}/{PREFIX}") else ""


def _start_server(private: str) -> None:
    with open(f"{private}/log", "ab") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, private],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True,
        )  # fmt: skip
    end = time.monotonic() + _PATIENCE
    while not os.path.exists(f"{private}/ready"):
        if server.poll() is not None or time.monotonic() > end:
            server.kill()
            server.wait()
            with open(f"{private}/log", encoding="utf-8", errors="replace") as file:
                said = file.read()[-500:].strip().splitlines()
            raise MountError(f"the data server did not start: {said[-1] if said else 'no reason given'}")
        time.sleep(0.01)
    # It lives on without us; subprocess would otherwise complain about a child that nobody waited for.
    server.returncode = 0


def _clear(private: str) -> None:
    """End server and holder, unmount, remove."""
    from weenv.plugin.snapshotter.blobfs import daemon

    with contextlib.suppress(MountError, OSError):  # it may have ended; what is left is detached below
        daemon.stop(_config(private), force=True)
    mounts.detach(f"{private}/blobs")
    _await_end(private)
    shutil.rmtree(private, ignore_errors=True)


def _await_end(private: str) -> None:
    """Wait until the server, which holds a lock for as long as it lives, is gone."""
    try:
        fd = os.open(f"{private}/alive", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
            else:
                return
    finally:
        os.close(fd)


def _config(private: str) -> BlobfsConfig:
    return from_table(
        {
            "root": private,
            "mountpoint": f"{private}/blobs",
            "holder_socket": f"{private}/holder.sock",
            "status_socket": f"{private}/status.sock",
            "fill": {"enabled": False},
        }
    )


def _serve(private: str) -> None:
    """The server's process."""
    from weenv.core.log import configure
    from weenv.plugin.snapshotter.blobfs import daemon

    configure()
    alive = os.open(f"{private}/alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(alive, fcntl.LOCK_EX)
    with open(f"{private}/registry.json", encoding="utf-8") as file:
        registry = settings.build(RegistryConfig, json.load(file), "registry")

    def ready() -> None:
        with open(f"{private}/ready", "w", encoding="ascii"):
            pass

    asyncio.run(daemon.serve(_config(private), registry, ready=ready))


if __name__ == "__main__":
    _serve(sys.argv[1])
