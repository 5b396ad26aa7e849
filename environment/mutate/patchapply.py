"""Patches (patch.py) applied to file contents. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weenv.environment.mutate.budget import Budget
from weenv.environment.mutate.delta import apply_delta, object_name
from weenv.environment.mutate.patch import EXECUTABLE, SYMLINK_MODE, FilePatch, Hunk, PatchError
from weenv.layer.tarscan import show


@dataclass(frozen=True, slots=True)
class Content:
    """A file as patches see it: bytes (a symlink's target), whether it is a symlink, and whether it is executable."""

    data: bytes
    symlink: bool = False
    executable: bool = False


def _split(data: bytes) -> list[bytes]:
    parts = data.split(b"\n")
    lines = [part + b"\n" for part in parts[:-1]]
    if parts[-1]:
        lines.append(parts[-1])
    return lines


@dataclass(slots=True)
class _Image:
    """A file's lines while hunks are applied; ``done`` marks those that a hunk has covered."""

    lines: list[bytes]
    budget: Budget
    done: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self.done = bytearray(len(self.lines))

    def matches(self, hunk: Hunk, at: int, beginning: bool, end: bool) -> bool:
        size = len(hunk.old)
        if at + size > len(self.lines) or (beginning and at) or (end and at + size != len(self.lines)):
            return False
        if size and self.lines[at] != hunk.old[0]:
            return False
        return not any(self.done[at : at + size]) and self.lines[at : at + size] == list(hunk.old)

    def find(self, hunk: Hunk) -> int | None:
        """Where a hunk belongs, or None."""
        if hunk.old_start > bool(hunk.old) and not hunk.leading and not hunk.trailing:
            # Made without context (-U0): it says where it belongs and nothing else does. As `git apply --unidiff-zero`.
            stated = hunk.new_start - 1 if hunk.new else hunk.new_start
            if self.matches(hunk, stated, beginning=False, end=False):
                return stated
        beginning = hunk.old_start <= 1
        end = not hunk.trailing
        count = len(self.lines)
        start = max(hunk.new_start - 1, 0)
        if beginning:
            start = 0
        elif end:
            start = max(count - len(hunk.old), 0)
        start = min(start, count)
        if self.matches(hunk, start, beginning, end):
            return start
        if beginning or end:
            return None  # no other place can match
        for distance in range(1, count + 1):
            self.budget.step(1 + (len(hunk.old) >> 6))
            for at in (start + distance, start - distance):
                if 0 <= at <= count and self.matches(hunk, at, beginning, end):
                    return at
        return None

    def apply(self, hunk: Hunk, at: int) -> None:
        if len(hunk.old) != len(hunk.new):
            self.budget.step((len(self.lines) - at) >> 10)  # what lies behind it is moved
        self.lines[at : at + len(hunk.old)] = hunk.new
        self.done[at : at + len(hunk.old)] = b"\1" * len(hunk.new)


def apply_hunks(data: bytes, hunks: Sequence[Hunk], name: bytes, budget: Budget | None = None) -> bytes:
    """``data`` with all hunks applied. Raises PatchError naming the hunk, LimitError."""
    image = _Image(_split(data), budget or Budget())
    for hunk in hunks:
        at = image.find(hunk)
        if at is None:
            raise PatchError(
                "does not apply",
                member=f"{show(name)}: hunk #{hunk.number} (line {hunk.line} of the patch)",
                hint=_mismatch(image, hunk),
            )
        image.apply(hunk, at)
    return b"".join(image.lines)


def _mismatch(image: _Image, hunk: Hunk) -> str:
    start = max(hunk.new_start - 1, 0)
    for offset, wanted in enumerate(hunk.old):
        have = image.lines[start + offset] if start + offset < len(image.lines) else None
        if have is None:
            return f"the file ends at line {len(image.lines)}, where {_quote(wanted)} is expected"
        if have != wanted:
            return f"line {start + offset + 1} is {_quote(have)}, expected {_quote(wanted)}"
    if not hunk.old:
        return "the file is not empty"
    return "it must lie at the very beginning or end of the file, or what it changes was changed by a hunk before"


def _quote(line: bytes) -> str:
    text = repr(line[:80].rstrip(b"\n").decode("utf-8", "backslashreplace"))
    return text if line.endswith(b"\n") else f"{text} without a newline"


def sources(patches: Sequence[FilePatch]) -> set[bytes]:
    """Every path whose content or absence :func:`apply_patches` has to know."""
    return {path for patch in patches for path in (patch.old, patch.new) if path is not None}


def apply_patches(
    patches: Sequence[FilePatch], before: Mapping[bytes, Content | None], budget: Budget | None = None
) -> dict[bytes, Content | None]:
    """Every path that changes, and its content after (None: it is gone). Nothing has changed where this raises.

    ``before`` has every path of :func:`sources`; None where there is no file. Raises PatchError, LimitError.
    """
    budget = budget or Budget()
    leaving = {p.old for p in patches if p.old is not None and (p.new is None or (p.moved and not p.copy))}
    after: dict[bytes, Content | None] = {}
    removed: set[bytes] = set()
    for patch in patches:
        content = _source(patch, before, after)
        if patch.new is None:
            assert patch.old is not None and content is not None
            left = _changed(patch, content, budget).data
            if left:
                raise PatchError("is deleted, but the hunks leave something of it", member=show(patch.old))
            removed.add(patch.old)
            after[patch.old] = None
            continue
        if patch.new != patch.old:
            there = after[patch.new] if patch.new in after else before[patch.new]
            if there is not None and (patch.new in after or patch.new not in leaving):
                raise PatchError("exists already", member=show(patch.new), hint="the patch says that it creates it")
        result = _changed(patch, content or Content(b""), budget)
        if patch.moved and not patch.copy and patch.old is not None and patch.old not in after:
            after[patch.old] = None
        after[patch.new] = result
    return after


def _source(patch: FilePatch, before: Mapping[bytes, Content | None], after: Mapping[bytes, Content | None]) -> Content | None:
    if patch.old is None:
        return None
    # The sources of renames and copies are meant as they were, whatever the patch does to them elsewhere.
    content = before[patch.old] if patch.moved or patch.old not in after else after[patch.old]
    if content is None and not patch.git and patch.old == patch.new and len(patch.hunks) == 1 and not patch.hunks[0].old:
        return None  # "@@ -0,0" of a file that is not there makes it
    if content is None:
        raise PatchError("does not exist", member=show(patch.old), hint=f"line {patch.line} of the patch changes it")
    if patch.old_mode and content.symlink != (patch.old_mode == SYMLINK_MODE):
        raise PatchError("is not of the type that the patch says", member=show(patch.old))
    if content.symlink and patch.old_mode != SYMLINK_MODE and not patch.git:
        raise PatchError("is a symlink, the patch is for a file", member=show(patch.old))
    return content


def _changed(patch: FilePatch, content: Content, budget: Budget) -> Content:
    budget.spend(len(content.data))
    if patch.binary is not None:
        data = _binary(patch, content.data, budget)
    elif patch.hunks:
        data = apply_hunks(content.data, patch.hunks, patch.path, budget)
    else:
        data = content.data
    symlink, executable = content.symlink, content.executable
    if patch.new_mode:
        symlink, executable = patch.new_mode == SYMLINK_MODE, patch.new_mode == EXECUTABLE
    return Content(data, symlink, executable)


def _binary(patch: FilePatch, data: bytes, budget: Budget) -> bytes:
    name = show(patch.path)
    assert patch.binary is not None
    before, after = patch.ids
    if len(before) not in (40, 64) or len(after) != len(before):
        raise PatchError("a binary change without full object names", member=name, hint="git diff --binary --full-index")
    algorithm = "sha1" if len(before) == 40 else "sha256"
    zero = b"0" * len(before)
    if (before == zero) != (patch.old is None) or (before != zero and _named(data, algorithm) != before):
        raise PatchError("is not the binary file that the patch was made for", member=name)
    result = b""
    if after != zero:
        result = apply_delta(data, patch.binary.data, name, budget) if patch.binary.is_delta else patch.binary.data
    if after != zero and _named(result, algorithm) != after:
        raise PatchError("the binary change does not give what the patch says", member=name)
    return result


def _named(data: bytes, algorithm: str) -> bytes:
    return object_name(b"blob", data, algorithm).encode()
