"""What a server has to know of the mount it takes over, in a memfd that lives as long as the ``/dev/fuse`` descriptor does.

Whoever keeps the one keeps the other: the holder, and the service manager's fd store. One JSON object a line, appended:

- ``{"node": [id, name]}``: the kernel may know the file ``name`` by this number. Written before the kernel learns of it.
- ``{"init": {...}}``: what was agreed in INIT; the last one counts.

A ``pwrite`` to a memfd is there for the next process whatever becomes of this one. A server that is killed in the middle of
one leaves part of a line, which nobody has been told of: the next server cuts it off.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any, Final

from weenv.core.errors import FormatError

_SIZE_MAX: Final = 1 << 30
"""Bytes; a node takes some 85."""


class MountState:
    """``init`` and ``nodes`` (id -> name), in memory and in the memfd ``fd``. Only the attached server writes; any thread."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.init: dict[str, Any] | None = None
        self.nodes: dict[int, str] = {}
        self._end = 0
        self._lock = threading.Lock()

    @classmethod
    def create(cls) -> MountState:
        """Of a new mount. Raises OSError."""
        return cls(os.memfd_create("weenv-blobfs-nodes", os.MFD_CLOEXEC))

    @classmethod
    def load(cls, fd: int) -> MountState:
        """What earlier servers left in ``fd``, which is the object's from now on. Raises OSError, FormatError."""
        state = cls(fd)
        size = os.fstat(fd).st_size
        if size > _SIZE_MAX:
            raise FormatError(f"the mount's state has {size} bytes")
        content = b""
        while part := os.pread(fd, size - len(content), len(content)):
            content += part
        state._end = content.rfind(b"\n") + 1
        try:
            for line in content[: state._end].splitlines():
                match json.loads(line):
                    case {"node": [int(nodeid), str(name)]}:
                        state.nodes[nodeid] = name
                    case {"init": dict(init)}:
                        state.init = init
                    case other:
                        raise FormatError(f"the mount's state has a line that says {str(other)[:100]}")
        except ValueError as error:
            raise FormatError(f"the mount's state is damaged: {error}") from error
        os.ftruncate(fd, state._end)
        return state

    def remember_node(self, nodeid: int, name: str) -> None:
        """Before the kernel learns of a node id. Raises OSError where there is no memory for it."""
        self._append({"node": [nodeid, name]})
        self.nodes[nodeid] = name

    def remember_init(self, init: dict[str, Any]) -> None:
        """What was agreed in INIT."""
        self._append({"init": init})
        self.init = init

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        with self._lock:
            done = 0
            while done < len(line):
                done += os.pwrite(self.fd, line[done:], self._end + done)
            self._end += len(line)

    def close(self) -> None:
        """Close this process's copy."""
        os.close(self.fd)
