"""Write a layer's table of contents as an EROFS metadata image that the kernel mounts.

Passes: :mod:`~weenv.layer.erofs.check` refuses tables that cannot be written, the ``compute_*`` functions of
:mod:`~weenv.layer.erofs.layout` and :mod:`~weenv.layer.erofs.xattrs` decide where everything goes, the ``write_*``
functions of :mod:`~weenv.layer.erofs.writer` fill the buffer. The layout is drawn in :mod:`~weenv.layer.erofs.format`.

The image is mounted with the layer's uncompressed tar stream as its one extra device (mount(2) data ``device=PATH``).
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from weenv.layer.erofs import format as fmt
from weenv.layer.erofs.check import check_toc
from weenv.layer.erofs.layout import compute_chunks, compute_directories, compute_inodes
from weenv.layer.erofs.writer import (
    Attributes,
    Image,
    write_chunks,
    write_directories,
    write_inodes,
    write_super,
    write_symlinks,
    write_xattrs,
)
from weenv.layer.erofs.xattrs import compute_xattrs
from weenv.layer.limits import DEFAULT_LIMITS, Limits
from weenv.layer.toc import DIRECTORY, FLAG_IMPLIED, HARDLINK, Toc

__all__ = ["DirAttributes", "build", "restamp"]


@dataclass(frozen=True, slots=True)
class DirAttributes:
    """Attributes of a directory as a lower layer has it: ``mode`` without file type, ``mtime`` in seconds since 1970,
    ``xattrs`` with full names."""

    mode: int
    uid: int
    gid: int
    mtime: int
    mtime_ns: int
    xattrs: tuple[tuple[bytes, bytes], ...] = field(default=())


def build(
    toc: Toc,
    *,
    implied: Mapping[int, DirAttributes] | None = None,
    positions: dict[int, int] | None = None,
    limits: Limits = DEFAULT_LIMITS,
) -> bytearray:
    """The EROFS metadata image of a layer; equal input gives equal bytes.

    ``implied`` replaces the attributes of directories that the layer itself does not describe (FLAG_IMPLIED), by entry
    number. ``positions`` is filled with where the inodes of all implied directories lie in the image, for :func:`restamp`.
    Raises FormatError for a malformed table, LimitError beyond ``limits``, UnsupportedError for what EROFS has no
    way to write (all three name the member), ValueError where ``implied`` names another entry.
    """
    check_toc(toc, limits)
    overrides = dict(sorted((implied or {}).items()))
    attributes = _attributes(toc, overrides)
    is_inode = toc.entries.kind != HARDLINK
    replaced = {entry: attribute.xattrs for entry, attribute in overrides.items()}
    xattrs = compute_xattrs(toc, is_inode, replaced)
    directories = compute_directories(toc)
    chunks = compute_chunks(toc, limits)
    inodes = compute_inodes(toc, xattrs, directories, chunks)
    if positions is not None:
        for entry in np.flatnonzero(toc.entries.flags & FLAG_IMPLIED).tolist():
            positions[entry] = int(inodes.position[entry])

    image = Image(inodes.total)
    body_end = inodes.position + fmt.INODE_SIZE
    if xattrs.bodies:
        body_end += xattrs.sizes[xattrs.set_of]
        write_xattrs(image, xattrs, inodes)
    count = write_inodes(image, toc, attributes, xattrs, directories, chunks, inodes)
    write_chunks(image, chunks, body_end)
    write_directories(image, toc, directories, inodes, body_end)
    write_symlinks(image, toc, inodes, body_end)
    write_super(image, toc, inodes, count, repr(overrides).encode() if overrides else b"")
    return image.finish()


def restamp(image: bytearray, position: int, attributes: DirAttributes) -> None:
    """Give the directory whose inode lies at ``position`` (see :func:`build`) other attributes, but for xattrs, in place.

    A thousand times cheaper than building the image anew. Raises ValueError where there is no directory's inode, or the
    attributes have xattrs.
    """
    if attributes.xattrs or not 0 <= position <= len(image) - fmt.INODE_SIZE or position % (1 << fmt.SLOT_BITS):
        raise ValueError("not a directory that can be given these attributes in place")
    inode = np.frombuffer(image, fmt.INODE, 1, position)
    if not stat.S_ISDIR(int(inode["mode"][0])):
        raise ValueError(f"no directory at {position}")
    inode["mode"] = stat.S_IFDIR | attributes.mode
    inode["uid"], inode["gid"] = attributes.uid, attributes.gid
    inode["mtime"], inode["mtime_ns"] = attributes.mtime, attributes.mtime_ns


def _attributes(toc: Toc, overrides: Mapping[int, DirAttributes]) -> Attributes:
    e = toc.entries
    mode, uid, gid = e.mode.astype(np.uint16), e.uid.astype(np.uint32), e.gid.astype(np.uint32)
    mtime, mtime_ns = e.mtime.astype(np.int64), e.mtime_ns.astype(np.uint32)
    for entry, new in overrides.items():
        if not 0 <= entry < len(e) or e.kind[entry] != DIRECTORY or not e.flags[entry] & FLAG_IMPLIED:
            raise ValueError(f"entry {entry} is not an implied directory")
        if not 0 <= new.mode <= 0o7777 or not 0 <= new.mtime_ns < 1_000_000_000:
            raise ValueError(f"attributes of entry {entry} are out of range")
        mode[entry], uid[entry], gid[entry] = new.mode, new.uid, new.gid
        mtime[entry], mtime_ns[entry] = new.mtime, new.mtime_ns
    return Attributes(mode, uid, gid, mtime, mtime_ns)
