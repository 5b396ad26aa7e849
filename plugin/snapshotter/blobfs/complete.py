"""Checks a complete layer's stream against the diffID of its TOC, once, before the layer counts as complete.

Every frame has been checked by then, and so has the table that holds their digests. What this adds (docs/adr/0006):
a TOC whose frames do not make up the stream that the image's config names, which containerd finds out when it unpacks a
layer and a lazy layer never would; and a disk that has lost or changed what it was given.

A layer in another format (layer/foreign/) has no tar stream to check: of what is on the disk each chunk is checked once more,
and all between them, which is zero; that its chunks make up the layer which the image's config names stays unknown. Those are
counted apart.

A mismatch may be the disk's fault, so the first one voids what is stored and has it fetched again: everything, or the frames
whose chunks are wrong. The second is the publisher's, or of chunks, which were right when they came, that of a disk which does
not keep what it is given: the layer is served no more.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable
from typing import Final

from weenv.core.errors import StorageError, VerificationError
from weenv.layer.pieces import verify_content
from weenv.plugin.snapshotter.blobfs.layers import Layer, why_bad
from weenv.plugin.snapshotter.cache import present
from weenv.plugin.snapshotter.fetch.fetcher import Fetcher

log = logging.getLogger(__name__)

_PIECE: Final = 2 << 20
"""Bytes hashed at a time: 1.5 ms, and all the memory that a check takes."""
_POLL: Final = 0.25
"""Seconds between looks for layers that are complete and not checked."""
_QUIET: Final = 0.5
"""Nothing is hashed until no reader has waited for a frame for so many seconds."""


class Completion:
    """Runs the checks, one layer at a time, for as long as ``run`` runs.

    ``refuse`` is called with a layer that is BAD and the reason. ``share`` of one CPU is what hashing takes at most.
    """

    def __init__(
        self, fetcher: Fetcher, layers: Callable[[], list[Layer]], refuse: Callable[[Layer, str], None], share: float = 0.5
    ) -> None:
        self.checked = 0
        """Layers found good."""
        self.unproven = 0
        """Layers in another format whose chunks were found good; what they have of a diffID, nobody knows."""
        self.mismatches = 0
        """Streams found not to have their diffID."""
        self.checking = ""
        """The layer at hand; empty where there is none."""
        self._fetcher = fetcher
        self._layers = layers
        self._refuse = refuse
        self._share = share
        self._failed: dict[int, float] = {}

    async def run(self) -> None:
        """Check layers until cancelled."""
        while True:
            await asyncio.sleep(_POLL)
            now = time.monotonic()
            self._failed = {key: until for key, until in self._failed.items() if until > now}
            for layer in self._layers():
                if layer.complete and layer.presence.verdict in (present.UNCHECKED, present.AGAIN):
                    if id(layer) in self._failed:
                        continue
                    self.checking = layer.name
                    try:
                        await self._check(layer)
                    except (OSError, StorageError) as error:
                        self._failed[id(layer)] = time.monotonic() + 30.0
                        layer.went_wrong("data", error)
                        log.error("a complete layer cannot be checked", extra={"layer": layer.name, "error": str(error)})
                    finally:
                        self.checking = ""

    async def _check(self, layer: Layer) -> None:
        losses = layer.presence.losses
        if layer.frames.pieces is not None:
            await self._check_pieces(layer, losses)
            return
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(_PIECE, max(1, layer.size))))
        position = 0

        def piece() -> tuple[int, float]:
            began = time.thread_time()
            count = os.preadv(layer.store.fd, [buffer[: min(len(buffer), layer.size - position)]], position)
            digest.update(buffer[:count])
            return count, time.thread_time() - began

        while position < layer.size:
            await self._yield()
            if not layer.complete or layer.presence.losses != losses:
                return  # a frame was lost or evicted meanwhile; it will be complete again
            try:
                count, used = await asyncio.to_thread(piece)
                if not count:
                    raise OSError(f"data ends at {position} of {layer.size} bytes")
            except OSError as error:
                self._lose(layer, position, error)
                return
            position += count
            if self._share < 1:
                await asyncio.sleep(used / self._share - used)
        await asyncio.to_thread(self._verdict, layer, "sha256:" + digest.hexdigest(), losses)

    async def _check_pieces(self, layer: Layer, losses: int) -> None:
        """Every frame in ``data`` against the digests of its pieces."""
        frames, pieces, contents = layer.frames, layer.frames.pieces, layer.contents
        assert pieces is not None
        wrong: list[int] = []

        def look(first: int) -> tuple[int, float]:
            began, number = time.thread_time(), first
            while number < len(frames) and contents[number] - contents[first] < _PIECE:
                size = contents[number + 1] - contents[number]
                content = os.pread(layer.store.fd, size, contents[number])
                if len(content) < size:
                    raise OSError(f"data ends at {contents[number] + len(content)} of {layer.size} bytes")
                try:
                    verify_content(frames, pieces, number, content)
                except VerificationError:
                    wrong.append(number)
                number += 1
            return number, time.thread_time() - began

        number = 0
        while number < len(frames):
            await self._yield()
            if not layer.complete or layer.presence.losses != losses:
                return
            try:
                number, used = await asyncio.to_thread(look, number)
            except OSError as error:
                self._lose(layer, contents[number], error)
                return
            if self._share < 1:
                await asyncio.sleep(used / self._share - used)
        if layer.presence.losses != losses:
            return  # what was read may have been a hole
        if wrong:
            self._changed(layer, wrong)
            return
        solid = await asyncio.to_thread(present.first_hole, layer.store.fd, 0, layer.size) >= layer.size
        if layer.presence.judge(present.GOOD, solid=solid):
            self.unproven += 1

    async def _yield(self) -> None:
        fetcher = self._fetcher
        # Polled: the condition changes in other threads, thousands of times a second while readers read.
        while fetcher.demanded or time.monotonic() - fetcher.last_demand < _QUIET:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    def _lose(self, layer: Layer, position: int, error: OSError) -> None:
        frames = layer.frames.covering(position, _PIECE)
        layer.take_back(frames, error)

    def _changed(self, layer: Layer, wrong: list[int]) -> None:
        """These frames, checked before they were stored, are other ones now."""
        presence, error = layer.presence, f"{len(wrong)} frames, the first of them {wrong[0]}, are not what was stored"
        if presence.verdict != present.AGAIN:
            presence.judge(present.AGAIN)
            layer.take_back(wrong, error)
            return
        layer.went_wrong("damage", error)
        log.error(
            "the disk has changed a layer's data twice: it is served no more",
            extra={"layer": layer.source.digest, "error": error, "hint": "look at the disk; then remove the image"},
        )
        presence.judge(present.BAD)
        self._refuse(layer, why_bad(layer.diff_id, pieces=True))

    def _verdict(self, layer: Layer, found: str, losses: int) -> None:
        presence = layer.presence
        if presence.losses != losses:
            return  # what was hashed may have been a hole
        if found == layer.diff_id:
            solid = present.first_hole(layer.store.fd, 0, layer.size) >= layer.size
            if presence.judge(present.GOOD, solid=solid):
                self.checked += 1
            return
        self.mismatches += 1
        layer.went_wrong("diffid", f"the stream is {found}, not {layer.diff_id}")
        fields = {"layer": layer.source.digest, "found": found, "expected": layer.diff_id}
        if presence.verdict != present.AGAIN:
            log.error("a complete layer does not have its diffID: everything of it is fetched again", extra=fields)
            presence.judge(present.AGAIN)
            presence.lose(range(len(presence)))
            return
        hint = "remove the image; whoever published it must mend it"
        log.error(
            "a layer does not have its diffID though it was fetched twice: it is served no more", extra={**fields, "hint": hint}
        )
        presence.judge(present.BAD)
        self._refuse(layer, why_bad(layer.diff_id))
