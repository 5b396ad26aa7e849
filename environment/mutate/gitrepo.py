"""A git repository within a tree of changes: objects (loose and packed), references, configuration; read lazily, verified."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections import OrderedDict
from typing import Protocol

from weenv.core.errors import FormatError, LimitError, NotFoundInSource, UnsupportedError
from weenv.environment.mutate.budget import Budget
from weenv.environment.mutate.changes import Changes, Node
from weenv.environment.mutate.delta import apply_delta, inflate, object_name
from weenv.environment.mutate.gitformat import (
    KINDS,
    OFS_DELTA,
    REF_DELTA,
    TREE,
    PackIndex,
    header_field,
    pack_entry,
    tree_entries,
)
from weenv.environment.mutate.view import Inode, Path, PathError, text
from weenv.layer.toc import DIRECTORY, FILE, SYMLINK

MAX_OBJECT = 256 << 20
"""Bytes of one object, inflated."""
MAX_INDEX = 512 << 20
"""Bytes of all pack indexes together."""
MAX_DELTAS = 64 << 30
"""Bytes that all deltas of a checkout make, those on the way to an object included."""
MAX_STEPS = 50_000_000
"""Instructions of all deltas, and entries of all trees, of a checkout: about a minute of one CPU."""
_CHAIN = 10_000
"""Deltas upon deltas; git itself stops at 4095."""
_LOOSE_HEAD = re.compile(rb"(commit|tree|blob|tag) (0|[1-9][0-9]{0,18})\0")
_KEEP = 32 << 20
_TREES = 100_000
"""Entries of trees that are kept parsed."""


class Read(Protocol):
    """Gives the bytes of a FILE of the view: all of it, or a range clipped to it."""

    async def __call__(self, inode: Inode, offset: int = 0, length: int | None = None) -> bytes: ...


class Repository:
    """The repository whose work tree is at ``worktree``. Made by :func:`open_repository`."""

    def __init__(self, changes: Changes, worktree: Path, gitdir: Path, read: Read) -> None:
        self.changes = changes
        self.worktree = worktree
        self.gitdir = gitdir
        self.width = 20
        self.config: dict[str, str] = {}
        self._read = read
        self._packs: list[tuple[PackIndex, Node, str]] | None = None
        self._objects: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
        self._size = 0
        self._trees: OrderedDict[bytes, dict[bytes, tuple[int, bytes]]] = OrderedDict()
        self._entries = 0
        self.budget = Budget(MAX_DELTAS, MAX_STEPS, "the repository")

    # -- files

    async def content(self, node: Node, offset: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file of the tree."""
        if node.data is not None:
            return node.data[offset:] if length is None else node.data[offset : offset + length]
        assert node.source is not None
        return await self._read(node.source, offset, length)

    async def file(self, *parts: bytes, limit: int = 64 << 20) -> bytes | None:
        """A file of the git directory, or None. Raises LimitError."""
        node = self.changes.at((*self.gitdir, *parts))
        if node is None or node.kind != FILE:
            return None
        data = await self.content(node, 0, limit + 1)
        if len(data) > limit:
            raise LimitError(f"larger than {limit} bytes", member=text((*self.gitdir, *parts)))
        return data

    # -- objects

    async def packs(self) -> list[tuple[PackIndex, Node, str]]:
        """Every pack: its index and its file."""
        if self._packs is None:
            folder = (*self.gitdir, b"objects", b"pack")
            node = self.changes.at(folder)
            names = self.changes.names(folder) if node is not None and node.kind == DIRECTORY else {}
            packs = []
            room = MAX_INDEX
            for name, item in names.items():
                pack = names.get(name[:-4] + b".pack") if name.endswith(b".idx") else None
                if pack is not None and pack.kind == FILE and item.kind == FILE:
                    data = await self.content(item, 0, room + 1)
                    room -= len(data)
                    if room < 0:
                        raise LimitError(f"its pack indexes have more than {MAX_INDEX} bytes", member=text(folder))
                    packs.append((PackIndex(data, self.width, text((*folder, name))), pack, text((*folder, name))))
            self._packs = packs
        return self._packs

    async def full_name(self, short: str) -> bytes:
        """The object that a (perhaps abbreviated) hex name means. Raises NotFoundInSource, FormatError where it is unclear."""
        if len(short) > 2 * self.width:
            raise FormatError("is longer than the repository's object names", member=f"commit {short}")
        if len(short) == 2 * self.width:
            return bytes.fromhex(short)
        prefix = bytes.fromhex(short + "0" * (len(short) % 2))
        found: set[bytes] = set()
        for index, _, _ in await self.packs():
            found.update(index.find(prefix, len(short)))
        folder = (*self.gitdir, b"objects", short[:2].encode())
        node = self.changes.at(folder)
        if node is not None and node.kind == DIRECTORY:
            loose = (short[:2] + name.decode("ascii", "replace") for name in self.changes.names(folder))
            found.update(bytes.fromhex(name) for name in loose if name.startswith(short) and self._is_name(name))
        if not found:
            raise self._missing(short)
        if len(found) > 1:
            raise FormatError("means more than one object", member=f"commit {short}", hint="write more of its digits")
        return found.pop()

    def _is_name(self, name: str) -> bool:
        return len(name) == 2 * self.width and re.fullmatch(r"[0-9a-f]+", name) is not None

    def _missing(self, name: str) -> NotFoundInSource:
        return NotFoundInSource(
            f"the repository at {text(self.worktree)} has no object {name}",
            hint="publish the repository group with the history that its tasks need",
        )

    async def object(self, name: bytes) -> tuple[bytes, bytes]:
        """(kind, data) of an object, its name verified. Raises NotFoundInSource, FormatError."""
        kept = self._objects.get(name)
        if kept is not None:
            return kept
        found = await self._loose(name) or await self._packed(name)
        if found is None:
            raise self._missing(name.hex())
        kind, data = found
        if object_name(kind, data, "sha1" if self.width == 20 else "sha256") != name.hex():
            raise FormatError("is damaged", member=f"object {name.hex()}")
        self._keep(name, found)
        return found

    def _keep(self, name: bytes, found: tuple[bytes, bytes]) -> None:
        self._objects[name] = found
        self._size += len(found[1])
        while self._size > _KEEP:
            self._size -= len(self._objects.popitem(last=False)[1][1])

    async def _loose(self, name: bytes) -> tuple[bytes, bytes] | None:
        hexadecimal = name.hex().encode()
        data = await self.file(b"objects", hexadecimal[:2], hexadecimal[2:], limit=MAX_OBJECT)
        if data is None:
            return None
        what = f"object {name.hex()}"
        try:
            head = _LOOSE_HEAD.match(zlib.decompressobj().decompress(data, 64))
        except zlib.error as error:
            raise FormatError("is damaged", member=what) from error
        if head is None or int(head[2]) > MAX_OBJECT:
            raise FormatError("has a head that is damaged or of an absurd size", member=what)
        whole = await asyncio.to_thread(inflate, data, head.end() + int(head[2]), what)
        return head[1], whole[head.end() :]

    async def _packed(self, name: bytes) -> tuple[bytes, bytes] | None:
        for index, pack, where in await self.packs():
            offset = index.offset(name)
            if offset is not None:
                return await self._entry(index, pack, where, offset, f"object {name.hex()}")
        return None

    async def _entry(self, index: PackIndex, pack: Node, where: str, offset: int, what: str) -> tuple[bytes, bytes]:
        """A pack's object: its chain of deltas down to what is whole, then back up."""
        size = len(pack.data) if pack.data is not None else pack.source.size if pack.source is not None else 0
        deltas: list[bytes] = []
        total = 0
        while True:
            data = await self.content(pack, offset, index.end(offset, size) - offset)
            entry = pack_entry(data[:64], self.width, where)
            total += entry.size
            if entry.size > MAX_OBJECT or total > 4 * MAX_OBJECT or len(deltas) > _CHAIN:
                raise LimitError("is too large, or too long a chain of deltas", member=what)
            content = await asyncio.to_thread(inflate, memoryview(data)[entry.start :], entry.size, what)
            if entry.kind == OFS_DELTA:
                if not 0 < entry.base_offset <= offset:
                    raise FormatError("a delta with a base outside its pack", member=what)
                deltas.append(content)
                offset -= entry.base_offset
                continue
            if entry.kind == REF_DELTA:
                deltas.append(content)
                base = index.offset(entry.base_name)
                if base is None:
                    raise FormatError("a delta whose base is not in its pack", member=what)
                offset = base
                continue
            for delta in reversed(deltas):
                content = await asyncio.to_thread(apply_delta, content, delta, what, self.budget)
            return KINDS[entry.kind], content

    async def commit_tree(self, name: bytes) -> bytes:
        """The tree of a commit, or of the commit that a tag names. Raises FormatError."""
        for _ in range(8):
            kind, data = await self.object(name)
            if kind == b"commit":
                return header_field(data, b"tree", self.width, f"commit {name.hex()}")
            if kind != b"tag":
                break
            name = header_field(data, b"object", self.width, f"tag {name.hex()}")
        raise FormatError("is no commit", member=f"object {name.hex()}")

    async def tree(self, name: bytes) -> dict[bytes, tuple[int, bytes]]:
        """The entries of a tree."""
        kept = self._trees.get(name)
        if kept is not None:
            self._trees.move_to_end(name)
            self.budget.step()
            return kept
        kind, data = await self.object(name)
        if kind != KINDS[TREE]:
            raise FormatError("is no tree", member=f"object {name.hex()}")
        found = tree_entries(data, self.width, f"tree {name.hex()}")
        self.budget.step(1 + len(found))
        self._trees[name] = found
        self._entries += len(found) + 1
        while self._entries > _TREES and len(self._trees) > 1:
            self._entries -= len(self._trees.popitem(last=False)[1]) + 1
        await asyncio.sleep(0)  # whoever else has this loop gets a turn
        return found

    # -- references

    async def head(self) -> bytes | None:
        """The commit that is checked out; None where there is none yet. Raises FormatError."""
        name = b"HEAD"
        for _ in range(6):
            if b".." in name.split(b"/") or len(name) > 4000:
                break
            value = (await self.file(*name.split(b"/"), limit=1 << 16) or await self._packed_ref(name)).strip()
            if not value:
                return None
            if self._is_name(value.decode("ascii", "replace")):
                return bytes.fromhex(value.decode())
            if not value.startswith(b"ref:"):
                break
            name = value[4:].strip()
        raise FormatError("a reference that cannot be read", member=text((*self.gitdir, b"HEAD")))

    async def _packed_ref(self, name: bytes) -> bytes:
        for line in (await self.file(b"packed-refs") or b"").splitlines():
            value, _, packed = line.partition(b" ")
            if packed == name:
                return value
        return b""


async def open_repository(changes: Changes, worktree: Path, read: Read) -> Repository:
    """The repository at ``worktree``. Raises PathError where there is none, UnsupportedError for what is not understood."""
    path: Path = (*worktree, b".git")
    node = changes.at(path)
    if node is not None and node.kind == SYMLINK:
        path, node = changes.resolve(b"/".join(path))
    if node is not None and node.kind == FILE:
        raise UnsupportedError("a linked work tree or submodule", member=text(path), hint="publish a repository of its own")
    if node is None or node.kind != DIRECTORY:
        raise PathError("holds no git repository", member=text(worktree), hint="directory names the work tree")
    repository = Repository(changes, worktree, path, read)
    repository.config = parse_config(await repository.file(b"config", limit=1 << 20) or b"")
    config = repository.config
    if config.get("extensions.objectformat", "sha1") == "sha256":
        repository.width = 32
    for key in ("extensions.refstorage", "extensions.partialclone", "extensions.worktreeconfig", "core.worktree"):
        if config.get(key, "files").lower() not in ("files", "false", ""):
            raise UnsupportedError(f"a repository with {key}", member=text(path))
    if changes.at((*path, b"objects", b"info", b"alternates")) is not None:
        raise UnsupportedError(
            "a repository that borrows objects", member=text(path), hint="git repack -ad, then rm alternates"
        )
    return repository


def parse_config(data: bytes) -> dict[str, str]:
    """A git configuration as ``section.key`` or ``section.subsection.key`` -> value, the last one said; simple values only."""
    found: dict[str, str] = {}
    section = ""
    for raw in data.decode("utf-8", "replace").splitlines():
        line = raw.strip()
        match = re.match(r'\[([A-Za-z0-9.-]+)(?:\s+"((?:[^"\\]|\\.)*)")?\]\s*', line)
        if match is not None:
            section = match[1].lower() + (f".{match[2]}" if match[2] is not None else "")
            line = line[match.end() :]
        match = re.match(r"([A-Za-z][A-Za-z0-9-]*)\s*(?:=\s*(.*))?\Z", line)
        if match is not None and section:
            value = "true" if match[2] is None else re.sub(r"\s*[#;].*", "", match[2]).strip().strip('"')
            found[f"{section}.{match[1].lower()}"] = value
    return found
