"""Which plane is chosen by what was found; integration/test_doctor.py has the machine find it."""

from __future__ import annotations

import errno

import pytest

from weenv.core.errors import ConfigError, MountError
from weenv.plugin.snapshotter.config import SnapshotterConfig
from weenv.plugin.snapshotter.planes.choose import decide

OLD = MountError("this kernel mounts EROFS from block devices only", errno=errno.ENOTBLK, hint="Linux 6.12 is needed")
BARE = MountError("pyfuse3 is not installed", hint="install pyfuse3")


@pytest.mark.parametrize(
    ("setting", "refused", "unserved", "name", "error"),
    [
        ("auto", None, None, "erofs", None),
        ("auto", OLD, None, "fuse", None),
        ("fuse", None, None, "fuse", None),
        ("fuse", None, BARE, "fuse", BARE),
        ("erofs", OLD, None, "erofs", OLD),
        ("erofs", None, None, "erofs", None),
    ],
)
def test_the_choice(
    setting: str, refused: MountError | None, unserved: MountError | None, name: str, error: MountError | None
) -> None:
    found = decide(setting, refused, unserved)
    assert (found.name, found.error) == (name, error)
    assert found.why
    assert ("block devices" in found.why and "6.12" in found.better) == (setting == "auto" and name == "fuse")


def test_a_machine_that_can_neither_is_told_both_ways_out() -> None:
    found = decide("auto", OLD, BARE)
    assert found.error is not None
    assert "block devices" in str(found.error) and "pyfuse3" in str(found.error)
    assert "6.12" in found.error.hint and "install pyfuse3" in found.error.hint


def test_only_known_planes_are_taken() -> None:
    assert SnapshotterConfig().plane == "auto"
    assert SnapshotterConfig(plane="fuse").plane == "fuse"
    with pytest.raises(ConfigError, match="auto, erofs or fuse"):
        SnapshotterConfig(plane="EROFS")
