"""For all tests: which process they run in, and what one does to that process's logging is undone before the next."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With ``-n 2 --dist loadgroup``: tests with real parts are one group, because they measure and count what is the whole
    machine's, but for those in a guest; each file of the others is one. The largest group is handed out first, so one process
    does nothing else.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    for item in items:
        real = "integration" in item.path.parts and item.get_closest_marker("guest") is None
        item.add_marker(pytest.mark.xdist_group("integration" if real else item.path.stem))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of code alone that run beside tests with real parts let these have the processor."""
    if "PYTEST_XDIST_WORKER" in os.environ and os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0 if "integration" in item.path.parts else 5)


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
