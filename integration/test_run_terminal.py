"""``weenv run -t`` and ``exec -t`` on a real terminal: a pseudo terminal with a session of its own."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import termios
import time
from collections.abc import Iterator

import pytest

from weenv_testkit.procs import Failed, wait_until
from weenv_testkit.running import Bench


class Terminal:
    """A terminal with a command of ours in it."""

    def __init__(self) -> None:
        self.far, self.near = os.openpty()
        termios.tcsetwinsize(self.near, (33, 101))
        self.before = termios.tcgetattr(self.near)
        self.text = b""
        self.child: subprocess.Popen[bytes] | None = None

    def start(self, argv: list[str]) -> subprocess.Popen[bytes]:
        """Start it with this terminal as its controlling one."""
        self.child = subprocess.Popen(["setsid", "--ctty", *argv], stdin=self.near, stdout=self.near, stderr=self.near)
        return self.child

    def expect(self, text: bytes, timeout: float = 60) -> None:
        """Wait until it has been shown after what was expected last."""
        end = time.monotonic() + timeout
        while text not in self.text:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.far], [], [], left)[0]:
                raise Failed(f"waited for {text!r}: {self.text[-2000:]!r}")
            self.text += os.read(self.far, 65536)
        self.text = self.text.partition(text)[2]

    def type(self, text: bytes) -> None:
        """Press keys."""
        os.write(self.far, text)

    @property
    def raw(self) -> bool:
        """Whether keys go through as they are."""
        return not termios.tcgetattr(self.near)[3] & (termios.ICANON | termios.ECHO | termios.ISIG)

    def restored(self) -> bool:
        """Whether it is as it was."""
        return termios.tcgetattr(self.near) == self.before

    def close(self) -> None:
        """End what still runs."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait()
        os.close(self.far)
        os.close(self.near)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


SHELL = "trap 'echo size $(stty size)' WINCH; tty; echo $TERM; stty size; echo ready; while :; do sleep 0.1; done"


def test_a_terminal_is_one_and_follows_ours(bench: Bench, terminal: Terminal) -> None:
    child = terminal.start(bench.argv("run", "--rm", "-it", bench.plan, "--", "sh", "-c", SHELL))
    terminal.expect(b"/dev/pts/0\r\n")
    terminal.expect(b"ready")
    assert terminal.raw
    termios.tcsetwinsize(terminal.far, (40, 120))
    terminal.expect(b"size 40 120")
    termios.tcsetwinsize(terminal.far, (20, 60))
    terminal.expect(b"size 20 60")
    terminal.type(b"\x03")  # read by the terminal inside, which interrupts what is in its foreground
    assert child.wait(60) == 130
    assert terminal.restored()


def test_the_size_is_right_from_the_beginning(bench: Bench, terminal: Terminal) -> None:
    child = terminal.start(bench.argv("run", "--rm", "-it", bench.plan, "--", "sh"))
    terminal.type(b"stty size; echo $((40 + 2)); exit 6\n")
    terminal.expect(b"33 101")
    terminal.expect(b"42")
    assert child.wait(60) == 6 and terminal.restored()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_leave_the_terminal_as_it_was(bench: Bench, terminal: Terminal, number: int) -> None:
    script = "trap 'exit 9' TERM HUP QUIT; echo ready; while :; do sleep 0.05; done"
    child = terminal.start(bench.argv("run", "--rm", "-it", bench.plan, "--", "sh", "-c", script))
    terminal.expect(b"ready")
    assert terminal.raw
    child.send_signal(number)
    assert child.wait(60) == 9 and terminal.restored()


def test_what_cannot_start_leaves_the_terminal_as_it_was(bench: Bench, terminal: Terminal) -> None:
    child = terminal.start(bench.argv("run", "--rm", "-it", bench.plan, "--", "no-such-program"))
    assert child.wait(60) == 127 and terminal.restored()
    terminal.expect(b"no-such-program")
    child = terminal.start(bench.argv("run", "--rm", "-it", "-u", "nobody-there", bench.plan))
    assert child.wait(60) == 1 and terminal.restored()


def test_an_early_signal_leaves_the_terminal_as_it_was(bench: Bench, terminal: Terminal) -> None:
    child = terminal.start(bench.argv("run", "--rm", "-it", bench.plan, "--", "sleep", "1000"))
    wait_until("raw mode", lambda: terminal.raw, 60, 0.001)
    child.send_signal(signal.SIGTERM)
    wait_until("the end", lambda: child.poll() is not None, 60)
    assert child.returncode in (143, 137) and terminal.restored()


def test_its_end_killed_from_elsewhere(bench: Bench, terminal: Terminal) -> None:
    child = terminal.start(bench.argv("run", "--name", "seen", "-it", bench.plan, "--", "sh"))
    terminal.type(b"echo $((40 + 2))\n")
    terminal.expect(b"42")
    bench.ok("stop", "-t", "0", "seen")
    assert child.wait(60) == 137 and terminal.restored()
    bench.ok("rm", "seen")


@pytest.mark.parametrize("init", [False, True])
def test_added_commands_have_terminals_too(bench: Bench, terminal: Terminal, init: bool) -> None:
    if init:
        child = terminal.start(bench.argv("run", "--rm", "--init", "-it", bench.plan, "--", "sh", "-c", SHELL))
    else:
        name = bench.ok("run", "-d", "--idle", bench.plan).strip()
        child = terminal.start(bench.argv("exec", "-it", name, "--", "sh", "-c", SHELL))
    try:
        terminal.expect(b"/dev/pts/0\r\n")
        terminal.expect(b"xterm\r\n")  # not at once: our size may come between
        terminal.expect(b"ready")
        assert terminal.raw
        termios.tcsetwinsize(terminal.far, (44, 122))
        terminal.expect(b"size 44 122")
        terminal.type(b"\x03")
        assert child.wait(60) == 130 and terminal.restored()
    finally:
        if not init:
            bench.ok("rm", "-f", name)


def test_without_a_terminal_there_is_none_to_give(bench: Bench) -> None:
    done = bench.call("run", "--rm", "-t", bench.plan, "--", "true")
    assert done.returncode == 1 and b"not a terminal" in done.stderr and b"-t" in done.stderr
