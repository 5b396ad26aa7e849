"""Mutations to changes, and changes to a layer.

``patch`` applies within ``directory``, whose own path may lead through symlinks; the patch's paths may not. ``files``,
``symlink`` and ``delete`` act on the name itself (a symlink there is replaced or removed), ``chmod`` on what it leads to, as
the commands do. ``run`` is no part of the layer: it is for the started environment.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import replace

from weenv.core.errors import FormatError, LimitError, SourceError
from weenv.environment.model import Mutation
from weenv.environment.mutate.budget import Budget
from weenv.environment.mutate.changes import MAX_DATA, Changes, Node
from weenv.environment.mutate.gitcheckout import checkout
from weenv.environment.mutate.gitrepo import Read
from weenv.environment.mutate.patch import FilePatch, parse_patch
from weenv.environment.mutate.patchapply import Content, apply_patches, sources
from weenv.environment.mutate.view import Path, PathError, text
from weenv.layer import tarwrite
from weenv.layer.encode import EncodedLayer, encode_layer
from weenv.layer.tarscan import Member
from weenv.layer.toc import DIRECTORY, FILE, SYMLINK

VERSION = 1
"""Part of every cache key: to be raised whenever the same mutation would give another layer."""

MAX_LAYER = MAX_DATA
"""Bytes of one mutation's layer, uncompressed."""


class MutationError(FormatError):
    """A mutation cannot be made; ``member`` says which one of the plan."""


def runs(mutations: Sequence[Mutation]) -> tuple[Mutation, ...]:
    """The mutations that are commands for the started environment, in order."""
    return tuple(mutation for mutation in mutations if mutation.run)


def layered(mutations: Sequence[Mutation]) -> tuple[Mutation, ...]:
    """The others, which make a layer. Raises MutationError where one of them is to come after a command."""
    seen_run = False
    for number, mutation in enumerate(mutations):
        if mutation.run:
            seen_run = True
        elif seen_run:
            raise MutationError(
                "comes after a run mutation, but only these wait for the environment to start",
                member=_name(number, mutation), hint="put the run mutations last",
            )  # fmt: skip
    return tuple(mutation for mutation in mutations if not mutation.run)


def canonical(mutations: Sequence[Mutation]) -> bytes:
    """Everything that decides what the mutations do, as JSON that is the same bytes for the same mutations."""

    def pairs(table: dict[str, bytes]) -> dict[str, str]:
        return {key: base64.b64encode(value).decode() for key, value in table.items()}

    rows = [
        {
            "patch": m.patch, "directory": m.directory, "strip": m.strip, "files": pairs(m.files), "delete": m.delete,
            "chmod": m.chmod, "symlink": m.symlink, "git": m.git_commit, "owner": m.owner, "mode": m.mode,
        }
        for m in mutations
    ]  # fmt: skip
    return json.dumps([VERSION, rows], sort_keys=True, separators=(",", ":")).encode()


async def apply_mutations(mutations: Sequence[Mutation], changes: Changes, read: Read) -> None:
    """Make all mutations, in order. Raises MutationError naming the one at fault, SourceError."""
    for number, mutation in enumerate(mutations):
        try:
            await _apply(mutation, changes, read)
        except FormatError as error:
            raise MutationError(str(error), member=_name(number, mutation), hint=error.hint) from error
        except SourceError as error:
            error.args = (f"{_name(number, mutation)}: {error.message}",)
            raise
        # Each is later than what went before, the git index that a checkout wrote included.
        changes.stamp += 2


def _name(number: int, mutation: Mutation) -> str:
    return f"mutations[{number}]" + (f" (line {mutation.line})" if mutation.line else "")


async def _apply(mutation: Mutation, changes: Changes, read: Read) -> None:
    owner = mutation.owner
    if mutation.patch:
        await _patch(mutation, changes, read)
    for name, data in mutation.files.items():
        path = _entry(changes, name)
        fresh = (there := changes.at(path)) is None or there.kind != FILE
        mode = mutation.mode if mutation.mode is not None or not fresh else 0o644
        changes.write(path, data, mode=mode, owner=owner)
    for name in mutation.delete:
        changes.remove(_entry(changes, name))
    for name, mode in mutation.chmod.items():
        changes.chmod(changes.resolve(name)[0], mode)
    for name, target in mutation.symlink.items():
        changes.link(_entry(changes, name), target.encode("utf-8", "surrogateescape"), owner=owner)
    if mutation.git_commit:
        directory, node = changes.resolve(mutation.directory)
        if node is None or node.kind != DIRECTORY:
            raise PathError("is no directory", member=text(directory))
        await checkout(changes, directory, mutation.git_commit, read)


def _entry(changes: Changes, name: str) -> Path:
    """The path of a name whose last component is meant itself."""
    return changes.resolve(name, follow=False)[0]


# -- patches


async def _patch(mutation: Mutation, changes: Changes, read: Read) -> None:
    budget = Budget()
    data = mutation.patch.encode("utf-8", "surrogateescape")
    # In a thread, as whoever serves others meanwhile (the gateway) has one loop for all of them.
    parsed = await asyncio.to_thread(parse_patch, data, mutation.strip, budget)
    directory, node = changes.resolve(mutation.directory)
    if node is None or node.kind != DIRECTORY:
        raise PathError("is no directory", member=text(directory), hint="directory says where the patch is applied")
    names = sorted(sources(parsed))
    nodes = {name: _patchable(changes, directory, name) for name in names}
    replace(budget).spend(sum(node.source.size for node in nodes.values() if node is not None and node.source is not None))
    contents = await asyncio.gather(*(_content(there, read) for there in nodes.values()))
    after = await asyncio.to_thread(apply_patches, parsed, dict(zip(names, contents, strict=True)), budget)
    origin: dict[bytes, FilePatch] = {patch.new: patch for patch in parsed if patch.new is not None and patch.moved}
    for name, content in after.items():
        if content is None and nodes[name] is not None:
            changes.remove((*directory, *name.split(b"/")))
    for name, content in after.items():
        if content is not None:
            moved = origin.get(name)
            model = nodes[moved.old] if moved is not None and moved.old is not None else nodes[name]
            _put(changes, (*directory, *name.split(b"/")), content, model, mutation)
    for name, content in after.items():
        if content is None:
            _prune(changes, directory, (*directory, *name.split(b"/")[:-1]))


def _patchable(changes: Changes, directory: Path, name: bytes) -> Node | None:
    """What a patch's path leads to, which may not be through a symlink (as git and GNU patch have it)."""
    parts = name.split(b"/")
    for depth in range(1, len(parts)):
        step = changes.at((*directory, *parts[:depth]))
        if step is not None and step.kind == SYMLINK:
            raise PathError("lies beyond a symlink", member=text((*directory, *parts)))
    node = changes.at((*directory, *parts))
    if node is not None and node.kind not in (FILE, SYMLINK):
        raise PathError("is no regular file", member=text((*directory, *parts)))
    return node


async def _content(node: Node | None, read: Read) -> Content | None:
    if node is None:
        return None
    if node.kind == SYMLINK:
        return Content(node.link, symlink=True)
    data = node.data if node.data is not None or node.source is None else await read(node.source)
    return Content(data or b"", executable=bool(node.mode & 0o100))


def _put(changes: Changes, path: Path, content: Content, model: Node | None, mutation: Mutation) -> None:
    """A patched or new file. ``model`` is what it was, or was made from."""
    if content.symlink:
        changes.link(path, content.data, owner=mutation.owner if model is None else (model.uid, model.gid))
        return
    if model is None or model.kind != FILE:
        mode = 0o755 if content.executable else mutation.mode if mutation.mode is not None else 0o644
        changes.write(path, content.data, mode=mode, owner=mutation.owner)
        return
    mode = model.mode
    if content.executable != bool(mode & 0o100):
        mode = mode | ((mode & 0o444) >> 2) if content.executable else mode & ~0o111
    changes.make_directories(path[:-1], owner=mutation.owner)
    there = changes.at(path)
    if there is None or there.kind != FILE:
        changes.put(path, replace(model, data=content.data, source=None))
    changes.write(path, content.data, mode=mode, owner=(model.uid, model.gid))


def _prune(changes: Changes, directory: Path, path: Path) -> None:
    """Remove directories that a deletion has left empty, up to where the patch was applied, as git and GNU patch do."""
    while len(path) > len(directory):
        node = changes.at(path)
        if node is None or node.kind != DIRECTORY or changes.names(path):
            return
        changes.remove(path)
        path = path[:-1]


# -- the layer


async def load(changes: Changes, read: Read) -> None:
    """Read what was copied up without being read (changed modes). Raises LimitError, SourceError."""
    files = list(changes.files())
    total = sum(node.source.size for _, node in files if node.source is not None)
    if total > MAX_LAYER:
        raise LimitError(f"{total} bytes would be copied, more than {MAX_LAYER}", member="mutations", hint="use a run mutation")
    for path, node in files:
        changes.load(path, await read(node.source) if node.source is not None else b"")


def tar_of(members: Sequence[tuple[Member, bytes]]) -> bytes:
    """The layer's tar stream, the same bytes for the same members. Raises FormatError, LimitError."""
    parts: list[bytes] = []
    size = 0
    for member, data in members:
        parts += (tarwrite.header(member), data, tarwrite.padding(len(data)))
        size += len(data)
    if size > MAX_LAYER:
        raise LimitError(f"{size} bytes of files, more than {MAX_LAYER}", member="mutations", hint="publish them as a group")
    parts.append(tarwrite.END)
    return b"".join(parts)


def encode(tar: bytes) -> tuple[bytes, EncodedLayer]:
    """The layer blob of a tar stream."""
    out = io.BytesIO()
    layer = encode_layer(io.BytesIO(tar), out, threads=1 if len(tar) < 1 << 20 else 0)
    return out.getvalue(), layer


def key_of(chain: str, mutations: Sequence[Mutation]) -> str:
    """The cache key (64 hex digits) of mutations on a base with that chainID."""
    return hashlib.sha256(chain.encode() + b"\0" + canonical(mutations)).hexdigest()
