"""Fill the caches that the tests use: a debootstrapped Debian and the corpus of archives. Run by ``make test`` beforehand,
so that the network is not on the clock of whichever test comes first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from weenv_testkit import corpus, images, installguest, kernels, tasks
from weenv_testkit.fetch_tools import SetupError
from weenv_testkit.procs import Failed
from weenv_testkit.store import PACKAGES


def install_into() -> None:
    """What test_install boots."""
    if kernels.supported():
        kernels.system(*installguest.PACKAGES, suite=installguest.suite_to_boot())


STEPS: dict[str, Callable[[], object]] = {
    "Debian by debootstrap": lambda: images.debian_tar(PACKAGES),
    "Debian packages": corpus.debian,
    "PyPI archives": corpus.pypi,
    "npm archives": corpus.npm,
    "kernels to test under": kernels.prepare,
    "a system to install into": install_into,
    "tasks in SWE-smith's shape": lambda: tasks.load(tasks.FEW),
}


def main() -> int:
    """0, or 1 with one line on standard error."""
    for name, make in STEPS.items():
        begin = time.monotonic()
        try:
            make()
        except (Failed, SetupError) as error:
            print(f"prefetch: {name}: {str(error).splitlines()[-1]}", file=sys.stderr)
            return 1
        if time.monotonic() - begin > 1:
            print(f"prefetch: {name} took {time.monotonic() - begin:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
