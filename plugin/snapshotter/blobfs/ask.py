"""Asking the running blobfs over its control socket (control.py), from commands that should not load what the server does."""

from __future__ import annotations

import json
from typing import Any

from weenv.core.errors import InvalidRequest, UnavailableError
from weenv.core.unixsocket import NOBODY, connected


def ask(path: str, request: dict[str, Any], *, patience: float = 5.0) -> dict[str, Any] | None:
    """What the running blobfs answers, or None where none runs.

    Raises :class:`InvalidRequest` for what it refuses, :class:`UnavailableError` where it runs and says nothing for
    ``patience`` seconds: what takes longer has signs of life (control.py).
    """
    try:
        with connected(path, patience) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            parts = []
            while part := connection.recv(1 << 16):
                parts.append(part)
        answer = json.loads(b"".join(parts))
    except NOBODY:
        return None
    except PermissionError as error:
        raise UnavailableError(f"blobfs cannot be asked at {path}: {error.strerror}", hint="run it as root") from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: it has ended amid its answer
        raise _mute(path) from error
    if not isinstance(answer, dict):
        raise _mute(path)
    if "error" in answer:
        raise InvalidRequest(str(answer["error"])[:1000], hint=str(answer.get("hint", ""))[:1000])
    return answer


def _mute(path: str) -> UnavailableError:
    hint = "is it stopped, starting anew, or the machine too busy? try again; weenv doctor says more"
    return UnavailableError(f"blobfs listens at {path} and does not answer", hint=hint)
