"""What weenv status and weenv doctor say of a running blobfs: its answer comes over a real socket."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from weenv.cli import doctor
from weenv.cli.status import _asked, _blobfs_line, _users, blobfs_problems, blobfs_status
from weenv.core.errors import UnavailableError
from weenv.core.unixsocket import connected
from weenv.plugin.snapshotter import mounts
from weenv.plugin.snapshotter.blobfs.ask import ask
from weenv.plugin.snapshotter.status import by_namespace

GOOD = {"digest": "sha256:" + "1" * 64, "local_percent": 12.5, "errors": {}, "last_error": ""}
WORSE = {
    "digest": "sha256:" + "2" * 64, "local_percent": 50.0, "errors": {"eio": 2, "digest": 1},
    "last_error": "2026-01-01T00:00:00Z frame 3: bad",
}  # fmt: skip


def serve(path: Path, answer: dict[str, Any]) -> threading.Thread:
    """Answer one client as blobfs does."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    path.chmod(0o600)
    server.listen(1)

    def run() -> None:
        with server:
            client, _ = server.accept()
            with client:
                assert json.loads(client.recv(1000)) == {"op": "status"}
                client.sendall(json.dumps(answer).encode())

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_layers_with_errors_have_a_line() -> None:
    assert blobfs_problems(None) == []
    assert blobfs_problems({"layers": [GOOD]}) == []
    (line,) = blobfs_problems({"layers": [GOOD, WORSE]})
    assert "(50% local): digest 1, eio 2; last: 2026-01-01T00:00:00Z frame 3: bad" in line
    ill = [{"server": f"https://{state}.example", "state": state, "seconds": 11.2} for state in ("busy", "rests")]
    busy, rests = blobfs_problems({"layers": [GOOD], "registries": ill})
    assert busy.startswith("https://busy.example ") and "wants 12 s of peace" in busy
    assert rests.startswith("https://rests.example ") and "rests for 12 s" in rests


@pytest.mark.parametrize(
    ("percent", "age", "kinds", "shown"),
    [
        (50.0, 5, ["source", "eio"], True),
        (50.0, 3600, ["source", "eio"], False),  # such as a gateway that is gone: others have served since
        (100.0, 5, ["source", "eio"], False),
        (100.0, 3600, ["source", "digest"], True),
        (50.0, 3600, ["storage"], True),
    ],
)
def test_what_is_over_is_no_problem(percent: float, age: int, kinds: list[str], shown: bool) -> None:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - age))
    layer = GOOD | {"local_percent": percent, "errors": dict.fromkeys(kinds, 1), "last_error": f"{when} a: Connection refused"}
    assert bool(blobfs_problems({"layers": [layer]})) is shown


@pytest.mark.parametrize(
    ("answer", "state", "seen"),
    [
        ({"layers": [GOOD], "bad_layers": []}, "ok", "mounted at"),
        ({"layers": [WORSE], "bad_layers": []}, "warn", "last: 2026"),
        ({"layers": [], "bad_layers": [{"digest": "sha256:3", "reason": "it lies"}]}, "fail", "sha256:3: it lies"),
    ],
)
def test_doctor_tells_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], state: str, seen: str
) -> None:
    blobs = str(tmp_path / "blobs")
    monkeypatch.setattr(mounts, "mounts_below", lambda _path: {blobs: None})
    thread = serve(tmp_path / "s", answer)
    found = doctor._blobs(blobs, str(tmp_path / "s"))[0]
    thread.join(60)
    assert found.state == state
    assert seen in found.seen
    assert blobfs_status(str(tmp_path / "s")) is None  # nobody answers any more


def test_users_are_told_by_namespace() -> None:
    names = ["k8s.io/12/abc", "default/1/job1", "default/7/job2", "odd", "x/5/with/slash"]
    assert by_namespace(names) == {"": ("odd",), "default": ("job1", "job2"), "k8s.io": ("abc",), "x": ("with/slash",)}
    assert _users(by_namespace(names)) == "2 default, 1 -, 1 k8s.io, 1 others"
    assert _users({}) == "-"
    assert _users({"[red]": ("a",)}) == "1 \\[red]"


def test_what_runs_of_blobfs_and_its_cache() -> None:
    assert _blobfs_line(None) == "not running"
    assert _blobfs_line({}) == "running"
    cache = {"data": 1 << 20, "high": 2 << 20, "evicted_bytes": {"size": 1 << 10, "prune": 1 << 10}, "stuck": True}
    assert _blobfs_line({"cache": cache}) == (
        "running; cache 1 MiB of 2 MiB, 2 KiB evicted since it began, over its bound and nothing can be evicted"
    )
    fetched = {"frames": {"demand": 3, "prefetch": 7}, "prefetch_used": 5, "prefetching": 1}
    assert _blobfs_line(fetched) == "running; by profiles: 7 frames, 5 of them read since, more on their way"
    assert _blobfs_line({"frames": {"prefetch": 0}}) == "running"


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b"[" * 100_000])
def test_one_that_listens_and_does_not_answer_is_not_none(tmp_path: Path, answer: bytes) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        assert ask(path, {"op": "status"}) is None, "a dead one's socket"
        server.listen(0)
        server.settimeout(30)
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(_asked, path)
            client, _ = server.accept()
            with client:
                client.recv(1000)
                client.sendall(answer)
            assert asked.result(60) == (None, [f"blobfs listens at {path} and does not answer"])
        with connected(path, 5), pytest.raises(UnavailableError, match="does not answer"):  # which fills its queue
            ask(path, {"op": "status"}, patience=0.05)
