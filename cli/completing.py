"""What shells complete beside commands and options: files, and the names of environments. Imported for that alone."""

from __future__ import annotations

import os
from collections.abc import Callable

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from weenv.core.errors import WeenvError
from weenv.core.settings import DEFAULT_CONFIG

_FILES = frozenset({"PLAN", "PLAN|IMAGE", "FILE|REF", "FILE|REF@DIGEST", "TRACES", "FILE", "DIR|TAR|-", "NAME|PATH", "SOCK"})
"""Metavars of what is or may be a file's name."""
_PATHS = frozenset({"config_path", "containerd_config", "docker_config", "output", "prefix", "socket"})
"""Parameters that are, and have no metavar."""
_ENVIRONMENTS = frozenset({"environment", "environments"})

_Complete = Callable[[click.Context, str], list[CompletionItem]]


class _Completed(StringParamType):
    """A text with completion."""

    def __init__(self, complete: _Complete) -> None:
        self._complete = complete

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """What may come."""
        return self._complete(ctx, incomplete)


def _files(_ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]  # the shell does it


def _directories(_ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="dir")]


def _environments(ctx: click.Context, incomplete: str) -> list[CompletionItem]:
    """Those that have a directory on this node: asking containerd would take half a second."""
    from weenv.environment.runconfig import load

    try:
        place = load(ctx.params.get("config_path") or DEFAULT_CONFIG, namespace=ctx.params.get("namespace")).home("x")
        names = os.listdir(os.path.dirname(place))
    except (WeenvError, OSError):
        return []
    return [CompletionItem(name) for name in sorted(names) if name.startswith(incomplete)]


def _completion(param: click.Parameter) -> _Complete | None:
    metavar = param.metavar or ""
    if param.name in _ENVIRONMENTS:
        return _environments
    if metavar in _FILES or (not metavar and param.name in _PATHS):
        return _files
    return _directories if metavar == "DIR" else None


def equip(command: click.Command) -> None:
    """Give a command's texts, and those of all below it, their completion."""
    for param in command.params:
        if type(param.type) is StringParamType and (complete := _completion(param)) is not None:
            param.type = _Completed(complete)
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            below = command.get_command(click.Context(command), name)
            if below is not None:
                equip(below)
