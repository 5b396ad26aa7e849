"""Read profiles: which frames of a layer are needed, in the order in which they are, as a text of one annotation.

``1,`` and base64url (RFC 4648 section 5, no padding) of varints (unsigned LEB128, at most 5 bytes each), three for each run
of frames that lie side by side, in the order of first use::

    time    since the run before it, in units of 100 ms; of the first run since the recorded start
    gap     from the end of the run before it (frame 0 for the first) to its first frame, zigzag: 0, -1, 1 ... as 0, 1, 2 ...
    length  its frames, less one

Pure, and all of it hostile when read: a value is at most a label, so at most some thousand runs, and they are checked as
intervals. Nothing here is proportional to what a value claims.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from weenv.core.errors import FormatError
from weenv.core.wire import varint
from weenv.layer.verify import MAX_LABEL, PREFETCH_ANNOTATION

UNITS: Final = 10
"""Units of time in a second."""
MAX_VALUE: Final = MAX_LABEL - len(PREFETCH_ANNOTATION)
"""Characters of a value at most."""
PAUSE: Final = 10 * UNITS
"""A recorded pause counts as no longer than this: a node was idle, or a layer was there before the others."""

_HEAD: Final = "1,"
_TEXT: Final = re.compile(r"1,[A-Za-z0-9_-]*\Z", re.ASCII)
_VARINT_MAX: Final = 5
_TIME_MAX: Final = (1 << 32) - 1
_WIDTHS: Final = (1, 2, 4, 8, 16, 32)
"""Units of time within which frames are put into the order of the layer, so that they make fewer runs: the first that fits."""


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` frames from ``first`` on, first needed ``time`` units after the start."""

    time: int
    first: int
    count: int

    @property
    def end(self) -> int:
        """The frame after its last."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class Encoded:
    """A profile as text, and what is in it: ``frames`` frames, and ``cut`` that were needed later and found no room."""

    value: str
    frames: int
    cut: int


def encode(needed: Iterable[tuple[int, int]], limit: int = MAX_VALUE) -> Encoded:
    """``(time, frame)`` of each frame, as a value of at most ``limit`` characters; empty where there are none.

    Where the order is too long it is coarsened, to 3.2 s at most; what does not fit even then is cut at the end.
    """
    first: dict[int, int] = {}
    for time, frame in sorted(needed):
        first.setdefault(frame, min(time, _TIME_MAX))
    room = max(0, limit - len(_HEAD)) * 3 // 4
    data, kept = b"", 0
    for width in _WIDTHS:
        data, kept = _pack(_runs(first, width), room)
        if kept == len(first):
            break
    if not kept:
        return Encoded("", 0, len(first))
    return Encoded(_HEAD + base64.urlsafe_b64encode(data).rstrip(b"=").decode(), kept, len(first) - kept)


def _runs(first: Mapping[int, int], width: int) -> list[Run]:
    runs: list[Run] = []
    for time, frame in sorted((time // width * width, frame) for frame, time in first.items()):
        last = runs[-1] if runs else None
        if last is not None and (last.time, last.end) == (time, frame):
            runs[-1] = Run(time, last.first, last.count + 1)
        else:
            runs.append(Run(time, frame, 1))
    return runs


def _pack(runs: Sequence[Run], room: int) -> tuple[bytes, int]:
    """As many of ``runs`` as take at most ``room`` bytes, and how many frames these have."""
    out = bytearray()
    time = end = kept = 0
    for run in runs:
        gap = run.first - end
        piece = varint(run.time - time) + varint(gap << 1 if gap >= 0 else ~(gap << 1)) + varint(run.count - 1)
        if len(out) + len(piece) > room:
            break
        out += piece
        time, end = run.time, run.end
        kept += run.count
    return bytes(out), kept


def decode(value: str, frames: int) -> list[Run]:
    """The runs of a value for a layer of ``frames`` frames, no frame in two of them.

    Raises :class:`FormatError` for whatever :func:`encode` would not write of such a layer.
    """
    if len(value) > MAX_VALUE or _TEXT.match(value) is None:
        raise _bad("not a profile of version 1")
    text = value[len(_HEAD) :]
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        raise _bad("not base64url") from None
    numbers = _numbers(data)
    if not numbers or len(numbers) % 3:
        raise _bad("its runs are not three numbers each")
    runs: list[Run] = []
    time = end = 0
    for place in range(0, len(numbers), 3):
        later, gap, more = numbers[place : place + 3]
        time += later
        begin = end + (gap >> 1 ^ -(gap & 1))
        end = begin + more + 1
        if time > _TIME_MAX or begin < 0 or end > frames:
            raise _bad(f"a run beyond the layer's {frames} frames")
        runs.append(Run(time, begin, end - begin))
    ordered = sorted(runs, key=lambda run: run.first)
    if any(one.end > other.first for one, other in pairwise(ordered)):
        raise _bad("a frame is in it twice")
    return runs


def _numbers(data: bytes) -> list[int]:
    found: list[int] = []
    value = shift = 0
    for byte in data:
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte & 0x80:
            if shift >= 7 * _VARINT_MAX:
                raise _bad("a number that is too large")
            continue
        found.append(value)
        value = shift = 0
    if shift:
        raise _bad("it ends within a number")
    return found


def _bad(reason: str) -> FormatError:
    return FormatError(reason, member=PREFETCH_ANNOTATION)


def timeline(recorded: Mapping[str, Iterable[tuple[int, int]]]) -> dict[str, list[tuple[int, int]]]:
    """Records of several layers, ``(time, frame)`` by one clock, as times since they began together, without long pauses."""
    moments = sorted({time for touches in recorded.values() for time, _ in touches})
    at: dict[int, int] = {}
    now = 0
    for before, moment in zip(moments[:1] + moments, moments, strict=False):
        now += min(moment - before, PAUSE)
        at[moment] = now
    return {name: sorted((at[time], frame) for time, frame in touches) for name, touches in recorded.items()}
