"""Which plane this node uses: EROFS where the kernel mounts it from files, else FUSE, unless the configuration says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weenv.core.errors import MountError
from weenv.plugin.snapshotter.planes.erofs import probe_kernel
from weenv.plugin.snapshotter.planes.fuse import probe_fuse

AUTO, EROFS, FUSE = "auto", "erofs", "fuse"


@dataclass(frozen=True, slots=True)
class Choice:
    """``name`` of the plane, ``why`` in words, ``error`` where it cannot be used: then no image is lazy; ``better`` says what
    would give a faster one."""

    name: str
    why: str
    error: MountError | None = None
    better: str = ""


def choose(setting: str, directory: str) -> Choice:
    """The plane for layers kept in ``directory``, by the value of ``[snapshotter] plane``. Needs root; blocking."""
    refused = None if setting == FUSE else _failure(lambda: probe_kernel(directory))
    asked = setting == FUSE or (setting == AUTO and refused is not None)
    return decide(setting, refused, _failure(probe_fuse) if asked else None)


def decide(setting: str, refused: MountError | None, unserved: MountError | None) -> Choice:
    """The same from what was found: why the kernel mounts no EROFS from files, and why pyfuse3 cannot be used; None where
    they can, or nobody wants to know."""
    if setting == FUSE:
        return Choice(FUSE, "[snapshotter] plane says so", unserved)
    if setting == EROFS:
        return Choice(EROFS, "[snapshotter] plane says so", refused)
    if refused is None:
        return Choice(EROFS, "the kernel mounts EROFS from files")
    if unserved is None:
        return Choice(FUSE, str(refused), better=refused.hint)
    hint = f"{refused.hint}; or: {unserved.hint}"
    return Choice(EROFS, "nothing else can be used", MountError(f"{refused}; and {unserved}", errno=refused.errno, hint=hint))


def _failure(probe: Callable[[], None]) -> MountError | None:
    try:
        probe()
    except MountError as error:
        return error
    return None
