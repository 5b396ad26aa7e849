"""For all tests: which process they run in, and what one does to that process's logging is undone before the next."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "gate", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not os.environ.get("WEENV_TEST_RANDOM")
)
settings.load_profile("gate")
"""No property is a race against 200 ms on a loaded machine, and of one tree the same is said each time. WEENV_TEST_RANDOM=1
looks for what nobody has seen yet."""

_NICE = os.getpriority(os.PRIO_PROCESS, 0)

GUESTS = ("test_elastic_guests.py", "test_install.py", "test_kit_kernels.py", "test_planes_old_kernel.py")
"""Those of integration/ that boot kernels of their own, and so see nothing of what else runs here."""


def work_of(nodeid: str) -> str:
    """The piece of work that a test belongs to."""
    path = nodeid.partition("::")[0]
    return "integration" if path.startswith("integration/") and os.path.basename(path) not in GUESTS else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """How the processes of ``-n 2`` share the tests: those with real parts are one piece of work, because they measure and
    count what is the whole machine's; of the others, each file is one. The largest is handed out first, so one process has
    nothing else to do, from the first of them to the last.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return work_of(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests of code alone that run beside tests with real parts let these have the processor."""
    if "PYTEST_XDIST_WORKER" in os.environ and os.geteuid() == 0:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE + (0 if item.nodeid.startswith("integration/") else 5))


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
