"""Unified and git diffs: bytes to :class:`FilePatch`; patchapply.py applies those to file contents. Pure.

The behaviour is ``git apply``'s, because that is what task collections are checked with, and GNU patch's wherever both agree
(fuzz 0):

- A hunk is looked for at its own line, then ever further away, below before above. Its context must match exactly: there is
  no fuzz. A hunk that begins at line 0 or 1 matches only at the beginning, one without context behind its last change only
  at the end; lines that an earlier hunk has covered are not matched again.
- ``/dev/null``, or a time stamp of 1970, on one side makes a creation or deletion; a deletion must leave nothing, a creation
  must find nothing.
- git's extended headers are understood: modes, renames, copies (their sources are read as they were before the patch), and
  binary data, ``literal`` and ``delta``, whose object names before and after are checked. ``Binary files differ`` without the
  data is refused.
- Text before, between and behind the diffs is skipped. Counts in a hunk's header must be right.
- Names are taken without ``strip`` leading components; absolute ones, ``..`` and ``.git`` are refused.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, replace

from weenv.core.errors import FormatError
from weenv.environment.mutate.budget import Budget
from weenv.environment.mutate.delta import decode_line, inflate
from weenv.layer.tarscan import show

MAX_FILES = 20_000
"""Files in one patch."""

REGULAR, EXECUTABLE, SYMLINK_MODE, GITLINK = 0o100644, 0o100755, 0o120000, 0o160000
_MODES = frozenset({REGULAR, EXECUTABLE, SYMLINK_MODE, 0o100664})

_HUNK = re.compile(rb"@@ -(\d{1,18})(?:,(\d{1,18}))? \+(\d{1,18})(?:,(\d{1,18}))? @@")
# What diff writes for a file that does not exist: the epoch, in any time zone.
_EPOCH = re.compile(rb"\t(?:1969-12-31|1970-01-01) (\d\d):(\d\d):00(?:\.0+)? ([-+])(\d\d):?(\d\d)\s*\Z")
_INDEX = re.compile(rb"index ([0-9a-f]{4,64})\.\.([0-9a-f]{4,64})(?: (\d{6}))?\s*\Z")
_ESCAPES = {0x61: 7, 0x62: 8, 0x74: 9, 0x6E: 10, 0x76: 11, 0x66: 12, 0x72: 13, 0x22: 0x22, 0x5C: 0x5C}


class PatchError(FormatError):
    """A patch is malformed or does not apply; ``member`` says which hunk of which file."""


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk: ``old`` and ``new`` are its lines before and after, with their newlines; starts count from 1.

    ``leading`` and ``trailing`` count the context lines around the changes; ``line`` is that of its header in the patch.
    """

    number: int
    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    leading: int
    trailing: int
    line: int


@dataclass(frozen=True, slots=True)
class Binary:
    """Binary data: the whole content, or a delta from the old one."""

    data: bytes
    is_delta: bool


@dataclass(frozen=True, slots=True)
class FilePatch:
    """What a patch does to one file. ``old`` is None for a creation, ``new`` for a deletion; paths are relative.

    Modes are git's (``0o100644`` ...), 0 where the patch says nothing. ``copy`` keeps the source of a rename.
    """

    old: bytes | None
    new: bytes | None
    old_mode: int = 0
    new_mode: int = 0
    hunks: tuple[Hunk, ...] = ()
    binary: Binary | None = None
    moved: bool = False
    """A rename, or with ``copy`` a copy."""
    copy: bool = False
    git: bool = False
    ids: tuple[bytes, bytes] = (b"", b"")
    """Object names before and after (hex, perhaps abbreviated)."""
    line: int = 0

    @property
    def path(self) -> bytes:
        """The file's name for messages."""
        return self.new or self.old or b""


def parse_patch(data: bytes, strip: int = 1, budget: Budget | None = None) -> tuple[FilePatch, ...]:
    """All files of a patch, in order. Raises LimitError; PatchError with the line at fault, also where there is no diff."""
    return _Parser(data, strip, budget or Budget()).run()


def _unquote(text: bytes, line: int) -> tuple[bytes, bytes]:
    """(a C-quoted string's value, what follows it)."""
    out = bytearray()
    at = 1
    while at < len(text):
        byte = text[at]
        at += 1
        if byte == 0x22:
            return bytes(out), text[at:]
        if byte != 0x5C:
            out.append(byte)
            continue
        escape = text[at] if at < len(text) else 0
        if escape in _ESCAPES:
            out.append(_ESCAPES[escape])
            at += 1
        elif re.match(rb"[0-3][0-7]{2}", text[at : at + 3]):
            out.append(int(text[at : at + 3], 8))
            at += 3
        else:
            break
    raise PatchError("a quoted name that is not closed or has an unknown escape", member=f"line {line}")


class _Parser:
    def __init__(self, data: bytes, strip: int, budget: Budget) -> None:
        self.lines = data.split(b"\n")
        if not self.lines[-1]:
            self.lines.pop()
        self.strip = strip
        self.budget = budget
        self.at = 0

    def fail(self, message: str, line: int | None = None, hint: str = "") -> PatchError:
        return PatchError(message, member=f"line {(self.at if line is None else line) + 1} of the patch", hint=hint)

    def peek(self, ahead: int = 0) -> bytes:
        at = self.at + ahead
        return self.lines[at] if at < len(self.lines) else b""

    def run(self) -> tuple[FilePatch, ...]:
        files: list[FilePatch] = []
        while self.at < len(self.lines):
            line = self.lines[self.at]
            found: FilePatch | None = None
            if line.startswith(b"diff --git "):
                found = self.git_file()
            elif line.startswith(b"--- ") and self.peek(1).startswith(b"+++ ") and _HUNK.match(self.peek(2)):
                found = self.plain_file()
            elif _HUNK.match(line):
                raise self.fail("a hunk without a file", hint="the lines '--- FILE' and '+++ FILE' are to stand before it")
            else:
                self.at += 1
            if found is not None:
                files.append(found)
                if len(files) > MAX_FILES:
                    raise self.fail(f"more than {MAX_FILES} files")
        if not files:
            raise PatchError("holds no diff", member="the patch", hint="unified ('diff -u') and git diffs are understood")
        return tuple(files)

    # names

    def stripped(self, name: bytes, count: int, line: int) -> bytes:
        """A name without its first components, checked."""
        rest = name
        for _ in range(count):
            _, slash, rest = rest.partition(b"/")
            rest = rest.lstrip(b"/")
            if not slash:
                raise self.fail(f"name {show(name)} has no {count} components to strip", line, "set strip in the plan")
        parts = rest.split(b"/")
        if not rest or b"\0" in rest or any(part in (b"", b".", b"..") for part in parts):
            raise self.fail(f"name {show(name)} is absolute, leaves the tree, or is none", line)
        if any(part.lower() == b".git" for part in parts):
            raise self.fail(f"name {show(name)} lies in a .git directory", line)
        if len(rest) > 4095 or any(len(part) > 255 for part in parts):
            raise self.fail(f"name {show(name)} is too long", line)
        return rest

    def name_line(self, text: bytes, line: int) -> tuple[bytes | None, bool]:
        """The name on a ``---`` or ``+++`` line (None: /dev/null) before stripping, and whether its time is the epoch."""
        if text.startswith(b'"'):
            name, rest = _unquote(text, line + 1)
        else:
            end = re.search(rb"[\t\r]|\Z", text)
            assert end is not None
            name, rest = text[: end.start()], text[end.start() :]
            if not rest.strip():
                name = name.rstrip(b" ") if name != b" " else name
        match = _EPOCH.search(rest)
        epoch = False
        if match is not None:
            minutes = int(match[1]) * 60 + int(match[2]) + (-1440 if b"\t1969" in rest else 0)
            zone = (int(match[4]) * 60 + int(match[5])) * (-1 if match[3] == b"-" else 1)
            epoch = minutes == zone
        return (None if name == b"/dev/null" else name), epoch

    # one file

    def plain_file(self) -> FilePatch:
        start = self.at
        first, gone_before = self.name_line(self.peek()[4:], start)
        second, gone_after = self.name_line(self.peek(1)[4:], start + 1)
        self.at += 2
        hunks = self.hunks()
        if first is None and second is None:
            raise self.fail("both names are /dev/null", start)
        old = self.stripped(first, self.strip, start) if first is not None else None
        new = self.stripped(second, self.strip, start + 1) if second is not None else None
        if old is not None and new is not None:
            # One file: "file.orig" and "file~" are said of "file".
            name = old if len(old) < len(new) and new.startswith(old) else new
            old = None if gone_before else name
            new = None if gone_after and not gone_before else name
        return FilePatch(old, new, hunks=hunks, line=start + 1)

    def git_file(self) -> FilePatch:
        start = self.at
        header = self.peek()[len(b"diff --git ") :].rstrip(b"\r")
        self.at += 1
        made = FilePatch(None, None, git=True, line=start + 1)
        created = deleted = False
        sides: dict[str, bytes] = {}
        while self.at < len(self.lines):
            line = self.peek().rstrip(b"\r")
            for key, value in (
                (b"old mode ", "old_mode"), (b"new mode ", "new_mode"), (b"deleted file mode ", "old_mode"),
                (b"new file mode ", "new_mode"),
            ):  # fmt: skip
                if line.startswith(key):
                    made = replace(made, **{value: self.mode(line[len(key) :])})  # type: ignore[arg-type]
                    created = created or key == b"new file mode "
                    deleted = deleted or key == b"deleted file mode "
                    break
            else:
                match = _INDEX.match(line)
                if match is not None:
                    made = replace(made, ids=(match[1], match[2]))
                elif (side := re.match(rb"(rename|copy) (from|to) ", line)) is not None:
                    name = self.plain_name(line[side.end() :], self.at)
                    sides[side[2].decode()] = self.stripped(name, max(self.strip - 1, 0), self.at)
                    made = replace(made, moved=True, copy=side[1] == b"copy")
                elif not re.match(rb"(dis)?similarity index ", line):
                    break
            self.at += 1
        if created and deleted:
            raise self.fail("a file that is both new and deleted", start)
        old, new = sides.get("from"), sides.get("to")
        if made.moved:
            if old is None or new is None:
                raise self.fail("a rename or copy without both names", start)
        else:
            old = new = self.header_name(header, start)
        hunks: tuple[Hunk, ...] = ()
        binary: Binary | None = None
        if self.peek().startswith(b"--- ") and self.peek(1).startswith(b"+++ "):
            line_of = self.at
            first, _ = self.name_line(self.peek()[4:], line_of)
            second, _ = self.name_line(self.peek(1)[4:], line_of + 1)
            self.at += 2
            created, deleted = created or first is None, deleted or second is None
            if first is not None and not made.moved:
                old = self.stripped(first, self.strip, line_of)
            if second is not None and not made.moved:
                new = self.stripped(second, self.strip, line_of + 1)
            hunks = self.hunks()
        elif self.peek().startswith(b"GIT binary patch"):
            binary = self.binary()
        elif re.match(rb"Binary files? .* differ", self.peek()):
            raise self.fail(
                "a binary file's change without its data", hint="make the patch with: git diff --binary (--full-index)"
            )
        if created and deleted:
            raise self.fail("both names are /dev/null", start)
        old, new = (None if created else old), (None if deleted else new)
        if old is None and new is None:
            raise self.fail("a diff without a name", start)
        if old is not None and new is not None and old != new and not made.moved:
            raise self.fail(f"names {show(old)} and {show(new)} differ, but it is no rename", start)
        empty = made.old_mode in (0, made.new_mode) and not made.moved and not created and not deleted
        if empty and not hunks and binary is None:
            raise self.fail(f"the diff of {show(new or old or b'')} changes nothing", start)
        return replace(made, old=old, new=new, hunks=hunks, binary=binary)

    def mode(self, text: bytes) -> int:
        mode = int(text, 8) if re.fullmatch(rb"[0-7]{6}", text) else 0
        if mode == GITLINK:
            raise self.fail("a change of a submodule", hint="publish its tree, a patch cannot hold it")
        if mode not in _MODES:
            raise self.fail(f"an unknown file mode {show(text)}")
        return mode

    def plain_name(self, text: bytes, line: int) -> bytes:
        return _unquote(text, line + 1)[0] if text.startswith(b'"') else text

    def header_name(self, header: bytes, line: int) -> bytes | None:
        """The name in ``diff --git A B``, where A and B are the same but for their prefix; None where that is unclear."""
        if header.startswith(b'"'):
            first, rest = _unquote(header, line + 1)
            rest = rest.removeprefix(b" ")
            second = _unquote(rest, line + 1)[0] if rest.startswith(b'"') else rest
            candidates = [(first, second)]
        elif header.endswith(b'"') and b' "' in header:
            first, _, rest = header.partition(b' "')
            candidates = [(first, _unquote(b'"' + rest, line + 1)[0])]
        elif (cut := self.cut(header)) is not None:
            candidates = [(header[:cut], header[cut + 1 :])]
        else:
            return None
        for first, second in candidates:
            if self.same(first, second):
                return self.stripped(second, self.strip, line)
        return None

    def cut(self, header: bytes) -> int | None:
        """The space between A and B. What is left of both has one length, so there is one such place at most."""
        if not self.strip:
            middle = len(header) // 2
            return middle if header[middle : middle + 1] == b" " else None
        slashes = [match.start() for match in re.finditer(b"/", header)]
        if len(slashes) < 2 * self.strip:
            return None
        kept = slashes[self.strip - 1] + 1
        for match in re.finditer(b" ", header):
            at = match.start()
            ends = bisect_left(slashes, at) + self.strip - 1
            if at < kept:
                continue
            if ends >= len(slashes):
                return None
            if at - kept == len(header) - slashes[ends] - 1:
                return at
        return None

    def same(self, first: bytes, second: bytes) -> bool:
        """True where two names agree but for the components that are stripped."""
        if not self.strip:
            return first == second
        return first.split(b"/", self.strip)[self.strip :] == second.split(b"/", self.strip)[self.strip :] != []

    # hunks

    def hunks(self) -> tuple[Hunk, ...]:
        found: list[Hunk] = []
        while (match := _HUNK.match(self.peek())) is not None and self.at < len(self.lines):
            found.append(self.hunk(match, len(found) + 1))
        return tuple(found)

    def hunk(self, match: re.Match[bytes], number: int) -> Hunk:
        start = self.at
        old_left = int(match[2]) if match[2] is not None else 1
        new_left = int(match[4]) if match[4] is not None else 1
        old: list[bytes] = []
        new: list[bytes] = []
        leading = trailing = 0
        changed = False
        self.at += 1
        while old_left > 0 or new_left > 0:
            if self.at >= len(self.lines):
                if changed and old_left == new_left <= 3:
                    # Editors and YAML drop blank lines at the end; GNU patch puts them back, too.
                    old.extend([b"\n"] * old_left)
                    new.extend([b"\n"] * old_left)
                    trailing += old_left
                    break
                raise self.fail(f"the patch ends within hunk #{number}", start, "its counts or its end are wrong")
            line = self.peek()
            tag = line[:1]
            text = line[1:] + b"\n"
            self.at += 1
            if self.peek().startswith(b"\\ ") and tag in b"-+ ":
                text = text[:-1]
                self.at += 1
            if tag in (b" ", b"", b"\r"):
                text = text if tag == b" " else line + b"\n"
                old.append(text)
                new.append(text)
                old_left, new_left = old_left - 1, new_left - 1
                leading, trailing = leading + (not changed), trailing + 1
            elif tag == b"-":
                old.append(text)
                old_left, changed, trailing = old_left - 1, True, 0
            elif tag == b"+":
                new.append(text)
                new_left, changed, trailing = new_left - 1, True, 0
            else:
                self.at -= 1
                raise self.fail(f"no line of a hunk: hunk #{number} began at line {start + 1}", hint="its counts are wrong")
            if old_left < 0 or new_left < 0:
                self.at -= 1
                raise self.fail(f"hunk #{number} has more lines than its header says")
        if self.peek().startswith(b"\\ "):
            self.at += 1
        if not changed:
            raise self.fail(f"hunk #{number} changes nothing", start)
        return Hunk(number, int(match[1]), int(match[3]), tuple(old), tuple(new), leading, trailing, start + 1)

    def binary(self) -> Binary:
        start = self.at
        self.at += 1
        match = re.match(rb"(literal|delta) (\d{1,10})\s*\Z", self.peek())
        if match is None:
            raise self.fail("binary data that is neither literal nor delta")
        self.at += 1
        packed = bytearray()
        what = f"line {start + 1} of the patch"
        while self.at < len(self.lines) and self.peek().strip():
            packed += decode_line(self.peek().rstrip(b"\r"), what)
            self.at += 1
        self.at += 1
        if re.match(rb"(literal|delta) \d+\s*\Z", self.peek()):  # the way back
            while self.at < len(self.lines) and self.peek().strip():
                self.at += 1
        size = int(match[2])
        self.budget.spend(size)
        return Binary(inflate(bytes(packed), size, what), match[1] == b"delta")
