"""What programs give to :mod:`weenv.environment.api`, checked before anything is made of it.

Python takes a text for a list of its letters and any object for a number, and what comes of that is said much later, if
at all. Every function here takes the argument's name, which its error begins with, and raises :class:`ArgumentError`.
"""

from __future__ import annotations

import io
import math
import operator
import os
from collections.abc import Iterable, Mapping
from typing import IO, Any

from weenv.core.errors import FormatError, WeenvError
from weenv.environment.requested import check_limits, size, sources
from weenv.environment.spec import Bind, Limits, parse_bind

MAX_CORES = 1e5
"""Most cores that can be asked for, as weenv.plugin.nri.config has it."""
MAX_NUMBER = 1 << 62
"""Most bytes or processes: what fits the kernel's and the runtime's signed 64 bits with room to spare."""


class ArgumentError(WeenvError):
    """A function was called with an argument of another kind than it takes."""


def _wrong(name: str, value: object, meant: str, hint: str = "") -> ArgumentError:
    return ArgumentError(f"{name} must be {meant}, not {repr(value)[:80]}", hint=hint)


def text(name: str, value: Any) -> str:
    """A text, or a path that is one, for a runtime's specification: UTF-8 without a zero byte."""
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(found, str):
        raise _wrong(name, value, "a text")
    if "\0" in found:
        raise ArgumentError(f"{name} has a zero byte: {found[:80]!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in found):  # runtimes, reading JSON, would put others in their place
        raise ArgumentError(f"{name} is not UTF-8: {found[:80]!r}")
    return found


def path(name: str, value: Any) -> str:
    """A file's name, as a text or a path; bytes that are not UTF-8 are in it as :func:`os.fsdecode` has them."""
    found = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        if isinstance(found, str) and b"\0" not in os.fsencode(found):
            return found
    except UnicodeEncodeError:
        pass
    raise _wrong(name, value, "a path")


def words(name: str, value: Any) -> tuple[str, ...]:
    """A list of texts."""
    if isinstance(value, str | bytes | bytearray | memoryview | Mapping) or not isinstance(value, Iterable):
        hint = f'write ["sh", "-c", {value!r:.60}] to have a shell take it apart' if isinstance(value, str) else ""
        raise _wrong(name, value, 'a list of words such as ["ls", "-l"]', hint)
    return tuple(text(f"{name}[{number}]", item) for number, item in enumerate(value))


def arguments(name: str, value: Any) -> tuple[str, ...]:
    """A command: a list of words that has at least one."""
    found = words(name, value)
    if not found or not found[0]:
        raise _wrong(name, value, "a list that begins with a program")
    return found


def variables(name: str, value: Any) -> dict[str, str]:
    """Names and values, both texts; None: none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(name, value, 'a mapping such as {"LANG": "C"}')
    return {text(f"a name in {name}", key): text(f"{name}[{key!r}]", item) for key, item in value.items()}


def data(name: str, value: Any) -> bytes:
    """Bytes, or a text, which is encoded as UTF-8."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError as error:
            raise _wrong(name, value, "bytes, or a text that UTF-8 can encode") from error
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _wrong(name, value, "bytes")
    return bytes(value)


def archive(name: str, value: Any) -> IO[bytes]:
    """Bytes, or a file that is read from where it stands."""
    if isinstance(value, bytes | bytearray | memoryview):
        return io.BytesIO(value)
    if isinstance(value, io.TextIOBase) or not callable(getattr(value, "read", None)):
        raise _wrong(name, value, "the bytes of a tar archive, or a file opened for reading in binary mode")
    found: IO[bytes] = value
    return found


def number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """A number from ``low`` to ``high``."""
    meant = f"a number from {low:g} to {high:g}" if low > -math.inf else "a number"
    try:
        found = math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not low <= found <= high:  # which no NaN is
        raise _wrong(name, value, meant)
    return found


def whole(name: str, value: Any, high: int = MAX_NUMBER) -> int:
    """A whole number from 0 to ``high``."""
    try:
        # 2e9 and the like are whole numbers too
        found = int(value) if isinstance(value, float) and value.is_integer() else operator.index(value)
    except TypeError:
        found = -1
    if not 0 <= found <= high or isinstance(value, bool):
        raise _wrong(name, value, "a whole number" if high == MAX_NUMBER else f"a whole number from 0 to {high}")
    return found


def amount(name: str, value: Any) -> int:
    """Bytes: a whole number, or a text such as ``512m`` as the command line takes it."""
    if isinstance(value, str):
        try:
            return whole(name, size(value))
        except FormatError as error:
            raise _wrong(name, value, 'bytes, or a text such as "512m"') from error
    return whole(name, value)


def limits(cpus: Any, memory: Any, pids: Any) -> Limits:
    """The limits of those names."""
    made = Limits(number("cpus", cpus, 0, MAX_CORES), amount("memory", memory), whole("pids", pids))
    try:
        return check_limits(made)
    except FormatError as error:
        raise ArgumentError(error.message, hint=error.hint) from error


def binds(name: str, value: Any) -> tuple[Bind, ...]:
    """Bind mounts of sources that are there; a WeenvError where one is not."""
    return sources(parse_bind(item) for item in words(name, value))


def network(name: str, value: Any) -> str:
    """``none`` or ``host``; empty for None."""
    if value not in (None, "", "none", "host"):
        raise _wrong(name, value, '"none" or "host"')
    return value or ""


def mode(name: str, value: Any) -> int | None:
    """Permission bits; None: none."""
    return None if value is None else whole(name, value, 0o7777)


def owner(name: str, value: Any) -> tuple[int, int] | None:
    """Numbers of a user and a group; None: none."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise _wrong(name, value, "two numbers, of a user and a group")
    return whole(f"{name}[0]", value[0], 2**32 - 2), whole(f"{name}[1]", value[1], 2**32 - 2)
