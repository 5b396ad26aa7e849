"""Where frames begin: decided from where payloads lie, whatever pieces the stream arrives in.

- A file of at least one target begins a frame and is cut every target bytes, one of at least HUGE targets every two; its
  last piece takes up to half of that more rather than leave a small frame. The header of a large file that follows at
  once goes with it.
- Smaller files share frames: a frame ends behind a file once it has a target's bytes, or when the next file would make
  it larger than one and a half.
- Long runs of members without payload are cut every target bytes.

So a small file is never split over two frames, and no read of a large file decompresses anything else's bytes.
"""

from __future__ import annotations

_BLOCK = 512
_SLACK = 4096
"""Bytes of headers and padding that may lie between two large files and still go with the first."""

HUGE = 8
"""Files of that many targets are read in long runs, as a rule, and are half of an image's bytes or more: frames of two
targets cost a reader little there and make the blob smaller (docs/adr/0001-frame-size.md)."""


class Cutter:
    """Turns payload positions into frame boundaries.

    :meth:`payload` and :meth:`known` return further boundaries in ascending order, stream offsets where one frame ends
    and the next begins. Within a large payload they come as :meth:`known` gets there, not when it is told of: its length
    is only what a header claims. :meth:`finish` gives the remaining ones.
    """

    def __init__(self, target: int) -> None:
        if target < _BLOCK or target % _BLOCK:
            raise ValueError("the target must be a multiple of 512")
        self._target = target
        self._most = target + target // 2
        self._start = 0  # where the open frame begins
        self._end = 0  # the end of the latest payload, with its padding
        self._large = False  # the open frame holds (a piece of) a large file
        self._piece = target  # and that file is cut every so many bytes

    def _cut(self, at: int, cuts: list[int]) -> None:
        if at > self._start:
            cuts.append(at)
            self._start = at
            self._large = False

    def known(self, position: int) -> list[int]:
        """No payload begins before ``position``, other than those told already."""
        cuts: list[int] = []
        if self._large:
            self._cut_large(position, cuts)
        if position - self._end > self._target:
            self._cut(self._end, cuts)
            while position - self._start > self._most:
                self._cut(self._start + self._target, cuts)
        return cuts

    def payload(self, offset: int, length: int) -> list[int]:
        """The next payload in the stream: ``length`` > 0 bytes at ``offset``."""
        cuts = self.known(offset)
        end = offset + -(-length // _BLOCK) * _BLOCK
        if length >= self._target:
            if not self._large or offset - self._end > _SLACK:
                self._close_large(cuts)
            self._cut(offset, cuts)
            self._large = True
            self._piece = self._target * 2 if length >= HUGE * self._target else self._target
        else:
            self._close_large(cuts)
            if self._end - self._start >= self._target or end - self._start > self._most:
                self._cut(self._end, cuts)
        self._end = end
        return cuts

    def _cut_large(self, position: int, cuts: list[int]) -> None:
        piece, most = self._piece, self._piece + self._piece // 2
        while self._end - self._start > most and self._start + piece <= position:
            self._cut(self._start + piece, cuts)
        self._large = True

    def _close_large(self, cuts: list[int]) -> None:
        if self._large:
            self._cut(self._end, cuts)

    def finish(self, size: int) -> list[int]:
        """The stream has ``size`` bytes: the boundaries up to and including it."""
        cuts = self.known(size)
        self._cut(size, cuts)
        return cuts
