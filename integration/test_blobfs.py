"""blobfs with a real kernel: real mounts, real processes that are killed, real full disks. Blobs are made by hand."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from weenv.core.errors import ConfigError, MountError
from weenv.plugin.snapshotter.blobfs import daemon, holder
from weenv.plugin.snapshotter.cache.present import is_complete, progress
from weenv.plugin.snapshotter.layerdir import LayerDirs, Origin
from weenv.plugin.snapshotter.mounts import MNT_DETACH, mount, unmount
from weenv_testkit.blobfsproc import Blobfs, completes, drop_caches, read, read_until_complete, running
from weenv_testkit.synthetic import make_layer, payload

pytestmark = pytest.mark.root

SMALL = make_layer([(f"f{number:03}", payload(3000 + 40 * number, number)) for number in range(200)], target=64 << 10)
LARGE = make_layer([("big", payload(96 << 20, 7))], target=256 << 10)

READER = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
file = os.open(sys.argv[1], os.O_RDONLY)
print("open", flush=True)
os.pread(file, 4096, 0)
"""


def test_a_stream_is_read_whole_in_pieces_and_at_random(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    assert os.stat(path).st_size == len(SMALL.stream)
    assert os.stat(path).st_mode == 0o100400
    assert read(path) == SMALL.stream
    assert completes(blobfs.directory(SMALL))
    large = blobfs.add(LARGE)
    generator = random.Random(3)
    with open(large, "rb", buffering=0) as file:
        for _ in range(200):
            offset = generator.randrange(len(LARGE.stream))
            size = generator.choice((1, 4096, 100_000, 1 << 20))
            assert os.pread(file.fileno(), size, offset) == LARGE.stream[offset : offset + size]
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            for _ in range(50):
                offset = generator.randrange(len(LARGE.stream) - 4096)
                assert mapped[offset : offset + 4096] == LARGE.stream[offset : offset + 4096]
    assert sorted(os.listdir(blobfs.config.mountpoint)) == sorted([SMALL.name, LARGE.name])


def test_random_reads_fetch_little_more_than_they_need(blobfs: Blobfs) -> None:
    path = blobfs.add(LARGE)
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        offsets = random.Random(9).sample(range(100 << 10, len(LARGE.stream), 4 << 20), 20)  # away from where frames meet
        for offset in offsets:
            assert os.pread(file.fileno(), 4096, offset) == LARGE.stream[offset : offset + 4096]
    assert sum(blobfs.status()["frames"].values()) <= len(offsets) + 4


def test_a_forward_reader_rarely_waits(blobfs: Blobfs) -> None:
    assert read(blobfs.add(LARGE)) == LARGE.stream
    status = blobfs.status()
    assert status["fetched_bytes"] == int(LARGE.frames.compressed_offsets[-1])
    assert status["ranges"] < len(LARGE.frames) // 2
    assert status["frames"]["demand"] < status["frames"]["ahead"]
    drop_caches()
    assert read(f"{blobfs.config.mountpoint}/{LARGE.name}") == LARGE.stream
    assert blobfs.status()["fetched_bytes"] == status["fetched_bytes"]


def test_many_readers_of_one_frame_fetch_it_once(blobfs: Blobfs) -> None:
    path = blobfs.add(LARGE)
    results: list[bytes] = []

    def reader() -> None:
        with open(path, "rb", buffering=0) as file:
            results.append(os.pread(file.fileno(), 4 << 20, 8 << 20))

    threads = [threading.Thread(target=reader) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result == LARGE.stream[8 << 20 : 12 << 20] for result in results)
    before: dict[str, Any] = {}
    status = blobfs.status()
    while before != status:  # read-ahead may still be under way
        time.sleep(0.2)
        before, status = status, blobfs.status()
    present, _ = progress(blobfs.directory(LARGE))
    frames = sum(status["frames"].values())
    assert (frames - 1) * (256 << 10) <= present <= frames * (256 << 10)
    assert status["fetched_bytes"] <= present


def test_killing_the_server_again_and_again_is_not_noticed(blobfs: Blobfs) -> None:
    path = blobfs.add(LARGE)
    digest = hashlib.sha256()
    kills = 0

    def reader() -> None:
        position = 0
        with open(path, "rb", buffering=0) as file:
            while part := file.read(64 << 10):
                digest.update(part)
                position += len(part)
                while kills < 6 * position // len(LARGE.stream) - 1:  # a sixth for each of the servers, as fast as they are
                    time.sleep(0.001)

    thread = threading.Thread(target=reader)
    thread.start()
    while kills < 5:
        time.sleep(0.15)
        blobfs.end(signal.SIGKILL)
        kills += 1
        time.sleep(0.05)
        blobfs.start()
    thread.join(60)
    assert not thread.is_alive()
    assert digest.hexdigest() == hashlib.sha256(LARGE.stream).hexdigest()
    assert "Traceback" not in blobfs.log()


def test_node_ids_and_open_files_survive_restarts(blobfs: Blobfs) -> None:
    paths = [blobfs.add(SMALL), blobfs.add(LARGE)]
    inodes = [os.stat(path).st_ino for path in paths]
    with open(paths[1], "rb", buffering=0) as file:
        for number in (signal.SIGKILL, signal.SIGTERM):
            blobfs.end(number)
            blobfs.start()
            offset = number << 20
            assert os.pread(file.fileno(), 4096, offset) == LARGE.stream[offset : offset + 4096]
    drop_caches()
    assert [os.stat(path).st_ino for path in reversed(paths)] == inodes[::-1]
    third = make_layer([("x", payload(1000))])
    assert os.stat(blobfs.add(third)).st_ino not in inodes


def test_a_reader_waits_while_there_is_no_server(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    os.stat(path)
    assert blobfs.end() == 0
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(read(path)))
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    blobfs.start()
    thread.join(60)
    assert got == [SMALL.stream]


def test_a_killed_holder_is_replaced_and_the_next_server_finds_the_mount(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    inode = os.stat(path).st_ino
    first = blobfs.holder_pid()
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = holder.ask(blobfs.config.holder_socket, {"op": "status"})
        if answer is not None and answer["pid"] != first:
            break
        time.sleep(0.05)
    assert blobfs.holder_pid() != first
    blobfs.end(signal.SIGKILL)
    blobfs.start()
    assert read(path) == SMALL.stream
    assert os.stat(path).st_ino == inode


def test_a_holder_whose_server_dies_while_it_begins_keeps_the_mount(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    inode = os.stat(path).st_ino
    blobfs.end(signal.SIGKILL)
    first = blobfs.holder_pid()
    found = holder.attach(blobfs.config.holder_socket)
    assert found is not None
    client, fuse, state = found
    os.kill(first, signal.SIGKILL)
    assert client.connection.recv(1) == b""
    client.close()
    server, attached = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.close()
    with attached:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "weenv.plugin.snapshotter.blobfs.holder",
                "--fuse", str(fuse), "--nodes", str(state.fd), "--attached", str(attached.fileno()),
                "--socket", blobfs.config.holder_socket, "--mountpoint", blobfs.config.mountpoint,
            ],
            pass_fds=[fuse, state.fd, attached.fileno()], start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 60
    while holder.ask(blobfs.config.holder_socket, {"op": "status"}) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.close(fuse)
    state.close()
    process.returncode = 0  # it ends with the mount
    blobfs.start()
    assert read(path) == SMALL.stream
    assert os.stat(path).st_ino == inode
    assert blobfs.holder_pid() == process.pid


def test_a_second_server_is_refused(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    with pytest.raises(ConfigError, match="being served already"):
        holder.attach(blobfs.config.holder_socket)
    assert read(path) == SMALL.stream


def test_stop_refuses_while_the_mount_is_in_use(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    with open(path, "rb") as file:
        with pytest.raises(MountError, match="in use") as caught:
            daemon.stop(blobfs.config)
        assert caught.value.hint
        assert file.read() == SMALL.stream
    assert daemon.stop(blobfs.config)
    assert blobfs.process is not None
    assert blobfs.process.wait(60) == 0
    assert not daemon.stop(blobfs.config)


def test_a_forced_stop_ends_everything_and_the_next_start_begins_anew(blobfs: Blobfs) -> None:
    path = blobfs.add(LARGE)
    with open(path, "rb", buffering=0) as file:
        file.read(4096)
        assert daemon.stop(blobfs.config, force=True)
        assert blobfs.process is not None
        assert blobfs.process.wait(60) == 0
        assert blobfs.process.stdout is not None
        blobfs.process.stdout.close()
        with pytest.raises(OSError) as caught:
            os.pread(file.fileno(), 4096, 50 << 20)
        assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
    blobfs.start()
    assert read(path) == LARGE.stream


def test_a_mount_whose_server_and_holder_are_both_dead_is_replaced(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    os.stat(path)
    pid = blobfs.holder_pid()
    assert blobfs.process is not None
    os.kill(pid, signal.SIGSTOP)  # it cannot be replaced while the server still lives
    blobfs.end(signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.stat(path)
        except OSError as error:
            if error.errno == errno.ENOTCONN:
                break
        time.sleep(0.05)
    blobfs.start()
    assert read(path) == SMALL.stream
    assert "dead blobfs mount" in blobfs.log()


def test_hostile_and_unknown_names_do_not_exist(blobfs: Blobfs) -> None:
    blobfs.add(SMALL)
    for name in ("x", "0" * 64, "A" * 64, "f" * 63, SMALL.name + "0", "toc", "\n" * 64, "é" * 32, SMALL.name.upper()):
        with pytest.raises(FileNotFoundError):
            os.stat(f"{blobfs.config.mountpoint}/{name}")
    with pytest.raises(OSError):
        os.open(f"{blobfs.config.mountpoint}/{SMALL.name}", os.O_RDWR)
    with pytest.raises(OSError):
        os.open(f"{blobfs.config.mountpoint}/new", os.O_WRONLY | os.O_CREAT)
    assert blobfs.status()["errors"] == {}


def test_a_corrupt_frame_is_eio_for_its_reader_and_nobody_else(blobfs: Blobfs) -> None:
    bad = 200
    path = blobfs.add(LARGE, LARGE.corrupted(bad))
    low, high = (int(LARGE.frames.content_offsets[frame]) for frame in (bad, bad + 1))
    other = blobfs.add(SMALL)
    with open(path, "rb", buffering=0) as file:
        for _ in range(2):
            with pytest.raises(OSError) as caught:
                os.pread(file.fileno(), 4096, low + 8192)
            assert caught.value.errno == errno.EIO
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        before = low // 4096 * 4096 - 4096
        assert os.pread(file.fileno(), 4096, before) == LARGE.stream[before : before + 4096]
        after = (high + 4095) // 4096 * 4096
        assert os.pread(file.fileno(), 1 << 20, after) == LARGE.stream[after : after + (1 << 20)]
    assert read(other) == SMALL.stream
    assert not is_complete(blobfs.directory(LARGE))
    errors = blobfs.status()["errors"]
    assert errors["digest"] >= 1
    assert errors["eio"] >= 1
    assert blobfs.log().count("readers get EIO") == 1


def test_an_origin_that_becomes_known_later_repairs_what_the_first_holds_wrongly(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL, SMALL.corrupted(3))
    with open(path, "rb", buffering=0) as file, pytest.raises(OSError):
        os.pread(file.fileno(), 4096, int(SMALL.frames.content_offsets[3]) + 8192)
    good = f"{blobfs.path}/good"
    Path(good).write_bytes(SMALL.blob)
    LayerDirs(blobfs.path).add_origins(SMALL.digest, [Origin("file", path=good)])
    time.sleep(1.1)  # a frame that failed is refused for a second
    assert read(path) == SMALL.stream


def test_a_layer_that_is_removed_and_comes_back_is_served_from_its_new_directory(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    dirs = LayerDirs(blobfs.path)
    with open(path, "rb", buffering=0) as old:
        assert old.read(4096) == SMALL.stream[:4096]
        dirs.discard(SMALL.digest)
        with pytest.raises(FileNotFoundError):
            os.stat(f"{dirs.path(SMALL.digest)}/data")
        assert os.pread(old.fileno(), 4096, 8192) == SMALL.stream[8192:12288]
        blobfs.end(signal.SIGKILL)
        blobfs.start()
        drop_caches()
        assert os.pread(old.fileno(), 4096, 100 << 10) == SMALL.stream[100 << 10 :][:4096]  # from the trash
    blobfs.add(SMALL)
    read_until_complete(path, SMALL.stream, dirs.path(SMALL.digest))
    dirs.empty_trash()


def test_opening_a_file_over_and_over_leaks_nothing(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    read(path)
    assert blobfs.process is not None
    descriptors = f"/proc/{blobfs.process.pid}/fd"
    before = len(os.listdir(descriptors))
    for _ in range(20_000):
        os.close(os.open(path, os.O_RDONLY))
    assert len(os.listdir(descriptors)) <= before + 1
    assert blobfs.status()["errors"] == {}


def test_a_full_disk_serves_without_a_cache_and_recovers(home: str) -> None:
    path = f"{home}/full"
    os.mkdir(path)
    mount("tmpfs", path, "tmpfs", 0, "size=48m")
    blob = f"{home}/full.blob"
    try:
        with running(path) as blobfs:
            Path(blob).write_bytes(LARGE.blob)
            LARGE.install(path, Origin("file", path=blob))
            file_path = f"{blobfs.config.mountpoint}/{LARGE.name}"
            assert read(file_path) == LARGE.stream  # twice the size of the disk
            status = blobfs.status()
            assert status["errors"]["enospc"] > 0
            assert status["errors"].keys() <= {"enospc"}
            assert not is_complete(blobfs.directory(LARGE))
            assert blobfs.log().count("serving without a cache") == 1
            small = blobfs.directory(SMALL)
            mount("tmpfs", path, "tmpfs", 32, "size=400m")  # MS_REMOUNT: the disk has room again
            read_until_complete(file_path, LARGE.stream, blobfs.directory(LARGE))
            assert not os.path.exists(small)
            assert "caching goes on" in blobfs.log()
    finally:
        unmount(path, MNT_DETACH)
        os.unlink(blob)


def test_a_log_that_nobody_reads_does_not_stop_the_serving(blobfs: Blobfs) -> None:
    blob = bytearray(LARGE.blob)
    for frame in range(len(LARGE.frames)):
        blob[int(LARGE.frames.compressed_offsets[frame]) + 9] ^= 0xFF
    blobfs.end()
    reading, writing = os.pipe()
    try:
        blobfs.start(writing)
        path = blobfs.add(LARGE, bytes(blob))
        with open(path, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for frame in range(1, len(LARGE.frames) - 1):
                with pytest.raises(OSError):
                    os.pread(file.fileno(), 4096, int(LARGE.frames.content_offsets[frame]) + 8192)
        poll = select.poll()
        poll.register(writing, select.POLLOUT)
        assert not poll.poll(0)  # the pipe is full: whoever writes to it hangs
        assert read(blobfs.add(SMALL)) == SMALL.stream
        assert blobfs.status()["errors"]["digest"] >= len(LARGE.frames) - 2
        assert blobfs.end() == 0
        blobfs.start()
    finally:
        os.close(reading)
        os.close(writing)


def test_a_source_that_cannot_be_reached_is_eio_after_the_deadline(home: str) -> None:
    path = f"{home}/gone"
    os.mkdir(path)
    with running(path, deadline=1.0) as blobfs:
        SMALL.install(path, Origin("registry", host="127.0.0.1:1", repository="no/where"))
        began = time.monotonic()
        with pytest.raises(OSError) as caught:
            read(f"{blobfs.config.mountpoint}/{SMALL.name}")
        assert caught.value.errno == errno.EIO
        assert time.monotonic() - began < 30
        assert blobfs.status()["errors"]["eio"] >= 1


def test_a_reader_that_is_killed_while_it_waits_ends_and_a_signal_does_no_harm(home: str) -> None:
    path = f"{home}/wait"
    os.mkdir(path)
    with running(path, deadline=300.0) as blobfs, socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen(16)  # accepts and never answers
        SMALL.install(path, Origin("registry", host=f"127.0.0.1:{mute.getsockname()[1]}", repository="no/answer"))
        name = f"{blobfs.config.mountpoint}/{SMALL.name}"
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, name],
            stdout=subprocess.PIPE,
        )
        assert reader.stdout is not None
        reader.stdout.readline()
        deadline = time.monotonic() + 60
        while not blobfs.status()["waiting"] and time.monotonic() < deadline:
            time.sleep(0.02)
        reader.send_signal(signal.SIGUSR1)
        time.sleep(0.3)
        assert reader.poll() is None
        assert blobfs.status()["waiting"] >= 1
        reader.kill()
        reader.wait(60)  # long before the deadline
        reader.stdout.close()


def test_what_was_fetched_is_there_after_a_restart(blobfs: Blobfs) -> None:
    path = blobfs.add(SMALL)
    read(path)
    blobfs.end()
    content = Path(f"{blobfs.directory(SMALL)}/data").read_bytes()
    assert content == SMALL.stream
    os.unlink(f"{blobfs.path}/{SMALL.name}.blob")
    blobfs.start()
    drop_caches()
    assert read(path) == SMALL.stream
    assert blobfs.status()["fetched_bytes"] == 0


def test_the_rest_of_a_layer_is_filled_in_the_background(home: str) -> None:
    path = f"{home}/fill"
    os.mkdir(path)
    # Any other process may keep this machine busy, so the share of the CPUs that others may use is set to all of it.
    with running(
        path, fill={"enabled": True, "quiet": 0.2, "cpu_busy": 1.1, "cpu_pressure": 100.0, "cpu_share": 1.0}
    ) as blobfs:
        name = blobfs.add(LARGE)
        with open(name, "rb", buffering=0) as file:
            file.read(4096)
        deadline = time.monotonic() + 60
        while not is_complete(blobfs.directory(LARGE)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert completes(blobfs.directory(LARGE))
        assert blobfs.status()["filled_bytes"] > 20 << 20
        assert Path(f"{blobfs.directory(LARGE)}/data").read_bytes() == LARGE.stream


def test_metrics_are_served_where_asked(home: str) -> None:
    path = f"{home}/metrics"
    os.mkdir(path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with running(path, metrics_address=address) as blobfs:
        read(blobfs.add(SMALL))
        host, port = address.split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            text = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.partition("\r\n\r\n")[2].splitlines() if not line.startswith("#"))
    assert float(lines["weenv_blobfs_served_bytes_total"]) >= len(SMALL.stream)
    assert float(lines["weenv_blobfs_fetched_bytes_total"]) == int(SMALL.frames.compressed_offsets[-1])
    assert float(lines['weenv_blobfs_wait_seconds_bucket{le="+Inf"}']) == float(lines["weenv_blobfs_wait_seconds_count"]) > 0
