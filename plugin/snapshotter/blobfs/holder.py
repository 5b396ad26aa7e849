"""The holder: a small process that keeps the ``/dev/fuse`` descriptor, so that the server may die at any time.

It is started by the server, which has made the mount, with the descriptor and one end of a socket pair; from then on it
answers on a 0600 unix socket (SOCK_SEQPACKET; one JSON object a packet). It owns nothing else, runs no FUSE code, and
ends when the mount is gone. If it dies itself, the server that is attached starts another one with the same descriptor.

===================================  ================================================================================
client says                          holder answers
===================================  ================================================================================
``{"op": "attach", "pid": p}``       ``{"error": "busy", "pid": q}`` while another server is attached, else
                                     ``{"ok": true, "mountpoint": m, "init": i, "nodes": n}`` with the descriptor as
                                     SCM_RIGHTS, followed by packets ``{"nodes": [[id, name], ...]}``, n nodes in all.
                                     The connection then is the server's; when it closes, the server is dead.
``{"op": "node", "id": i, "name": s}``  nothing; remembered (attached server only)
``{"op": "init", "init": {...}}``    nothing; remembered (attached server only)
``{"op": "status"}``                 ``{"pid": p, "server": q or null, "mountpoint": m, "init": i, "nodes": n}``
``{"op": "stop", "force": false}``   unmounts; ``{"ok": true}``, or ``{"error": "busy in use"}`` and all stays as it is
===================================  ================================================================================

Packets stay in the socket's buffer when their sender dies, so a node id that the kernel has seen is never lost.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any

from weenv.core.errors import ConfigError, MountError
from weenv.core.unixsocket import bind_private

_PACKET = 128 << 10
_BATCH = 500  # nodes per packet: 80 bytes each, well below the default send buffer


def _pack(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


class Holder:
    """The holder's state and its loop. ``fuse`` is the descriptor to keep."""

    def __init__(self, fuse: int, mountpoint: str, path: str, attached: socket.socket) -> None:
        self.fuse = fuse
        self.mountpoint = mountpoint
        self.path = path
        self.init: dict[str, Any] | None = None
        self.nodes: dict[int, str] = {}
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
        if self.attached is not None:
            self.attached.send(_pack({"op": "ready"}))
        self.poll.register(listener, select.POLLIN)
        self.poll.register(self.fuse, 0)  # POLLERR alone: the connection has ended
        for fd in self.clients:
            self.poll.register(fd, select.POLLIN)
        while self.running:
            for fd, event in self.poll.poll():
                if fd == listener.fileno():
                    self._accept(listener)
                elif fd == self.fuse:
                    self.running = not event & (select.POLLERR | select.POLLNVAL)
                elif fd in self.clients:
                    self._client(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def _accept(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        if struct.unpack("iII", credentials)[1] not in (0, os.geteuid()):
            client.close()
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
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # gone, or no client of ours
        self.poll.unregister(fd)
        del self.clients[fd]
        client.close()
        if client is self.attached:
            self.attached = self.server_pid = None

    def _message(self, client: socket.socket, message: dict[str, Any]) -> None:
        match message["op"]:
            case "node" if client is self.attached:
                self.nodes[int(message["id"])] = str(message["name"])
            case "init" if client is self.attached:
                self.init = message["init"]
            case "attach":
                self._attach(client, int(message["pid"]))
            case "status":
                client.send(
                    _pack(
                        {
                            "pid": os.getpid(),
                            "server": self.server_pid,
                            "mountpoint": self.mountpoint,
                            "init": self.init,
                            "nodes": len(self.nodes),
                        }
                    )
                )
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
            while self.attached is not None:  # take in the packets it sent before it died
                self._client(self.attached.fileno())
        answer = {"ok": True, "mountpoint": self.mountpoint, "init": self.init, "nodes": len(self.nodes)}
        socket.send_fds(client, [_pack(answer)], [self.fuse])
        items = list(self.nodes.items())
        for start in range(0, len(items), _BATCH):
            client.send(_pack({"nodes": items[start : start + _BATCH]}))
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
            with contextlib.suppress(OSError):
                self.attached.send(_pack({"op": "stop"}))
        client.send(_pack({"ok": True}))


class HolderClient:
    """The server's end of its connection to the holder. ``init`` and ``nodes`` are what an earlier server left."""

    def __init__(
        self,
        connection: socket.socket,
        init: dict[str, Any] | None,
        nodes: dict[int, str],
        process: subprocess.Popen[bytes] | None,
    ) -> None:
        self.connection = connection
        self.init = init
        self.nodes = nodes
        self.process = process

    def remember_node(self, nodeid: int, name: str) -> None:
        """Tell the holder a node id before the kernel learns of it. A dead holder is no error: its successor is told."""
        self.nodes[nodeid] = name
        self._send({"op": "node", "id": nodeid, "name": name})

    def remember_init(self, init: dict[str, Any]) -> None:
        """Tell the holder what was agreed in INIT."""
        self.init = init
        self._send({"op": "init", "init": init})

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.connection.send(_pack(message))

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
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    connection.settimeout(10.0)
    try:
        connection.connect(path)
    except BaseException:
        connection.close()
        raise
    return connection


def attach(path: str) -> tuple[HolderClient, int] | None:
    """Get the descriptor from the holder at ``path``; None where none answers.

    Raises :class:`ConfigError` where another server is attached to it.
    """
    try:
        connection = _connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return None
    try:
        connection.send(_pack({"op": "attach", "pid": os.getpid()}))
        packet, fds, _, _ = socket.recv_fds(connection, _PACKET, 4)
        answer: dict[str, Any] = json.loads(packet) if packet else {"error": "closed"}
        if answer.get("error") == "busy":
            raise ConfigError(f"blobfs is being served already, by process {answer.get('pid')}", hint="weenv status shows it")
        if not fds:
            return None
        nodes: dict[int, str] = {}
        while len(nodes) < answer["nodes"]:
            nodes.update((int(nodeid), str(name)) for nodeid, name in json.loads(connection.recv(_PACKET))["nodes"])
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError | ValueError):
            return None
        raise
    os.set_inheritable(fds[0], False)
    return HolderClient(connection, answer["init"], nodes, None), fds[0]


def start(path: str, mountpoint: str, fuse: int) -> HolderClient:
    """Start a holder for the mount behind ``fuse``; the calling process is its attached server.

    Returns once the holder has the descriptor and answers: from then on, this process may be killed. Raises
    :class:`ConfigError` where the holder does not start, OSError.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(30.0)
    with theirs:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "weenv.plugin.snapshotter.blobfs.holder",
                "--fuse", str(fuse), "--attached", str(theirs.fileno()), "--socket", path, "--mountpoint", mountpoint,
            ],
            pass_fds=[fuse, theirs.fileno()], start_new_session=True, cwd="/",
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
    return HolderClient(ours, None, {}, process)


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
    parser.add_argument("--attached", type=int, required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--mountpoint", required=True)
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the mount, not with the terminal or the unit
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("-900")
    os.set_inheritable(options.fuse, False)
    attached = socket.socket(fileno=options.attached)
    attached.set_inheritable(False)
    attached.settimeout(5.0)
    Holder(options.fuse, options.mountpoint, options.socket, attached).run()


if __name__ == "__main__":
    main()
