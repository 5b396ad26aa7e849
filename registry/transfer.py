"""Whole manifests and blobs, pulled and pushed through the oras library in worker threads.

Blobs stream between file and socket in blocks of a megabyte, whatever their size. A pull that breaks is resumed where it
stopped; a push that breaks starts over, because an upload session does not survive a failed PUT everywhere. What a call
has pulled is verified before it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import requests
import urllib3.exceptions

from weenv.core import digest as digests
from weenv.core.errors import (
    ConfigError,
    NotFoundInSource,
    SourceError,
    StorageError,
    UnavailableError,
    VerificationError,
    WeenvError,
)
from weenv.core.rights import remedy
from weenv.registry.auth import scope_of
from weenv.registry.hosts import PULL, PUSH, RESOLVE, Endpoint
from weenv.registry.manifest import ACCEPT, MAX_MANIFEST, Descriptor
from weenv.registry.orasreg import Body, OrasRegistry, Progress, explain
from weenv.registry.policy import TRANSIENT, Pace, parse_retry_after, retry_delay, status_error, unavailable
from weenv.registry.reference import Reference
from weenv.registry.sessions import BLOCK
from weenv.registry.threads import Cancelled, in_thread

if TYPE_CHECKING:
    from weenv.registry.client import RegistryClient

T = TypeVar("T")
BROKEN = (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError, TimeoutError)
"""What reading from a broken connection raises."""


class Transfer:
    """Transfers of one :class:`RegistryClient`. ``threads`` bounds how many run at once."""

    def __init__(self, client: RegistryClient, *, threads: int = 8) -> None:
        self._client = client
        # Not the loop's own executor: transfers wait for credential look-ups that run there.
        self._pool = ThreadPoolExecutor(threads, "weenv-transfer")
        self._registries: dict[tuple[Endpoint, str, int], OrasRegistry] = {}

    def close(self) -> None:
        """Close all connections. Transfers under way have been awaited or cancelled by then."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for registry in self._registries.values():
            registry.session.close()
        self._registries.clear()

    def _registry(self, endpoint: Endpoint, scope: str, attempts: int) -> OrasRegistry:
        key = (endpoint, scope, attempts)
        if key not in self._registries:
            loop = asyncio.get_running_loop()
            self._registries[key] = OrasRegistry(endpoint, scope, self._client, loop, attempts)
        return self._registries[key]

    def _pushed_to(self, host: str, scope: str) -> OrasRegistry:
        """The server that takes uploads. Raises SourceError where there is none."""
        client = self._client
        return self._registry(client.endpoints(host, PUSH)[0], scope, client.config.attempts)

    async def _pull(self, host: str, repository: str, capability: str, work: Callable[[OrasRegistry], T]) -> T:
        """What ``work`` makes of the first server that serves it. Raises the registry's own error where none does.

        Where there are several, each gets one try before all get the configured number. Wrong bytes everywhere are fetched
        once more.
        """
        client, scope = self._client, scope_of(repository)
        endpoints = client.endpoints(host, capability)
        several, most = len(endpoints) > 1, client.config.attempts
        again = (UnavailableError, VerificationError) if several else VerificationError  # one alone has had all its tries
        failures: dict[Endpoint, WeenvError] = {}
        for attempts in (1 if several else most, most):
            for endpoint in client.health.order(endpoints, asyncio.get_running_loop().time()):
                if endpoint in failures and not isinstance(failures[endpoint], again):
                    continue
                try:
                    registry = self._registry(endpoint, scope, attempts)
                    found = await self._run(registry, partial(work, registry))
                except (SourceError, VerificationError, ConfigError) as error:
                    failures[endpoint] = error
                    if isinstance(error, UnavailableError | VerificationError):
                        client.failed(endpoint, error.message, getattr(error, "retry_after", None))
                    continue
                client.health.worked(endpoint)
                return found
        raise failures[endpoints[-1]]

    async def _run(self, registry: OrasRegistry, work: Callable[[], T]) -> T:
        def begin(cancel: threading.Event) -> T:
            registry.begin(cancel)
            return work()

        return await in_thread(self._pool, begin)

    # -- pull ---------------------------------------------------------------------------------------------------

    async def pull_manifest(self, reference: Reference) -> tuple[bytes, Descriptor]:
        """A manifest's or index's bytes and descriptor, verified. Raises SourceError, VerificationError."""
        capability = PULL if reference.digest else RESOLVE
        return await self._pull(
            reference.host, reference.repository, capability, lambda registry: _pull_manifest(registry, reference)
        )

    async def pull_bytes(self, host: str, repository: str, descriptor: Descriptor, limit: int = MAX_MANIFEST) -> bytes:
        """A small blob (an image config), verified. Raises SourceError, VerificationError."""
        if descriptor.size > limit:
            raise SourceError(f"{descriptor.digest} is larger than {limit} bytes")

        def work(registry: OrasRegistry) -> bytes:
            data = bytearray()
            _pull_blob(registry, repository, descriptor, data.extend, None)
            return bytes(data)

        return await self._pull(host, repository, PULL, work)

    async def pull_blob(
        self, host: str, repository: str, descriptor: Descriptor, path: str, progress: Progress | None = None
    ) -> None:
        """A blob into a new file at ``path``, verified; the file is removed where that fails.

        Raises SourceError, VerificationError, StorageError. ``progress`` is called from another thread.
        """
        counted = _Counted(progress) if progress is not None else None

        def work(registry: OrasRegistry) -> None:
            with _new_file(path) as file:
                try:
                    _pull_blob(registry, repository, descriptor, file.write, counted, path)
                except BaseException:
                    os.unlink(path)
                    raise

        try:
            await self._pull(host, repository, PULL, work)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise

    # -- push ---------------------------------------------------------------------------------------------------

    async def push_blob(
        self, host: str, repository: str, descriptor: Descriptor, path: str, *,
        mount_from: str = "", chunk_size: int = 0, progress: Progress | None = None,
    ) -> str:  # fmt: skip
        """A file as a blob. Returns ``exists``, ``mounted`` (from repository ``mount_from``) or ``uploaded``.

        ``chunk_size`` in bytes uploads in PATCH requests of that size, for registries behind proxies that limit a body;
        0 sends one PUT. Raises SourceError.
        """
        scope = scope_of(repository, "pull,push", also_pull=mount_from)
        registry = self._pushed_to(host, scope)
        return await self._run(
            registry, lambda: _push_blob(registry, repository, descriptor, path, mount_from, chunk_size, progress)
        )

    async def mount_blob(self, host: str, repository: str, descriptor: Descriptor, mount_from: str) -> bool:
        """True where the blob is in the repository now without being sent: it was there or could be mounted.

        An empty ``mount_from`` only asks whether it is there, with the authority to push.
        """
        registry = self._pushed_to(host, scope_of(repository, "pull,push", also_pull=mount_from))

        def work() -> bool:
            container = registry.container(repository, descriptor.digest)
            if registry.blob_exists({"digest": descriptor.digest}, container):
                return True
            if not mount_from or mount_from == repository:
                return False
            answer = _start_mount(registry, container, descriptor.digest, mount_from)
            if answer.status_code == 202:  # not mounted: the session is of no use
                location = registry._get_location(answer, container)
                with contextlib.suppress(SourceError):
                    registry.do_request(location, "DELETE")
            return answer.status_code == 201

        return await self._run(registry, work)

    async def push_manifest(self, reference: Reference, data: bytes, media_type: str) -> Descriptor:
        """A manifest or index under the reference's digest, else tag. Raises SourceError, VerificationError."""
        registry = self._pushed_to(reference.host, scope_of(reference.repository, "pull,push"))
        return await self._run(registry, lambda: _push_manifest(registry, reference, data, media_type))


class _Counted:
    """Tells a progress what is new, however often a blob is begun again."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._reached = 0

    def __call__(self, position: int) -> None:
        if position > self._reached:
            self._progress(position - self._reached)
            self._reached = position


def _new_file(path: str) -> BinaryIO:
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb", buffering=0)
    except OSError as error:
        raise StorageError(f"cannot create {path}: {error.strerror}", errno=error.errno or 0) from error


def _complaint(answer: requests.Response) -> str:
    """The registry's own words (distribution-spec, "Error Codes"), made fit for one line."""
    try:
        error = answer.json()["errors"][0]
        text = f"{error.get('code', '')}: {error.get('message', '')}"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        return ""
    return " (" + "".join(c if c.isprintable() else "?" for c in text[:200]) + ")"


def _fail(registry: OrasRegistry, answer: requests.Response, what: str) -> SourceError:
    retry_after = parse_retry_after(answer.headers.get("Retry-After"))
    return status_error(answer.status_code, what + _complaint(answer), registry.host, retry_after)


def _pull_manifest(registry: OrasRegistry, reference: Reference) -> tuple[bytes, Descriptor]:
    url = registry.url(f"/v2/{reference.repository}/manifests/{reference.target}")
    failures = 0
    give_up = time.monotonic() + registry.config.deadline
    while True:
        try:
            with registry.do_request(url, "GET", headers={"Accept": ACCEPT}, stream=True) as answer:
                if answer.status_code != 200:
                    raise _fail(registry, answer, str(reference))
                data = _read_small(registry, answer, str(reference), give_up)
            if not data:  # a connection that was cut in the header looks like that
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            break
        except BROKEN as error:
            failures += 1
            _wait(registry, failures, unavailable(registry.host, str(reference), explain(error)))
    if len(data) > MAX_MANIFEST:
        raise SourceError(f"{reference} is larger than {MAX_MANIFEST} bytes")
    digest = digests.sha256(data)
    promised = reference.digest or answer.headers.get("Docker-Content-Digest", "")
    if digests.is_digest(promised) and promised != digest:
        raise VerificationError(f"the manifest has digest {digest}, expected {promised}", member=str(reference))
    media_type = answer.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    return data, Descriptor("" if media_type == "application/json" else media_type, digest, len(data))


def _read_small(registry: OrasRegistry, answer: requests.Response, what: str, give_up: float) -> bytes:
    """Up to a byte more than a manifest may have. Raises UnavailableError at ``give_up`` (monotonic), Cancelled."""
    data = bytearray()
    while len(data) <= MAX_MANIFEST and (chunk := answer.raw.read1(BLOCK)):
        data += chunk
        if registry.cancel.is_set():
            raise Cancelled
        if time.monotonic() > give_up:
            raise UnavailableError(f"{registry.host} is too slow in serving {what}")
    return bytes(data)


def _wait(registry: OrasRegistry, failures: int, failure: UnavailableError) -> None:
    delay = retry_delay(registry.config, failures, failure.retry_after)
    if delay is None:
        raise failure
    if registry.cancel.wait(delay):
        raise Cancelled


def _pull_blob(
    registry: OrasRegistry, repository: str, descriptor: Descriptor, write: Callable[[memoryview], Any],
    reached: Callable[[int], None] | None, path: str = "",
) -> None:  # fmt: skip
    """``path``: the file that ``write`` writes."""
    position, failures, hasher = 0, 0, hashlib.sha256()
    what = f"{repository}@{descriptor.digest}"
    give_up = time.monotonic() + registry.config.deadline + descriptor.size / registry.config.min_rate
    while True:
        before, pace = position, Pace(registry.config)
        reason = "the answer ended early"
        try:
            with registry.open_stream(repository, descriptor.digest, position) as answer:
                if answer.status_code not in (200, 206):
                    raise _fail(registry, answer, what)
                skip = position if answer.status_code == 200 else 0  # it ignores Range: read on to where we were
                began = time.monotonic()
                while chunk := answer.raw.read1(BLOCK):  # what has come: who drips bytes must not hold us in one call
                    slow = pace.add(len(chunk), time.monotonic() - began)
                    if registry.cancel.is_set():
                        raise Cancelled
                    if skip:
                        chunk, skip = chunk[skip:], max(0, skip - len(chunk))
                    position += len(chunk)
                    if position > descriptor.size:
                        raise VerificationError(f"longer than the {descriptor.size} bytes of its descriptor", member=what)
                    hasher.update(chunk)
                    _write(write, chunk, path)
                    if reached is not None:
                        reached(position)
                    if time.monotonic() > give_up:
                        raise UnavailableError(f"{registry.host} is too slow in serving {what}")
                    if slow and position < descriptor.size:
                        reason = "it is too slow"
                        break
                    began = time.monotonic()
            if position == descriptor.size:
                break
        except BROKEN as error:
            reason = explain(error)
        failures = 1 if position > before else failures + 1
        _wait(registry, failures, unavailable(registry.host, what, reason))
    if "sha256:" + hasher.hexdigest() != descriptor.digest:
        raise VerificationError("content does not have its digest", member=what)


def _write(write: Callable[[memoryview], Any], chunk: bytes, path: str) -> None:
    view = memoryview(chunk)
    try:
        while view:
            done = write(view)
            view = view[done if isinstance(done, int) else len(view) :]
    except OSError as error:
        text = f"cannot write to {os.path.dirname(path)}: {error.strerror}"
        raise StorageError(text, errno=error.errno or 0, hint=remedy(error)) from error


def _start_mount(registry: OrasRegistry, container: Any, digest: str, mount_from: str) -> requests.Response:
    url = f"{registry.prefix}://{container.upload_blob_url()}"
    url += f"{'&' if '?' in url else '?'}mount={digest}&from={mount_from}"
    return registry.do_request(url, "POST", headers={"Content-Length": "0"})


def _push_blob(
    registry: OrasRegistry, repository: str, descriptor: Descriptor, path: str, mount_from: str, chunk_size: int,
    progress: Progress | None,
) -> str:  # fmt: skip
    container = registry.container(repository, descriptor.digest)
    layer = {"digest": descriptor.digest, "size": descriptor.size, "mediaType": descriptor.media_type}
    what = f"an upload to {repository}"
    failures = 0
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size != descriptor.size:
            raise SourceError(f"{path} does not have the {descriptor.size} bytes of its descriptor")
        body = Body(file, descriptor.size, registry.cancel, progress)
        while True:
            retry_after: float | None = None
            try:
                if registry.blob_exists(layer, container):
                    return "exists"
                answer = None
                if mount_from and mount_from != repository:
                    answer = _start_mount(registry, container, descriptor.digest, mount_from)
                    if answer.status_code == 201:
                        return "mounted"
                session = registry._get_location(answer, container) if answer is not None else ""
                if answer is not None and answer.status_code == 202 and session and not chunk_size:
                    answer = registry.finish_upload(session, body, layer)
                elif chunk_size and descriptor.size > chunk_size:
                    answer = _chunked(registry, path, container, layer, chunk_size)
                else:
                    answer = registry.put_upload(body, container, layer)
                if answer.status_code == 201:
                    return "uploaded"
                if answer.status_code not in TRANSIENT and answer.status_code not in (404, 416):
                    raise _fail(registry, answer, what)
                reason = f"status {answer.status_code}"
            except UnavailableError as error:
                reason, retry_after = error.message, error.retry_after
            failures += 1
            _wait(registry, failures, UnavailableError(f"{what} failed: {reason}", retry_after=retry_after))


def _chunked(registry: OrasRegistry, path: str, container: Any, layer: dict[str, Any], size: int) -> requests.Response:
    try:
        answer: requests.Response = registry.chunked_upload(path, container, layer, chunk_size=size)
    except ValueError as error:  # oras' way to say that a PATCH was refused
        raise UnavailableError(f"{registry.host} refused a part of an upload") from error
    return answer


def _push_manifest(registry: OrasRegistry, reference: Reference, data: bytes, media_type: str) -> Descriptor:
    descriptor = Descriptor(media_type, digests.sha256(data), len(data))
    if reference.digest and reference.digest != descriptor.digest:
        raise VerificationError(f"the manifest to push has digest {descriptor.digest}", member=str(reference))
    url = registry.url(f"/v2/{reference.repository}/manifests/{reference.target}")
    answer = registry.do_request(url, "PUT", data=data, headers={"Content-Type": media_type})
    if answer.status_code == 404:
        raise NotFoundInSource(f"{registry.host} does not take {reference}{_complaint(answer)}")
    if answer.status_code not in (200, 201):
        raise _fail(registry, answer, str(reference))
    stored = answer.headers.get("Docker-Content-Digest", descriptor.digest)
    if stored != descriptor.digest:
        raise VerificationError(f"{registry.host} stored the manifest as {stored}", member=str(reference))
    return descriptor
