"""The snapshotter's small parts: configuration, mountinfo, disk walks, implied directories, builder, metrics, lock, status."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from conformance.snapshots import committed
from test_service import direct

from weenv.core import digest as digests
from weenv.core.endpoint import MetricsEndpoint, parse_loopback
from weenv.core.errors import ConfigError, FormatError, LimitError, MountError, StorageError, VerificationError
from weenv.core.process import only_instance
from weenv.layer import erofs
from weenv.layer.encode import encode_layer
from weenv.layer.erofs import DirAttributes
from weenv.layer.verify import verify_tail
from weenv.plugin.containerd.types import Usage
from weenv.plugin.snapshotter import builder, disk, mounts
from weenv.plugin.snapshotter.builder import Builder
from weenv.plugin.snapshotter.config import SnapshotterConfig, from_tables, load
from weenv.plugin.snapshotter.daemon import serve
from weenv.plugin.snapshotter.implied import attributes_below, open_in_root
from weenv.plugin.snapshotter.layerdir import LayerDirs, LayerSource
from weenv.plugin.snapshotter.metrics import Metrics
from weenv.plugin.snapshotter.planes.base import (
    Implied,
    LayerFacts,
    Variant,
    decode_attributes,
    encode_attributes,
    variant_of,
)
from weenv.plugin.snapshotter.status import collect
from weenv_testkit.images import Member, write_tar

# -- configuration


def test_the_configuration_has_defaults_and_overrides(tmp_path: object) -> None:
    path = f"{tmp_path}/config.toml"
    with open(path, "w") as file:
        file.write(
            '[snapshotter]\nroot = "/x/"\nresolve_timeout = 5\nmount_options = ["volatile"]\n'
            '[registry]\nplain_http = ["r:5000"]\nattempts = 2\n[blobfs]\nthreads = 9\n'
        )
    config = load(path, socket="/y/s.sock", blobs=None)
    assert (config.root, config.socket, config.blobs) == ("/x", "/y/s.sock", "/run/weenv/blobs")
    assert config.resolve_timeout == 5.0 and config.mount_options == ("volatile",)
    assert config.registry.plain_http == frozenset({"r:5000"}) and config.registry.attempts == 2
    assert from_tables({}) == SnapshotterConfig()


@pytest.mark.parametrize(
    "text",
    [
        "[snapshotter]\nroot = 5",
        '[snapshotter]\nroot = "relative"',
        '[snapshotter]\nroot = "/with:colon"',
        '[snapshotter]\nroot = "/with,comma"',
        "[snapshotter]\nbuilders = 0",
        "[snapshotter]\nbuilders = true",
        "[snapshotter]\nresolve_timeout = -1",
        "[snapshotter]\nunknown = 1",
        '[snapshotter]\nmount_options = ["upperdir=/x"]',
        '[snapshotter]\nmount_options = ["a,b"]',
        '[snapshotter]\nmount_options = "volatile"',
        "snapshotter = 1",
        "[registry]\nmirrors = {}",
        "[registry]\nplain_http = [5]",
        "not toml at all",
    ],
)
def test_a_bad_configuration_names_the_setting(tmp_path: object, text: str) -> None:
    path = f"{tmp_path}/config.toml"
    with open(path, "w") as file:
        file.write(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_configuration_file() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load("/nowhere/config.toml")


# -- mounts


def test_mountinfo() -> None:
    text = (
        "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n"
        "37 36 0:44 / /run/with\\040space\\134 ro shared:5 master:1 - erofs /l/meta.erofs ro,user_xattr\n"
        "38 36 0:45 / /run/x rw - tmpfs none rw\n"
        "broken line\n"
        "39 36 0:46 / /run/x ro - erofs a\\303\\266b ro\n"
    )
    first, second, _, top = mounts.parse_mountinfo(text)
    assert (first.mount_id, first.device, first.point, first.fstype, first.source) == (36, "98:0", "/mnt2", "ext3", "/dev/root")
    assert (second.point, second.super_options) == ("/run/with space\\", "ro,user_xattr")
    assert top.source == "aöb"


def test_the_running_kernels_mountinfo_is_read() -> None:
    found = mounts.mounts_below("/")
    assert "/proc" in found and found["/proc"].fstype == "proc"
    assert mounts.mounts_below("/nowhere") == {}


def test_refused_mounts_say_why(tmp_path: object) -> None:
    with pytest.raises(MountError) as caught:
        mounts.unmount(f"{tmp_path}")
    assert caught.value.errno in (1, 22)
    if os.geteuid() == 0:
        assert mounts.detach(f"{tmp_path}/missing") is False
    with pytest.raises((MountError, OSError)):
        mounts.open_erofs(f"{tmp_path}/missing", f"{tmp_path}/missing")


# -- disk


def test_usage_and_deletion_of_trees(tmp_path: object) -> None:
    root = f"{tmp_path}/tree"
    assert disk.usage(root) == Usage()
    os.makedirs(f"{root}/a/b")
    for name in ("a/f", "a/b/g"):
        with open(f"{root}/{name}", "wb") as file:
            file.write(b"x" * 10_000)
    os.link(f"{root}/a/f", f"{root}/a/b/same")
    os.symlink("/", f"{root}/a/up")
    used = disk.usage(root)
    assert used.inodes == 6
    expected = sum(os.lstat(f"{root}/{name}").st_blocks * 512 for name in ("", "a", "a/b", "a/f", "a/b/g", "a/up"))
    assert used.size == expected
    keep = f"{tmp_path}/keep"
    os.mkdir(keep)
    os.symlink(keep, f"{root}/link")
    disk.delete_trees([root, f"{tmp_path}/missing", f"{tmp_path}/-rf"])
    assert os.listdir(f"{tmp_path}") == ["keep"]


@pytest.mark.skipif(os.geteuid() != 0, reason="root may delete everything but this")
def test_what_cannot_be_deleted_is_an_error() -> None:
    with pytest.raises(OSError, match="cannot delete"):
        disk.delete_trees(["/proc/self/fd"])


# -- implied directories


def test_lookups_stay_within_the_layer(tmp_path: object) -> None:
    inside, outside = f"{tmp_path}/lower", f"{tmp_path}/secret"
    os.makedirs(f"{inside}/usr/lib")
    os.makedirs(f"{outside}/d")
    os.chmod(f"{outside}/d", 0o700)
    os.chmod(f"{inside}/usr/lib", 0o711)
    os.symlink("usr/lib", f"{inside}/lib")
    os.symlink(f"../../../../..{outside}", f"{inside}/escape")
    os.symlink(outside, f"{inside}/absolute")
    os.symlink("loop", f"{inside}/loop")
    with open(f"{inside}/file", "w"):
        pass
    names = [b"lib", b"usr", b"escape/d", b"absolute/d", b"loop/x", b"file", b"file/x", b"missing/d", b"n" * 300]
    implied = [Implied(number, name) for number, name in enumerate(names, 1)]
    found = attributes_below(implied, [inside])
    assert set(found) == {1, 2}
    assert found[1].mode == 0o711, "symlinks within the layer are followed"
    root = os.open(inside, os.O_PATH)
    with pytest.raises(FileNotFoundError):
        open_in_root(root, b"escape/d")
    os.close(root)


def test_the_topmost_layer_that_has_the_path_decides(tmp_path: object) -> None:
    for name, mode in (("top", 0o700), ("bottom", 0o750)):
        os.makedirs(f"{tmp_path}/{name}/d/{name}")
        os.chmod(f"{tmp_path}/{name}/d", mode)
    os.makedirs(f"{tmp_path}/bottom/e")
    with open(f"{tmp_path}/top/e", "w"):
        pass
    os.utime(f"{tmp_path}/top/d", ns=(1, 1_700_000_000_123_456_789))
    implied = [Implied(1, b"d"), Implied(2, b"d/bottom"), Implied(3, b"e"), Implied(4, b"f")]
    found = attributes_below(implied, [f"{tmp_path}/top", f"{tmp_path}/bottom"])
    assert (found[1].mode, found[1].mtime, found[1].mtime_ns) == (0o700, 1_700_000_000, 123_456_789)
    assert set(found) == {1, 2}, "a file above ends the search"
    with pytest.raises(FileNotFoundError):
        attributes_below(implied, [f"{tmp_path}/gone"])


def test_attributes_are_kept_as_text() -> None:
    attributes = {7: DirAttributes(0o2755, 1, 2, -5, 6, ((b"user.\xff", b"\x00"),)), 3: DirAttributes(0, 0, 0, 0, 0)}
    assert decode_attributes(encode_attributes(attributes)) == attributes
    assert variant_of({}) == Variant()
    assert variant_of(attributes) == variant_of(dict(reversed(attributes.items())))
    assert len(variant_of(attributes).name) == 12
    for bad in ("", "[1]", "[[1,2]]", '[[1,2,3,4,5,6,[["zz","00"]]]]', "{}x"):
        with pytest.raises(FormatError):
            decode_attributes(bad)
    facts = LayerFacts("sha256:x", (Implied(3, b"a/\xff", 64),))
    assert LayerFacts.from_json(facts.to_json()) == facts
    for bad_facts in (b"", b"[]", b'{"diffId":1}', b'{"diffId":"x","implied":[[1]]}'):
        with pytest.raises(FormatError):
            LayerFacts.from_json(bad_facts)


# -- builder


def layer_directory(root: str, *members: Member) -> tuple[str, bytes]:
    """A layer directory with toc and source.json; its path and the tail."""
    tar = write_tar(f"{root}/layer.tar", members)
    out = io.BytesIO()
    with open(tar, "rb") as file:
        encoded = encode_layer(file, out)
    tail = out.getvalue()[encoded.toc_offset :]
    assert verify_tail(tail, encoded.descriptor()).diff_id == encoded.diff_id
    source = LayerSource(encoded.blob_digest, encoded.blob_size, encoded.toc_offset, encoded.toc_length, encoded.toc_digest)
    return LayerDirs(root).create(source, tail), tail


async def test_metadata_is_built_in_children(tmp_path: object) -> None:
    directory, _ = layer_directory(f"{tmp_path}", Member("a/b/f", b"x" * 1000), Member.directory("c", 0o700))
    async with Builder(2) as build:
        await asyncio.gather(*(build.build(directory, "", "[]") for _ in range(4)))
        with open(f"{directory}/facts.json", "rb") as file:
            facts = LayerFacts.from_json(file.read())
        assert [item.path for item in facts.implied] == [b"a", b"a/b"]
        attributes = {facts.implied[0].entry: DirAttributes(0o1777, 5, 6, 7, 8)}
        await build.build(directory, "v", encode_attributes(attributes))
        with open(f"{directory}/meta.erofs", "rb") as file:
            plain = bytearray(file.read())
        with open(f"{directory}/meta-v.erofs", "rb") as file:
            variant = file.read()
        erofs.restamp(plain, facts.implied[0].position, attributes[facts.implied[0].entry])
        differing = [at for at in range(1536, len(plain)) if plain[at] != variant[at]]
        assert not differing, "stamping and building give the same inodes (the UUID in the superblock differs)"
        for bad in (1, facts.implied[0].position + 1, len(plain), -64):
            with pytest.raises(ValueError, match="director"):
                erofs.restamp(plain, bad, attributes[facts.implied[0].entry])


async def test_a_bad_tail_fails_one_job_and_no_other(tmp_path: object) -> None:
    good, _ = layer_directory(f"{tmp_path}", Member("f", b"x"))
    os.mkdir(f"{tmp_path}/other")
    bad, tail = layer_directory(f"{tmp_path}/other", Member("g", b"y"))
    with open(f"{bad}/toc", "wb") as file:
        file.write(tail[:-1] + b"?")
    async with Builder(2) as build:
        outcomes = await asyncio.gather(
            build.build(good, "", "[]"),
            build.build(bad, "", "[]"),
            build.build(f"{tmp_path}/missing", "", "[]"),
            build.build(good, "v", "rubbish"),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [float, VerificationError, StorageError, FormatError]
        assert os.path.exists(f"{good}/meta.erofs") and not os.path.exists(f"{bad}/meta.erofs")


async def test_a_killed_nursery_is_replaced(tmp_path: object) -> None:
    directory, _ = layer_directory(f"{tmp_path}", Member("f", b"x"))
    async with Builder(1) as build:
        await build.build(directory, "", "[]")
        assert build._process is not None
        os.kill(build._process.pid, signal.SIGKILL)
        for _ in range(3):
            with contextlib.suppress(StorageError):
                await build.build(directory, "", "[]")
                break
        else:
            pytest.fail("the nursery did not come back")


async def test_cancelled_jobs_leave_the_builder_usable(tmp_path: object) -> None:
    directory, _ = layer_directory(f"{tmp_path}", Member("f", b"x"))
    async with Builder(1) as build:
        for delay in (0, 0.001, 0.005):
            job = asyncio.ensure_future(build.build(directory, "", "[]"))
            await asyncio.sleep(delay)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)
        assert await asyncio.wait_for(build.build(directory, "", "[]"), 60) > 0
        assert not build._waiting


async def test_builders_share_a_budget_of_memory(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("small", "large"):
        os.mkdir(f"{tmp_path}/{name}")
    small, _ = layer_directory(f"{tmp_path}/small", Member("f", b"x"))
    large, _ = layer_directory(f"{tmp_path}/large", *(Member(f"{number:0200}", b"") for number in range(40_000)))
    assert builder.expected_memory(small) == pytest.approx(64 << 20, rel=0.01)
    assert builder.expected_memory(large) > 120 << 20, "two do not fit into the budget below"
    assert builder.expected_memory(f"{tmp_path}") == 64 << 20
    (tmp_path / "toc").write_bytes(b"\0" * 100)
    assert builder.expected_memory(f"{tmp_path}") == 64 << 20, "what is wrong with it, the job says"
    async with Builder(8, 240 << 20) as build:
        free: list[int] = []
        job = build._job

        async def watched(request: dict[str, Any], share: int) -> float:
            free.append(build._budget.free)
            return await job(request, share)

        monkeypatch.setattr(build, "_job", watched)
        names = [*(f"v{number}" for number in range(4)), ""]
        await asyncio.gather(*(build.build(each, name, "[]") for each in (small, large) for name in names))
        assert min(free) >= 0 and build._budget.free == 240 << 20
        await asyncio.gather(*(build.build(small, name, "[]") for name in names))
        assert all(os.path.exists(f"{each}/{builder.meta_name(name)}") for each in (small, large) for name in names)


async def test_a_job_that_needs_more_memory_gets_it_alone_or_is_refused(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = layer_directory(f"{tmp_path}", *(Member(f"{number:0200}", b"") for number in range(40_000)))
    monkeypatch.setattr(builder, "expected_memory", lambda _: 1 << 20)
    async with Builder(2, 512 << 20) as build:
        await build.build(directory, "", "[]")
        assert os.path.exists(f"{directory}/meta.erofs")
    async with Builder(2, 2 << 20) as build:
        with pytest.raises(LimitError, match="more than 2 MiB of memory") as caught:
            await build.build(directory, "v", "[]")
        assert "builder_memory" in caught.value.hint and build._budget.free == 2 << 20
        assert not os.path.exists(f"{directory}/meta-v.erofs")


async def test_a_job_that_nobody_waits_for_keeps_its_room_until_it_ends(tmp_path: object) -> None:
    directory, _ = layer_directory(f"{tmp_path}", Member("f", b"x"))
    async with Builder(1, 64 << 20) as build:
        await build.build(directory, "", "[]")
        assert build._process is not None
        os.kill(build._process.pid, signal.SIGSTOP)
        job = asyncio.ensure_future(build.build(directory, "v", "[]"))
        async with asyncio.timeout(60):
            while not build._jobs:
                await asyncio.sleep(0.001)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        assert build._budget.free == 0 and build._slots.locked()
        os.kill(build._process.pid, signal.SIGCONT)
        assert await asyncio.wait_for(build.build(directory, "", "[]"), 60) > 0
        assert build._budget.free == 64 << 20 and os.path.exists(f"{directory}/meta-v.erofs")


def test_a_childs_errors_come_back_as_they_were() -> None:
    error = builder._revive({"error": "LimitError", "message": "m", "hint": "h"})
    assert isinstance(error, LimitError) and error.hint == "h"
    assert type(builder._revive({"error": "os", "message": "m"})) is FormatError
    full = builder._revive({"error": "StorageError", "message": "m", "errno": 28})
    assert isinstance(full, StorageError) and full.errno == 28


# -- metrics


@pytest.mark.parametrize("text", ["", "9180", "0.0.0.0:9180", "example.org:1", "127.0.0.1:", "127.0.0.1:99999", ":1"])
def test_metrics_are_for_loopback_only(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_loopback(text)


def test_the_metrics_endpoint() -> None:
    assert parse_loopback("[::1]:5") == ("::1", 5)
    metrics = Metrics()
    metrics.fallbacks.labels(reason="not-converted").inc()
    endpoint = MetricsEndpoint(metrics, "127.0.0.1:0")
    with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    assert 'weenv_snapshotter_fallbacks_total{reason="not-converted"} 1.0' in text
    with pytest.raises(ConfigError, match="cannot listen"):
        MetricsEndpoint(metrics, f"127.0.0.1:{endpoint.port}")
    endpoint.close()


# -- the daemon


def test_a_second_instance_is_refused(tmp_path: object) -> None:
    root = f"{tmp_path}"
    with only_instance(root, "snapshotter"):
        program = f"from weenv.core.process import only_instance\nwith only_instance({root!r}, 'snapshotter'): pass"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode != 0 and f"another snapshotter (pid {os.getpid()})" in done.stderr
    with only_instance(root, "snapshotter"):
        pass


def test_who_asks_for_the_holder_keeps_nobody_from_starting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asker = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(asker, fcntl.LOCK_SH)  # as holder_of does, for a moment
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        fcntl.flock(asker, fcntl.LOCK_UN)

    monkeypatch.setattr(time, "sleep", wait)
    with only_instance(str(tmp_path), "snapshotter"):
        assert len(waits) == 1
    os.close(asker)


async def test_serving_until_cancelled_leaves_everything(tmp_path: object) -> None:
    config = SnapshotterConfig(root=f"{tmp_path}/w", socket=f"{tmp_path}/s.sock", lazy=False, cleanup_delay=0.0)
    for _ in range(2):
        ready = asyncio.Event()
        task = asyncio.ensure_future(serve(config, ready=ready.set))
        await asyncio.wait_for(ready.wait(), 60)
        status = collect(config.root)
        assert status.running and status.pid == os.getpid()
        with pytest.raises(ConfigError, match="another snapshotter"):
            await serve(config)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert not collect(config.root).running


async def test_status_reads_beside_the_daemon(tmp_path: object) -> None:
    root = f"{tmp_path}"
    assert collect(root + "/nowhere").layers == ()
    async with direct(root) as service:
        await committed(service, "one", files={"f": "x" * 5000})
        await service.prepare("a", "one")
        await service.view("v", "one")
        directory, _ = layer_directory(root, Member("f", b"x"))
        digest = digests.from_hex(os.path.basename(directory))
        row = service.core.store.layer(digest, "")
        from weenv.plugin.containerd.types import Kind

        service.core.store.add(Kind.COMMITTED, "lazy", None, {}, layer_id=row.id)
        await asyncio.to_thread(json.dumps, {})
        status = collect(root)
    assert (status.active, status.views, status.committed_ordinary, status.committed_lazy) == (1, 1, 1, 1)
    assert status.ordinary_bytes > 5000 and not status.running
    (layer,) = status.layers
    assert (layer.digest, layer.mode, layer.snapshots, layer.users) == (digest, "unmounted", 1, 0)
    assert layer.compressed_size > 0 and status.problems == (f"layer {digest} is not mounted",)
