"""docs/logs.md says what the daemons log, and machines can tell the lines apart by what stays the same."""

from __future__ import annotations

import json
import logging
import runpy
from pathlib import Path
from typing import Any

import pytest

from weenv.core.log import JsonFormatter, event_name

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def made() -> dict[str, Any]:
    """docs/make_logs.py."""
    return runpy.run_path(str(DOCS / "make_logs.py"))


def test_the_page_is_what_the_code_says(made: dict[str, Any]) -> None:
    assert (DOCS / "logs.md").read_text() == made["page"](), "run .venv/bin/python docs/make_logs.py"


def test_every_field_is_explained(made: dict[str, Any]) -> None:
    used = {field for event in made["events"]() for field in event.fields}
    assert used <= set(made["KEYS"]), "add them to KEYS in docs/make_logs.py"
    assert {"layer", "reason", "hint", "error", "image", "bytes"} <= used, "the code is really looked at"


def test_no_field_hides_what_is_always_there(made: dict[str, Any]) -> None:
    always = {"time", "level", "logger", "event", "message", "traceback"}
    assert not always & {field for event in made["events"]() for field in event.fields}


def line(message: str, *args: object, **fields: object) -> dict[str, Any]:
    """A line as a machine gets it."""
    always = {"name": "weenv.x", "levelno": 30, "levelname": "WARNING", "msg": message, "args": args}
    record = logging.makeLogRecord({**always, **fields})
    text = JsonFormatter().format(record)
    assert "\n" not in text
    return dict(json.loads(text))


def test_a_line_has_a_name_that_does_not_depend_on_what_it_is_about() -> None:
    one, two = line("image is not served lazily: %s", "a\nb", reason="disk"), line("image is not served lazily: %s", "c")
    assert one["event"] == two["event"] == "image-is-not-served-lazily"
    assert (one["message"], one["reason"], one["level"]) == ("image is not served lazily: a\nb", "disk", "warning")


@pytest.mark.parametrize(
    ("template", "name"),
    [("%s failed: %s", "failed"), ("A %-5.2f b's %d", "a-b-s"), ("100 %s", "100"), ("Größe", "gr-e"), ("", "")],
)
def test_names(template: str, name: str) -> None:
    assert event_name(template) == name
    assert event_name(template, "weenv.plugin.x") == (name or "x")


def test_fields_take_the_place_of_nothing() -> None:
    found = line("x", event="faked", time="faked", level="faked", logger="faked")
    assert (found["event"], found["level"], found["logger"]) == ("x", "warning", "weenv.x")
    assert isinstance(found["time"], float)


def test_what_is_no_json_is_written_as_text() -> None:
    assert line("x", layer=b"\xff", reasons={1})["layer"] == "b'\\xff'"
