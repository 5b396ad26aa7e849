"""A kernel that cannot mount EROFS from files, Debian 12's 6.1: the FUSE plane is chosen there by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weenv_testkit import kernels, tools

pytestmark = [
    pytest.mark.soak,  # an emulated machine: minutes
    pytest.mark.skipif(not kernels.supported(), reason="these kernels are for x86-64"),
]

SCRIPT = """
cd "$CLONE"
printf '[snapshotter]\nroot = "/var/tmp/weenv"\n' > /tmp/weenv.toml  # on a disk, as on a node
"$WEENV" doctor --config /tmp/weenv.toml --json > /tmp/doctor.json
tr -d '\\n' < /tmp/doctor.json; echo
"""


def test_doctor_chooses_the_fuse_plane_on_linux_6_1() -> None:
    environment = {"CLONE": str(Path(__file__).parents[1]), "WEENV": tools.weenv()[0]}
    done = kernels.run(kernels.LINUX_6_1, SCRIPT, timeout=600, disk=512, environment=environment)
    findings = {row["name"]: row for row in json.loads(next(line for line in done.output.splitlines() if line[:1] == "["))}
    assert findings["plane"]["state"] == "warn"
    assert findings["plane"]["seen"].startswith("fuse: this kernel mounts EROFS from block devices only"), findings["plane"]
    assert "6.12" in findings["plane"]["remedy"]
