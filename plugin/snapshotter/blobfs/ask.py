"""Asking the running blobfs over its control socket (control.py), from commands that should not load what the server does."""

from __future__ import annotations

import json
from typing import Any

from weenv.core.errors import InvalidRequest
from weenv.core.unixsocket import connected


def ask(path: str, request: dict[str, Any], *, patience: float = 5.0) -> dict[str, Any] | None:
    """What the running blobfs answers, or None where none does. Raises :class:`InvalidRequest` for what it refuses."""
    try:
        with connected(path, patience) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
        answer = json.loads(b"".join(parts))
    except (OSError, ValueError):
        return None
    if not isinstance(answer, dict):
        return None
    if "error" in answer:
        raise InvalidRequest(str(answer["error"])[:1000], hint=str(answer.get("hint", ""))[:1000])
    return answer
