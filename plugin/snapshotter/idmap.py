"""Lower directories with mapped ids: what a container in a user namespace of its own is given to stand on.

containerd says with two labels which ids of the container are which of the node (WithUserNSRemapperLabels,
client/snapshotter_opts_unix.go, v2.1.9), as text ``<container>:<node>:<length>[,...]``. Each directory below such a
snapshot appears once more as an id-mapped mount (mount_setattr(2), MOUNT_ATTR_IDMAP)::

    <root>/i/<snapshot id>/<n>      the n-th directory of the overlay's ``lowerdir``, from the top

Nothing is copied, and nothing of a lazy layer is fetched. The mounts go with the snapshot; what was mounted from them
(a container's overlay has clones of its own) stays. Why containerd is not asked to do it: docs/adr/0007.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weenv.core.errors import InvalidRequest, MountError
from weenv.plugin.snapshotter import mounts

log = logging.getLogger(__name__)

LABEL_UID_MAPPING = "containerd.io/snapshot/uidmapping"
LABEL_GID_MAPPING = "containerd.io/snapshot/gidmapping"

_EXTENTS = 340
"""Lines that /proc/PID/uid_map takes (UID_GID_MAP_MAX_EXTENTS, include/linux/user_namespace.h)."""
_IDS = (1 << 32) - 1
"""Ids there are; the number after the last means "no id"."""
_HELPER = ("unshare", "--user", "--", "cat")
"""A process in a new user namespace, which ends with its input (unshare is util-linux's)."""
_HELPER_SECONDS = 10.0
_NOT_POSSIBLE = "take remap-ids out of containerd's [proxy_plugins.weenv] capabilities: containerd then changes owners itself"

Extents = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class IdMapping:
    """Both mappings of a user namespace: (id in the container, id on the node, how many) each."""

    uids: Extents
    gids: Extents

    @classmethod
    def parse(cls, uids: str, gids: str) -> IdMapping:
        """From the values of the two labels. Raises :class:`InvalidRequest`."""
        return cls(_extents(uids), _extents(gids))

    @property
    def root(self) -> tuple[int, int]:
        """The node's ids of the container's root. Raises :class:`InvalidRequest` where it has none."""
        return _outside(self.uids), _outside(self.gids)


def mapping_of(labels: Mapping[str, str]) -> IdMapping | None:
    """The mapping that a snapshot's labels ask for, or None. Raises :class:`InvalidRequest`."""
    uids, gids = labels.get(LABEL_UID_MAPPING, ""), labels.get(LABEL_GID_MAPPING, "")
    return IdMapping.parse(uids, gids) if uids or gids else None


def _extents(text: str) -> Extents:
    parts = text.split(",", _EXTENTS)
    found: list[tuple[int, int, int]] = []
    for part in parts:
        numbers = part.split(":")
        if len(numbers) != 3 or not all(number.isascii() and number.isdigit() and len(number) <= 10 for number in numbers):
            break
        inside, outside, length = (int(number) for number in numbers)
        if length < 1 or inside + length > _IDS or outside + length > _IDS:
            break
        found.append((inside, outside, length))
    if len(found) != len(parts) or len(found) > _EXTENTS:
        raise InvalidRequest(f"id mapping {text[:200]!r} is not of the form CONTAINER:NODE:LENGTH[,...]")
    return tuple(found)


def _outside(extents: Extents) -> int:
    for inside, outside, _ in extents:
        if inside == 0:
            return outside
    raise InvalidRequest("an id mapping does not map id 0")


@contextlib.contextmanager
def user_namespace(mapping: IdMapping) -> Iterator[int]:
    """A descriptor of a new user namespace with that mapping, open within the block. Blocks for some milliseconds.

    Raises :class:`MountError` where the kernel does not make one.
    """
    with contextlib.ExitStack() as stack:
        try:
            helper = subprocess.Popen(
                _HELPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
            )  # fmt: skip
        except OSError as error:
            raise MountError(f"cannot run {_HELPER[0]}: {error.strerror}", errno=error.errno or 0) from error
        stack.enter_context(helper)  # closes the pipes and waits
        stack.callback(helper.kill)
        assert helper.stdin is not None and helper.stdout is not None and helper.stderr is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, and says why
            helper.stdin.write(b"\n")
        if not select.select([helper.stdout], [], [], _HELPER_SECONDS)[0] or helper.stdout.read(1) != b"\n":
            helper.kill()
            said = helper.stderr.read(1000).decode("utf-8", "replace").strip()
            raise MountError(
                f"no user namespace can be made: {said or 'no answer'}", hint="see sysctl user.max_user_namespaces"
            )
        process = f"/proc/{helper.pid}"
        try:
            namespace = os.open(f"{process}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, namespace)
            for name, extents in (("uid_map", mapping.uids), ("gid_map", mapping.gids)):
                with open(f"{process}/{name}", "wb", buffering=0) as file:  # the kernel takes one write
                    file.write("".join(f"{inside} {outside} {length}\n" for inside, outside, length in extents).encode())
        except OSError as error:
            raise MountError(f"the kernel refuses the id mapping: {error.strerror}", errno=error.errno or 0) from error
        yield namespace


class MappedLowers:
    """See the module's text; ``root`` is the snapshotter's. Methods block: they are called in one thread, by turns."""

    def __init__(self, root: str) -> None:
        self.directory = os.path.join(root, "i")

    def paths(self, snapshot_id: int, count: int) -> list[str]:
        """Where the ``count`` directories below a snapshot are, or will be, mounted; the top first."""
        return [f"{self.directory}/{snapshot_id}/{number}" for number in range(count)]

    def attach(self, snapshot_id: int, lowers: Sequence[str], mapping: IdMapping) -> None:
        """Mount each of ``lowers`` with its ids mapped, but for those that are mounted as they are now.

        Raises :class:`MountError`.
        """
        pairs = zip(lowers, self.paths(snapshot_id, len(lowers)), strict=True)
        missing = [(lower, target) for lower, target in pairs if not _same(lower, target)]
        if not missing:
            return
        with user_namespace(mapping) as namespace:
            for lower, target in missing:
                os.makedirs(target, mode=0o711, exist_ok=True)
                mounts.detach(target)  # of a layer that was mounted anew since
                try:
                    mapped = mounts.open_mapped(lower, namespace)
                except MountError as error:
                    kind = mounts.filesystem_at(lower)
                    text = f"ids cannot be mapped on {kind}: {error.message}"
                    raise MountError(text, errno=error.errno, hint=_NOT_POSSIBLE) from error
                with mapped:
                    mapped.attach(target)

    def detach(self, snapshot_ids: Collection[int]) -> None:
        """Take away what was mounted for these snapshots; nothing there is no error, what cannot go is logged."""
        for number in snapshot_ids:
            home = f"{self.directory}/{number}"
            try:
                names = os.listdir(home)
            except FileNotFoundError:
                continue
            try:
                for name in names:
                    mounts.detach(f"{home}/{name}")
                    os.rmdir(f"{home}/{name}")
                os.rmdir(home)
            except (OSError, MountError) as error:
                log.error("cannot clear id-mapped mounts: %s", error, extra={"path": home})

    def recover(self, known: Collection[int]) -> None:
        """Take away what a former process left for snapshots that are not ``known``."""
        try:
            names = os.listdir(self.directory)
        except FileNotFoundError:
            return
        self.detach([int(name) for name in names if name.isdigit() and int(name) not in known])


def _same(lower: str, target: str) -> bool:
    """True where ``target`` shows the directory ``lower``."""
    try:
        there = os.stat(target)
    except FileNotFoundError:
        return False
    here = os.stat(lower)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def probe(directory: str) -> None:
    """Raises :class:`MountError` where this kernel does not map ids on the filesystem of ``directory``. Needs root."""
    with user_namespace(IdMapping(((0, 1, 1),), ((0, 1, 1),))) as namespace, mounts.open_mapped(directory, namespace):
        pass
