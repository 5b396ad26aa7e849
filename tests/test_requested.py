"""What weenv run may be asked for, and what it says while it waits."""

from __future__ import annotations

import math
import os
import signal

import pytest

from weenv.core.errors import FormatError
from weenv.environment.lifecycle import StartError, start_error
from weenv.environment.requested import check_limits, told, unread
from weenv.environment.spec import Limits, resources
from weenv.plugin.containerd.client import ContainerdError


@pytest.mark.parametrize(
    ("limits", "name"),
    [(Limits(cpus=100_000), "cpus"), (Limits(cpus=-1), "cpus"), (Limits(cpus=math.nan), "cpus"),
     (Limits(memory=1 << 20), "memory"), (Limits(memory=1 << 63), "memory"),
     (Limits(memory=-1), "memory"), (Limits(pids=-5), "pids")],
)  # fmt: skip
def test_what_no_node_can_give_is_refused_by_name(limits: Limits, name: str) -> None:
    with pytest.raises(FormatError, match=f"^{name}: "):
        check_limits(limits)


def test_what_can_be_given_is_taken_and_fits_the_kernel() -> None:
    for limits in Limits(), Limits(os.cpu_count() or 1, 6 << 20, 1), Limits(256, 1 << 62, 1 << 62):
        assert check_limits(limits) is limits
    assert resources(Limits(cpus=512))["cpu"]["shares"] == 262144


def test_a_program_that_could_not_be_read_is_told_from_one_that_says_so() -> None:
    said = b"exec /opt/agent/bin/agent: input/output error\n"
    assert unread(1, said) and unread(255, b"before\n" + said)
    assert not unread(0, said) and not unread(3, said) and not unread(1, said + b"more")
    assert not unread(1, b"cat: input/output error\n")
    assert told(signal.SIGINT).startswith("SIGINT ")


@pytest.mark.parametrize(
    ("said", "code", "words"),
    [('unable to start: exec: "nosuch": executable file not found in $PATH: unknown', 127, "'nosuch' is not in /a:/b"),
     ('runc create failed: exec: "/no/such": stat /no/such: no such file or directory: unknown', 127,
      "'/no/such': stat /no/such: no such file or directory"),
     ('exec: "/tmp": is a directory: unknown', 126, "'/tmp': is a directory"),
     ('exec: "/bin/x": stat /bin/x: input/output error: unknown', 126, "'/bin/x': stat /bin/x: input/output error")],
)  # fmt: skip
def test_a_runtimes_word_of_a_command_is_one_line_of_ours(said: str, code: int, words: str) -> None:
    spec = {"process": {"env": ["PATH=/a:/b"]}}
    error = start_error(ContainerdError(f"containerd Create: failed: OCI runtime: {said}", "UNKNOWN"), spec)
    assert isinstance(error, StartError) and error.exit_code == code
    assert error.message == f"the command cannot be executed: {words}"
    assert ("weenv status" in error.hint) == ("input/output" in said)
