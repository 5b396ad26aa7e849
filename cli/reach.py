"""How a command reaches registries: ``--config`` and ``--plain-http``, and the settings that they make."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from weenv.core.settings import DEFAULT_CONFIG, read_tables

if TYPE_CHECKING:
    from weenv.registry.config import RegistryConfig


@dataclass(frozen=True, slots=True)
class Reach:
    """What the command line said: the configuration's path, and hosts to be spoken to over plain HTTP."""

    config_path: str = DEFAULT_CONFIG
    plain_http: tuple[str, ...] = ()

    def tables(self) -> dict[str, Any]:
        """The configuration's tables. Raises ConfigError."""
        return read_tables(self.config_path)

    def registry(self) -> RegistryConfig:
        """The ``[registry]`` table, with the hosts of the command line. Raises ConfigError."""
        import dataclasses

        from weenv.plugin.snapshotter.config import registry_config

        config = registry_config(self.tables())
        return dataclasses.replace(config, plain_http=config.plain_http | frozenset(self.plain_http))


def reaching(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command both options, and their values as its argument ``reach``."""

    @click.option("--config", "config_path", default=DEFAULT_CONFIG, show_default=True, help="WeEnv's configuration.")
    @click.option("--plain-http", multiple=True, metavar="HOST", help="Speak HTTP to this registry (loopback: always).")
    @functools.wraps(command)
    def wrapped(*, config_path: str, plain_http: tuple[str, ...], **rest: Any) -> None:
        command(**rest, reach=Reach(config_path, plain_http))

    return wrapped
