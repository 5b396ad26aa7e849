"""A node whose two daemons run under ``weenv serve``, as users run them, and may be killed one by one."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

from weenv_testkit import tools
from weenv_testkit.node import LOUD, Node
from weenv_testkit.procs import Failed, Process, clean_environment, text_of, wait_until

DAEMONS = ("blobfs", "snapshotter")
_SERVING = "weenv.systemd.supervisor: serving"


class ServedNode(Node):
    """See :class:`Node`; whoever is killed here is started again by the supervisor, not by the test."""

    def __init__(self, line: str, home: str, *, registry: str, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(line, home, registry=registry, settings=settings)
        self.log = os.path.join(home, "serve.log")
        self.supervisor: Process | None = None
        self._logged = 0

    def spawn(self) -> Process:
        """Start ``weenv serve``, not waiting for anything."""
        argv = [*tools.weenv(), "serve", "--config", self.config]
        self.supervisor = Process("weenv serve", argv, self.log, clean_environment())
        return self.supervisor

    def log_text(self) -> str:
        """What supervisor and daemons have logged."""
        return text_of(self.log)

    def start_daemons(self) -> None:
        """Start ``weenv serve`` and wait until it says that both daemons answer."""
        before = self.log_text().count(_SERVING)
        self.spawn().wait_ready(lambda: self.log_text().count(_SERVING) > before, 60)

    def start(self) -> None:
        """Start everything. Raises Failed."""
        self.start_daemons()
        self.containerd.start()

    def stop_daemons(self) -> None:
        """SIGTERM to the supervisor. Raises Failed where it does not end well."""
        assert self.supervisor is not None
        code = self.supervisor.stop(30)
        self.supervisor = None
        if code != 0:
            raise Failed(f"weenv serve ended with {code} on SIGTERM:\n{self.log_text()[-3000:]}")

    def daemon(self, name: str) -> int | None:
        """Process id of a daemon, or None while there is none."""
        assert self.supervisor is not None
        parent = self.supervisor.pid
        try:
            with open(f"/proc/{parent}/task/{parent}/children") as file:
                children = [int(word) for word in file.read().split()]
            for pid in children:
                with open(f"/proc/{pid}/cmdline", "rb") as file:
                    if f"\0{name}\0serve\0".encode() in file.read():
                        return pid
        except (FileNotFoundError, ProcessLookupError):
            pass
        return None

    def kill_daemon(self, name: str) -> int:
        """``kill -9`` of a daemon as soon as there is one; the id of the process that is dead now."""
        pid = wait_until(f"{name} to be there", lambda: self.daemon(name), 60)
        os.kill(pid, signal.SIGKILL)
        return pid

    def successor(self, name: str, pid: int) -> int:
        """Wait for another process of the daemon than ``pid``; its id."""
        return wait_until(f"another {name}", lambda: (found := self.daemon(name)) != pid and found, 60) or 0

    def complaints(self) -> list[str]:
        """See :meth:`Node.complaints`; both daemons have one log here."""
        text = self.log_text()
        new, self._logged = text[self._logged :], len(text)
        return self.unexpected([line for line in new.splitlines() if LOUD.search(line)])

    def close(self) -> None:
        """Stop everything, unmount everything, remove the directory. Raises Failed where something cannot be had away."""
        self.containerd.close()
        try:
            if self.supervisor is not None:
                self.stop_daemons()
        finally:
            self._clear()

    def _clear(self) -> None:
        if self.supervisor is not None:
            self.supervisor.stop()
        super()._clear()
