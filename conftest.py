"""For all tests: what one test does to the process's logging is undone before the next."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_logging() -> Iterator[None]:
    """Level and handlers of the root logger stay as they were.

    More than tidiness: at level DEBUG, grpcio logs a server in the server's own destructor; pytest keeps the record and
    with it a pointer to freed memory, and the run ends in a segmentation fault some tests later.
    """
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in list(root.handlers):
        if handler not in handlers and not type(handler).__module__.startswith("_pytest"):
            root.removeHandler(handler)
    for handler in handlers:
        if handler not in root.handlers and not type(handler).__module__.startswith("_pytest"):
            root.addHandler(handler)
