"""The quick way of ``weenv run``: the same options as the ordinary one, and a client that speaks to a gRPC server."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.cli.run import run as ordinary
from weenv.core.errors import WeenvError
from weenv.environment import owner
from weenv.environment.quick import FLAGS, SHORT, VALUES, parse, run
from weenv.environment.quickclient import BROKEN, NOT_FOUND, QuickClient, QuickError
from weenv.environment.requested import options_of, size
from weenv.plugin.containerd.schema import SCHEMA

SERVICE = "containerd.services.tasks.v1.Tasks"


def parameters() -> dict[str, click.Option]:
    return {option: item for item in ordinary.params if isinstance(item, click.Option) for option in item.opts}


def test_its_options_are_the_ordinary_ones() -> None:
    known = parameters()
    for name, target in {**FLAGS, **VALUES}.items():
        option = known[f"--{name}"]
        assert option.name == target and option.is_flag == (name in FLAGS)
    for letter, name in SHORT.items():
        assert known[f"-{letter}"] is known[f"--{name}"]


words = st.sampled_from(
    ["--timeout", "7", "--timeout=nan", "--pids=-1",
     "--rm", "-e", "A=1", "--env=B=2", "-w", "/w", "-u", "ann", "--cpus", "2", "--cpus=x", "--memory", "64m", "--pids=5", "-v",
     "/:/x", "--read-only", "--name", "n", "-d", "-t", "-it", "--network", "none", "plan.yaml", "--", "sh", "-c", "--no-such",
     "-e=1", ""]
)  # fmt: skip


@given(argv=st.lists(words, max_size=8))
def test_what_it_reads_the_ordinary_way_reads_the_same(argv: list[str]) -> None:
    found = parse(argv)
    if found is None:
        return
    try:
        context = ordinary.make_context("run", list(argv), resilient_parsing=False)
    except click.UsageError:
        # What is refused there has to be refused, or left to it, here: nothing runs in this test.
        assert found["network"] not in (None, "none", "host") or found["target"] == "" or not found["target"]
        return
    theirs = context.params
    for name, value in found.items():
        if name != "command":
            assert theirs[name] == value, name
    made: list[object] = []
    for values in (theirs, found):
        try:
            made.append(options_of({**values, "volume": ()}, values["command"], "none"))
        except WeenvError as error:
            made.append(error.message)
    assert made[0] == made[1]


def test_what_is_not_plain_is_left_to_the_ordinary_way(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("x")
    config = tmp_path / "weenv.toml"
    config.write_text(f'[snapshotter]\nroot = "{tmp_path}"\n[run]\naddress = "{tmp_path}/none.sock"\n')
    for argv in (
        [], ["--rm"], [str(plan)], ["--rm", "image:1"], ["--rm", "-d", str(plan)], ["--rm", "-it", str(plan)],
        ["--rm", "--help"], ["--rm", "--config", str(config), str(plan)], ["--rm", "--config", str(config), "/no/plan.yaml"],
    ):  # fmt: skip
        assert run(argv) is None


def test_sizes() -> None:
    assert [size(text) for text in ("", None, "5", "1k", "64m", "1.5g", "2GiB", "3mb")] == [
        0, 0, 5, 1024, 64 << 20, 3 << 29, 2 << 30, 3 << 20,
    ]  # fmt: skip
    for text in ("x", "-1", "5q", "1 2"):
        with pytest.raises(WeenvError):
            size(text)


class Server:
    """A gRPC server that nobody here wrote."""

    def __init__(self, path: str) -> None:
        self.release = threading.Event()
        self.namespaces: list[str] = []
        self._pool = ThreadPoolExecutor(8)
        self._server = grpc.server(self._pool)
        handlers = {
            "Wait": ("WaitRequest", self.wait), "Get": ("GetTaskRequest", self.get), "Kill": ("KillRequest", self.kill),
            "ListPids": ("ListPidsRequest", self.pids),
        }  # fmt: skip
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    SERVICE,
                    {
                        name: grpc.unary_unary_rpc_method_handler(
                            work,
                            request_deserializer=SCHEMA[request].FromString,
                            response_serializer=lambda answer: answer.SerializeToString(),
                        )
                        for name, (request, work) in handlers.items()
                    },
                ),
            )
        )
        self._server.add_insecure_port("unix:" + path)
        self._server.start()

    def wait(self, request: Any, context: Any) -> Any:
        self.namespaces.append(dict(context.invocation_metadata())["containerd-namespace"])
        assert self.release.wait(60)
        return SCHEMA["WaitResponse"](exit_status=len(request.container_id))

    def get(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.NOT_FOUND, f"kein Gefäß {request.container_id[:50]}\nzweite Zeile")

    def kill(self, request: Any, context: Any) -> Any:
        return SCHEMA[".google.protobuf.Empty"]()

    def pids(self, request: Any, context: Any) -> Any:
        return SCHEMA["ListPidsResponse"](processes=[SCHEMA["ProcessInfo"](pid=n) for n in range(1, 200_001)])

    def stop(self) -> None:
        self.release.set()
        self._server.stop(0).wait()
        self._pool.shutdown()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    path = str(tmp_path / "s.sock")
    made = Server(path)
    yield made, path
    made.stop()


def test_calls_side_by_side_errors_and_large_messages(server: tuple[Server, str]) -> None:
    made, path = server
    client = QuickClient(path, "space")
    # Larger than all of the peer's windows at first.
    waiting = client.begin(SERVICE, "Wait", "WaitRequest", {"container_id": "x" * 700_000}, "WaitResponse")
    assert client.result(waiting, block=False) is None
    for _ in range(3):
        assert client.call(SERVICE, "Kill", "KillRequest", {"container_id": "a", "signal": 9}, ".google.protobuf.Empty") == {}
    with pytest.raises(QuickError, match="kein Gefäß abc") as caught:
        client.call(SERVICE, "Get", "GetTaskRequest", {"container_id": "abc"}, "GetTaskResponse")
    assert caught.value.code == NOT_FOUND
    with pytest.raises(QuickError) as caught:
        client.call(SERVICE, "Pause", "PauseTaskRequest", {"container_id": "abc"}, ".google.protobuf.Empty")
    assert caught.value.code == 12, "unimplemented"
    answer = client.call(SERVICE, "ListPids", "ListPidsRequest", {}, "ListPidsResponse")
    assert [item["pid"] for item in answer["processes"]] == list(range(1, 200_001))
    made.release.set()
    assert client.result(waiting) == {"exit_status": 700_000}
    assert made.namespaces == ["space"]
    client.close()


def test_a_server_that_goes_away(server: tuple[Server, str], tmp_path: Path) -> None:
    made, path = server
    client = QuickClient(path, "space")
    waiting = client.begin(SERVICE, "Wait", "WaitRequest", {"container_id": "x"}, "WaitResponse")
    threading.Timer(0.2, made._server.stop, (0,)).start()
    with pytest.raises(QuickError) as caught:
        client.result(waiting)
    assert caught.value.code in (BROKEN, 1, 14)
    client.close()
    with pytest.raises(QuickError):
        QuickClient(str(tmp_path / "nobody"), "space")


def test_owners() -> None:
    mine = owner.mark()
    assert not owner.is_gone(mine)
    pid, start, boot, space = mine.split()
    assert owner.is_gone(f"{pid} {int(start) + 1} {boot} {space}"), "another process of that number"
    assert owner.is_gone(f"{pid} {start} {'0' * 36} {space}"), "before a reboot"
    assert not owner.is_gone(f"{pid} {int(start) + 1} {boot} 1"), "of another pid namespace nothing can be said"
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert owner.is_gone(f"{child} {start} {boot} {space}")
    assert owner.is_gone("-") and owner.is_gone("")
    for odd in ("0", "²", "-1", "1" * 40):
        assert owner.is_gone(f"{odd} {start} {boot} {space}")


def test_who_is_dead_but_not_waited_for_is_gone() -> None:
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    text = owner.mark(child)
    assert not owner.is_gone(text)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert owner.is_gone(text)
    os.waitpid(child, 0)
    assert owner.is_gone(text)


def test_only_our_own_leases_of_the_dead_are_orphans() -> None:
    mine = owner.lease_mark()
    user, pid, start, boot, space = mine.split()
    dead = f"{user} {pid} {int(start) + 1} {boot} {space}"
    name = owner.LEASE_PREFIX + "1"
    assert owner.is_orphan(name, {owner.LEASE_LABEL: dead})
    assert not owner.is_orphan("another", {owner.LEASE_LABEL: dead})
    assert not owner.is_orphan(name, {}) and not owner.is_orphan(name, {"containerd.io/gc.expire": dead})
    for alive in (
        mine, "", "-", "0", f"{int(user) + 1} {pid} {int(start) + 1} {boot} {space}", f"{user} {pid} 1 {'0' * 36} {space}",
        f"{user} {pid} 1 {boot} 1", f"{user} {pid} 1", f"{user} x 1 {boot} {space}", dead + " 1",
    ):  # fmt: skip
        assert not owner.is_orphan(name, {owner.LEASE_LABEL: alive}), alive
