"""The holder: a small process that keeps the ``/dev/fuse`` descriptor, so that the server may die at any time.

It is started by the server, which has made the mount, with that descriptor, the mount's state
(:mod:`weenv.plugin.snapshotter.blobfs.mountstate`) and one end of a socket pair; from then on it answers on a 0600 unix
socket (SOCK_SEQPACKET; one JSON object a packet). It owns nothing else, runs no FUSE code, and ends when the mount is gone.
If it dies itself, the server that is attached starts another one with the same descriptors. A service manager that keeps
descriptors has a second copy of both, for the case that holder and server die together.

===================================  ================================================================================
client says                          holder answers
===================================  ================================================================================
``{"op": "attach", "pid": p}``       ``{"error": "busy", "pid": q}`` while another server is attached, else
                                     ``{"ok": true, "mountpoint": m}`` with both descriptors as SCM_RIGHTS. The
                                     connection then is the server's; when it closes, the server is dead.
``{"op": "status"}``                 ``{"pid": p, "server": q or null, "mountpoint": m}``
``{"op": "stop", "force": false}``   unmounts; ``{"ok": true}``, or ``{"error": "busy in use"}`` and all stays as it is
===================================  ================================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import time
from typing import Any

from weenv.core.accepting import Entrance
from weenv.core.errors import ConfigError, MountError
from weenv.core.process import outlive
from weenv.core.unixsocket import NOBODY, accept_trusted, bind_private, connected
from weenv.plugin.snapshotter.blobfs.mountstate import MountState

_PACKET = 64 << 10
_ANSWER = 10.0
"""Seconds that a holder gets for an answer."""


class Busy(ConfigError):
    """Another server is attached to the holder."""


def _pack(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


class Holder:
    """The holder's loop, and the two descriptors that it keeps."""

    def __init__(self, fuse: int, nodes: int, mountpoint: str, path: str, attached: socket.socket) -> None:
        self.fuse = fuse
        self.nodes = nodes
        self.mountpoint = mountpoint
        self.path = path
        self.attached: socket.socket | None = attached
        self.server_pid: int | None = os.getppid()
        self.clients: dict[int, socket.socket] = {attached.fileno(): attached}
        self.poll = select.poll()
        self.running = True

    def run(self) -> None:
        """Serve until the mount is gone. Raises OSError where the socket cannot be made."""
        lock = os.open(self.path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for _ in range(50):  # the holder that this one follows may not be quite dead
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        else:
            raise ConfigError(f"another holder serves {self.path}")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)
        listener = bind_private(self.path, socket.SOCK_SEQPACKET)
        listener.listen(16)
        with contextlib.suppress(OSError):  # the server is dead already: all the more is there something to hold
            if self.attached is not None:
                self.attached.send(_pack({"op": "ready"}))
        entrance = Entrance(listener)
        entrance.open(self.poll)
        self.poll.register(self.fuse, 0)  # POLLERR alone: the connection has ended
        for fd in self.clients:
            self.poll.register(fd, select.POLLIN)
        while self.running:
            entrance.tend()
            for fd, event in self.poll.poll(entrance.timeout()):
                if fd == listener.fileno():
                    self._accept(entrance)
                elif fd == self.fuse:
                    self.running = not event & (select.POLLERR | select.POLLNVAL)
                elif fd in self.clients:
                    self._client(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _accept(self, entrance: Entrance) -> None:
        client = accept_trusted(entrance)
        if client is None:
            return
        client.settimeout(5.0)  # a client that does not read its answer does not stop the holder for long
        self.clients[client.fileno()] = client
        self.poll.register(client, select.POLLIN)

    def _client(self, fd: int) -> None:
        client = self.clients[fd]
        try:
            packet = client.recv(_PACKET)
            if packet:
                self._message(client, json.loads(packet))
                return
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            pass  # gone, or no client of ours; whatever it says, the mount outlives it
        self.poll.unregister(fd)
        del self.clients[fd]
        client.close()
        if client is self.attached:
            self.attached = self.server_pid = None

    def _message(self, client: socket.socket, message: dict[str, Any]) -> None:
        match message["op"]:
            case "attach":
                self._attach(client, int(message["pid"]))
            case "status":
                client.send(_pack({"pid": os.getpid(), "server": self.server_pid, "mountpoint": self.mountpoint}))
            case "stop":
                self._stop(client, bool(message.get("force")))
            case _:
                client.send(_pack({"error": "unknown"}))

    def _attach(self, client: socket.socket, pid: int) -> None:
        if self.attached is not None:
            # The dead server's end may be closed and not looked at yet.
            gone = select.poll()
            gone.register(self.attached, 0)
            if not gone.poll(0):
                client.send(_pack({"error": "busy", "pid": self.server_pid}))
                return
            self._client(self.attached.fileno())
        socket.send_fds(client, [_pack({"ok": True, "mountpoint": self.mountpoint})], [self.fuse, self.nodes])
        self.attached, self.server_pid = client, pid

    def _stop(self, client: socket.socket, force: bool) -> None:
        from weenv.plugin.snapshotter.mounts import MNT_DETACH, UMOUNT_NOFOLLOW, unmount  # 20 MB that are rarely needed

        try:
            unmount(self.mountpoint, UMOUNT_NOFOLLOW | (MNT_DETACH if force else 0))
        except MountError as error:
            client.send(_pack({"error": str(error), "errno": error.errno}))
            return
        self.running = False
        if self.attached is not None:
            with contextlib.suppress(OSError):  # the server is ending by itself
                self.attached.send(_pack({"op": "stop"}))
        client.send(_pack({"ok": True}))


class HolderClient:
    """The server's end of its connection to the holder; ``process`` where it is a child of this server."""

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | None) -> None:
        self.connection = connection
        self.process = process

    def told_to_stop(self) -> bool:
        """What the holder has to say, now that its connection is readable: True: the mount is gone; False: the holder is."""
        try:
            return bool(self.connection.recv(_PACKET))
        except OSError:
            return False

    def hold(self) -> None:
        """Leave the connection open until the process has ended, whatever becomes of this object."""
        self.connection.detach()

    def close(self) -> None:
        """Let go; the holder then takes the server for dead."""
        self.connection.close()


def _connect(path: str) -> socket.socket:
    return connected(path, _ANSWER, socket.SOCK_SEQPACKET)


def _mute(path: str) -> ConfigError:
    hint = "is it stopped, or the machine too busy? with the process killed, its mount is lost to who reads from it"
    return ConfigError(f"the holder at {path} does not answer", hint=hint)


def attach(path: str) -> tuple[HolderClient, int, MountState] | None:
    """Get the descriptors from the holder at ``path``; None where none answers.

    Raises :class:`Busy` where another server is attached to it, :class:`ConfigError` where it is of another version or is
    there and does not answer, and FormatError where the mount's state is damaged.
    """
    try:
        connection = _connect(path)
    except NOBODY:
        return None
    except BlockingIOError as error:  # as many wait for it already as may
        raise _mute(path) from error
    fds: list[int] = []
    try:
        connection.send(_pack({"op": "attach", "pid": os.getpid()}))
        packet, fds, _, _ = socket.recv_fds(connection, _PACKET, 4)
        answer: dict[str, Any] = json.loads(packet) if packet else {"error": "closed"}
        if answer.get("error") == "busy":
            raise Busy(f"blobfs is being served already, by process {answer.get('pid')}", hint="weenv status shows it")
        if len(fds) == 1:
            raise ConfigError("the mount is kept by a holder of an older version", hint="run: weenv blobfs stop")
        if not fds:
            raise OSError("no descriptors")
        state = MountState.load(fds[1])
    except BaseException as error:
        connection.close()
        for fd in fds:
            os.close(fd)
        if isinstance(error, TimeoutError):  # it is there, and has the mount: another one would take the place of it
            raise _mute(path) from error
        if isinstance(error, OSError | ValueError):
            return None
        raise
    for fd in fds:
        os.set_inheritable(fd, False)
    return HolderClient(connection, None), fds[0], state


def start(path: str, mountpoint: str, fuse: int, state: MountState) -> HolderClient:
    """Start a holder for the mount behind ``fuse``; the calling process is its attached server.

    Returns once the holder has the descriptors and answers: from then on, this process may be killed. Raises
    :class:`ConfigError` where the holder does not start, OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30.0)
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "weenv.plugin.snapshotter.blobfs.holder",
                "--fuse", str(fuse), "--nodes", str(state.fd), "--attached", str(theirs.fileno()),
                "--socket", path, "--mountpoint", mountpoint,
            ],
            pass_fds=[fuse, state.fd, theirs.fileno()], start_new_session=True, cwd="/",
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    try:
        ready = ours.recv(_PACKET)
    except OSError as error:
        ready, reason = b"", str(error)
    else:
        reason = "it ended"
    if not ready:
        ours.close()
        process.kill()
        process.wait()
        raise ConfigError(f"the holder for {path} does not start: {reason}", hint="see whether another one is running")
    return HolderClient(ours, process)


def ask(path: str, message: dict[str, Any]) -> dict[str, Any] | None:
    """Send one message to the holder at ``path`` and return its answer; None where no holder is there."""
    try:
        with _connect(path) as connection:
            connection.send(_pack(message))
            packet = connection.recv(_PACKET)
    except OSError:
        return None
    return dict(json.loads(packet)) if packet else None


def main() -> None:
    """Entry point of the holder's process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fuse", type=int, required=True)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--attached", type=int, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--mountpoint", required=True)
    options = parser.parse_args()
    outlive()
    for fd in (options.fuse, options.nodes):
        os.set_inheritable(fd, False)
    attached = socket.socket(fileno=options.attached)
    attached.set_inheritable(False)
    attached.settimeout(5.0)
    Holder(options.fuse, options.nodes, options.mountpoint, options.socket, attached).run()


if __name__ == "__main__":
    main()
