"""A plane without kernel: a layer is "mounted" by writing its directories and empty files to the target.

It keeps the promises of :class:`weenv.plugin.snapshotter.planes.base.Plane` that the layers above rely on, counts what is
asked of it, and fails or waits where a test says so.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from collections.abc import Callable

from weenv.core.errors import MountError, WeenvError
from weenv.layer.toc import DIRECTORY, FLAG_IMPLIED, Toc
from weenv.layer.verify import verify_tail
from weenv.plugin.snapshotter.layerdir import LayerDirs
from weenv.plugin.snapshotter.mounts import MountEntry
from weenv.plugin.snapshotter.planes.base import LAZY, Attachment, Implied, LayerFacts, Variant, decode_attributes


class TreePlane:
    """See the module's text. ``calls`` counts (method, digest)."""

    name = "tree"

    def __init__(self, dirs: LayerDirs) -> None:
        self.dirs = dirs
        self.calls: Counter[tuple[str, str]] = Counter()
        self.fail: dict[str, WeenvError] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.better: dict[str, Attachment] = {}

    async def probe(self) -> None:
        """Always possible."""

    def _toc(self, digest: str) -> Toc:
        source = self.dirs.source(digest)
        with open(self.dirs.file(digest, "toc"), "rb") as file:
            return verify_tail(file.read(), source.descriptor())

    async def prepare(self, digest: str, variant: Variant) -> LayerFacts:
        """Read the stored tail."""
        self.calls["prepare", digest] += 1
        await self.gate.wait()
        toc = self._toc(digest)
        entries = [entry for entry in range(1, len(toc.entries)) if toc.entries.flags[entry] & FLAG_IMPLIED]
        return LayerFacts(toc.diff_id, tuple(Implied(entry, toc.path(entry)) for entry in entries))

    async def attach(self, digest: str, variant: Variant, target: str, *, replace: bool) -> Attachment:
        """Write the tree."""
        self.calls["replace" if replace else "attach", digest] += 1
        await self.gate.wait()
        if digest in self.fail:
            raise self.fail[digest]
        toc = self._toc(digest)
        attributes = decode_attributes(variant.attributes)
        for entry in range(1, len(toc.entries)):
            path = os.path.join(os.fsencode(target), toc.path(entry))
            if toc.entries.kind[entry] == DIRECTORY:
                os.makedirs(path, exist_ok=True)
                known = attributes.get(entry)
                os.chmod(path, known.mode if known else int(toc.entries.mode[entry]))
            else:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC))
        return self.better.get(digest, Attachment(LAZY, 1))

    def usable(self, digest: str, entry: MountEntry, attachment: Attachment) -> bool:
        """Nothing is left of a former process."""
        return False

    def wanted(self, digest: str, attachment: Attachment) -> bool:
        """Where a test says that something better can be had."""
        return self.better.get(digest, attachment) != attachment

    def on_loss(self, lost: Callable[[str], None]) -> None:
        """Nothing here ceases to work by itself."""

    def detach(self, target: str) -> None:
        """Remove the tree."""
        try:
            shutil.rmtree(target)
            os.mkdir(target)
        except OSError as error:
            raise MountError(str(error), errno=error.errno or 0) from error
