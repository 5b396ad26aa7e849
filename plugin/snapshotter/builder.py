"""EROFS metadata in processes of their own: tail in, ``meta[-<variant>].erofs`` out.

Decoding a TOC and laying out an image takes a few microseconds per entry, most of them under the interpreter's lock: in a
thread of the daemon it would hold up every other request, and the memory of a large layer would stay with the daemon. So
one small process (the *nursery*) is started with everything imported, and forks a child per job: two milliseconds, two
jobs on two cores, memory back at the end, and a malformed layer that brings down its parser brings down nothing else.

All that run at once share one budget of memory. A job's share is judged by the size that its TOC states, and is the limit
of the child's address space: who needs more is tried once more with the whole budget, alone. What does not fit waits.

Protocol on the nursery's stdin and stdout: one JSON object a line. Request: ``id``, ``directory`` (a layer directory),
``variant``, ``attributes`` (text, see planes/base.py), ``memory`` (bytes); or ``directory``, ``foreign``, ``offset`` and
``memory``: a TOC in another format is to be made into ours. Answer: ``id`` and either ``seconds`` and, for the latter, ``tail``
(:data:`Place` as a list), or ``error``, ``message``, ``hint``; error ``MemoryError``: more memory is needed. The end of stdin
ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import mmap
import os
import resource
import selectors
import signal
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from weenv.core import errors
from weenv.core.process import fork

if TYPE_CHECKING:
    from weenv.layer.foreign.formats import ForeignLayer

log = logging.getLogger(__name__)

Place = tuple[int, int, str]
"""Of a tail that was made: where it would begin in the blob, its length, its digest."""

META = "meta.erofs"
FACTS = "facts.json"
_SHARE = 64 << 20
"""Bytes that any job is given; a layer of 10 000 entries takes 7 MiB."""
_PER_BYTE = 12
"""Bytes of memory per byte of uncompressed TOC. Measured: 260 to 450 bytes per entry, of which the TOC has 35 to 75."""
_LEAST = 512 << 20
_LINE = 1 << 20


def meta_name(variant: str) -> str:
    """File name of a variant's metadata image."""
    return f"meta-{variant}.erofs" if variant else META


# the nursery's side


def build(directory: str, variant: str, attributes: str) -> None:
    """Build one image from the tail in ``directory``. Raises FormatError, OSError.

    The tail is checked against its digest again: after a power cut it may not be what was written.
    """
    from weenv.core import digest as digests
    from weenv.core.atomic import write_atomic
    from weenv.layer import erofs
    from weenv.layer.tail import parse_tail
    from weenv.plugin.snapshotter.layerdir import LayerSource
    from weenv.plugin.snapshotter.planes.base import Implied, LayerFacts, decode_attributes

    with open(os.path.join(directory, "source.json"), "rb") as file:
        source = LayerSource.from_json(file.read(1 << 20))
    with open(os.path.join(directory, "toc"), "rb") as file:
        tail = file.read(source.toc_length + 1)
    digests.verify(tail, source.toc_digest, f"the stored tail of {source.digest}")
    descriptor = source.descriptor()
    toc = parse_tail(tail, layer_size=descriptor.size, toc_offset=descriptor.toc_offset, foreign=descriptor.foreign)
    positions: dict[int, int] = {}
    image = erofs.build(toc, implied=decode_attributes(attributes), positions=positions)
    if not variant:
        implied = (Implied(entry, toc.path(entry), position) for entry, position in positions.items() if entry)
        facts = LayerFacts(toc.diff_id, tuple(implied))
        write_atomic(os.path.join(directory, FACTS), facts.to_json(), durable=False)
    write_atomic(os.path.join(directory, meta_name(variant)), image, durable=False)


def translate(directory: str, layer: ForeignLayer, offset: int) -> Place:
    """Make ``directory/toc``, a tail of ours, of ``directory/foreign``, the TOC of a layer in another format, at ``offset``.

    The latter is gone then. Raises FormatError (VerificationError where it is not the TOC that ``layer`` promises), OSError.
    """
    from weenv.core.atomic import write_atomic
    from weenv.layer.foreign.tail import make_tail

    path = os.path.join(directory, "foreign")
    with open(path, "rb") as file:
        data = file.read()
    _, descriptor, tail = make_tail(layer, data, offset)
    write_atomic(os.path.join(directory, "toc"), tail, durable=False)
    os.unlink(path)  # not before: who runs out of memory is tried again
    return descriptor.toc_offset, descriptor.toc_length, descriptor.toc_digest


def _job(request: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    place: Place | None = None
    try:
        if "foreign" in request:
            from weenv.layer.foreign.formats import ForeignLayer

            place = translate(str(request["directory"]), ForeignLayer(**request["foreign"]), int(request["offset"]))
        else:
            build(str(request["directory"]), str(request["variant"]), str(request["attributes"]))
    except errors.WeenvError as error:
        return {"error": type(error).__name__, "message": error.message, "hint": error.hint}
    except OSError as error:
        return {"error": "StorageError", "message": str(error), "errno": error.errno or 0}
    except MemoryError:
        return {"error": "MemoryError", "message": ""}
    except Exception as error:  # noqa: BLE001 (a child's last words)
        return {"error": "FormatError", "message": f"internal error: {type(error).__name__}: {error}"}
    return {"seconds": time.perf_counter() - begin, "tail": place}


def nursery() -> None:
    """The nursery's main loop."""
    import weenv.layer.erofs
    import weenv.layer.foreign.tail
    import weenv.layer.tail
    import weenv.plugin.snapshotter.layerdir
    import weenv.plugin.snapshotter.planes.base  # noqa: F401 (imported for the children)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a ^C is the daemon's to handle
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    children: dict[int, tuple[int, Any]] = {}
    pending = b""
    while True:
        for key, _ in selector.select():
            if key.fd != 0:
                pid, number = children.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                status = os.waitpid(pid, 0)[1]
                if status != 0:
                    how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"status {os.WEXITSTATUS(status)}"
                    _answer({"id": number, "error": "FormatError", "message": f"building the metadata ended with {how}"})
                continue
            data = os.read(0, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                try:
                    pid, fd = fork()
                except OSError as error:
                    text = f"no process to build metadata can be started: {error.strerror}"
                    _answer({"id": request["id"], "error": "StorageError", "message": text, "errno": error.errno or 0})
                    continue
                if pid == 0:
                    with contextlib.suppress(ValueError, OSError):  # beyond a hard limit, which is lower and holds
                        most = _address_space() + int(request["memory"])
                        resource.setrlimit(resource.RLIMIT_AS, (most, most))
                    _answer({"id": request["id"], **_job(request)})
                    os._exit(0)
                children[fd] = (pid, request["id"])
                selector.register(fd, selectors.EVENT_READ)


def _address_space() -> int:
    """Bytes of address space that this process has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _answer(answer: dict[str, Any]) -> None:
    line = json.dumps(answer)
    if len(line) > 4000:  # a pipe keeps writes of up to 4096 bytes whole
        answer["message"] = str(answer.get("message", ""))[:1000]
        line = json.dumps(answer)
    with contextlib.suppress(BrokenPipeError):  # the daemon was killed meanwhile: the next one asks anew
        os.write(1, line.encode() + b"\n")


# the daemon's side


def default_memory() -> int:
    """The budget where none is configured: a quarter of the machine's memory, and not less than 512 MiB."""
    return max(_LEAST, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)


def expected_memory(directory: str) -> int:
    """Bytes that building the image of a layer directory is expected to take; blocking."""
    from weenv.layer.tail import content_size

    try:
        with (
            open(os.path.join(directory, "toc"), "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as tail,
            memoryview(tail) as view,
        ):
            return _SHARE + _PER_BYTE * content_size(view)
    except (OSError, ValueError, errors.FormatError, BufferError):  # the job will say what is wrong with it
        return _SHARE


class Budget:
    """Bytes that are handed out in the order in which they are asked for: a large share is not starved by small ones."""

    def __init__(self, total: int) -> None:
        self.total = self.free = total
        self._door = asyncio.Lock()
        self._returned = asyncio.Event()

    async def take(self, amount: int) -> None:
        """Wait until ``amount``, at most :attr:`total`, is free, and take it."""
        async with self._door:
            while self.free < amount:
                self._returned.clear()
                await self._returned.wait()
            self.free -= amount

    def give(self, amount: int) -> None:
        """Give back what was taken."""
        self.free += amount
        self._returned.set()


class _MoreMemory(Exception):
    """The job's share was too small."""


class Builder:
    """Starts the nursery, and again where it died. Use as an async context manager.

    At most ``jobs`` images are built at once, in ``memory`` bytes together (0: :func:`default_memory`).
    """

    def __init__(self, jobs: int, memory: int = 0) -> None:
        self._slots = asyncio.Semaphore(jobs)
        self._budget = Budget(memory or default_memory())
        self._jobs: set[asyncio.Task[dict[str, Any]]] = set()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._next = 0
        self._starting = asyncio.Lock()

    async def __aenter__(self) -> Builder:
        await self._start()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if self._reader is not None:
            await self._reader

    async def _start(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is not None and self._process.returncode is None:
                return self._process
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # a forking process has one
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "from weenv.plugin.snapshotter.builder import nursery; nursery()",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment, limit=_LINE,
            )  # fmt: skip
            self._process = process
            self._reader = asyncio.create_task(self._read(process), name="nursery")
            return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            answer = json.loads(line)
            future = self._waiting.pop(answer.pop("id"), None)
            if future is not None and not future.done():
                future.set_result(answer)
        await process.wait()
        for future in self._waiting.values():
            if not future.done():
                future.set_result({"error": "StorageError", "message": "the process that builds metadata died"})
        self._waiting.clear()

    async def build(self, directory: str, variant: str, attributes: str) -> float:
        """Build one image; returns the seconds it took in the child. Raises what the child raised."""
        request = {"directory": directory, "variant": variant, "attributes": attributes}
        answer = await self._in_budget(request, await asyncio.to_thread(expected_memory, directory))
        return float(answer["seconds"])

    async def translate(self, directory: str, layer: ForeignLayer, offset: int, content: int) -> Place:
        """:func:`translate` in a child; ``content`` is about how many bytes the TOC has decompressed. Raises what it raised."""
        request = {"directory": directory, "foreign": asdict(layer), "offset": offset}
        begin, length, digest = (await self._in_budget(request, _SHARE + _PER_BYTE * content))["tail"]
        return int(begin), int(length), str(digest)

    async def _in_budget(self, request: dict[str, Any], expected: int) -> dict[str, Any]:
        whole = self._budget.total
        share = min(expected, whole)
        try:
            return await self._start_job(request, share)
        except _MoreMemory:
            if share < whole:
                with contextlib.suppress(_MoreMemory):
                    return await self._start_job(request, whole)
            raise errors.LimitError(
                f"the layer's TOC needs more than {whole >> 20} MiB of memory", hint="raise [snapshotter] builder_memory"
            ) from None

    async def _start_job(self, request: dict[str, Any], share: int) -> dict[str, Any]:
        """Wait for room, then run a job. Who is cancelled leaves it running: its room is taken until it ends."""
        await self._slots.acquire()
        try:
            await self._budget.take(share)
        except BaseException:
            self._slots.release()
            raise
        job = asyncio.create_task(self._job({**request, "memory": share}, share), name="build")
        self._jobs.add(job)
        job.add_done_callback(self._ended)
        return await asyncio.shield(job)

    def _ended(self, job: asyncio.Task[dict[str, Any]]) -> None:
        self._jobs.discard(job)
        if not job.cancelled():
            job.exception()  # whoever waits has it

    async def _job(self, request: dict[str, Any], share: int) -> dict[str, Any]:
        try:
            process = await self._start()
            assert process.stdin is not None
            self._next += 1
            future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            number = self._next
            self._waiting[number] = future
            try:
                process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
                with contextlib.suppress(ConnectionError):  # a dead nursery is told of by the reader
                    await process.stdin.drain()
                answer = await future
            finally:
                self._waiting.pop(number, None)
        finally:
            self._budget.give(share)
            self._slots.release()
        if answer.get("error") == "MemoryError":
            raise _MoreMemory
        if "error" in answer:
            raise _revive(answer)
        return answer


async def translate_alone(directory: str, layer: ForeignLayer, offset: int, content: int) -> Place:
    """:meth:`Builder.translate` with a nursery for this one job: for who seldom has any."""
    async with Builder(1) as builder:
        return await builder.translate(directory, layer, offset, content)


def _revive(answer: dict[str, Any]) -> errors.WeenvError:
    kind = getattr(errors, str(answer["error"]), errors.FormatError)
    message, hint = str(answer["message"]), str(answer.get("hint", ""))
    if kind is errors.StorageError:
        return errors.StorageError(message, errno=int(answer.get("errno", 0)), hint=hint)
    if isinstance(kind, type) and issubclass(kind, errors.FormatError):
        return kind(message, hint=hint)
    return errors.FormatError(message, hint=hint)
