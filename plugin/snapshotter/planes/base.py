"""What a plane is: it makes a layer's tree appear at a directory.

A *variant* of a layer differs in the attributes of directories that the layer only implies (FLAG_IMPLIED): containerd
gives a missing parent directory the attributes that the path has in the layers below, so the same layer may need
different ones on different bases. The empty variant has the TOC's own attributes (0755, 0:0).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from weenv.core.errors import FormatError
from weenv.layer.erofs import DirAttributes
from weenv.plugin.snapshotter.mounts import MountEntry

LAZY = "lazy"
"""Over blobfs: missing bytes are fetched when read."""
COMPLETE = "complete"
"""Over the plain file: every byte is there."""

NO_ATTRIBUTES = "[]"


@dataclass(frozen=True, slots=True)
class Implied:
    """A directory that the layer only implies: its entry number in the TOC, its path without leading slash, and where its
    inode lies in the metadata image of the empty variant (bytes)."""

    entry: int
    path: bytes
    position: int = -1


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What the snapshotter wants to know of a layer's TOC without reading it again; file ``facts.json``.

    ``diff_id`` is the digest of the tar stream as the TOC has it; ``implied`` the directories that the layer implies.
    """

    diff_id: str
    implied: tuple[Implied, ...] = ()

    def to_json(self) -> bytes:
        """The file's content."""
        rows = [[item.entry, item.path.hex(), item.position] for item in self.implied]
        return json.dumps({"diffId": self.diff_id, "implied": rows}, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> LayerFacts:
        """The inverse. Raises :class:`FormatError`."""
        try:
            raw = json.loads(data)
            implied = tuple(Implied(int(entry), bytes.fromhex(path), int(at)) for entry, path, at in raw["implied"])
            return cls(str(raw["diffId"]), implied)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise FormatError(f"facts.json cannot be read: {str(error)[:300]!r}") from error


@dataclass(frozen=True, slots=True)
class Attachment:
    """How a layer is attached: ``mode`` LAZY or COMPLETE, and for LAZY the st_dev of the blobfs mount it reads from."""

    mode: str
    device: int = 0


@dataclass(frozen=True, slots=True)
class Variant:
    """``name`` is empty or 12 hex digits; ``attributes`` the JSON text that :func:`encode_attributes` makes."""

    name: str = ""
    attributes: str = NO_ATTRIBUTES


class Plane(Protocol):
    """One way of making layers appear. All methods belong to the event loop; blocking work is done in threads."""

    name: str

    def close(self) -> None:
        """Stop the threads; mounts stay."""

    async def probe(self) -> None:
        """Raises MountError saying why this kernel cannot do it, or returns."""

    async def prepare(self, digest: str, variant: Variant) -> LayerFacts:
        """Derive from the layer directory what attaching needs.

        Raises FormatError for a layer that cannot be represented, StorageError for a full disk.
        """

    async def attach(self, digest: str, variant: Variant, target: str, *, replace: bool) -> Attachment:
        """Make the layer appear at the existing directory ``target``; :meth:`prepare` has succeeded at some time.

        ``replace``: something is attached there; the new one takes its place in one step, and whoever uses the old one
        keeps it. Raises MountError.
        """

    def usable(self, digest: str, entry: MountEntry, attachment: Attachment) -> bool:
        """True where a mount left by a former process serves as it is."""

    def wanted(self, digest: str, attachment: Attachment) -> bool:
        """True where attaching anew would give something better: the layer is complete now, or blobfs another mount.

        Blocking; called in a thread.
        """

    def on_loss(self, lost: Callable[[str], None]) -> None:
        """Call ``lost`` with a target, in the event loop, when what is attached there has ceased to work by itself."""

    def detach(self, target: str) -> None:
        """Take the layer away from ``target``, which stays as an empty directory; whoever uses the layer keeps it.

        Blocking; called in a thread. Nothing attached is no error. Raises MountError.
        """


def encode_attributes(attributes: dict[int, DirAttributes]) -> str:
    """Attributes by entry number, as JSON text; equal input gives equal text."""
    rows = [
        [entry, a.mode, a.uid, a.gid, a.mtime, a.mtime_ns, [[name.hex(), value.hex()] for name, value in a.xattrs]]
        for entry, a in sorted(attributes.items())
    ]
    return json.dumps(rows, separators=(",", ":"))


def decode_attributes(text: str) -> dict[int, DirAttributes]:
    """The inverse of :func:`encode_attributes`. Raises :class:`FormatError`."""
    try:
        found: dict[int, DirAttributes] = {}
        for entry, mode, uid, gid, mtime, mtime_ns, xattrs in json.loads(text):
            pairs = tuple((bytes.fromhex(name), bytes.fromhex(value)) for name, value in xattrs)
            found[int(entry)] = DirAttributes(int(mode), int(uid), int(gid), int(mtime), int(mtime_ns), pairs)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"stored attributes of implied directories cannot be read: {str(error)[:300]!r}") from error
    return found


def variant_of(attributes: dict[int, DirAttributes]) -> Variant:
    """The variant that gives ``attributes`` to implied directories."""
    if not attributes:
        return Variant()
    text = encode_attributes(attributes)
    return Variant(hashlib.sha256(text.encode()).hexdigest()[:12], text)
