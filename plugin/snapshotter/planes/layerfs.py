"""A layer's tree as a FUSE file system: pyfuse3's requests answered from the metadata image, bytes from the stream.

All that the kernel learns is good for ever (a layer never changes), so it asks once for each name, each inode and each page
that it still has room for. File handles are inode numbers, and forgetting costs nothing: nothing is kept for an inode.

pyfuse3 drops a request whose handler raises anything but FUSEError, and its caller waits for ever: so nothing else leaves here.
"""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar, cast

import pyfuse3

from weenv.core.errors import FormatError
from weenv.layer.erofs.format import BLOCK
from weenv.layer.erofs.reader import HOLE, Image, Inode
from weenv.plugin.snapshotter.planes.stream import Stream

log = logging.getLogger(__name__)

_FOREVER: Final = float(1 << 30)
"""Seconds: 34 years."""
_ALL: Final = (1 << 64) - 1

Handler = TypeVar("Handler", bound=Callable[..., Coroutine[Any, Any, Any]])


def _answered(method: Handler) -> Handler:
    """Turn every error into one that the caller of the system call sees."""

    @functools.wraps(method)
    async def call(self: LayerFs, *args: Any) -> Any:
        self.in_hand += 1
        try:
            return await method(self, *args)
        except pyfuse3.FUSEError:
            raise
        except OSError as error:
            self.complain(error)
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from error
        except FormatError as error:
            self.complain(error)
            raise pyfuse3.FUSEError(errno.EIO) from error
        except Exception as error:
            log.exception("a request failed")
            raise pyfuse3.FUSEError(errno.EIO) from error
        finally:
            self.in_hand -= 1

    return cast(Handler, call)


class LayerFs(pyfuse3.Operations):
    """The tree of ``image``, whose bytes ``stream`` gives. ``begun`` is called when the kernel has been spoken to."""

    supports_dot_lookup = False

    def __init__(self, image: Image, stream: Stream, begun: Callable[[], None]) -> None:
        super().__init__()
        self.image = image
        self.stream = stream
        self.in_hand = 0
        """Requests that have been read, and not answered."""
        self._begun = begun
        self._told: set[str] = set()

    def complain(self, error: Exception) -> None:
        """Log an error, once for each text."""
        if str(error) not in self._told and len(self._told) < 100:
            self._told.add(str(error))
            log.error("a layer cannot be read: %s", error)

    def init(self) -> None:
        """The kernel's first request."""
        self._begun()

    def _inode(self, number: int) -> Inode:
        return self.image.inode(self.image.root if number == pyfuse3.ROOT_INODE else number)

    @staticmethod
    def _attributes(inode: Inode) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = pyfuse3.InodeT(inode.nid)
        entry.st_mode = pyfuse3.ModeT(inode.mode)
        entry.st_nlink = inode.nlink
        entry.st_uid = inode.uid
        entry.st_gid = inode.gid
        entry.st_rdev = inode.rdev
        entry.st_size = inode.size
        entry.st_blksize = BLOCK
        entry.st_blocks = -(-inode.size // BLOCK)
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = inode.mtime_ns
        entry.entry_timeout = entry.attr_timeout = _FOREVER
        return entry

    @_answered
    async def lookup(self, parent_inode: int, name: bytes, ctx: object) -> pyfuse3.EntryAttributes:
        """A name's inode; one that is not there is remembered as well."""
        nid = self.image.lookup(self._inode(parent_inode), name)
        if nid:
            return self._attributes(self.image.inode(nid))
        absent = pyfuse3.EntryAttributes()
        absent.st_ino = pyfuse3.InodeT(0)
        absent.entry_timeout = _FOREVER
        return absent

    @_answered
    async def getattr(self, inode: int, ctx: object) -> pyfuse3.EntryAttributes:
        """An inode's attributes."""
        return self._attributes(self._inode(inode))

    @_answered
    async def readlink(self, inode: int, ctx: object) -> bytes:
        """A symlink's target."""
        return self.image.target(self._inode(inode))

    @_answered
    async def getxattr(self, inode: int, name: bytes, ctx: object) -> bytes:
        """The value of an extended attribute."""
        value = self.image.xattrs(self._inode(inode)).get(bytes(name))
        if value is None:
            raise pyfuse3.FUSEError(errno.ENODATA)
        return value

    @_answered
    async def listxattr(self, inode: int, ctx: object) -> Sequence[bytes]:
        """The names of all extended attributes."""
        return list(self.image.xattrs(self._inode(inode)))

    @_answered
    async def statfs(self, ctx: object) -> pyfuse3.StatvfsData:
        """As EROFS says it (fs/erofs/super.c, erofs_statfs): all blocks are used, in blocks of 512 bytes."""
        found = pyfuse3.StatvfsData()
        found.f_bsize = found.f_frsize = BLOCK
        found.f_blocks = self.image.size // BLOCK + self.image.stream_blocks
        found.f_files = _ALL
        found.f_ffree = found.f_favail = _ALL - self.image.inodes
        found.f_namemax = 255
        return found

    @_answered
    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        """A file handle is the inode number; what the page cache holds of the file stays good."""
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(inode), keep_cache=True)

    @_answered
    async def read(self, fh: int, off: int, size: int) -> bytes:
        """Bytes of a file, fewer at its end."""
        pieces = self.image.pieces(self._inode(fh), off, size)
        if len(pieces) == 1 and pieces[0].stream != HOLE:
            return await self.stream.read(*pieces[0])
        parts = [bytes(p.length) if p.stream == HOLE else await self.stream.read(*p) for p in pieces]
        return b"".join(parts)

    async def release(self, fh: int) -> None:
        """Nothing was kept."""

    @_answered
    async def opendir(self, inode: int, ctx: object) -> int:
        """As :meth:`open`."""
        return inode

    @_answered
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Names with their attributes; a position is where a name lies in the directory's blocks."""
        for cookie, nid, name in self.image.entries(self._inode(fh), start_id):
            entry = self._attributes(self.image.inode(nid))
            if not pyfuse3.readdir_reply(token, pyfuse3.FileNameT(name), entry, cookie):
                return

    async def releasedir(self, fh: int) -> None:
        """Nothing was kept."""

    async def forget(self, inode_list: Any) -> None:
        """Nothing was kept."""
