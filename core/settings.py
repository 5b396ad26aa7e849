"""The configuration file: TOML tables into frozen dataclasses, every fault named by the setting it is in.

A dataclass is one table; a field's type is that of its default. Fields may be ``str``, ``bool``, ``int``, ``float``, a
``tuple`` or ``frozenset`` of strings, or another dataclass (a table within the table).
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from weenv.core.errors import ConfigError
from weenv.core.regular import given, read_file

T = TypeVar("T")

DEFAULT_CONFIG = "/etc/weenv/config.toml"
_MAX_CONFIG = 1 << 20
"""Bytes of the file; the longest that anybody needs has a few thousand."""
TABLES = frozenset({"snapshotter", "blobfs", "registry", "run", "compose", "policy", "gateway", "elastic", "nri"})
"""Every table that a part of the project reads: a misspelt one must not silently mean its defaults."""


class Table(dict[str, Any]):
    """A table of a configuration file that knows which (``source``): errors name it."""

    source = ""


def read_tables(path: str = DEFAULT_CONFIG) -> dict[str, Any]:
    """The file's tables; none where the default file does not exist. Raises :class:`ConfigError`."""
    try:
        data = read_file(path, _MAX_CONFIG, given)
    except FileNotFoundError as error:
        if path != DEFAULT_CONFIG:
            raise ConfigError(f"no such file: {path}", hint="write it, or leave --config out") from error
        return {}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    import tomllib  # where there is no file, importing what reads it would be the most of a command's start

    try:
        tables: dict[str, Any] = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, or a number too long, too
        raise ConfigError(f"cannot read {path}: {error}") from error
    for name in tables:
        if name not in TABLES and not isinstance(tables[name], dict):
            hint = f"settings are in tables: {', '.join(f'[{table}]' for table in sorted(TABLES))}"
            raise ConfigError(f"the setting {name} in {path} is in no table", hint=hint)
        if name not in TABLES:
            raise ConfigError(f"unknown table [{name}] in {path}", hint=f"known: {', '.join(sorted(TABLES))}")
        if isinstance(tables[name], dict):
            tables[name] = _named(tables[name], path)
    return tables


def _named(table: dict[str, Any], source: str) -> Table:
    made = Table({name: _named(value, source) if isinstance(value, dict) else value for name, value in table.items()})
    made.source = source
    return made


def build(cls: type[T], raw: object, where: str, *, skip: frozenset[str] = frozenset(), **overrides: Any) -> T:
    """Make a ``cls`` from the table ``raw``, called ``where`` in messages; ``overrides`` that are not None win.

    ``skip`` names fields that no file may set. Raises :class:`ConfigError`.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"[{where}] must be a table")
    defaults = cls()
    known = {item.name: getattr(defaults, item.name) for item in dataclasses.fields(defaults)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, value in raw.items():
        if name not in known or name in skip:
            place = f" in {raw.source}" if isinstance(raw, Table) else ""
            raise ConfigError(f"unknown setting {where}.{name}{place}", hint=f"known: {', '.join(sorted(set(known) - skip))}")
        default = known[name]
        if dataclasses.is_dataclass(default) and not isinstance(default, type):
            values[name] = build(type(default), value, f"{where}.{name}")
        else:
            values[name] = _convert(f"{where}.{name}", value, default)
    values.update({name: value for name, value in overrides.items() if value is not None})
    return cls(**values)


def check_ranges(config: object, where: str, **bounds: tuple[float, float]) -> None:
    """Raises :class:`ConfigError` for the first field named in ``bounds`` that is outside its (lowest, highest) value."""
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        if not low <= value <= high:  # nor is NaN
            least, most = (str(number) if isinstance(number, int) else f"{number:g}" for number in (low, high))
            raise ConfigError(f"{where}.{name} must be between {least} and {most}, not {value!r}")


def _convert(where: str, value: object, default: object) -> Any:
    """``value`` as the type of ``default``."""
    if isinstance(default, tuple | frozenset):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{where} must be a list of strings, not {value!r}")
        return type(default)(value)
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        raise ConfigError(f"{where} must be a {type(default).__name__}, not {value!r}")
    return value
