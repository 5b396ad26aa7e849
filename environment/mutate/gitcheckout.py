"""``git checkout COMMIT`` on a tree of changes: only what differs between the two commits is read and written.

What it does is what the command does: files that differ between HEAD and the commit are written or removed, others are left
as they are with their local changes; a file that is to be written but was changed, in the index or on disk, is an error; the
index and HEAD (detached) follow. Not done: reflogs, hooks, and content filters; a repository where a filter would apply to a
file that changes is refused.

**What git status has to look at afterwards.** git trusts an index entry where size, times, owner, inode number and mode are
those of the file (git's racy-git.txt). The inode number of a file in a container is not known beforehand, and the index that
came with the image holds those of the machine that built it, so by default git would read every file once: with lazy layers,
fetch the whole tree. Therefore ``core.checkStat=minimal`` and ``core.trustCtime=false`` are set in the repository (git then
looks at size and modification time only) and the index gets these as the container sees them. An entry keeps being trusted
only where the old index trusted it: its recorded size and time are the file's, and the time is before the index was written;
a file of that same second is hashed here, once, up to :data:`MAX_HASHED` bytes in all, and beyond that left for git to look at.
"""

from __future__ import annotations

import asyncio
import fnmatch
import re
from collections.abc import Callable
from dataclasses import replace

from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.environment.mutate.changes import Changes, Node
from weenv.environment.mutate.delta import object_name
from weenv.environment.mutate.gitformat import ALGORITHMS, SKIP_WORKTREE, IndexEntry, read_index, write_index
from weenv.environment.mutate.gitrepo import Read, Repository, open_repository
from weenv.environment.mutate.patch import EXECUTABLE, GITLINK, REGULAR, SYMLINK_MODE
from weenv.environment.mutate.view import MAX_PATH, Path, PathError, text
from weenv.layer.tarscan import show
from weenv.layer.toc import DIRECTORY, FILE, SYMLINK

MAX_INDEX = 64 << 20
"""Bytes of the index: some 600 000 files."""
MAX_HASHED = 64 << 20
"""Bytes of files hashed because the index is as old as they are."""
_MAX_CHANGES = 200_000
_MAX_NAMES = 64 << 20
"""Bytes of the names of all that differs."""
_MAX_ATTRIBUTES = 8 << 20
"""Bytes of all .gitattributes together."""
_MAX_RULES = 20_000_000
"""Patterns of .gitattributes times files that they are asked about."""
_DIRECTORY_MODE = 0o040000

Item = tuple[int, bytes]
"""Mode and object of a path."""


async def checkout(changes: Changes, worktree: Path, commit: str, read: Read) -> None:
    """Make the tree at ``worktree`` what ``git checkout COMMIT`` would leave. Raises FormatError, SourceError."""
    repository = await open_repository(changes, worktree, read)
    await _Checkout(repository).run(commit)


class _Checkout:
    def __init__(self, repository: Repository) -> None:
        self.repo = repository
        self.changes = repository.changes
        self.worktree = repository.worktree
        self.algorithm = ALGORITHMS[repository.width]
        self._hashed = 0

    async def run(self, commit: str) -> None:
        repo = self.repo
        index_path = (*repo.gitdir, b"index")
        data, node = await repo.file(b"index", limit=MAX_INDEX), self.changes.at(index_path)
        if data is None or node is None:
            raise PathError("is missing", member=text(index_path), hint="publish the repository with its work tree checked out")
        index = read_index(data, repo.width)
        target = await repo.full_name(commit)
        head = await repo.head()
        wanted = await repo.commit_tree(target)
        current = await repo.commit_tree(head) if head is not None else b""
        changed = await self._difference(current, wanted)
        await self._check_filters(wanted, changed)
        index_time = node.mtime
        for path, (before, after) in sorted(changed.items()):
            await self._check(path, before, after, index)
        removed = [path for path, (_, after) in changed.items() if after is None]
        for path in removed:
            self._remove(path)
        written: dict[bytes, IndexEntry] = {}
        for path, (_, after) in sorted(changed.items()):
            if after is not None:
                written[path] = await self._write(path, after)
        entries = {path: entry for path, entry in index.items() if path not in changed}
        fresh = {path: await self._refreshed(entry, index_time) for path, entry in entries.items()}
        # Later than every file, or git would not trust what it says of those of the same second (racy-git.txt).
        later = self.changes.stamp + 1
        self._store(index_path, write_index([*fresh.values(), *written.values()], repo.width), later)
        self._store((*repo.gitdir, b"HEAD"), target.hex().encode() + b"\n", later)
        await self._configure()

    def _store(self, path: Path, data: bytes, mtime: int) -> None:
        self.changes.write(path, data)
        node = self.changes.at(path)
        assert node is not None
        self.changes.put(path, replace(node, mtime=mtime, mtime_ns=0))

    # -- what differs

    async def _difference(self, old: bytes, new: bytes) -> dict[bytes, tuple[Item | None, Item | None]]:
        """Paths that differ between two trees (empty: no tree), with what they are in each."""
        found: dict[bytes, tuple[Item | None, Item | None]] = {}
        todo = [(b"", old, new)]
        visited = spelt = 0
        while todo:
            prefix, before, after = todo.pop()
            if before == after:
                continue
            if prefix.count(b"/") > 1000 or len(prefix) > MAX_PATH:
                raise LimitError("a tree deeper than 1000 directories, or with a longer path than a file can have",
                                 member=show(prefix[:200]))  # fmt: skip
            visited += 1  # trees may hold nothing but each other, and that many times over
            spelt += len(prefix)
            if not visited % 100:
                await asyncio.sleep(0)
            left = await self.repo.tree(before) if before else {}
            right = await self.repo.tree(after) if after else {}
            for name in {*left, *right}:
                a, b = left.get(name), right.get(name)
                if a == b:
                    continue
                below = [item[1] if item is not None and item[0] == _DIRECTORY_MODE else b"" for item in (a, b)]
                if any(below):
                    todo.append((prefix + name + b"/", below[0], below[1]))
                files = [item if item is not None and item[0] != _DIRECTORY_MODE else None for item in (a, b)]
                if any(files):
                    found[prefix + name] = (files[0], files[1])
                    spelt += len(prefix) + len(name)
                if len(found) + visited > _MAX_CHANGES or spelt > _MAX_NAMES:
                    raise LimitError(
                        f"more than {_MAX_CHANGES} files and directories differ", member="git",
                        hint="publish a group of that commit",
                    )
        return found

    def _path(self, path: bytes) -> Path:
        return (*self.worktree, *path.split(b"/"))

    def _beyond_symlink(self, path: Path) -> bool:
        steps = range(len(self.worktree) + 1, len(path))
        return any((node := self.changes.at(path[:n])) is not None and node.kind == SYMLINK for n in steps)

    # -- whether it may be written

    async def _check(self, path: bytes, before: Item | None, after: Item | None, index: dict[bytes, IndexEntry]) -> None:
        entry = index.get(path)
        have = (entry.mode, entry.name) if entry is not None else None
        if have not in (_normal(before), _normal(after)):
            raise FormatError("the index has other changes of it", member=show(path), hint="publish a clean work tree")
        if entry is not None and entry.more & SKIP_WORKTREE:
            raise UnsupportedError("a sparse checkout", member=show(path), hint="git sparse-checkout disable")
        where = self._path(path)
        node = self.changes.at(where) if not self._beyond_symlink(where) else None
        if node is None or (node.kind == DIRECTORY and (before is None or before[0] == GITLINK)):
            return  # a directory is in the way only where something in it stays: _write says so
        for item in (before, after):
            if item is not None and await self._is(node, item):
                return
        what = "local changes of it" if before is not None else "a file that git does not know"
        raise FormatError(f"{what} would be overwritten by the checkout", member=show(path), hint="publish a clean work tree")

    async def _is(self, node: Node, item: Item) -> bool:
        """True where a file of the work tree is what the repository says; its executable bit aside."""
        if node.kind == SYMLINK and item[0] == SYMLINK_MODE:
            return object_name(b"blob", node.link, self.algorithm) == item[1].hex()
        if node.kind != FILE or item[0] in (SYMLINK_MODE, GITLINK):
            return False
        return object_name(b"blob", await self.repo.content(node), self.algorithm) == item[1].hex()

    async def _check_filters(self, tree: bytes, changed: dict[bytes, tuple[Item | None, Item | None]]) -> None:
        """Raise UnsupportedError where git would write other bytes than the repository holds."""
        config = self.repo.config
        if config.get("core.autocrlf", "false").lower() == "true" or config.get("core.eol", "lf").lower() == "crlf":
            raise UnsupportedError("a repository that converts line endings", member=text(self.repo.gitdir))
        rules = self._rules(b"", await self.repo.file(b"info", b"attributes", limit=_MAX_ATTRIBUTES) or b"")
        room = _MAX_ATTRIBUTES
        folders = sorted({path[: n + 1] for path in changed for n in range(-1, len(path)) if n < 0 or path[n] == 0x2F})
        for number, folder in enumerate(folders):
            if not number % 100:
                await asyncio.sleep(0)
            item: Item | None = (_DIRECTORY_MODE, tree)
            for name in [*folder.split(b"/")[:-1], b".gitattributes"]:
                item = (await self.repo.tree(item[1])).get(name) if item is not None and item[0] == _DIRECTORY_MODE else None
            if item is not None and item[0] in (REGULAR, EXECUTABLE):
                data = (await self.repo.object(item[1]))[1]
                room -= len(data)
                if room >= 0:
                    rules += self._rules(folder, data)
            if room < 0 or len(rules) * len(changed) > _MAX_RULES:
                raise LimitError("too many rules in .gitattributes for so many changes", member=text(self.repo.gitdir),
                                 hint="use a run mutation")  # fmt: skip
        for number, (path, (_, after)) in enumerate(changed.items()):
            if not number % 100:
                await asyncio.sleep(0)
            if after is not None and after[0] in (REGULAR, EXECUTABLE):
                for matches, why in rules:
                    if matches(path):
                        raise UnsupportedError(f"git would convert it ({why})", member=show(path), hint="use a run mutation")

    def _rules(self, folder: bytes, data: bytes) -> list[tuple[Callable[[bytes], bool], str]]:
        """The lines of a .gitattributes that make git convert a file, and which files they are about."""
        found: list[tuple[Callable[[bytes], bool], str]] = []
        for line in data.splitlines():
            pattern, *attributes = line.decode("utf-8", "replace").split() or [""]
            for attribute in attributes:
                driver = re.fullmatch(r"filter=(.+)", attribute)
                converts = attribute in ("ident", "eol=crlf") or attribute.startswith("working-tree-encoding=")
                if driver is not None:
                    converts = any(f"filter.{driver[1]}.{key}" in self.repo.config for key in ("smudge", "process"))
                if converts and not pattern.startswith("#"):
                    found.append((_matcher(folder, pattern), attribute))
        return found

    # -- writing

    def _remove(self, path: bytes) -> None:
        where = self._path(path)
        if self._beyond_symlink(where):
            return
        node = self.changes.at(where)
        if node is None or node.kind == DIRECTORY:
            return
        self.changes.remove(where)
        where = where[:-1]
        while len(where) > len(self.worktree) and not self.changes.names(where):
            self.changes.remove(where)
            where = where[:-1]

    async def _write(self, path: bytes, item: Item) -> IndexEntry:
        where = self._path(path)
        mode, name = item[0], item[1]
        entry = IndexEntry(path, _normal_mode(mode), name)
        for depth in range(len(self.worktree) + 1, len(where)):
            step = self.changes.at(where[:depth])
            if step is not None and step.kind != DIRECTORY:
                raise FormatError("something that git does not know is in the way", member=text(where[:depth]))
        there = self.changes.at(where)
        if mode == GITLINK:
            self.changes.make_directories(where)
            return entry
        if there is not None and there.kind == DIRECTORY:
            if self.changes.names(where):
                raise FormatError("a directory that git does not know is in the way", member=text(where))
            self.changes.remove(where)
            there = None
        kind, data = await self.repo.object(name)
        if kind != b"blob":
            raise FormatError("a tree names something else than a file", member=show(path))
        if mode == SYMLINK_MODE:
            if there is None or there.kind != SYMLINK or there.link != data:
                self.changes.link(where, data, owner=None if there is None else (there.uid, there.gid))
        else:
            bits = 0o755 if mode == EXECUTABLE else 0o644
            if there is not None and there.kind == FILE and bool(there.mode & 0o100) == (mode == EXECUTABLE):
                bits = there.mode
            self.changes.write(where, data, mode=bits)
        node = self.changes.at(where)
        assert node is not None
        return self._stat(entry, node, len(data))

    @staticmethod
    def _stat(entry: IndexEntry, node: Node, size: int) -> IndexEntry:
        return entry.stat(mtime=node.mtime, mtime_ns=node.mtime_ns, uid=node.uid, gid=node.gid, size=size)

    async def _refreshed(self, entry: IndexEntry, index_time: int) -> IndexEntry:
        """An entry that stays, with what a container sees of its file, where it is known to be unchanged."""
        where = self._path(entry.path)
        node = self.changes.at(where)
        if node is None or node.kind not in (FILE, SYMLINK) or entry.more & SKIP_WORKTREE or self._beyond_symlink(where):
            return entry
        size = len(node.link) if node.kind == SYMLINK else len(node.data) if node.data is not None else -1
        if size < 0:
            size = node.source.size if node.source is not None else 0
        if entry.size != size & 0xFFFF_FFFF or entry.mtime != node.mtime & 0xFFFF_FFFF:
            return replace(entry, mtime=0, mtime_ns=0)  # git shall look
        if node.mtime < index_time:
            return self._stat(entry, node, size)
        if self._hashed + size <= MAX_HASHED:
            self._hashed += size
            if await self._is(node, (entry.mode, entry.name)):
                return self._stat(entry, node, size)
        return replace(entry, mtime=0, mtime_ns=0)

    async def _configure(self) -> None:
        config = self.repo.config
        if config.get("core.checkstat", "").lower() == "minimal" and config.get("core.trustctime", "").lower() == "false":
            return
        data = await self.repo.file(b"config", limit=1 << 20) or b""
        data += b"" if not data or data.endswith(b"\n") else b"\n"
        data += b"[core]\n\tcheckStat = minimal\n\ttrustctime = false\n"
        self._store((*self.repo.gitdir, b"config"), data, self.changes.stamp)


def _normal_mode(mode: int) -> int:
    """A tree's mode as the index has it: old trees hold 0664."""
    return mode if mode in (SYMLINK_MODE, GITLINK) else EXECUTABLE if mode & 0o100 else REGULAR


def _normal(item: Item | None) -> Item | None:
    return None if item is None else (_normal_mode(item[0]), item[1])


def _matcher(folder: bytes, pattern: str) -> Callable[[bytes], bool]:
    """Whether a path matches a pattern of ``folder``'s .gitattributes (gitattributes(5)); too often rather than too seldom."""
    base = folder.decode("utf-8", "replace")

    def matches(path: bytes) -> bool:
        name = path.decode("utf-8", "replace")
        if not name.startswith(base):
            return False
        rest = name[len(base) :]
        if "/" not in pattern.strip("/"):
            return fnmatch.fnmatchcase(rest.rpartition("/")[2], pattern.strip("/"))
        return fnmatch.fnmatchcase(rest, pattern.lstrip("/").replace("**/", "*"))

    return matches
