"""``weenv serve``: the small process above the two daemons; it keeps what must not end with one of them.

- The listening sockets of both. A daemon that is killed, or replaced by a newer version, refuses nobody: whoever connects
  meanwhile waits until the next one accepts. containerd is greeted here while there is no snapshotter, and its connection
  given to the next one (:mod:`weenv.systemd.lobby`).
- A second copy of the mount's descriptors (blobfs's holder has the first), so that even blobfs and its holder may die together.
- The daemons themselves: what ends is started again, at once, or later and later (:func:`pause`) if it does not come up.

It speaks the service manager's protocol (:mod:`weenv.systemd.notify`) to them, so they run under systemd as they do here.
It does nothing else, imports little, and has one thread. If it is killed, the kernel sends SIGTERM to the daemons; readers
wait, for the holder lives on, and the next start goes on from there.

==========  =========================================================================================================
signal      what
==========  =========================================================================================================
SIGTERM, SIGINT  end the daemons, then itself; mounts, holder and data stay
SIGHUP      end the daemons and start them anew: what to send after an upgrade
==========  =========================================================================================================
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from weenv.core.errors import ConfigError, WeenvError
from weenv.core.log import configure
from weenv.core.process import fork, holder_of, only_instance, oom_score
from weenv.core.rights import remedy
from weenv.core.unixsocket import bind_private, clear_path
from weenv.systemd import notify
from weenv.systemd.lobby import Lobby, make_channel

log = logging.getLogger("weenv.systemd.supervisor")  # it is run as __main__

_STOP: Final = 20.0
"""Seconds that a daemon gets for ending."""
_STEADY: Final = 1.0
"""Seconds after which one that was ready counts as having come up."""
_LONGEST: Final = 5.0
"""Seconds between attempts, at most."""
_KEPT_MAX: Final = 16
_OURS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOCK: Final = "serve.lock"
"""Beside the sockets."""
_PR_SET_PDEATHSIG: Final = 1
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred, unix(7)

_libc = ctypes.CDLL(None, use_errno=True)


def pause(failures: int) -> float:
    """Seconds before the next attempt, after so many in a row that did not come up."""
    return 0.0 if failures <= 1 else min(_LONGEST, 0.1 * 2.0 ** min(failures - 2, 10))


@dataclass(slots=True)
class Child:
    """A daemon. ``listener`` and ``kept`` are passed to each of its processes, ``listener`` under the daemon's name.

    With a ``lobby``, who connects while no process is ready is greeted, and waits: the connection is sent, once one is
    ready, over a channel of which the process has the other end as ``<name>-waiting``.
    """

    name: str
    argv: list[str]
    listener: socket.socket | None = None
    kept: dict[str, int] = field(default_factory=dict)
    lobby: Lobby | None = None
    channel: socket.socket | None = None
    """Our end of it."""
    due: float | None = None
    """``time.monotonic()`` of its next start; None: it runs, or waits for the one before it."""
    pid: int = 0
    handle: int = -1
    ready_at: float | None = None
    failures: int = 0
    asked: bool = False
    """It has been told to end."""

    def close_channel(self) -> None:
        """Nobody is at its other end."""
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class Supervisor:
    """Runs ``children``, the first one first; each of the others is begun when the one before it is ready."""

    def __init__(self, children: Sequence[Child], place: str) -> None:
        self.children = children
        self._address = os.path.join(place, "serve.notify")
        self._poll = select.poll()
        self._by_handle: dict[int, Child] = {}
        self._by_pid: dict[int, Child] = {}
        self._by_listener: dict[int, Child] = {}
        self._pid = os.getpid()
        self._served = False
        self._stop_at: float | None = None
        self._status = 0
        self._score = oom_score("-900")

    def run(self) -> int:
        """Until SIGTERM or SIGINT, or until a daemon says at its first start that it cannot work; the exit status."""
        clear_path(self._address)
        inbox = bind_private(self._address, socket.SOCK_DGRAM)
        inbox.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in _OURS:
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._poll.register(inbox, select.POLLIN)
        self._poll.register(woken, select.POLLIN)
        for child in self.children:
            self._greet_from_now_on(child)
        self.children[0].due = time.monotonic()
        try:
            while self._stop_at is None or self._by_pid:
                self._start_those_due()
                for child in self._by_listener.values():
                    if child.lobby is not None:
                        child.lobby.tend()
                for fd, _ in self._poll.poll(self._timeout()):
                    if fd == woken:
                        for byte in os.read(woken, 64):
                            self._signal(byte)
                    elif fd == inbox.fileno():
                        self._messages(inbox)
                    elif fd in self._by_listener:
                        self._greet(self._by_listener[fd])
                    elif fd in self._by_handle:
                        self._messages(inbox)  # what it said before it ended
                        self._ended(self._by_handle[fd])
        finally:
            signal.set_wakeup_fd(-1)
            inbox.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._address)
        return self._status

    def _timeout(self) -> float:
        """Milliseconds until there is something to do without being told."""
        waits = [wait for child in self.children if child.lobby is not None and (wait := child.lobby.timeout()) is not None]
        dues = [self._stop_at] if self._stop_at is not None else [child.due for child in self.children if child.due is not None]
        waits += [max(0.0, due - time.monotonic()) * 1000 + 1 for due in dues]
        return min(waits, default=-1)

    # -- starting ---------------------------------------------------------------------------------------------------

    def _start_those_due(self) -> None:
        now = time.monotonic()
        if self._stop_at is not None:
            if now >= self._stop_at:
                for child in self._by_pid.values():
                    log.error("%s does not end: it is killed", child.name)
                    self._send(child, signal.SIGKILL)
                self._stop_at = now + _STOP
            return
        for child in self.children:
            if child.due is not None and now >= child.due:
                child.due = None
                self._spawn(child)

    def _spawn(self, child: Child) -> None:
        passed = {child.name: child.listener.fileno()} if child.listener is not None else {}
        passed |= child.kept
        theirs = None
        try:
            if child.lobby is not None:
                child.channel, theirs = make_channel()
                passed[f"{child.name}-waiting"] = theirs.fileno()
            signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)  # until those that are the child's would end it
            pid, child.handle = fork()
        except OSError as error:
            child.failures += 1
            delay = max(_STEADY, pause(child.failures))
            child.due = time.monotonic() + delay
            child.close_channel()
            log.error("%s cannot be started: %s", child.name, error.strerror, extra={"in_seconds": delay})
            return
        else:
            if pid == 0:
                try:
                    self._become(child, passed)
                finally:
                    os._exit(127)
            child.pid = pid
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
            if theirs is not None:
                theirs.close()
        child.ready_at, child.asked = None, False
        self._by_pid[pid] = self._by_handle[child.handle] = child
        self._poll.register(child.handle, select.POLLIN)

    def _become(self, child: Child, passed: dict[str, int]) -> NoReturn:
        """In the forked process."""
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != self._pid:  # it is dead already
            os._exit(1)
        for number in _OURS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
        os.setsid()
        above = 100 + len(passed)
        for place, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above) for fd in passed.values()]):
            os.dup2(fd, notify.FIRST_FD + place, inheritable=True)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("LISTEN_", "WATCHDOG_"))}
        environment |= {
            "NOTIFY_SOCKET": self._address,
            "FDSTORE": str(_KEPT_MAX),
            "LISTEN_PID": str(os.getpid()),
            "LISTEN_FDS": str(len(passed)),
            "LISTEN_FDNAMES": ":".join(passed),
        }
        oom_score(self._score)
        os.execve(child.argv[0], child.argv, environment)  # noqa: S606

    # -- those who wait ------------------------------------------------------------------------------------------------

    def _greet_from_now_on(self, child: Child) -> None:
        """No process of the daemon is ready."""
        if child.lobby is not None:
            self._by_listener[child.lobby.listener.fileno()] = child
            child.lobby.open(self._poll)

    def _greet(self, child: Child) -> None:
        if child.lobby is not None:
            child.lobby.admit()

    def _hand_over(self, child: Child) -> None:
        """Give those who wait to the process that is ready."""
        if child.lobby is not None:
            self._by_listener.pop(child.lobby.listener.fileno(), None)
            child.lobby.shut()
            child.lobby.hand_over(child.channel)

    # -- what is heard ------------------------------------------------------------------------------------------------

    def _messages(self, inbox: socket.socket) -> None:
        """Take in what daemons have sent, none of which may be anybody else's."""
        room = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4 * 64)
        while True:
            try:
                text, extras, _, _ = inbox.recvmsg(4096, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                return
            fds: list[int] = []
            pid = 0
            for level, kind, content in extras:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds += struct.unpack(f"{len(content) // 4}i", content[: len(content) // 4 * 4])
                elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid = _CREDENTIALS.unpack(content)[0]
            child = self._by_pid.get(pid)
            if child is not None:
                said = dict(line.partition("=")[::2] for line in text.decode("utf-8", "replace").splitlines())
                fds = self._said(child, said, fds)
            for fd in fds:
                os.close(fd)

    def _said(self, child: Child, said: dict[str, str], fds: list[int]) -> list[int]:
        """Act on one message; returns the descriptors of it that are not kept."""
        if said.get("READY") == "1" and child.ready_at is None:
            child.ready_at = time.monotonic()
            self._hand_over(child)
            self._ready()
        if said.get("STOPPING") == "1":
            self._greet_from_now_on(child)
        name = said.get("FDNAME", "stored")
        if said.get("FDSTOREREMOVE") == "1" and name in child.kept:
            os.close(child.kept.pop(name))
        if said.get("FDSTORE") == "1" and fds and ":" not in name and (name in child.kept or len(child.kept) < _KEPT_MAX):
            first, *fds = fds
            if name in child.kept:
                os.close(child.kept[name])
            child.kept[name] = first
        return fds

    def _ready(self) -> None:
        """A daemon answers: begin the next one, or say that all do."""
        for child in self.children:
            if child.ready_at is None:
                if not child.pid and child.due is None and self._stop_at is None:
                    child.due = time.monotonic()
                return
        if not self._served:
            self._served = True
            log.info("serving", extra={child.name: child.pid for child in self.children})
            notify.ready()

    def _signal(self, number: int) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            if self._stop_at is None:
                log.info("stopping; mounts and data stay")
                notify.stopping()
                self._stop()
        elif number == signal.SIGHUP:
            log.info("starting the daemons anew")
            for child in self._by_pid.values():
                child.asked = True
                self._send(child, signal.SIGTERM)

    def _stop(self) -> None:
        self._stop_at = time.monotonic() + _STOP
        for child in self._by_pid.values():
            child.asked = True
            self._send(child, signal.SIGTERM)

    def _send(self, child: Child, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child.handle, number)

    def _ended(self, child: Child) -> None:
        self._poll.unregister(child.handle)
        del self._by_handle[child.handle], self._by_pid[child.pid]
        os.close(child.handle)
        _, status = os.waitpid(child.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        steady = child.ready_at is not None and now - child.ready_at >= _STEADY
        child.pid, child.handle = 0, -1
        child.close_channel()
        if self._stop_at is not None:
            return
        if not self._served and child.ready_at is None and code in (1, 2):  # it has said why
            self._status = code
            self._stop()
            return
        if child.ready_at is not None:
            self._greet_from_now_on(child)
        child.ready_at = None
        child.failures = 0 if steady or child.asked else child.failures + 1
        delay = pause(child.failures)
        child.due = now + delay
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        level = logging.INFO if child.asked else logging.WARNING
        log.log(level, "%s %s: starting it again", child.name, how, extra={"in_seconds": delay} if delay else None)


def _listener(path: str, passed: Sequence[int]) -> socket.socket:
    """Of a service manager above us, or bound here."""
    found = notify.listening_socket(passed)
    if found is None:
        clear_path(path)
        try:
            found = bind_private(path)
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error.strerror}") from error
        found.listen(128)
    return found


def running(status_socket: str) -> str:
    """The ``weenv serve`` that runs the blobfs of ``status_socket``, as people call it; empty where there is none."""
    held, pid = running_pid(status_socket)
    return "" if not held else f"weenv serve (pid {pid})" if pid else "weenv serve"


def running_pid(status_socket: str) -> tuple[bool, int]:
    """Whether there is one, and its process id, 0 where that cannot be told."""
    with contextlib.suppress(OSError):  # no such directory: nobody holds it
        return holder_of(os.path.dirname(status_socket), _LOCK)
    return False, 0


def serve(config: str, level: str, style: str, sockets: dict[str, str]) -> int:
    """Supervise both daemons with the configuration file ``config``; ``sockets`` are the paths of those to hold, by daemon.

    Returns the exit status. Raises ConfigError.
    """
    place = os.path.dirname(next(iter(sockets.values())))
    os.makedirs(place, mode=0o711, exist_ok=True)
    passed = notify.inherited()
    with only_instance(place, "weenv serve", _LOCK, patience=notify.patience()):
        bound = [path for name, path in sockets.items() if name not in passed]
        children = [
            Child(
                name,
                [
                    sys.executable, "-P", "-m", "weenv.cli.entry", name, "serve",
                    "--config", config, "--log-level", level, "--log-format", style,
                ],
                _listener(sockets[name], passed.pop(name, ())) if name in sockets else None,
            )
            for name in ("blobfs", "snapshotter")
        ]  # fmt: skip
        if children[1].listener is not None:
            children[1].lobby = Lobby(children[1].listener)
        notify.close_all(passed)
        try:
            return Supervisor(children, place).run()
        finally:
            for path in bound:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


def _say(message: str, hint: str, status: int) -> int:
    sys.stderr.write(f"weenv: {message}\n" + (f"  {hint}\n" if hint else ""))
    return status


def main() -> None:
    """``python -m weenv.systemd.supervisor CONFIG LEVEL STYLE [DAEMON=SOCKET ...]``, which ``weenv serve`` becomes."""
    config, level, style, *sockets = sys.argv[1:]
    configure(level, style)
    try:
        status = serve(config, level, style, dict(item.partition("=")[::2] for item in sockets))
    except WeenvError as error:
        status = _say(error.message, error.hint, error.exit_code)
    except OSError as error:
        status = _say(f"{error.filename or 'weenv serve'}: {error.strerror}", remedy(error), 1)
    sys.exit(status)


if __name__ == "__main__":
    main()
