"""From what should be on a system, and what is, to the steps between; and the way back.

Nothing is changed by planning. A file of ours is recognised by its digest in the record; one that somebody has changed, or has
put there himself, is a conflict and not touched. Files of others are only edited, and a copy is kept.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weenv.core.errors import ConfigError
from weenv.systemd.install import edits
from weenv.systemd.install.edits import Change
from weenv.systemd.install.files import Item
from weenv.systemd.install.record import BACKUP, PATH, Edit, Record, digest
from weenv.systemd.install.tree import Tree


@dataclass(frozen=True, slots=True)
class Amend:
    """A file of somebody else's to edit; ``first`` is its text where there is none yet. ``kind``: toml or json."""

    path: str
    kind: str
    changes: Sequence[Change]
    first: str | None = None


@dataclass(frozen=True, slots=True)
class Write:
    """A file to write; ``old`` None: there is none. ``edit``: what the record is to say of a file of somebody else's."""

    path: str
    old: bytes | None
    new: bytes
    edit: Edit | None = None

    def diff(self) -> str:
        """Unified, for people."""
        before, after = ((data or b"").decode("utf-8", "replace").splitlines(keepends=True) for data in (self.old, self.new))
        name = "/dev/null" if self.old is None else self.path
        lines = difflib.unified_diff(before, after, name, self.path)
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


@dataclass(slots=True)
class Plan:
    """The steps. ``links`` are to be made, ``stale`` files and links of an earlier version to be removed."""

    writes: list[Write] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Everything is as it should be."""
        return not (self.writes or self.links or self.stale)


def plan(
    tree: Tree, record: Record, items: Sequence[Item], links: dict[str, str], amends: Sequence[Amend], *, within: Sequence[str]
) -> Plan:
    """What to do. Files of the record that are not wanted any more go, if they are ``within`` these places.

    Raises ConfigError for files that cannot be edited, OSError.
    """
    found = Plan()
    for item in items:
        data = tree.read(item.path)
        if data == item.data or (item.keep and data is not None):
            continue
        if data is not None and digest(data) not in record.files.get(item.path, ()):
            found.conflicts.append(item.path)
        found.writes.append(Write(item.path, data, item.data))
    for amend in amends:
        write = _amend(tree, record.edits.get(amend.path), amend)
        if write is not None:
            found.writes.append(write)
    for path, target in links.items():
        if tree.link(path) != target:
            if tree.link(path) is None and tree.read(path) is not None:
                found.conflicts.append(path)
            found.links[path] = target
    wanted = {item.path for item in items}
    old = [path for path in record.files if path not in wanted and path.startswith(tuple(within))]
    found.stale = [path for path in old if _is_ours(tree, record, path)]
    found.stale += [path for path, target in record.links.items() if path not in links and tree.link(path) == target]
    return found


def _is_ours(tree: Tree, record: Record, path: str) -> bool:
    data = tree.read(path)
    return data is not None and digest(data) in record.files[path]


def _amend(tree: Tree, earlier: Edit | None, amend: Amend) -> Write | None:
    old = tree.read(amend.path)
    if old is None and amend.first is None and not amend.changes:
        return None
    text = (amend.first or "") if old is None else _text(old, amend.path)
    edit = edits.edit_json if amend.kind == "json" else edits.edit_toml
    new, undo = edit(text, amend.changes, amend.path)
    data = new.encode()
    if data == old:
        return None
    if earlier is not None and old is not None:
        # A second change on top of ours; the copy is of no use any more where somebody else changed the file in between.
        after = digest(data) if digest(old) == earlier.after else ""
        return Write(amend.path, old, data, replace(earlier, after=after, undo=[*earlier.undo, *undo]))
    backup = _free_name(tree, amend.path + BACKUP) if old is not None else ""
    return Write(amend.path, old, data, Edit(amend.kind, digest(data), backup, undo))


def _text(data: bytes, path: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text", hint="mend it first") from error


def _free_name(tree: Tree, path: str) -> str:
    names = [path, *(f"{path}.{number}" for number in range(1, 100))]
    return next(name for name in names if tree.read(name) is None)


def untouched(tree: Tree, path: str, edit: Edit) -> bool:
    """Whether a file of somebody else's is as it was left."""
    data = tree.read(path)
    return data is not None and digest(data) == edit.after


def begin(tree: Tree, record: Record, steps: Plan) -> None:
    """Put into the record what is going to happen: whatever interrupts the rest, it can be taken back."""
    for path in [PATH, *(write.path for write in steps.writes), *steps.links]:
        record.will_make(tree.missing(path))
    for write in steps.writes:
        if write.edit is not None:
            record.edits[write.path] = write.edit
            if write.edit.backup and write.old is not None and tree.read(write.edit.backup) is None:
                tree.write(write.edit.backup, write.old, like=write.path)  # it may hold secrets
        else:
            record.files[write.path] = [*record.files.get(write.path, ()), digest(write.new)]
    record.links.update(steps.links)
    tree.write(PATH, record.dump())


def carry_out(tree: Tree, record: Record, steps: Plan) -> None:
    """Write the files. Links are :func:`enable`'s, or systemd's. Raises OSError."""
    for path in steps.stale:
        tree.remove(path)
        record.files.pop(path, None)
        record.links.pop(path, None)
    for write in steps.writes:
        tree.write(write.path, write.new)
        if write.edit is None:
            record.files[write.path] = [digest(write.new)]


def enable(tree: Tree, links: dict[str, str]) -> None:
    """Make the links, where no systemd is there to do it."""
    for path, target in links.items():
        tree.make_link(path, target)


def finish(tree: Tree, record: Record) -> None:
    """The record as it is now, if it is another."""
    data = record.dump()
    if tree.read(PATH) != data:
        tree.write(PATH, data)


@dataclass(slots=True)
class Removal:
    """What uninstalling does: ``files`` and ``links`` go, ``writes`` mend files of others; ``kept`` stay, with the reason."""

    files: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)


def plan_removal(tree: Tree, record: Record) -> Removal:
    """The way back. Raises ConfigError, OSError."""
    found = Removal()
    for path in record.files:
        data = tree.read(path)
        if data is None:
            continue
        if digest(data) in record.files[path]:
            found.files.append(path)
        else:
            found.kept[path] = "it has been changed since"
    found.links = [path for path, target in record.links.items() if tree.link(path) == target]
    for path, edit in record.edits.items():
        _restore(tree, path, edit, found)
    return found


def _restore(tree: Tree, path: str, edit: Edit, found: Removal) -> None:
    now = tree.read(path)
    backup = tree.read(edit.backup) if edit.backup else None
    if backup is not None:
        found.files.append(edit.backup)
    if now is None:
        return
    if digest(now) == edit.after:
        if not edit.backup:
            found.files.append(path)
            return
        if backup is not None:
            found.writes.append(Write(path, now, backup))
            return
    take_back = edits.revert_json if edit.kind == "json" else edits.revert_toml
    data = take_back(_text(now, path), edit.undo, path).encode()
    if data != now:
        found.writes.append(Write(path, now, data))


def remove(tree: Tree, record: Record, removal: Removal) -> None:
    """Carry it out; the record goes last. Raises OSError."""
    for write in removal.writes:
        tree.write(write.path, write.new)
    for path in [*removal.links, *removal.files, PATH]:
        tree.remove(path)
    for path in sorted(record.directories, key=len, reverse=True):
        tree.remove_directory(path)
