"""The control socket of blobfs: one JSON line in, one JSON line out, then it is closed.

::

    {"op": "status"}                          what ``weenv status`` shows; also for who says nothing for a moment
    {"op": "cache"}                           {"layers": [...], "cache": {...}} for ``weenv cache ls``
    {"op": "prune", "layers": ["0a1b"], "before": 1.7e9, "to": 1048576, "dry_run": false}
                                              what ``weenv cache prune`` does; all of these are optional
    {"op": "start", "layers": [digest]}       a container of an image with these layers begins: fetch what their profiles say
    {"op": "forget", "layers": [digest]}      drop what was recorded of these layers' reads

While an answer takes its time, there is a space every second before it: a sign of life, which is nothing to JSON.
An answer that has ``error`` (and perhaps ``hint``) says why nothing was done. The socket's mode is 0600.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from typing import Any, Final

from weenv.core.errors import InvalidRequest, WeenvError
from weenv.plugin.snapshotter.blobfs.evictor import Evictor
from weenv.plugin.snapshotter.blobfs.profiles import Profiles
from weenv.plugin.snapshotter.cache.keeper import Which

_PATIENCE: Final = 0.3
"""Seconds that a client has to say what it wants; one that says nothing gets the status."""
SIGN: Final = 1.0
"""Seconds between signs of life."""
LINE_MAX: Final = 1 << 17
"""Bytes of a request at most."""
_PREFIXES: Final = 1000


def prune_request(raw: dict[str, Any]) -> tuple[Which, int | None, bool]:
    """What a prune asks for: which layers and frames, the size to stop at, and whether it is a dry run.

    Raises :class:`InvalidRequest`.
    """
    prefixes, before, to, dry = (raw.get(name) for name in ("layers", "before", "to", "dry_run"))
    prefixes = prefixes if prefixes is not None else []
    if not isinstance(prefixes, list) or len(prefixes) > _PREFIXES:
        raise InvalidRequest("layers must be a list of digests or their beginnings")
    for prefix in prefixes:
        if not isinstance(prefix, str) or not 1 <= len(prefix) <= 64 or set(prefix) - set("0123456789abcdef"):
            raise InvalidRequest(f"not the beginning of a layer's digest: {str(prefix)[:80]!r}")
    number = isinstance(before, int | float) and not isinstance(before, bool) and 0 <= before < 1e12
    if before is not None and not number:
        raise InvalidRequest("before must be a time in seconds since 1970")
    if to is not None and (type(to) is not int or not 0 <= to < 1 << 62):
        raise InvalidRequest("to must be a number of bytes")
    return Which(tuple(prefixes), float(before or 0.0)), to, dry is True


class Control:
    """Answers requests. ``status`` gives the report of the whole server."""

    def __init__(self, evictor: Evictor, status: Callable[[], dict[str, Any]], profiles: Profiles) -> None:
        self._evictor = evictor
        self._profiles = profiles
        self._status = status

    async def answer(self, raw: object) -> dict[str, Any]:
        """The answer to one request, which anybody may have made up. Raises nothing that a client can cause."""
        try:
            if not isinstance(raw, dict):
                raise InvalidRequest("a request is a JSON object")
            op = raw.get("op")
            if op == "status":
                return self._status()
            if op == "cache":
                rows = await asyncio.to_thread(self._evictor.keeper.rows)
                return {"layers": rows, "cache": self._evictor.status()}
            if op == "prune":
                which, to, dry = prune_request(raw)
                return await self._evictor.prune(which, to, dry=dry)
            if op == "start":
                return await self._profiles.begin(raw.get("layers"))
            if op == "forget":
                return await self._profiles.forget(raw.get("layers"))
            raise InvalidRequest(f"unknown request {str(op)[:80]!r}")
        except (WeenvError, OSError) as error:
            return {"error": str(error), "hint": error.hint if isinstance(error, WeenvError) else ""}

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection; a callback for :func:`asyncio.start_unix_server`, with ``limit`` LINE_MAX."""
        try:
            try:
                line = await asyncio.wait_for(reader.readline(), _PATIENCE)
            except TimeoutError:
                line = b""
            except ValueError:
                line = b"null"  # longer than any request
            try:
                raw = json.loads(line) if line.strip() else {"op": "status"}
            except (ValueError, RecursionError):
                raw = None
            work = asyncio.ensure_future(self.answer(raw))
            while not (await asyncio.wait({work}, timeout=SIGN))[0]:
                if not writer.is_closing():
                    writer.write(b" ")
            writer.write(json.dumps(work.result()).encode() + b"\n")
            await writer.drain()
        except OSError:
            return  # who asked is gone
        finally:
            writer.close()
            with contextlib.suppress(OSError):  # who asked is gone
                await writer.wait_closed()
