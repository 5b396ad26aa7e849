"""Eviction in a running blobfs, on a real disk and under the kernel's own readers: no byte is ever wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weenv.plugin.snapshotter import builder, mounts
from weenv.plugin.snapshotter.blobfs.ask import ask
from weenv.plugin.snapshotter.cache.present import frame_states, is_complete, is_whole, progress
from weenv.plugin.snapshotter.layerdir import EVICT
from weenv_testkit import tools
from weenv_testkit.blobfsproc import Blobfs, completes, read, running
from weenv_testkit.procs import wait_until
from weenv_testkit.synthetic import SyntheticLayer, make_layer, payload

MIB = 1 << 20
FILES = [(f"small{n:03}", payload(9_000 + 97 * n, n)) for n in range(200)] + [("big", payload(12 * MIB, 7))]
LAYER = make_layer(FILES)
OTHER = make_layer([("other", payload(6 * MIB, 8)), *((f"o{n:03}", payload(20_000, 900 + n)) for n in range(60))])
THIRD = make_layer([("third", payload(2 * MIB, 9))])


@pytest.fixture
def path(home: str, request: pytest.FixtureRequest) -> str:
    """A directory of the test's own, on a disk."""
    made = f"{home}/{abs(hash(request.node.name)) % 10**8}"
    os.mkdir(made)
    return made


def data(blobfs: Blobfs, layer: SyntheticLayer) -> int:
    """Bytes of disk that the layer's data takes."""
    return os.stat(f"{blobfs.directory(layer)}/data").st_blocks * 512


def prune(blobfs: Blobfs, **request: object) -> dict[str, object]:
    """Have the server prune."""
    answer = ask(blobfs.config.status_socket, {"op": "prune", **request})
    assert answer is not None
    return answer


def forget(file: int) -> None:
    """Have the kernel ask again for what it knows of a file."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


class Readers:
    """Threads that read random pieces of layers and compare them, for the length of the block."""

    def __init__(self, paths: dict[str, SyntheticLayer], count: int = 4) -> None:
        self.paths = paths
        self.reads = 0
        self.wrong: list[str] = []
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(count)]

    def _run(self, number: int) -> None:
        dice = random.Random(number)
        with contextlib.ExitStack() as stack:
            opened = [(stack.enter_context(open(path, "rb", buffering=0)), layer) for path, layer in self.paths.items()]
            files = [(file.fileno(), layer.stream) for file, layer in opened]
            while not self._done.is_set() and not self.wrong:
                file, stream = dice.choice(files)
                if dice.random() < 0.3:
                    forget(file)
                offset = dice.randrange(len(stream))
                length = dice.choice((4096, 128 << 10, 1 << 20))
                try:
                    if os.pread(file, length, offset) != stream[offset : offset + length]:
                        self.wrong.append(f"wrong bytes in {length} at {offset}")
                except OSError as error:
                    self.wrong.append(f"{error} for {length} at {offset}")
                self.reads += 1

    def __enter__(self) -> Readers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join(60)
        assert not self.wrong
        assert not any(thread.is_alive() for thread in self._threads)


def churn(path: str, seconds: float, disturb: Callable[[Blobfs], None] | None) -> None:
    """Readers of two layers over a cache that holds a tenth of them; ``disturb`` is called now and then."""
    bounds = {"high": 2 * MIB, "low": 3 * MIB // 2, "interval": 0.05}
    with running(path, cache=bounds, sync=0.5) as blobfs:
        paths = {blobfs.add(layer): layer for layer in (LAYER, OTHER)}
        evicted = 0
        with Readers(paths) as readers:
            end = time.monotonic() + seconds
            while time.monotonic() < end and not readers.wrong:
                time.sleep(1.0)
                if disturb is not None:
                    evicted += blobfs.status()["cache"]["evicted_frames"].get("size", 0)
                    disturb(blobfs)
            before = readers.reads
            wait_until("readers to go on", lambda: readers.reads > before + 20, 60)
        evicted += blobfs.status()["cache"]["evicted_frames"].get("size", 0)
        assert evicted > 50, "the test is to evict what is being read"
        wait_until("the cache to be within its bounds", lambda: data(blobfs, LAYER) + data(blobfs, OTHER) <= 2 * MIB, 60)
        for path_, layer in paths.items():
            with open(path_, "rb") as file:
                forget(file.fileno())
            assert read(path_) == layer.stream
        assert "Traceback" not in blobfs.log()


def test_readers_of_what_is_being_evicted_see_no_hole(path: str) -> None:
    churn(path, 6.0, None)


def test_nor_when_the_server_is_killed_meanwhile(path: str) -> None:
    def kill(blobfs: Blobfs) -> None:
        blobfs.end(signal.SIGKILL)
        blobfs.start()

    churn(path, 6.0, kill)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_for_minutes(path: str) -> None:
    """As before, with whatever an operator may do in between."""
    dice = random.Random(5)

    def disturb(blobfs: Blobfs) -> None:
        match dice.randrange(4):
            case 0:
                blobfs.end(signal.SIGKILL)
                blobfs.start()
            case 1:
                prune(blobfs)
            case 2:
                prune(blobfs, to=1 * MIB)
            case 3:
                Path("/proc/sys/vm/drop_caches").write_text("1")

    churn(path, float(os.environ.get("WEENV_SOAK_SECONDS", "300")), disturb)


def test_what_was_read_last_stays(path: str) -> None:
    with running(path, cache={"high": 10 * MIB, "low": 9 * MIB, "interval": 0.05}) as blobfs:
        old, new = blobfs.add(OTHER), blobfs.add(THIRD)
        read(old)
        wait_until("the first to be stored", lambda: data(blobfs, OTHER) > 6 * MIB)
        read(new)
        third = blobfs.add(LAYER)
        hot = os.open(new, os.O_RDONLY | os.O_DIRECT)  # past the page cache: what the kernel answers nobody learns of
        with open(third, "rb", buffering=0) as file:
            for position in range(0, len(LAYER.stream), 256 << 10):
                os.pread(file.fileno(), 4096, position)
                assert os.pread(hot, 4096, position % MIB) == THIRD.stream[position % MIB :][:4096]
                time.sleep(0.02)
        wait_until("eviction", lambda: blobfs.status()["cache"]["data"] <= 10 * MIB, 60)
        assert progress(blobfs.directory(OTHER))[0] < 6 * MIB
        states = frame_states(blobfs.directory(THIRD), THIRD.frames.content_sizes, len(THIRD.stream))
        assert states is not None
        for position in range(0, MIB, 256 << 10):
            (frame,) = THIRD.frames.covering(position, 1)
            assert states[frame], f"frame {frame} was read all the time"
        os.close(hot)


def test_prune_takes_all_but_what_is_in_use_and_tells(path: str) -> None:
    with running(path) as blobfs:
        names = {blobfs.add(layer): layer for layer in (LAYER, OTHER)}
        for name, layer in names.items():
            assert read(name) == layer.stream
            wait_until("it to be stored", lambda layer=layer: progress(blobfs.directory(layer))[0] == len(layer.stream))
        dry = prune(blobfs, dry_run=True)
        assert dry["bytes"] == len(LAYER.stream) + len(OTHER.stream) and dry["dry_run"] is True
        assert data(blobfs, LAYER) > 12 * MIB
        one = prune(blobfs, layers=[OTHER.name[:12]])
        assert [row["digest"] for row in one["layers"]] == [OTHER.digest]  # type: ignore[attr-defined]
        assert (data(blobfs, OTHER), progress(blobfs.directory(OTHER))[0]) == (0, 0)
        some = prune(blobfs, to=8 * MIB)
        assert 7 * MIB < some["data_after"] <= 8 * MIB  # type: ignore[operator]
        young = prune(blobfs, before=time.time() - 3600)
        assert young["frames"] == 0, "all of it was read within the hour"
        assert prune(blobfs, before=time.time() + 1)["data_after"] == 0
        for name, layer in names.items():
            with open(name, "rb") as file:
                forget(file.fileno())
            assert read(name) == layer.stream


def test_prune_works_where_no_server_runs_and_beside_one_that_starts(path: str) -> None:
    with running(path) as blobfs:
        name = blobfs.add(LAYER)
        read(name)
        wait_until("it to be stored", lambda: progress(blobfs.directory(LAYER))[0] == len(LAYER.stream))
        config = Path(path, "c.toml")
        config.write_text(f'[blobfs]\nroot = "{path}"\nstatus_socket = "{path}/status.sock"\n')
        command = [*tools.weenv(), "cache", "prune", "--config", str(config), "--json"]
        blobfs.end(signal.SIGTERM)
        done = subprocess.run([*command, "--to", "5Mi"], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout)["data_after"] <= 5 * MIB
        listed = subprocess.run(
            [*tools.weenv(), "cache", "ls", "--config", str(config)], capture_output=True, text=True, check=True
        )
        assert LAYER.name[:12] in listed.stdout
        blobfs.start()
        with open(name, "rb") as file:
            forget(file.fileno())
        assert read(name) == LAYER.stream
        # Another process that prunes by itself must leave what the server has open alone.
        config.write_text(f'[blobfs]\nroot = "{path}"\nstatus_socket = "{path}/none.sock"\n')
        alone = json.loads(subprocess.run([*command, "--all"], capture_output=True, text=True, check=True).stdout)
        assert (alone["frames"], alone["layers"][0]["why"]) == (0, "mounted")


def test_the_socket_refuses_what_is_no_request(path: str) -> None:
    import socket

    def say(text: bytes) -> dict[str, object]:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{path}/status.sock")
            with contextlib.suppress(BrokenPipeError):
                client.sendall(text)
            parts = b""
            while part := client.recv(1 << 16):
                parts += part
        return dict(json.loads(parts))

    with running(path):
        prunes = (b'"layers":["../.."]', b'"layers":"a"', b'"layers":["ab"]', b'"to":-1', b'"before":"now"')
        for text in (b"[]\n", b"x\n", b'{"op": "rm -rf"}\n', *(b'{"op":"prune",%s}\n' % each for each in prunes),
                     b"[" * 70_000 + b"\n", b"x" * 200_000):  # fmt: skip
            assert "error" in say(text), text[:80]
        assert "layers" in say(b"")


# -- what the kernel reads by itself ----------------------------------------------------------------------------------


@contextlib.contextmanager
def plain_mount(blobfs: Blobfs, target: str) -> Iterator[None]:
    """A complete layer mounted over its plain file, as planes/erofs.py does it."""
    directory = blobfs.directory(LAYER)
    builder.build(directory, "", "[]")
    with mounts.open_erofs(f"{directory}/{builder.META}", f"{directory}/data") as mount:
        mount.attach(target)
    try:
        yield
    finally:
        mounts.detach(target)


def whole(directory: str) -> None:
    """Every file of the mounted layer is right, read from the disk."""
    Path("/proc/sys/vm/drop_caches").write_text("3")
    for name, content in FILES:
        assert Path(directory, name).read_bytes() == content, name


def test_a_layer_that_the_kernel_reads_by_itself_is_never_punched(path: str) -> None:
    """Not while it is mounted, nor below an overlay whose lower mount has been taken away from everybody's sight."""
    target, over = f"{path}/t", f"{path}/o"
    for name in ("t", "o", "u", "w"):
        os.mkdir(f"{path}/{name}")
    with running(path, cache={"high": 1 * MIB, "interval": 0.05}, idle=1.0, sync=0.2) as blobfs:
        blobfs.end(signal.SIGTERM)
        blobfs.table["cache"] = {"high": 1 << 40}
        blobfs.start()
        assert read(blobfs.add(LAYER)) == LAYER.stream
        assert completes(blobfs.directory(LAYER))
        with plain_mount(blobfs, target):
            mounts.mount("overlay", over, "overlay", 0, f"lowerdir={target},upperdir={path}/u,workdir={path}/w")
            try:
                answer = prune(blobfs)
                assert (answer["frames"], answer["layers"][0]["why"]) == (0, "mounted")  # type: ignore[index]
                mounts.detach(target)
                assert prune(blobfs)["frames"] == 0
                # One that must evict asks for a mount that it may, and leaves this one alone all the same.
                blobfs.end(signal.SIGKILL)
                blobfs.table["cache"] = {"high": 1 * MIB, "interval": 0.05}
                blobfs.start()
                wait_until("it to ask", lambda: os.path.exists(f"{blobfs.directory(LAYER)}/{EVICT}"), 60)
                assert is_complete(blobfs.directory(LAYER)) and not is_whole(blobfs.directory(LAYER))
                whole(over)
                wait_until("it to say so", lambda: "nothing can be evicted" in blobfs.log(), 60)
                assert is_complete(blobfs.directory(LAYER))
            finally:
                mounts.unmount(over)
        wait_until("it to go now", lambda: data(blobfs, LAYER) <= 1 * MIB, 60)
        wait_until("the mark to go", lambda: not os.path.exists(f"{blobfs.directory(LAYER)}/{EVICT}"))
        assert read(f"{blobfs.config.mountpoint}/{LAYER.name}") == LAYER.stream


def test_what_was_asked_for_is_withdrawn_where_there_is_room(path: str) -> None:
    with running(path, cache={"high": 1 << 40, "interval": 0.05}) as blobfs:
        blobfs.add(LAYER)
        marker = Path(blobfs.directory(LAYER), EVICT)
        blobfs.end(signal.SIGKILL)
        marker.touch()  # by a server before this one
        blobfs.start()
        wait_until("the mark to go", lambda: not marker.exists(), 60)
