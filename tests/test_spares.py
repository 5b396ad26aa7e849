"""Directories made ahead."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from weenv.plugin.snapshotter.spares import make_directory


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    """Another thread may have it changed for a moment, while it binds a socket."""
    home = tmp_path / "1"
    before = os.umask(0o177)
    try:
        make_directory(str(home))
    finally:
        os.umask(before)
    assert [stat.S_IMODE(os.stat(path).st_mode) for path in (home, home / "fs", home / "work")] == [0o700, 0o755, 0o711]
