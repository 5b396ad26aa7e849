"""Debian's docker-registry over plain HTTP on a loopback port, with its own record of who asked for what."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import socket
import time
from dataclasses import dataclass
from hashlib import sha256
from types import TracebackType
from typing import BinaryIO

from weenv_testkit import tools
from weenv_testkit.procs import Failed, Process, thread_states

_CONFIG = """version: 0.1
log:
  level: warn
  accesslog:
    disabled: false
storage:
  filesystem:
    rootdirectory: {root}
  delete:
    enabled: true
  maintenance:
    uploadpurging:
      enabled: false
  redirect:
    disable: true
http:
  addr: {address}
"""

_ACCESS = re.compile(r'^\S+ - \S* \[[^\]]*\] "([A-Z]+) (\S+) HTTP/[\d.]+" (\d+) (\d+) "[^"]*" "([^"]*)"', re.MULTILINE)

MANIFEST_TYPES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)


@dataclass(frozen=True)
class Request:
    """One line of the registry's access log; ``size`` is the length of the answer's body in bytes."""

    method: str
    path: str
    status: int
    size: int
    agent: str

    @property
    def blob(self) -> str | None:
        """The digest asked for, where it was a blob."""
        _, found, digest = self.path.partition("/blobs/sha256:")
        return "sha256:" + digest.partition("?")[0] if found else None


_GIVEN: set[int] = set()


def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on now, and that the kernel gives to nobody meanwhile.

    Not one that the kernel chooses: it may choose the same for an outgoing connection a moment later, or while a daemon is
    restarted. Those are of ``ip_local_port_range`` (ip(7)); this one is below.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        low = int(file.read().split()[0])
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = 10_000 + secrets.randbelow(max(low - 10_000, 10_000))
        if port % workers != int(worker[2:]) % workers:  # the others' processes do not know what is given here
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _GIVEN:
                _GIVEN.add(port)
                return port


class Registry:
    """A running registry; a context manager. ``host`` is ``127.0.0.1:port``; ``root`` where it keeps its blobs.

    ``login`` (user name, bcrypt hash of a password) makes it a private one, ``root`` one that serves what another was pushed.
    ``docker-registry`` writes one line to its log when it has answered; :meth:`requests` waits for that.
    """

    def __init__(
        self, directory: str, *, root: str | None = None, address: str | None = None, login: tuple[str, str] | None = None
    ) -> None:
        self.directory = directory
        self._login = login
        os.makedirs(directory, exist_ok=True)
        self.root = root or os.path.join(directory, "storage")
        os.makedirs(self.root, exist_ok=True)
        self.host = address or f"127.0.0.1:{free_port()}"
        self.log = os.path.join(directory, "registry.log")
        self._process: Process | None = None

    def start(self) -> None:
        """Start it and wait until it answers. Raises Failed."""
        path = os.path.join(self.directory, "registry.yml")
        with open(path, "w") as file:
            file.write(_CONFIG.format(root=json.dumps(self.root), address=json.dumps(self.host)))
            if self._login is not None:
                users = os.path.join(self.directory, "htpasswd")
                with open(users, "w") as table:
                    table.write(":".join(self._login) + "\n")
                file.write(f"auth:\n  htpasswd: {{realm: test, path: {json.dumps(users)}}}\n")
        environment = {"PATH": os.environ["PATH"], "OTEL_TRACES_EXPORTER": "none"}
        self._process = Process("docker-registry", [tools.docker_registry(), "serve", path], self.log, environment)
        self._process.wait_ready(self._answers)

    def _answers(self) -> bool:
        try:
            return self._call("GET", "/v2/")[0] == (200 if self._login is None else 401)
        except OSError:
            return False

    def stop(self) -> None:
        """Stop it; its blobs stay."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    @property
    def pid(self) -> int:
        """Process id of the running registry."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Registry:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    # -- what was asked of it ------------------------------------------------------------------------------------

    def mark(self) -> int:
        """A position in the request log, for :meth:`requests`."""
        self._settle()
        return os.path.getsize(self.log)

    def _settle(self) -> None:
        """Wait until all that was answered is in the log: no thread of the registry runs or wants to, and the log stays."""
        size, quiet = -1, 0
        deadline = time.monotonic() + 60
        while quiet < 3:
            if time.monotonic() > deadline:
                raise Failed("the registry does not come to rest")
            now = os.path.getsize(self.log)
            quiet = quiet + 1 if now == size and not self._busy() else 0
            size = now
            time.sleep(0.005)

    def _busy(self) -> bool:
        """Whether one of its threads does not sleep; one whose turn it is not yet counts as running (proc_pid_stat(5))."""
        return self._process is not None and any(state != "S" for state in thread_states(self._process.pid))

    def requests(self, since: int = 0) -> list[Request]:
        """Everything answered since a :meth:`mark`, but the kit's own requests."""
        self._settle()
        with open(self.log, errors="replace") as file:
            file.seek(since)
            found = [Request(m, p, int(s), int(b), a) for m, p, s, b, a in _ACCESS.findall(file.read())]
        return [request for request in found if request.agent != "weenv-testkit"]

    def blob_bytes(self, since: int = 0) -> dict[str, int]:
        """Bytes of blob answers since a mark, by digest (GET only)."""
        total: dict[str, int] = {}
        for request in self.requests(since):
            if request.blob and request.method == "GET" and request.status < 300:
                total[request.blob] = total.get(request.blob, 0) + request.size
        return total

    # -- pushing, with nothing but HTTP -----------------------------------------------------------------------------

    def _call(
        self, method: str, path: str, body: bytes | BinaryIO | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        try:
            connection.request(method, path, body, {"User-Agent": "weenv-testkit", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def push_blob(self, repository: str, digest: str, path: str) -> None:
        """Upload a file as a blob, unless the repository has it. Raises Failed."""
        if self._call("HEAD", f"/v2/{repository}/blobs/{digest}")[0] == 200:
            return
        status, headers, body = self._call("POST", f"/v2/{repository}/blobs/uploads/")
        if status != 202:
            raise Failed(f"upload to {repository} refused: {status} {body[:300]!r}")
        location = headers["location"]
        location = location.partition(self.host)[2] if location.startswith("http") else location
        joint = "&" if "?" in location else "?"
        with open(path, "rb") as file:
            length = {"Content-Length": str(os.path.getsize(path)), "Content-Type": "application/octet-stream"}
            status, _, body = self._call("PUT", f"{location}{joint}digest={digest}", file, length)
        if status != 201:
            raise Failed(f"blob {digest} refused: {status} {body[:300]!r}")

    def push_manifest(self, repository: str, reference: str, data: bytes, media_type: str) -> str:
        """Store a manifest under a tag or digest; its digest. Raises Failed."""
        status, _, body = self._call("PUT", f"/v2/{repository}/manifests/{reference}", data, {"Content-Type": media_type})
        if status != 201:
            raise Failed(f"manifest {repository}:{reference} refused: {status} {body[:300]!r}")
        return "sha256:" + sha256(data).hexdigest()

    def manifest(self, repository: str, reference: str) -> tuple[dict[str, object], str]:
        """A manifest and its digest. Raises Failed."""
        accept = {"Accept": ", ".join(MANIFEST_TYPES)}
        status, _, body = self._call("GET", f"/v2/{repository}/manifests/{reference}", None, accept)
        if status != 200:
            raise Failed(f"manifest {repository}:{reference}: {status} {body[:300]!r}")
        return json.loads(body), "sha256:" + sha256(body).hexdigest()

    def delete_blob(self, repository: str, digest: str) -> None:
        """Make the registry forget a blob of a repository."""
        self._call("DELETE", f"/v2/{repository}/blobs/{digest}")

    def blob_path(self, digest: str) -> str:
        """Where the registry keeps a blob on disk, for tests that damage it."""
        hexadecimal = digest.partition(":")[2]
        return os.path.join(self.root, "docker/registry/v2/blobs/sha256", hexadecimal[:2], hexadecimal, "data")
