"""Structured logs: one line per event, ``key=value`` pairs for people or one JSON object for machines."""

from __future__ import annotations

import json
import logging
import re
import sys
import time

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_FILLED_IN = re.compile(r"%[-#0 +]*[0-9.]*[a-zA-Z]")
_WORD = re.compile(r"[a-z0-9]+")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


def printable(text: str) -> str:
    """``text`` without control characters: names come from registries, and must not drive a terminal or fake a line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


class TextFormatter(logging.Formatter):
    """``2026-11-29T16:44:07Z WARNING weenv.x: message key=value``."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = f"{stamp} {record.levelname} {record.name}: {record.getMessage()}"
        for key, value in _fields(record).items():
            text = str(value)
            line += f" {key}={json.dumps(text) if not text or any(c in text for c in ' =' + chr(34)) else text}"
        line = printable(line.replace("\n", "\\n").replace("\r", "\\r"))
        if record.exc_info and record.levelno <= logging.DEBUG:
            line += "\n" + "\n".join(map(printable, self.formatException(record.exc_info).split("\n")))
        return line


def event_name(template: str, logger: str = "") -> str:
    """A log call's name, for machines to tell it by: its text without what is filled in, ``image-is-not-served-lazily``.

    Where nothing else is in it, the last part of its ``logger``.
    """
    return "-".join(_WORD.findall(_FILLED_IN.sub(" ", template).lower())) or logger.rpartition(".")[2]


class JsonFormatter(logging.Formatter):
    """One JSON object per line; fields given as ``extra=`` become keys (docs/logs.md), but take the place of none of ours."""

    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, object] = {
            **_fields(record),
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event_name(str(record.msg), record.name),
            "message": record.getMessage(),
        }
        if record.exc_info:
            out["traceback"] = self.formatException(record.exc_info)
        return json.dumps(out, default=str)


def configure(level: str = "info", style: str = "text") -> None:
    """Send the log of the process to stderr. ``style`` is ``text`` or ``json``; ``level`` a logging level name."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
