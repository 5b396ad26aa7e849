"""Linux 6.1, which cannot mount EROFS from files: the FUSE plane is chosen there by itself, and does all that it does here.

User-mode Linux has that kernel at nearly full speed; the one that Debian 12 boots runs in an emulator, so that little is asked.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weenv_testkit import kernels, tools
from weenv_testkit.kernels import LINUX_6_1, UML_6_1, Kernel, run_tests

pytestmark = pytest.mark.skipif(not kernels.supported(), reason="these kernels are for x86-64")

SCRIPT = """
cd "$CLONE"
printf '[snapshotter]\nroot = "/var/tmp/weenv"\n' > /tmp/weenv.toml  # on a disk, as on a node
"$WEENV" doctor --config /tmp/weenv.toml --json > /tmp/doctor.json
tr -d '\\n' < /tmp/doctor.json; echo
"""
ONE_PLANE = {"WEENV_TEST_PLANES": "fuse"}
BOTH = ["test_planes.py", "test_planes_processes.py"]
SOME = "another_goes_on or owes_an_answer"
"""What is mounted is what GNU tar extracts, and servers that are killed, at rest and while they owe something."""


@pytest.mark.timeout(300)
def test_the_plane_on_linux_6_1() -> None:
    run_tests(UML_6_1, ["test_planes_processes.py"], SOME, timeout=250, disk=1000, environment=ONE_PLANE)


@pytest.mark.soak
@pytest.mark.timeout(1300)
def test_all_that_a_plane_is_asked_on_linux_6_1() -> None:
    run_tests(UML_6_1, BOTH, "test", timeout=1200, memory=2000, disk=3000, environment=ONE_PLANE)


@pytest.mark.soak
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(("file", "lines"), [("test_planes_containerd.py", "1.7 or 2.1"), ("test_lazy_containerd.py", "2.1")])
def test_lazy_containers_on_linux_6_1(file: str, lines: str) -> None:
    """With containerd and runc, on nodes whose configuration says nothing of planes."""
    run_tests(UML_6_1, [file], lines, timeout=1800, memory=4000, disk=6000)


@pytest.mark.soak
@pytest.mark.timeout(1900)
def test_the_plane_on_the_kernel_that_debian_12_boots() -> None:
    some = "another_goes_on or whiteouts"
    run_tests(LINUX_6_1, BOTH, some, timeout=1800, memory=2000, disk=1000, environment=ONE_PLANE)


@pytest.mark.soak
@pytest.mark.parametrize("kernel", [UML_6_1, LINUX_6_1], ids=lambda kernel: kernel.name)
def test_doctor_chooses_the_fuse_plane(kernel: Kernel) -> None:
    environment = {"CLONE": str(Path(__file__).parents[1]), "WEENV": tools.weenv()[0]}
    done = kernels.run(kernel, SCRIPT, timeout=600, disk=512, environment=environment)
    findings = {row["name"]: row for row in json.loads(next(line for line in done.output.splitlines() if line[:1] == "["))}
    assert findings["plane"]["state"] == "warn"
    assert findings["plane"]["seen"].startswith("fuse: this kernel mounts EROFS from block devices only"), findings["plane"]
    assert "6.12" in findings["plane"]["remedy"]
    assert "FUSE resend" not in findings, "this plane does without"
