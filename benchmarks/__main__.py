"""``make bench``: ``python -m benchmarks [--only PART] [--quick] [--json FILE] [--out DIR]`` from the project's directory."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from weenv_bench.main import main

if __name__ == "__main__":
    sys.exit(main())
