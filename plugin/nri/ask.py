"""Asking the daemon of this node: one JSON object a line, there and back, over its socket. Blocking, and light to import.

Requests have ``op``: ``node`` (what there is and who is managed), ``admit`` (wait for room), ``release``. Answers are what is
asked for, or have ``error`` and perhaps ``hint``.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable
from typing import Any

from weenv.core.errors import WeenvError
from weenv.core.rights import remedy
from weenv.core.unixsocket import connected

MAX_LINE = 8 << 20
"""Bytes of an answer: some ten thousand environments."""


class NoDaemon(WeenvError):
    """Nobody serves this node."""


class Denied(WeenvError):
    """The daemon's answer is an error."""


class Asker:
    """One connection. What :meth:`ask` admitted with ``hold`` is given back when it is closed."""

    def __init__(self, path: str, *, timeout: float = 10.0) -> None:
        self._path = path
        try:
            self._socket = connected(path, timeout)
        except OSError as error:
            if hint := remedy(error):  # there may well be one
                raise NoDaemon(f"cannot connect to {path}: {error.strerror}", hint=hint) from error
            raise NoDaemon(
                f"nobody serves elastic provisioning at {path}: {error.strerror or error}", hint="weenv elastic serve"
            ) from error
        self._rest = b""

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def shut(self) -> None:
        """End what another thread waits for."""
        with contextlib.suppress(OSError):  # the other side has ended it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def ask(
        self, op: str, *, timeout: float = 10.0, waiting: Callable[[], object] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """One request and its answer, within ``timeout`` seconds. Raises Denied, NoDaemon.

        Where the daemon answers in that time that it will take longer, ``waiting`` is called and it is waited for.
        """
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")
            answer = self._receive()
            if answer.get("waiting") is True and waiting is not None:
                waiting()
                self._socket.settimeout(None)
                answer = self._receive()
        except OSError as error:
            raise NoDaemon(f"the daemon at {self._path} does not answer: {error.strerror or error}") from error
        if "error" in answer:
            raise Denied(str(answer["error"]), hint=str(answer.get("hint", "")))
        return answer

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            data = self._socket.recv(1 << 16)
            if not data or len(self._rest) > MAX_LINE:
                raise NoDaemon(f"the daemon at {self._path} has ended", hint="weenv elastic serve")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise NoDaemon(f"what answers at {self._path} is no daemon of ours") from error
        if not isinstance(answer, dict):
            raise NoDaemon(f"what answers at {self._path} is no daemon of ours")
        return answer
