"""A kernel that cannot mount EROFS from files, Debian 12's 6.1: the FUSE plane is chosen there by itself, and works."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weenv_testkit import kernels, tools

pytestmark = [
    pytest.mark.soak,  # an emulated machine: minutes
    pytest.mark.skipif(not kernels.supported(), reason="these kernels are for x86-64"),
]

CHOSEN = "empty_layer or one_inode or past_the_end or whiteouts or killed_server or next_blobfs"
SCRIPT = """
cd "$CLONE"
printf '[snapshotter]\nroot = "/var/tmp/weenv"\n' > /tmp/weenv.toml  # on a disk, as on a node
"$WEENV" doctor --config /tmp/weenv.toml --json > /tmp/doctor.json
tr -d '\\n' < /tmp/doctor.json; echo
"$PYTHON" -m pytest integration/test_planes.py -q -p no:cacheprovider --timeout=900 \
    -k "(fuse or killed or outlive or next_blobfs) and not erofs and ($CHOSEN)" 2>&1 | tail -40
"""


def test_the_fuse_plane_on_linux_6_1() -> None:
    weenv = tools.weenv()[0]
    environment = {
        "CLONE": str(Path(__file__).parents[1]), "WEENV": weenv, "PYTHON": str(Path(weenv).with_name("python")),
        "CHOSEN": CHOSEN,
    }  # fmt: skip
    done = kernels.run(kernels.LINUX_6_1, SCRIPT, timeout=1700, memory=3072, disk=2048, environment=environment)
    assert " passed" in done.output and " failed" not in done.output and " error" not in done.output, done.output
    findings = {row["name"]: row for row in json.loads(next(line for line in done.output.splitlines() if line[:1] == "["))}
    assert findings["plane"]["state"] == "warn"
    assert findings["plane"]["seen"].startswith("fuse: this kernel mounts EROFS from block devices only"), findings["plane"]
    assert "6.12" in findings["plane"]["remedy"]
