"""A registry that misbehaves by chance: a process of its own, over real sockets, and nothing but Python in it.

Of its answers to ranged reads a share each is refused (429, Retry-After: 1), cut short or has a wrong byte; it can be taken
down, which closes its sockets, and up again at the same address. It serves the files of ``DIRECTORY`` (named by 64 hex digits)
as blobs of any repository.

    python -m weenv_testkit.unruly DIRECTORY PORT SEED REFUSED CUT WRONG

Commands on standard input, a line each: ``down``, ``up``, ``counts`` (one line of JSON comes back; so it does for the others).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import subprocess
import sys
from types import TracebackType

_REQUEST = re.compile(rb"GET /v2/\S+/blobs/sha256:([0-9a-f]{64})\S* HTTP/1\.1\r\n")
_RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d+)\r\n", re.IGNORECASE)


class _Server:
    def __init__(self, directory: str, port: int, seed: int, shares: list[float]) -> None:
        self.directory = directory
        self.port = port
        self.dice = random.Random(seed)
        self.refused, self.cut, self.wrong = shares
        self.counts = {"answers": 0, "refused": 0, "cut": 0, "wrong": 0, "bytes": 0, "downs": 0}
        self.connections: set[asyncio.StreamWriter] = set()
        self.listener: asyncio.Server | None = None

    async def up(self) -> None:
        self.listener = await asyncio.start_server(self.serve, "127.0.0.1", self.port, reuse_address=True, limit=1 << 16)
        self.port = self.listener.sockets[0].getsockname()[1]

    async def down(self) -> None:
        self.counts["downs"] += 1
        assert self.listener is not None
        self.listener.close()
        for writer in list(self.connections):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while await self.answer(await reader.readuntil(b"\r\n\r\n"), writer):
                await writer.drain()
        self.connections.discard(writer)
        writer.close()

    async def answer(self, request: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; False where the connection is to be closed."""
        found, wanted = _REQUEST.match(request), _RANGE.search(request)
        if found is None or wanted is None:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return True
        self.counts["answers"] += 1
        roll = self.dice.random()
        if roll < self.refused:
            self.counts["refused"] += 1
            writer.write(b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n")
            return True
        begin, end = int(wanted[1]), int(wanted[2]) + 1
        path = os.path.join(self.directory, found[1].decode())
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            body = bytearray(os.pread(file.fileno(), end - begin, begin))
        head = f"Content-Range: bytes {begin}-{end - 1}/{size}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(b"HTTP/1.1 206 Partial Content\r\n" + head.encode())
        if roll < self.refused + self.cut:
            self.counts["cut"] += 1
            writer.write(bytes(body[: self.dice.randrange(len(body))]))
            if self.dice.random() < 0.5:
                writer.transport.abort()
            return False
        if roll < self.refused + self.cut + self.wrong:
            self.counts["wrong"] += 1
            body[self.dice.randrange(len(body))] ^= 1 << self.dice.randrange(8)
        self.counts["bytes"] += len(body)
        writer.write(bytes(body))
        return True


async def _main(directory: str, port: int, seed: int, shares: list[float]) -> None:
    server = _Server(directory, port, seed, shares)
    await server.up()
    print(json.dumps({"port": server.port}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line == "down\n":
            await server.down()
        elif line == "up\n":
            await server.up()
        print(json.dumps(server.counts), flush=True)


class UnrulyRegistry:
    """One in a process of its own, for the length of a block. ``host`` is its address; blobs are put into ``directory``."""

    def __init__(self, directory: str, *, seed: int, refused: float = 0.1, cut: float = 0.1, wrong: float = 0.01) -> None:
        self.directory = directory
        os.makedirs(directory, exist_ok=True)
        shares = [str(share) for share in (refused, cut, wrong)]
        self._child = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), directory, "0", str(seed), *shares],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.host = f"127.0.0.1:{self._answer()['port']}"

    def __enter__(self) -> UnrulyRegistry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        self._child.wait(60)
        self._child.stdout.close()

    def _answer(self) -> dict[str, int]:
        assert self._child.stdout is not None
        return dict(json.loads(self._child.stdout.readline()))

    def tell(self, command: str) -> dict[str, int]:
        """``down``, ``up`` or ``counts``; the counts so far."""
        assert self._child.stdin is not None
        self._child.stdin.write(command + "\n")
        self._child.stdin.flush()
        return self._answer()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [float(share) for share in sys.argv[4:7]]))
