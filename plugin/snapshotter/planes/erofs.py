"""The EROFS plane: metadata written by this node, mounted from a plain file, over the layer's tar stream as device.

No loop device: fsopen(2) with the image as source and the stream as ``device``. The stream is the file that blobfs
serves, or, once every byte of the layer is on disk, that plain file itself. Needs Linux 6.12 with
CONFIG_EROFS_FS_BACKED_BY_FILE; MOVE_MOUNT_BENEATH (6.5) is thereby there too.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from weenv.core import digest as digests
from weenv.core.errors import MountError
from weenv.plugin.snapshotter import mounts
from weenv.plugin.snapshotter.builder import Builder
from weenv.plugin.snapshotter.cache.present import is_whole
from weenv.plugin.snapshotter.cache.store import hold
from weenv.plugin.snapshotter.layerdir import EVICT, LayerDirs
from weenv.plugin.snapshotter.planes.base import COMPLETE, LAZY, Attachment, LayerFacts, Variant
from weenv.plugin.snapshotter.planes.images import Images, plain_file

log = logging.getLogger(__name__)

_BDI = "/sys/class/bdi"
_ATTEMPTS = 4
"""How often a mount is made again whose backing device cannot be told from another's."""
_READ_AHEAD_MAX = 1024
"""KiB; from 2048 on, half of the cold starts of a large program took twice as long (docs/adr/0002)."""


class ErofsPlane:
    """See the module's text. ``blobs`` is where blobfs is mounted."""

    name = "erofs"

    def __init__(self, dirs: LayerDirs, blobs: str, builder: Builder) -> None:
        self.dirs = dirs
        self.blobs = blobs
        self._one_at_a_time = threading.Lock()
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="mount")
        self._images = Images(dirs, builder, self._threads)

    def close(self) -> None:
        """Stop the threads; mounts stay."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def probe(self) -> None:
        """Mounts an empty file as EROFS: the kernel's refusal tells whether it could."""
        await asyncio.get_running_loop().run_in_executor(self._threads, probe_kernel, os.path.dirname(self.dirs.root))

    async def prepare(self, digest: str, variant: Variant) -> LayerFacts:
        """Build what is missing of ``meta.erofs``, ``facts.json`` and the variant's own image."""
        return await self._images.prepare(digest, variant)

    async def attach(self, digest: str, variant: Variant, target: str, *, replace: bool) -> Attachment:
        """Mount at ``target``; in place of the topmost mount there where ``replace``."""
        await self.prepare(digest, variant)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._mount, digest, variant, target, replace)
        except MountError as error:
            if error.errno not in (errno.EINVAL, errno.EUCLEAN, errno.EBADMSG):
                raise
            log.warning("metadata image is damaged, building it again: %s", error, extra={"layer": digest})
            await self._images.rebuild(digest, variant)
            return await loop.run_in_executor(self._threads, self._mount, digest, variant, target, replace)

    def _mount(self, digest: str, variant: Variant, target: str, replace: bool) -> Attachment:
        directory = self.dirs.path(digest)
        image = self._images.path(digest, variant)
        with contextlib.suppress(OSError), open(image, "rb") as file:  # a cold walk of the tree wants all of it (docs/adr/0002)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        with contextlib.ExitStack() as stack:
            with hold(f"{directory}/data"):  # until the mount has it open, so that nothing is evicted between the two
                attachment, device = self._device(digest, directory)
                mount = stack.enter_context(self._open(image, device, attachment))
            if replace:
                mount.attach(target, beneath=True)
                mounts.unmount(target, mounts.MNT_DETACH | mounts.UMOUNT_NOFOLLOW)
            else:
                mounts.detach(target)  # what a request that was given up may have left there
                mount.attach(target)
        return attachment

    def _open(self, image: str, device: str, attachment: Attachment) -> mounts.DetachedMount:
        """Mount; over a plain file with the read-ahead of the disk that holds it (docs/adr/0002).

        A file-backed mount has a backing device of its own, named by a sequence number that nothing ties to the mount but
        its appearing with it. So one is made at a time; where another process made one meanwhile, both are left as they are and
        it is made again.
        """
        with self._one_at_a_time:
            if attachment.mode != COMPLETE:
                return mounts.open_erofs(image, device)
            attempts = _ATTEMPTS
            while True:
                before = _erofs_devices()
                mount = mounts.open_erofs(image, device)
                new = _erofs_devices() - before
                attempts -= 1
                if len(new) == 1:
                    _inherit_read_ahead(device, new.pop())
                if len(new) < 2 or not attempts:
                    return mount
                with mount:  # leaving it unmounts it
                    pass

    def _device(self, digest: str, directory: str) -> tuple[Attachment, str]:
        if plain := plain_file(directory):
            return Attachment(COMPLETE), plain
        path = f"{self.blobs}/{digests.hex_of(digest)}"
        try:
            return Attachment(LAZY, os.stat(path).st_dev), path
        except OSError as error:
            raise MountError(
                f"blobfs does not serve {digest}: {error.strerror}",
                errno=error.errno or 0,
                hint=f"is weenv blobfs running, with its mount at {self.blobs}?",
            ) from error

    def usable(self, digest: str, entry: mounts.MountEntry, attachment: Attachment) -> bool:
        """An EROFS mount of this layer, over the blobfs mount that is there now or over the plain file."""
        if entry.fstype != "erofs" or digests.hex_of(digest) not in entry.source:
            return False
        return attachment.mode == COMPLETE or (attachment.mode == LAZY and attachment.device == self._blobs_device())

    def _blobs_device(self) -> int:
        try:
            return os.stat(self.blobs).st_dev
        except OSError:
            return -1

    def wanted(self, digest: str, attachment: Attachment) -> bool:
        """A lazy mount of what is complete by now, or whose blobfs was mounted anew; a plain one of what is to be evicted."""
        directory = self.dirs.path(digest)
        if attachment.mode == COMPLETE:
            return os.path.exists(f"{directory}/{EVICT}") and self._blobs_device() != -1
        return is_whole(directory) or self._blobs_device() not in (-1, attachment.device)

    def on_loss(self, lost: Callable[[str], None]) -> None:
        """The kernel serves its mounts by itself: none is lost."""

    def detach(self, target: str) -> None:
        """Unmount lazily; overlays that were made on it keep their own clone of the mount."""
        mounts.detach(target)


def _erofs_devices() -> set[str]:
    """Backing devices of file-backed EROFS mounts: ``erofs-N`` (fs/super.c, super_setup_bdi)."""
    try:
        return {name for name in os.listdir(_BDI) if name.startswith("erofs-")}
    except OSError:
        return set()


def _inherit_read_ahead(path: str, name: str) -> None:
    """Give backing device ``name`` the read-ahead of the disk under ``path``, if that is more than the kernel's own.

    A page fault in a mapped file reads as much as the backing device says; with less than the disk's, a large program starts
    slower from here than from the disk's own file system.
    """
    with contextlib.suppress(OSError, ValueError):  # no /sys, or a file system without a disk: the kernel's own will do
        disk = os.stat(path).st_dev
        with open(f"{_BDI}/{os.major(disk)}:{os.minor(disk)}/read_ahead_kb", encoding="ascii") as file:
            wanted = min(int(file.read()), _READ_AHEAD_MAX)
        with open(f"{_BDI}/{name}/read_ahead_kb", "r+", encoding="ascii") as file:
            if wanted > int(file.read()):
                file.seek(0)
                file.write(str(wanted))


_NO_BACKING = ("tmpfs", "overlay")
"""Filesystems whose files EROFS cannot be mounted from: they have no way to read single pages (Linux 6.18)."""


def probe_kernel(directory: str) -> None:
    """Raises :class:`MountError` where this kernel does not mount EROFS from a file in ``directory``. Needs root.

    Nothing is seen in the directory: the file that is tried has no name.
    """
    try:
        file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 (closed below)
    except OSError as error:
        raise MountError(f"cannot make a file in {directory}: {error.strerror}", errno=error.errno or 0) from error
    with file:
        file.truncate(4096)
        path = f"/proc/self/fd/{file.fileno()}"
        try:
            mounts.open_erofs(path, path).__exit__()
        except MountError as error:
            if error.errno == errno.ENOTBLK:
                kind = mounts.filesystem_at(directory)
                if kind in _NO_BACKING:
                    raise MountError(
                        f"EROFS cannot be mounted from files on {kind}, which {directory} is on",
                        errno=error.errno,
                        hint="set [snapshotter] root (and [blobfs] root) to a directory on a disk, such as ext4 or xfs",
                    ) from error
                raise MountError(
                    "this kernel mounts EROFS from block devices only",
                    errno=error.errno,
                    hint="Linux 6.12 or newer with CONFIG_EROFS_FS_BACKED_BY_FILE is needed",
                ) from error
            if error.errno != errno.EINVAL:  # EINVAL: it read the file and found no superblock, as it should
                raise
