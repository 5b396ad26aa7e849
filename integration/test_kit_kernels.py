"""The guests of the test kit: what scripts see in them, and that nothing of them is left, however they end."""

from __future__ import annotations

import os
import time

import pytest

from weenv_testkit import kernels, tools
from weenv_testkit.kernels import LINUX_6_1, LINUX_6_12, UML, UML_6_1, Kernel
from weenv_testkit.procs import Failed, mounts_under, processes_of

pytestmark = pytest.mark.skipif(not kernels.supported(), reason="these kernels are for x86-64")

SEEN = """
set -e
uname -r; id -u; nproc
cat /proc/cmdline | grep -c weenv || true
stat -f -c %T /sys/fs/cgroup
cat /sys/fs/cgroup/cgroup.subtree_control
for name in overlay fuse erofs; do grep -cw $name /proc/filesystems; done
ls /tmp /var/tmp
echo written > "$SHARE/file"
echo gone > /etc/weenv-was-here
echo $WORD; echo complaint >&2
exit 7
"""


def seen(kernel: Kernel, home: str) -> list[str]:
    share = os.path.join(home, kernel.name)
    os.mkdir(share)
    done = kernels.run(kernel, SEEN, shares=[share], environment={"SHARE": share, "WORD": "it's; $HOME"}, timeout=250)
    assert done.status == 7, done
    with open(f"{share}/file") as file:
        assert file.read() == "written\n"
    assert not os.path.exists("/etc/weenv-was-here")
    lines = done.output.splitlines()
    assert "complaint" in lines and "it's; $HOME" in lines and "cgroup2fs" in lines
    assert {"cpu", "memory", "pids", "io"} <= set(lines[lines.index("cgroup2fs") + 1].split())
    return lines


def nothing_left() -> None:
    assert not processes_of(f"/{kernels.PREFIX}")
    assert not [name for name in os.listdir("/tmp") if name.startswith(kernels.PREFIX)]
    for kernel in kernels.KERNELS:
        assert not mounts_under(str(kernel.home))


@pytest.mark.parametrize("kernel", [UML, pytest.param(UML_6_1, marks=pytest.mark.soak)], ids=lambda kernel: kernel.name)
def test_user_mode_linux(home: str, kernel: Kernel) -> None:
    lines = seen(kernel, home)
    assert lines[0].startswith("6.1.") if kernel is UML_6_1 else lines[0].split(".") >= ["7", "2"]
    assert lines[1:3] == ["0", "1"]
    assert [line for line in lines if line in ("1", "2")].count("1") >= 3
    nothing_left()


@pytest.mark.soak
def test_linux_6_12_in_qemu(home: str) -> None:
    lines = seen(LINUX_6_12, home)
    assert lines[0].startswith("6.12.") and lines[1:3] == ["0", "2"]


@pytest.mark.soak
def test_linux_6_1_in_qemu(home: str) -> None:
    assert seen(LINUX_6_1, home)[0].startswith("6.1.")


@pytest.mark.soak
@pytest.mark.parametrize("kernel", [UML, LINUX_6_12], ids=lambda kernel: kernel.name)
def test_systemd_is_the_first_process(kernel: Kernel) -> None:
    root = kernels.system("systemd", "dbus")
    script = f"cat /proc/1/comm; systemctl is-active weenv-kit.service basic.target; {tools.weenv()[0]} --version"
    done = kernels.run(kernel, script, root=root, systemd=True)
    assert done.output.split()[:3] == ["systemd", "activating", "active"], done
    assert "weenv" in done.output


@pytest.mark.parametrize("kernel", [UML, pytest.param(LINUX_6_12, marks=pytest.mark.soak)], ids=lambda kernel: kernel.name)
def test_a_guest_whose_time_is_up_is_gone(kernel: Kernel) -> None:
    for timeout in (5, 25, 125):  # on a busy machine it does not come so far in the first
        begin = time.monotonic()
        with pytest.raises(Failed, match=f"was ended after {timeout} s") as caught:
            kernels.run(kernel, "echo so far; sleep 1000", timeout=timeout)
        assert time.monotonic() - begin < timeout + 30
        nothing_left()
        if "so far" in str(caught.value):
            return
    pytest.fail("it never came to its script")


def test_a_guest_that_dies_is_told_from_one_that_ends() -> None:
    with pytest.raises(Failed, match=r"uml ended with \d+, before the script did(.|\n)*reboot: "):
        kernels.run(UML, "busybox poweroff -f || echo o > /proc/sysrq-trigger; sleep 5")
