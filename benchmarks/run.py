"""Entry point of ``make bench``: ``python benchmarks/run.py [--only ROW] [--quick] [--json FILE] [--out DIR]``."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from weenv_bench.main import main  # noqa: E402 - the package lies beside this file

if __name__ == "__main__":
    sys.exit(main())
