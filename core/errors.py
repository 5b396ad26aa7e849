"""The one error tree of the project.

Every error that a user or an operator can cause derives from :class:`WeenvError`; its text is one line that says what is
wrong, and ``hint`` (optional, one line) says what to do. Each seam translates the tree once: the command line to exit
codes (1: the user's or the environment's fault; 2: usage), the snapshotter to gRPC status codes, blobfs to errno values.

::

    WeenvError
    ├── ConfigError                 a configuration file or flag cannot be used
    ├── BadReference                an image reference or digest cannot be parsed
    ├── FormatError                 bytes from outside are malformed; ``member`` names the entry at fault
    │   ├── VerificationError       bytes do not have the digest that the chain of trust promises
    │   ├── UnsupportedError        well formed, but something that this version does not represent
    │   └── LimitError              well formed, but beyond a configured limit
    ├── SourceError                 bytes could not be had from a registry, mirror or directory
    │   ├── NotFoundInSource        the source answered that it does not hold them
    │   ├── UnauthorizedError       the source refused the credentials (401, 403)
    │   └── UnavailableError        no usable answer in time; ``retry_after`` seconds when the source said so
    ├── SnapshotError               a snapshots.v1 request cannot be carried out
    │   ├── SnapshotNotFound
    │   ├── SnapshotExists
    │   ├── SnapshotInUse           failed precondition: has children, or is not committed / not active
    │   └── InvalidRequest
    ├── MountError                  the kernel refused a mount; ``errno`` holds its answer
    ├── StorageError                the local disk is full or broken; ``errno`` holds the answer
    └── ForkedError                 the process was forked from one that had used what it uses now

What only one part of the code raises is defined there, below one of these::

    WeenvError
    ├── ContainerdError             plugin.containerd.client: containerd's answer, with its status ``code``
    ├── ArgumentError               environment.arguments: an argument of the Python API
    ├── NoSuchEnvironment, StartError    environment.lifecycle
    ├── FileError, UnknownUser      environment.rootfs, environment.users
    ├── NotLazyError                environment.compose
    ├── QuickError                  environment.quickclient: a gRPC answer
    ├── Refused                     environment.gateway.protocol: an HTTP answer; plugin.nri.actuate: limits that cannot be had
    ├── NotAdmitted                 plugin.nri.admission: no room on the node
    ├── NoDaemon, Denied, BadRequest     plugin.nri.ask, plugin.nri.control: the socket of elastic provisioning
    ├── EnvGone, CgroupGone, CgroupUnreadable    plugin.nri.actuate, plugin.nri.cgroups
    ├── RuntimeRefused, Lost, NriUnavailable, CreationRefused    plugin.nri.nriconnection, nriplugin, nrihandler
    └── UnitFailed                  systemd.install.manager
    ConfigError
    └── Busy                        plugin.snapshotter.blobfs.holder: another server is attached
    FormatError
    ├── PlanError                   environment.yamlnodes: a fault of a plan, with its line
    ├── ConflictError, TooLong      environment.merge, environment.spec
    ├── MutationError, PatchError, PathError    environment.mutate
    └── BadLayer                    plugin.snapshotter.blobfs.layers: a stream without its diffID
    SourceError
    └── RangesIgnored               registry.ranged
    StorageError
    └── DamagedTail                 plugin.snapshotter.blobfs.layers
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class WeenvError(Exception):
    """Base of every expected error. ``str(e)`` is one line; ``e.hint`` says what to do, or is empty."""

    exit_code = 1
    also: tuple[WeenvError, ...] = ()
    """Faults that were found with this one, each of which would have been raised alone."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(WeenvError):
    """A configuration file, flag or environment value cannot be used."""


class BadReference(WeenvError):
    """An image reference, digest or location cannot be parsed."""


class FormatError(WeenvError):
    """Bytes from outside are malformed. ``member`` names the archive member or structure at fault, or is empty."""

    def __init__(self, message: str, *, member: str = "", hint: str = "") -> None:
        super().__init__(f"{member}: {message}" if member else message, hint=hint)
        self.member = member


class VerificationError(FormatError):
    """Bytes do not have the digest or size that the chain of trust promises."""


class UnsupportedError(FormatError):
    """Well formed, but something that this version does not represent."""


class LimitError(FormatError):
    """Well formed, but beyond a configured limit."""


class SourceError(WeenvError):
    """Bytes could not be had from a registry, mirror or directory."""


class NotFoundInSource(SourceError):
    """The source answered that it does not hold what was asked for."""


class UnauthorizedError(SourceError):
    """The source refused the credentials (401 or 403)."""


class UnavailableError(SourceError):
    """No usable answer in time. ``retry_after`` is in seconds, or None."""

    def __init__(self, message: str, *, retry_after: float | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class SnapshotError(WeenvError):
    """A snapshots.v1 request cannot be carried out."""


class SnapshotNotFound(SnapshotError):
    """No snapshot has that key."""


class SnapshotExists(SnapshotError):
    """A snapshot has that key already."""


class SnapshotInUse(SnapshotError):
    """The snapshot has children, or is not in the state that the request needs."""


class InvalidRequest(SnapshotError):
    """The request itself makes no sense."""


class ForkedError(WeenvError):
    """This process was forked from one that had used what it uses now."""


class MountError(WeenvError):
    """The kernel refused a mount or an unmount; ``errno`` is its answer."""

    def __init__(self, message: str, *, errno: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


class StorageError(WeenvError):
    """The local disk is full or broken; ``errno`` is the kernel's answer."""

    def __init__(self, message: str, *, errno: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno = errno


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """What is malformed within the block says in which file or image, where it does not."""
    try:
        yield
    except FormatError as error:
        if name in error.message:
            raise
        raise type(error)(error.message, member=name, hint=error.hint) from error
