"""WeEnv: lazy, composable, elastic software environments on containerd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weenv.core.errors import WeenvError
    from weenv.environment.api import AsyncEnvironment, Environment
    from weenv.environment.exec import ExecResult
    from weenv.environment.node import load as load_config

__version__ = "0.1.0"

__all__ = ["AsyncEnvironment", "Environment", "ExecResult", "WeenvError", "__version__", "load_config"]

_LAZY = {
    "AsyncEnvironment": ("weenv.environment.api", "AsyncEnvironment"),
    "Environment": ("weenv.environment.api", "Environment"),
    "ExecResult": ("weenv.environment.exec", "ExecResult"),
    "WeenvError": ("weenv.core.errors", "WeenvError"),
    "load_config": ("weenv.environment.node", "load"),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for; the command line and the daemons need none of it."""
    if name not in _LAZY:
        raise AttributeError(f"module 'weenv' has no attribute {name!r}")
    from importlib import import_module

    module, attribute = _LAZY[name]
    return getattr(import_module(module), attribute)
