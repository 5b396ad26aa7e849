"""Which service a process is, from what systemd.exec(5) and cgroups(7) say of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from weenv.systemd.unit import Service, parse, service_of

STARTED = b"LANG=C\0SYSTEMD_EXEC_PID=70\0NOTIFY_SOCKET=/run/systemd/notify\0"
V1 = "12:pids:/weenv.slice/w.service\n1:name=systemd:/weenv.slice/w.service\n0::/weenv.slice/w.service\n"


@pytest.mark.parametrize(
    ("environ", "cgroup", "found"),
    [
        (STARTED, "0::/weenv.slice/weenv-blobfs.service\n", Service("weenv-blobfs.service")),
        (STARTED + b"LISTEN_PID=70\0LISTEN_FDS=1\0", V1, Service("w.service", True)),
        (STARTED + b"LISTEN_PID=7\0", "0::/system.slice/a.service/below\n", Service("a.service")),
        (STARTED, "1:name=systemd:/a.service\n0::/\n", Service("a.service")),
        (STARTED, "0::/user.slice/session-1.scope\n", None),
        (STARTED, "", None),
        (STARTED, "nonsense\n::\n", None),
        (b"SYSTEMD_EXEC_PID=71\0", "0::/cron.service\n", None),
        (b"", "0::/cron.service\n", None),
    ],
)
def test_what_is_said_of_it(environ: bytes, cgroup: str, found: Service | None) -> None:
    assert parse(70, environ, cgroup) == found


def test_how_it_is_ended() -> None:
    assert Service("a.service").stop == "systemctl stop a.service"
    assert Service("a.service", True).stop == "systemctl stop a.socket a.service"


def test_a_child_of_a_service_is_not_the_service() -> None:
    code = "import os; from weenv.systemd.unit import service_of; print(service_of(os.getpid()))"
    environment = {**os.environ, "SYSTEMD_EXEC_PID": str(os.getpid())}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True).stdout
    assert said == "None\n"
    assert service_of(2**22 + 1) is None
