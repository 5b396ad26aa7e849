"""The FUSE plane's processes: what becomes of a mount, and of who uses it, when one of them is killed."""
# ruff: noqa: F811 (a fixture of another module is imported, and asked for by name)

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from test_planes import large, tar_of  # noqa: F401
from weenv.core import procfs
from weenv.core.errors import MountError
from weenv.core.process import only_instance
from weenv.plugin.containerd.types import Kind
from weenv.plugin.snapshotter.blobfs.ask import ask
from weenv.plugin.snapshotter.cache.present import is_complete
from weenv.plugin.snapshotter.metastore import Metastore
from weenv.plugin.snapshotter.planes import fuse as planes_fuse
from weenv.plugin.snapshotter.planes.base import COMPLETE, LAZY, Attachment
from weenv.plugin.snapshotter.planes.fuse import FusePlane, Process, _answer, serving
from weenv.plugin.snapshotter.planes.fuseserver import start_time
from weenv_testkit.blobfsproc import drop_caches
from weenv_testkit.planerig import Rig, rigged
from weenv_testkit.procs import end_processes, mounts_under, open_fds, wait_until
from weenv_testkit.richtree import extract
from weenv_testkit.trees import differences, read_tree

pytestmark = pytest.mark.root
SECONDS = float(os.environ.get("WEENV_SOAK_SECONDS", "300"))


@pytest.fixture(scope="module")
def processes(workdir: str) -> Iterator[Rig]:
    path = tempfile.mkdtemp(prefix="f", dir=workdir)
    with rigged("fuse", path) as made:
        yield made
    shutil.rmtree(path)


@pytest.fixture
def fuse(processes: Rig) -> Iterator[Rig]:
    """The FUSE plane with nothing mounted."""
    processes.lost.clear()
    yield processes
    for target in mounts_under(processes.root):
        if target != processes.blobfs.config.mountpoint:
            processes.plane.detach(target)


RESENDS = tuple(int(number) for number in os.uname().release.split(".")[:2]) >= (6, 9)
"""The kernel delivers again what a server that was killed had read (FUSE_NOTIFY_RESEND)."""


def killed(fuse: Rig, target: str) -> int:
    """Kill who serves a mount, and wait for the next one; its process id, 0 where there is none."""
    end_processes([fuse.server(target)])
    return fuse.server(target)


def test_another_goes_on_where_a_server_is_killed(fuse: Rig, large: tuple[str, bytes], here: str) -> None:
    content = large[1]
    names = [f"d/{number:03d}" for number in range(300)]
    tar = tar_of(here, [*({"name": name} for name in names), {"name": "f", "data": content}])
    digest = fuse.add(tar)
    target = fuse.attach(digest)
    fd, folder = os.open(f"{target}/f", os.O_RDONLY), os.scandir(f"{target}/d")
    assert os.pread(fd, 100, 0) == content[:100]
    begun = [next(folder) for _ in range(3)]
    seen = {fuse.server(target)}
    for number, entry in enumerate(begun):
        seen.add(killed(fuse, target))
        drop_caches()
        at = 4_000_000 + number * 300_000
        assert os.pread(fd, 100, at) == content[at : at + 100]
        assert os.lstat(entry.path).st_ino == entry.inode()
    assert len(seen) == 4 and 0 not in seen
    assert len(list(folder)) == 297
    folder.close()
    os.close(fd)
    extract(tar, f"{here}/x")
    assert differences(read_tree(f"{here}/x"), read_tree(target), times_free=[b".", b"d"]) == []
    assert target not in fuse.lost
    fuse.restart_plane()  # mountinfo names the first one, which is no more

    async def usable() -> bool:
        return fuse.plane.usable(digest, fuse.entry(target), Attachment(LAZY))

    assert fuse.run(usable())
    last = fuse.server(target)
    fuse.plane.detach(target)
    wait_until("the server to end with its mount", lambda: not start_time(last))


def test_a_server_is_killed_while_it_owes_an_answer(fuse: Rig, large: tuple[str, bytes]) -> None:
    """Where the kernel asks again, whoever waits gets it; else the mount ends, and nobody waits for ever."""
    path, content = large
    digest = fuse.add(path, target=32 << 10)
    target = fuse.attach(digest)
    got: list[object] = []

    def read() -> None:
        try:
            got.append(Path(target, "large").read_bytes())
        except OSError as error:
            got.append(error.errno)

    reader = threading.Thread(target=read)
    blobfs = fuse.blobfs.process.pid if fuse.blobfs.process else 0
    os.kill(blobfs, signal.SIGSTOP)
    try:
        reader.start()
        wait_until("the reader to wait", lambda: _waits(fuse.server(target)))
        killed(fuse, target)
    finally:
        os.kill(blobfs, signal.SIGCONT)
    reader.join(60)
    if RESENDS:
        assert got == [content]
        assert target not in fuse.lost
    else:
        assert got[0] in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
        wait_until("the loss to be told", lambda: target in fuse.lost)
        fuse.attach(digest, target)
        assert Path(target, "large").read_bytes() == content


@pytest.mark.parametrize("followed", [True, False])
def test_one_that_dies_as_soon_as_it_serves(
    fuse: Rig, large: tuple[str, bytes], followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another follows it, nothing has happened; else nothing stays mounted."""
    digest, target = fuse.add(large[0]), f"{fuse.root}/dies-{followed}"
    path, mount = f"{fuse.root}/layers.sock", FusePlane._mount

    def and_die(*args: Any) -> Process:
        first = mount(*args)
        end_processes([first.pid])
        while not followed and (now := serving(path, first)).pid:
            end_processes([now.pid])
        return first

    monkeypatch.setattr(FusePlane, "_mount", and_die)
    if not followed:
        with pytest.raises(MountError, match="died at once"):
            fuse.attach(digest, target)
        assert target not in mounts_under(fuse.root)
        return
    fuse.attach(digest, target)
    assert Path(target, "small").read_bytes() == b"small\n"
    assert killed(fuse, target), "which is noticed"
    assert Path(target, "small").read_bytes() == b"small\n"
    assert target not in fuse.lost


def test_a_snapshotter_that_dies_while_it_mounts_costs_its_server_nothing(
    fuse: Rig, large: tuple[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = fuse.add(large[0])
    other = fuse.attach(digest)
    usual = fuse.server(other)
    answers: list[dict[str, Any]] = []

    def answer(connection: socket.socket) -> dict[str, Any]:
        if len(answers) == 2:  # go was said
            connection.close()
            os.kill(answers[0]["pid"], signal.SIGCONT)
            return {}
        answers.append(_answer(connection))
        if len(answers) == 2:  # it is ready
            os.kill(answers[0]["pid"], signal.SIGSTOP)
        return answers[-1]

    monkeypatch.setattr(planes_fuse, "_answer", answer)
    target = fuse.attach(digest)
    monkeypatch.undo()
    assert Path(target, "small").read_bytes() == Path(other, "small").read_bytes() == b"small\n"
    wait_until("as few descriptors as usual", lambda: len(open_fds(fuse.server(target))) == len(open_fds(usual)))
    assert killed(fuse, target)
    assert Path(target, "small").read_bytes() == b"small\n"


@pytest.mark.soak
@pytest.mark.skipif(not RESENDS, reason="what a killed server owed is lost there")
@pytest.mark.timeout(SECONDS + 120)
def test_servers_killed_again_and_again_under_readers(fuse: Rig, here: str) -> None:
    """Every two seconds or so, with the page cache dropped; nobody sees an error, or a wrong byte."""
    rng = random.Random(1)
    files = {f"d{number // 50}/f{number}": rng.randbytes(rng.randrange(1, 60_000)) for number in range(600)}
    tar = tar_of(here, [{"name": name, "data": data} for name, data in files.items()])
    target = fuse.attach(fuse.add(tar, target=64 << 10))
    end = time.monotonic() + SECONDS
    wrong: list[object] = []
    read = [0] * 6

    def reader(number: int) -> None:
        choose = random.Random(number)
        while time.monotonic() < end:
            name = choose.choice(list(files))
            try:
                if Path(target, name).read_bytes() != files[name] or not os.listdir(os.path.dirname(f"{target}/{name}")):
                    wrong.append(name)
                read[number] += 1
            except OSError as error:
                wrong.append((name, error))

    readers = [threading.Thread(target=reader, args=(number,)) for number in range(len(read))]
    for each in readers:
        each.start()
    kills = 0
    while time.monotonic() < end:
        time.sleep(2.3)  # those that die young do not count as followed
        drop_caches()
        assert killed(fuse, target)
        kills += 1
    for each in readers:
        each.join()
    print(f"{kills} servers killed in {SECONDS:.0f} s under {len(read)} readers: {sum(read)} files read, {len(wrong)} wrong")
    assert not wrong, wrong[:5]
    assert kills and target not in fuse.lost


def test_a_server_that_cannot_be_started_is_started_when_there_is_room(fuse: Rig, large: tuple[str, bytes]) -> None:
    target = fuse.attach(fuse.add(large[0]))
    server = fuse.server(target)
    host = procfs.stat(server).parent
    limits = resource.prlimit(host, resource.RLIMIT_NOFILE)
    wait_until("the host to have nothing to do", lambda: procfs.stat(host).state == "S")
    about = {int(fd): Path(f"/proc/{host}/fdinfo/{fd}").read_text() for fd in os.listdir(f"/proc/{host}/fdinfo")}
    (last,) = (fd for fd, text in about.items() if f"\nPid:\t{server}\n" in text)
    limit = next(fd for fd in range(last + 1) if fd not in about or fd == last)  # nor is what its end makes free of any use
    resource.prlimit(host, resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        end_processes([server])
        wait_until("the host to have tried", lambda: not os.path.exists(f"/proc/{server}") and procfs.stat(host).state == "S")
    finally:
        resource.prlimit(host, resource.RLIMIT_NOFILE, limits)
    assert Path(target, "small").read_bytes() == b"small\n"
    assert procfs.stat(fuse.server(target)).parent == host
    assert target not in fuse.lost


def test_nobody_goes_on_with_another_image(fuse: Rig, here: str) -> None:
    """Its inode numbers may be others, which the kernel takes for the ones that it knows."""
    digest = fuse.add(tar_of(here, [{"name": "f", "data": b"1"}]))
    target = fuse.attach(digest)
    image = Path(fuse.directory(digest), "meta.erofs")
    content = image.read_bytes()
    image.unlink()
    image.write_bytes(content)
    killed(fuse, target)
    wait_until("the loss to be told", lambda: target in fuse.lost)
    assert not fuse.server(target)


def test_servers_that_die_one_after_another_cost_their_layer_and_no_other(
    fuse: Rig, large: tuple[str, bytes], here: str
) -> None:
    one, two = fuse.add(large[0]), fuse.add(tar_of(here, [{"name": "f", "data": b"2"}]))
    first, second = fuse.attach(one), fuse.attach(two)
    fd = os.open(f"{first}/large", os.O_RDONLY)
    ended = set()

    def given_up() -> bool:  # those that lived for two seconds on a loaded machine do not count: then it takes more of them
        if server := fuse.server(first):
            end_processes([server])
            ended.add(server)
        return first in fuse.lost

    wait_until("the host to give up, and the loss to be told", given_up, 200)
    assert len(ended) >= 6
    assert second not in fuse.lost
    drop_caches()
    with pytest.raises(OSError) as told:
        os.pread(fd, 100, 4_000_000)
    assert told.value.errno == errno.ENOTCONN
    with contextlib.suppress(OSError):  # close(2) asks the server, too
        os.close(fd)
    assert Path(second, "f").read_text() == "2"
    attachment = Attachment(LAZY)
    entry = fuse.entry(first)

    async def usable() -> bool:
        return fuse.plane.usable(one, entry, attachment)

    assert not fuse.run(usable())
    fuse.attach(one, first)
    assert Path(first, "large").read_bytes() == large[1]


def test_servers_outlive_their_host(fuse: Rig, large: tuple[str, bytes]) -> None:
    digest = fuse.add(large[0])
    target = fuse.attach(digest)
    with open(f"/proc/{fuse.server(target)}/stat") as file:
        host = int(file.read().rpartition(")")[2].split()[1])
    os.kill(host, signal.SIGKILL)
    wait_until("the host to be gone", lambda: not os.path.exists(f"/proc/{host}") or _is_zombie(host))
    assert Path(target, "large").read_bytes() == large[1]
    other = fuse.attach(digest)  # by another host
    assert Path(other, "small").read_bytes() == b"small\n"
    assert target not in fuse.lost
    first = Process(*map(int, fuse.entry(target).source.split(":")[2:]))
    wait_until("the next host to know the server", lambda: serving(f"{fuse.root}/layers.sock", first).pid)
    assert killed(fuse, target)
    assert Path(target, "small").read_bytes() == b"small\n"
    assert target not in fuse.lost


def _is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_signals_that_stop_daemons_do_not_stop_a_server(fuse: Rig, large: tuple[str, bytes]) -> None:
    target = fuse.attach(fuse.add(large[0]))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(fuse.server(target), number)
    assert Path(target, "small").read_bytes() == b"small\n"
    assert target not in fuse.lost


def test_reads_wait_for_the_next_blobfs(fuse: Rig, large: tuple[str, bytes]) -> None:
    """Killed while it owes answers, and stopped: whoever reads waits, and gets the right bytes."""
    path, content = large
    target = fuse.attach(fuse.add(path, target=64 << 10))
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(Path(target, "large").read_bytes()))
    pid = fuse.blobfs.process.pid if fuse.blobfs.process else 0
    os.kill(pid, signal.SIGSTOP)  # it takes no more requests, and the reader's are in its socket
    reader.start()
    wait_until("the reader to wait", lambda: _waits(fuse.server(target)))
    fuse.blobfs.end(signal.SIGKILL)
    fuse.blobfs.start()
    reader.join(30)
    assert got == [content]


def _waits(pid: int) -> bool:
    """A server with a connection to blobfs has asked it for something; two sockets are its event loop's own."""
    return sum(link.startswith("socket:") for link in open_fds(pid).values()) > 2


def test_a_server_is_small(fuse: Rig, here: str) -> None:
    """Of a layer of 50 000 files, after all of it has been looked at: what is a server's alone is a few megabytes."""
    digest = fuse.add(tar_of(here, [{"name": f"d{number // 500}/f{number}", "data": b"x"} for number in range(50_000)]))
    with fuse.attached(digest) as tree:
        assert sum(len(names) for _, _, names in os.walk(tree)) == 50_000
        private = 0
        with open(f"/proc/{fuse.server(tree)}/smaps_rollup") as file:
            for line in file:
                if line.startswith("Private_"):
                    private += int(line.split()[1])
        assert private < 40_000, f"{private} KiB"


def test_servers_take_no_descriptors_from_the_host(fuse: Rig, large: tuple[str, bytes]) -> None:
    targets = [fuse.attach(fuse.add(large[0])) for _ in range(3)]
    servers = [fuse.server(target) for target in targets]

    def settled() -> bool:  # a server closes the connection it was started by after it has answered
        counts = {len(os.listdir(f"/proc/{server}/fd")) for server in servers}
        return len(counts) == 1 and max(counts) < 12

    wait_until("servers with as few descriptors as the first", settled)


def test_the_host_takes_no_strangers(fuse: Rig) -> None:
    assert stat.S_IMODE(os.stat(f"{fuse.root}/layers.sock").st_mode) == 0o600
    assert stat.S_IMODE(os.stat(f"{fuse.root}/mnt.sock").st_mode) == 0o600


def test_without_pyfuse3_it_says_so(fuse: Rig) -> None:
    code = "import sys; sys.modules['pyfuse3'] = None; from weenv.plugin.snapshotter.planes.fusehost import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--socket", f"{fuse.root}/other.sock"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "pyfuse3 cannot be imported" in done.stderr


@pytest.mark.soak  # fifteen seconds
def test_a_complete_layer_that_something_else_has_open_is_said_to_be_that(workdir: str, large: tuple[str, bytes]) -> None:
    """Its server lets go by itself: nobody has to mount it anew, and nobody is waited for."""
    path = tempfile.mkdtemp(prefix="f", dir=workdir)
    with rigged("fuse", path, fill={"quiet": 0.0, "cpu_busy": 1.0, "cpu_pressure": 1.0}) as fuse:
        digest = fuse.add(large[0])
        with contextlib.closing(Metastore(f"{path}/metastore.db")) as store:
            row = store.layer(digest, "")
            store.add(Kind.COMMITTED, "s", None, {}, layer_id=row.id)
            target = fuse.attach(digest, f"{path}/m/{row.id}")
            store.set_layer_mode(row.id, COMPLETE, 0)
        assert Path(target, "large").read_bytes() == large[1]
        wait_until("the layer to be complete", lambda: is_complete(fuse.directory(digest)), 60)
        prune = {"op": "prune", "layers": [digest.removeprefix("sha256:")]}
        with only_instance(path, "snapshotter"), open(f"{fuse.directory(digest)}/data", "rb") as other:
            refused = ask(fuse.blobfs.config.status_socket, prune, patience=60)
            other.close()
            done = ask(fuse.blobfs.config.status_socket, prune, patience=60)
        assert refused is not None and [(row["why"], row["frames"]) for row in refused["layers"]] == [("mounted", 0)]
        assert done is not None and done["bytes"] >= len(large[1])
        drop_caches()
        assert Path(target, "large").read_bytes() == large[1], "it is fetched again"
    shutil.rmtree(path)
