"""WeEnv: lazy, composable, elastic software environments on containerd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weenv.environment.api import AsyncEnvironment, Environment
    from weenv.environment.exec import ExecResult

__version__ = "0.1.0"

__all__ = ["AsyncEnvironment", "Environment", "ExecResult", "__version__"]

_LAZY = {
    "AsyncEnvironment": "weenv.environment.api",
    "Environment": "weenv.environment.api",
    "ExecResult": "weenv.environment.exec",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for; the command line and the daemons need none of it."""
    if name not in _LAZY:
        raise AttributeError(f"module 'weenv' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
