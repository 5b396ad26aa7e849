"""Reading cgroups: where they are, what is in them, what is no cgroup file."""

from __future__ import annotations

import math
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.cgroup import Cgroup

from weenv.plugin.nri import cgroups
from weenv.plugin.nri.cgroups import STAT_EVERY, CgroupGone, CgroupUnreadable, Paths, Reader, locate, pressure
from weenv.plugin.nri.model import UNLIMITED_MEMORY, Quota

V1 = """31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
40 31 0:37 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
"""
V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
OF_V1 = "9:name=systemd:/\n4:memory:/weenv/a\n2:cpu,cpuacct:/weenv/a\n0::/weenv/a\n"


def test_each_controller_is_found_where_it_is() -> None:
    base = "/sys/fs/cgroup"
    assert locate(V1, OF_V1) == Paths(
        f"{base}/cpu,cpuacct/weenv/a", f"{base}/cpu,cpuacct/weenv/a", f"{base}/memory/weenv/a", f"{base}/unified/weenv/a",
        True, True, f"{base}/unified/weenv/a",
    )  # fmt: skip
    whole = f"{base}/kubepods/pod1/c"
    assert locate(V2, "0::/kubepods/pod1/c\n") == Paths(whole, "", whole, whole, False, False, whole)
    # A machine whose memory controller was moved to v2 while CPU stayed on v1.
    mixed = "".join(line + "\n" for line in V1.splitlines() if "memory" not in line)
    found = locate(mixed, "2:cpu,cpuacct:/x/y\n0::/x/y\n")
    assert (found.cpu_v1, found.memory_v1, found.memory) == (True, False, f"{base}/unified/x/y")


def test_a_first_process_in_a_group_of_its_own_is_watched_from_above() -> None:
    membership = "0::/system.slice/c1/init.scope\n"
    assert locate(V2, membership).cpu == "/sys/fs/cgroup/system.slice/c1/init.scope"
    assert locate(V2, membership, inside="/system.slice/c1").cpu == "/sys/fs/cgroup/system.slice/c1"
    assert locate(V2, membership, inside="/system.slice/c").cpu.endswith("init.scope"), "only whole names count"
    assert locate(V2, membership, inside="machine.slice:crio:c1").cpu.endswith("init.scope"), "systemd's names are no paths"


@pytest.mark.parametrize(
    ("mountinfo", "membership"),
    [
        (V1, "0::/\n4:memory:/\n2:cpu,cpuacct:/\n"),  # the root is nobody's environment
        (V2, "0::/../outside\n"),  # not within our cgroup namespace
        (V2, ""),
        ("", OF_V1),
        ("nonsense\n1 2 3\n- - -\n", "::\nnonsense"),
        (V2.replace(" / /sys", " /elsewhere /sys"), "0::/weenv/a\n"),
    ],
)
def test_what_cannot_be_seen_is_said(mountinfo: str, membership: str) -> None:
    with pytest.raises(CgroupUnreadable, match="cannot be seen"):
        locate(mountinfo, membership)


def test_a_mount_of_a_part_of_the_hierarchy() -> None:
    part = V2.replace(" / /sys/fs/cgroup", " /pods /mnt/with\\040space")
    assert locate(part, "0::/pods/c\n").cpu == "/mnt/with space/c"


def test_a_process_that_has_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(CgroupGone):
            cgroups.find(pid)  # it has ended, and nobody has asked how: the kernel shows it in the root of each hierarchy
    finally:
        os.waitpid(pid, 0)
    with pytest.raises(CgroupGone):
        cgroups.find(pid)


@pytest.fixture(params=[1, 2])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Cgroup:
    return Cgroup(str(tmp_path / "group"), request.param)


@pytest.fixture
def reader(group: Cgroup) -> Iterator[Reader]:
    reader = Reader(group.paths)
    yield reader
    reader.close()


def test_a_sample_is_what_the_files_say(group: Cgroup, reader: Reader) -> None:
    group.usage_s, group.periods, group.throttled, group.throttled_s = 12.5, 40, 7, 1.25
    group.anon, group.active_file, group.inactive_file, group.kernel = 100 << 20, 20 << 20, 30 << 20, 5 << 20
    group.max_events, group.oom_kill = 9, 2
    group.cpu_some, group.memory_some, group.memory_full = 11, 22, 33
    group.write()
    sample = reader.sample(1.0)
    assert sample.when == 1.0
    cpu, memory = sample.cpu, sample.memory
    assert (cpu.usage_s, cpu.nr_periods, cpu.nr_throttled, cpu.throttled_s) == (12.5, 40, 7, 1.25)
    assert (memory.current, memory.anon, memory.active_file, memory.inactive_file) == (155 << 20, 100 << 20, 20 << 20, 30 << 20)
    assert memory.unreclaimable == 105 << 20, "all but file pages that are clean"
    assert (memory.max_events, memory.oom_kill, memory.max) == (9, 2, 256 << 20)
    assert (cpu.pressure_some_us, memory.pressure_some_us, memory.pressure_full_us) == (11, 22, 33)


def test_growth_between_two_reads_of_the_details_counts_as_what_cannot_be_freed(group: Cgroup, reader: Reader) -> None:
    before = reader.sample(1.0).memory
    group.anon += 1 << 20  # less than is worth reading the details for
    group.write()
    after = reader.sample(1.2).memory
    assert after.anon == before.anon and after.current == before.current + (1 << 20)
    assert after.unreclaimable == before.unreclaimable + (1 << 20)
    assert reader.sample(1.2 + STAT_EVERY).memory.anon == group.anon, "they are read when they are due"
    group.anon = 250 << 20
    group.write()
    assert reader.sample(3.3).memory.anon == 250 << 20, "and when memory has moved, or the limit is near"


def test_limits_are_read_back(group: Cgroup, reader: Reader) -> None:
    assert reader.limits() == Quota(0.25, 256 << 20)
    group.cpu, group.limit = 3.5, 1 << 30
    group.write()
    assert reader.limits() == Quota(3.5, 1 << 30)
    group.cpu, group.limit = (-0.00001 if group.version == 1 else 0), 0
    group.write()
    assert reader.limits() == Quota(math.inf, UNLIMITED_MEMORY)


def test_a_peek_sees_use_and_memory_that_moves(group: Cgroup, reader: Reader) -> None:
    reader.sample(1.0)
    group.usage_s, group.throttled = 2.0, 0
    group.write()
    assert reader.peek() == (2.0, 0)
    group.anon += 64 << 20
    group.write()
    assert reader.peek() is None
    reader.sample(1.2)
    assert reader.peek() is not None
    group.anon = 220 << 20
    group.write()
    reader.sample(1.4)
    assert reader.peek() is None, "near its limit every byte counts"


def test_memory_that_has_moved_is_seen_without_a_look(group: Cgroup, reader: Reader) -> None:
    reader.sample(1.0)
    assert not reader.moved()
    group.anon += 64 << 20
    group.write()
    assert reader.moved() and reader.moved()
    reader.sample(1.01)
    assert not reader.moved()


def test_where_the_kernel_tells_of_limits_that_are_met(group: Cgroup, reader: Reader) -> None:
    fd = reader.notices("memory")
    assert (fd is not None) == (group.version == 2), "v1 has no such file"
    if fd is not None:
        os.close(fd)
    assert reader.notices("pids") is None, "nobody counts processes here"
    Path(group.directory, "pids.events").write_text("max 0\n")
    fd = reader.notices("pids")
    assert fd is not None and os.get_inheritable(fd) is False
    os.close(fd)


def test_without_pressure_files(tmp_path: Path) -> None:
    for version in (1, 2):
        reader = Reader(Cgroup(str(tmp_path / str(version)), version, psi=False).paths)
        sample = reader.sample(1.0)
        assert sample.cpu.pressure_some_us is None and sample.memory.pressure_full_us is None
        assert reader.trigger("cpu", 50_000, 500_000) is None
        reader.close()


def test_no_trigger_for_a_group_that_is_gone_or_without_descriptors_is_no_word_of_the_kernels(tmp_path: Path) -> None:
    reader = Reader(Cgroup(str(tmp_path / "2"), 2).paths)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(CgroupUnreadable, match="Too many open files"):
            reader.trigger("cpu", 50_000, 500_000)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fd = reader.trigger("cpu", 50_000, 500_000)
    assert fd is not None
    os.close(fd)
    shutil.rmtree(reader.paths.unified)
    with pytest.raises(CgroupGone):
        reader.trigger("cpu", 50_000, 500_000)
    reader.close()


def test_the_brake_and_reclaim_are_v2s(group: Cgroup, reader: Reader) -> None:
    if group.version == 1:
        assert not reader.set_high(1 << 20) and not reader.reclaim(1 << 20)
        assert reader.swap_limit() == 256 << 20
        return
    assert reader.set_high(100 << 20) and reader.sample(1.0).memory.high == 100 << 20
    assert reader.reclaim(2 << 20) and group.reclaimed() == 2 << 20
    assert reader.swap_limit() == UNLIMITED_MEMORY


def test_a_closed_reader_reads_nobody_elses_files(group: Cgroup) -> None:
    reader = Reader(group.paths)
    reader.close()
    with pytest.raises(CgroupGone):
        reader.sample(1.0)
    with pytest.raises(CgroupGone):
        reader.limits()


def test_a_missing_file_is_named(group: Cgroup) -> None:
    os.unlink(os.path.join(group.directory, "memory.stat"))
    open_before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CgroupUnreadable, match=r"memory\.stat"):
        Reader(group.paths)
    assert set(os.listdir("/proc/self/fd")) <= open_before


def test_a_missing_directory_is_an_ended_environment(group: Cgroup) -> None:
    for name in os.listdir(group.directory):
        os.unlink(os.path.join(group.directory, name))
    os.rmdir(group.directory)
    with pytest.raises(CgroupGone):
        Reader(group.paths)


@pytest.mark.parametrize(
    "name", ["cpu.stat", "memory.stat", "memory.events", "memory.current", "memory.usage_in_bytes", "cpu.pressure"]
)
def test_nonsense_in_a_file_is_an_error_of_ours(group: Cgroup, reader: Reader, name: str) -> None:
    path = os.path.join(group.directory, name)
    if not os.path.exists(path):  # the other version's
        return
    for text in (b"\xff\xfe\n", b"usage_usec x\nnr_periods y\ntotal_rss z\nanon z\noom_kill 1e9\nnr_throttled -\n", b"some"):
        with open(path, "r+b") as file:
            file.truncate()
            file.write(text)
        try:
            reader.sample(1.0, whole=True)
        except CgroupUnreadable:
            continue
        assert name.endswith(("stat", "events")), "only files of many lines may lack one"


@given(st.binary(max_size=200))
def test_no_bytes_in_a_pressure_file_do_harm(data: bytes) -> None:
    try:
        some, full = pressure(data)
    except CgroupUnreadable:
        return
    assert isinstance(some, int) and (full is None or isinstance(full, int))


@pytest.mark.parametrize(("version", "name"), [(1, "cpu.cfs_burst_us"), (2, "cpu.max.burst")])
def test_burst_is_set_where_the_kernel_has_it_and_read_back(tmp_path: Path, version: int, name: str) -> None:
    group = Cgroup(str(tmp_path / "c"), version, cpu=0.5)
    reader = Reader(group.paths)
    try:
        assert reader.set_burst(0.25) == 0.0, "no such file"
        file = tmp_path / "c" / name
        file.write_text("0\n")
        assert reader.set_burst(0.25) == 0.25 and file.read_text().startswith("25000")
        group.cpu = 0.0  # none
        group.write()
        assert reader.set_burst(0.25) == 0.0, "without a quota there is nothing to save"
    finally:
        reader.close()
