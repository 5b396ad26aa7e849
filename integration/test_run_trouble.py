"""``weenv run`` against trouble: signals and kill -9 at any moment, readers that are slow or go, and what is left then."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import weenv
from weenv.core import procfs
from weenv.core.errors import WeenvError
from weenv.environment import lifecycle, orphans, owner
from weenv.plugin.containerd.client import Client, Namespaced
from weenv_testkit import tools
from weenv_testkit.containerd import cgroup_processes
from weenv_testkit.procs import wait_until
from weenv_testkit.running import NAMESPACE, RUNTIME_ROOT, Bench

WAYS = {
    "quick": ("run", "--rm"),
    "input": ("run", "--rm", "-i"),
    "init": ("run", "--rm", "--init"),
    "detached": ("run", "-d"),
    "passing": ("run", "-d", "--rm"),
}

soak = pytest.mark.soak  # green, but long, or not yet run often enough under load to stand in everybody's way


def seconds_of(bench: Bench, way: str) -> float:
    """How long it takes to start and end one."""
    begin = time.monotonic()
    out = bench.ok(*WAYS[way], bench.plan, "--", "true")
    took = time.monotonic() - begin
    if way == "detached":
        bench.ok("rm", "-f", out.strip())
    # Of itself, or by its own command's sweep, "passing" may be gone already.
    wait_until("nothing to be left", lambda: bench.ok("rm", "--sweep") is not None and not bench.left(), 60, 0.1)
    return took


@soak
@pytest.mark.parametrize("way", WAYS)
def test_killed_at_any_moment_nothing_is_left_after_the_next_command(bench: Bench, way: str) -> None:
    chance = random.Random(way)
    whole = seconds_of(bench, way)
    for _ in range(3):
        children = [
            bench.popen(*WAYS[way], bench.plan, "--", "sleep", "1000", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for _ in range(2)
        ]
        for child in children:
            time.sleep(chance.uniform(0, whole))  # the moment is what is drawn
            child.kill()
            child.wait()
        bench.ok("rm", "--sweep")
        if way in ("detached", "passing"):  # killed when it was its own already, it was not to be removed
            for name in bench.ok("ps", "-q").split():
                bench.ok("rm", "-f", name)
        wait_until("nothing to be left", lambda: not bench.left() or print(bench.left()), 60, 0.1)


@soak
@pytest.mark.parametrize("way", ["quick", "input", "init"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_moment_ends_it_and_leaves_nothing(bench: Bench, way: str, number: int) -> None:
    chance = random.Random(f"{way} {number}")
    whole = seconds_of(bench, way)
    script = "trap 'exit 7' TERM INT; echo up; while :; do sleep 0.02; done"
    ends = set()
    for _ in range(6):
        child = bench.popen(*WAYS[way], bench.plan, "--", "sh", "-c", script, stderr=subprocess.PIPE)
        time.sleep(chance.uniform(0, whole))
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
        # Before Python runs a line of ours its own handler, or none, is what there is: "Traceback", -n.
        ends.add((child.returncode, out))
        assert child.returncode in (7, 128 + number, 137, -number, 1), (child.returncode, out, err)
        assert not bench.left(), (child.returncode, out, err)
    assert ends


@soak
def test_a_signal_is_never_lost(bench: Bench) -> None:
    script = "trap 'exit 7' TERM; echo up; while :; do sleep 0.01; done"
    for way in ("quick", "input", "init"):
        for _ in range(5):
            child = bench.popen(*WAYS[way], bench.plan, "--", "sh", "-c", script)
            assert child.stdout is not None and child.stdout.readline() == b"up\n"
            begin = time.monotonic()
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 7 and time.monotonic() - begin < 9
            child.stdout.close()


@soak
def test_other_signals_go_through(bench: Bench) -> None:
    script = "trap 'echo one' USR1; trap 'exit 8' USR2; echo up; while :; do sleep 0.01; done"
    for way in ("quick", "input", "init"):
        child = bench.popen(*WAYS[way], bench.plan, "--", "sh", "-c", script)
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGUSR1)
        assert child.stdout.readline() == b"one\n"
        child.send_signal(signal.SIGUSR2)
        assert child.wait(60) == 8
        child.stdout.close()


@soak
def test_nohup_is_respected(bench: Bench) -> None:
    argv = ["nohup", *bench.argv("run", "--rm", bench.plan, "--", "sh", "-c", "echo up; sleep 1; exit 3")]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    child.send_signal(signal.SIGHUP)
    assert child.wait(60) == 3
    child.stdout.close()


@pytest.mark.parametrize("sweeper", ["rm", "quick", "ordinary"])
def test_leases_of_the_dead_end_and_no_others(bench: Bench, sweeper: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    mark = owner.lease_mark(child.pid)
    child.kill()
    child.wait()
    user, _, process = mark.partition(" ")
    pid, start, _, space = process.split()
    leases = {
        f"{owner.LEASE_PREFIX}dead": mark,
        f"{owner.LEASE_PREFIX}alive": owner.lease_mark(),
        f"{owner.LEASE_PREFIX}elsewhere": f"{user} {pid} {start} {'0' * 36} {space}",
        f"{owner.LEASE_PREFIX}somebody": f"{int(user) + 1} {process}",
        f"{owner.LEASE_PREFIX}unmarked": "",
        "not-ours": mark,
    }

    async def on(work: Callable[[Namespaced], Awaitable[list[Any]]]) -> list[Any]:
        async with Client(bench.node.containerd.socket) as client:
            return await work(client.namespace(NAMESPACE))

    async def make(namespace: Namespaced) -> list[Any]:
        return [
            await namespace.create_lease(name, {owner.LEASE_LABEL: text} if text else {}) for name, text in leases.items()
        ]

    async def remove(namespace: Namespaced) -> list[Any]:
        return [await namespace.delete_lease(name) for name in kept]

    bench.ok("run", "--rm", bench.plan, "--", "true")
    asyncio.run(on(make))
    kept = set(leases) - {f"{owner.LEASE_PREFIX}dead"}
    try:
        # Of a run that is over at once the sweeping need not have begun.
        how = {"rm": ("rm", "--sweep"), "quick": ("run", "--rm", bench.plan, "--", "sleep", "0.5")}
        bench.ok(*how.get(sweeper, ("run", "--rm", "-i", bench.plan, "--", "sleep", "0.5")))
        assert {lease.id for lease in asyncio.run(on(lambda namespace: namespace.list_leases()))} == kept
    finally:
        asyncio.run(on(remove))


def test_killed_while_it_composes_nothing_is_left_after_the_next_command(bench: Bench, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    text = Path(bench.plan).read_text()
    assert "TASK: '17'" in text
    plan.write_text(text.replace("TASK: '17'", f"TASK: '{os.urandom(4).hex()}'"))  # the layers are known, the image is new
    bench.ok("run", "--rm", bench.plan, "--", "true")
    os.kill(bench.node.snapshotter.pid, signal.SIGSTOP)
    try:
        child = bench.popen("run", "--rm", str(plan), "--", "true", stdout=subprocess.DEVNULL)
        wait_until("it to compose", lambda: any(owner.LEASE_PREFIX in lease for lease in leases_of(bench)), 60, 0.1)
        child.kill()
        child.wait()
    finally:
        os.kill(bench.node.snapshotter.pid, signal.SIGCONT)
    assert leases_of(bench)
    bench.ok("rm", "--sweep")
    wait_until("nothing to be left", lambda: not bench.left(), 60, 0.1)
    assert bench.ok("run", "--rm", str(plan), "--", "echo", "there") == "there\n"


def leases_of(bench: Bench) -> list[str]:
    """The names of the leases there are."""
    return bench.node.containerd.ctr("leases", "ls", "-q", namespace=NAMESPACE).split()


class SlowRuntime:
    """The runtime, but that one verb of it makes the file ``there`` and waits for :meth:`go_on`, before or after its work."""

    def __init__(self, folder: Path, verb: str, *, done: bool) -> None:
        self.there, self._go, program = (folder / name for name in ("there", "go", "runtime"))
        self.program = str(program)
        wait = f": >{self.there}; until [ -e {self._go} ]; do sleep 0.01; done"
        work = f'{tools.runc()} "$@"'
        steps = f"{work} || exit; {wait}" if done else f"{wait}; exec {work}"
        program.write_text(f'#!/bin/sh\ncase " $* " in *" {verb} "*) ;; *) exec {work} ;; esac\n{steps}\n')
        program.chmod(0o755)

    def wait(self) -> None:
        wait_until("the runtime to be called", self.there.exists, 60)

    def go_on(self) -> None:
        self._go.touch()


@pytest.mark.parametrize("way", ["quick", *(pytest.param(way, marks=soak) for way in ("input", "unread", "waited"))])
def test_killed_while_the_runtime_makes_its_container_nothing_is_left_and_the_name_is_free(
    bench: Bench, way: str, tmp_path: Path
) -> None:
    runtime = SlowRuntime(tmp_path, "create", done=True)
    name = f"same-{os.getpid()}"
    run = (*WAYS["input" if way == "input" else "quick"], "--name", name)
    child = bench.popen(
        *run, "--runtime", runtime.program, bench.plan, "--", "sleep", "1000",
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    runtime.wait()
    # As if it were killed a moment later, when the shim has opened these: without readers it would wait for some.
    home = bench.loaded.home(name)
    ends = [os.open(f"{home}/{stream}", os.O_RDONLY | os.O_NONBLOCK) for stream in ("1", "2") if way != "unread"]
    child.kill()
    child.wait()
    # Now the shim has a container made, of which its containerd, which has given up, wants to hear nothing more.
    runtime.go_on()
    if way == "waited":
        wait_until("containerd to forget the shim", lambda: "bundles" not in bench.left(), 60)
    bench.ok("rm", "--sweep")
    for end in ends:
        os.close(end)
    assert not orphans.makers(NAMESPACE, name)
    assert not {"containers", "snapshots", "processes", "runtime", "cgroups"} & bench.left().keys(), bench.left()
    assert bench.ok(*run, bench.plan, "--", "echo", "again") == "again\n"


@soak
@pytest.mark.parametrize("how", ["deleted", "killed"])
def test_what_was_to_be_removed_at_its_end_is_without_its_task(bench: Bench, how: str, tmp_path: Path) -> None:
    runtime = SlowRuntime(tmp_path, "delete", done=True)
    name = bench.ok("run", "-d", "--rm", "--runtime", runtime.program, bench.plan, "--", "sleep", "1000").strip()
    if how == "deleted":
        runtime.go_on()
        bench.node.containerd.ctr("tasks", "delete", "--force", name, namespace=NAMESPACE)
    else:
        child = bench.popen("rm", "--force", name, stdout=subprocess.DEVNULL)
        runtime.wait()
        child.kill()
        child.wait()
        runtime.go_on()
    bench.ok("rm", "--sweep")
    wait_until("its shim to end", lambda: not orphans.makers(NAMESPACE, name), 60)
    assert not bench.left()


@soak
def test_what_the_runtime_keeps_of_one_that_was_given_up_is_in_nobodys_way(bench: Bench) -> None:
    name = f"same-{os.getpid()}"
    child = bench.popen("run", "--rm", "--name", name, bench.plan, "--", "sleep", "1000", stdout=subprocess.DEVNULL)
    wait_until("it to run", lambda: cgroup_processes(f"{bench.cgroup}/{name}"), 60)
    state = os.path.join(RUNTIME_ROOT, NAMESPACE, name)
    shutil.copytree(state, f"{state}.kept", ignore=lambda folder, names: [x for x in names if not x.endswith("json")])
    bench.ok("rm", "-f", name)
    child.wait(60)
    os.rename(f"{state}.kept", state)
    assert bench.ok("run", "--rm", "--name", name, bench.plan, "--", "echo", "again") == "again\n"


@soak
@pytest.mark.parametrize("cleared", [True, False])
def test_a_name_that_containerd_has_not_done_with_is_waited_for(
    bench: Bench, cleared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"same-{os.getpid()}"
    folder = os.path.join(bench.node.containerd.state, "io.containerd.runtime.v2.task", NAMESPACE, name)
    bench.ok("run", "--rm", bench.plan, "--", "true")  # that makes the namespace's
    os.mkdir(folder)
    seen = []
    ask = lifecycle.is_cleared_away

    def told(message: str, container: str) -> bool:
        seen.append(ask(message, container))
        if cleared and len(seen) == 2:
            os.rmdir(folder)
        return seen[-1]

    monkeypatch.setattr(lifecycle, "is_cleared_away", told)
    if cleared:
        with bench.start(name=name) as env:
            assert env.exec(["echo", "there"]).text == "there\n"
    else:
        monkeypatch.setattr(lifecycle, "_CLEARED", 0.2)
        with pytest.raises(WeenvError, match="has not cleared away what an earlier 'same-"):
            bench.start(name=name)
        os.rmdir(folder)
    assert len(seen) > 1 and all(seen)


@soak
@pytest.mark.parametrize("end", ["first", "shim", "paused"])
def test_a_command_is_added_while_the_environment_ends(bench: Bench, end: str, tmp_path: Path) -> None:
    runtime = SlowRuntime(tmp_path, "exec", done=False)
    name = bench.ok("run", "-d", "--idle", "--runtime", runtime.program, bench.plan).strip()
    first = min(cgroup_processes(f"{bench.cgroup}/{name}"))
    shim = procfs.stat(first).parent
    if end == "paused":
        bench.node.containerd.ctr("tasks", "pause", name, namespace=NAMESPACE)
    child = bench.popen("exec", name, "--", "true", stderr=subprocess.PIPE)
    if end != "paused":
        runtime.wait()
        os.kill(first if end == "first" else shim, signal.SIGKILL)
    runtime.go_on()
    _, err = child.communicate(timeout=60)
    wanted = {"first": "has ended|has exited", "shim": "has ended|does not run|has exited", "paused": "is paused"}[end]
    assert child.returncode == 1 and re.search(f"^weenv: {name} ({wanted})", err.decode()), err
    assert b"containerd" not in err and b"ttrpc" not in err
    bench.ok("rm", "-f", name)


@soak
def test_the_first_process_of_a_task_given_up_is_ended(bench: Bench) -> None:
    """What containerd leaves where a caller dies at the worst moment, made by hand: a process in the control group, which
    no shim and no runtime knows of."""
    name = f"left-{os.getpid()}"
    group = bench.loaded.cgroup(name)
    folders = [f"/sys/fs/cgroup/{kind}{group}" for kind in ("freezer", "pids")]
    if not os.path.isdir("/sys/fs/cgroup/freezer"):
        folders = [f"/sys/fs/cgroup{group}"]
    state = os.path.join(RUNTIME_ROOT, bench.loaded.run.namespace, name)
    os.makedirs(state)
    child = subprocess.Popen(["sleep", "1000"])
    for folder in folders:
        os.makedirs(folder)
        with open(f"{folder}/cgroup.procs", "w") as file:
            file.write(str(child.pid))
    assert orphans.end(bench.loaded.run.address, "another", name, group)
    assert child.wait(60) == -signal.SIGKILL
    assert not any(os.path.exists(folder) for folder in folders) and os.path.isdir(state)
    assert orphans.end(bench.loaded.run.address, bench.loaded.run.namespace, name, group)
    assert not os.path.exists(state)


@pytest.mark.parametrize("line", ["2.1"], indirect=True)
@pytest.mark.parametrize("way", ["command", "python"])
def test_a_name_that_a_killed_command_has_left_is_free(bench: Bench, way: str) -> None:
    def again() -> str:
        if way == "command":
            return bench.ok("run", "--rm", "--name", "fixed", bench.plan, "--", "echo", "second")
        with bench.start(name="fixed") as env:
            return env.exec(["echo", "second"]).text

    with bench.popen("run", "--rm", "--name", "fixed", bench.plan, "--", "sh", "-c", "echo up; exec sleep 1000") as first:
        assert first.stdout is not None and first.stdout.readline() == b"up\n"
        refused = bench.call("run", "--rm", "--name", "fixed", bench.plan, "--", "true")
        assert refused.returncode == 1 and b"there is an environment 'fixed' already" in refused.stderr, "its owner lives"
        first.kill()
        first.wait()
    assert again() == "second\n"
    assert not bench.left()


@soak
def test_what_runs_elsewhere_under_the_name_is_not_touched(bench: Bench) -> None:
    name = bench.ok("run", "-d", "--name", f"mine-{os.getpid()}", bench.plan, "--", "sleep", "1000").strip()
    assert orphans.makers(bench.loaded.run.namespace, name) and not orphans.makers("another", name)
    place = name, bench.loaded.cgroup(name)
    assert orphans.end(bench.loaded.run.address, "another", *place)
    assert orphans.end(bench.node.socket, bench.loaded.run.namespace, *place)  # there listens something else
    assert bench.ok("exec", name, "--", "echo", "alive") == "alive\n"
    bench.ok("rm", "-f", name)


@soak
@pytest.mark.parametrize("way", ["quick", "input", "init"])
def test_a_slow_reader_gets_everything(bench: Bench, way: str) -> None:
    size = 100_000_000
    made = "head -c 100000000 /dev/zero | tr '\\0' x; printf end; printf err >&2; exit 4"
    child = bench.popen(*WAYS[way], bench.plan, "--", "sh", "-c", made, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    time.sleep(1.5)  # slow is what this reader is
    count, tail = 0, b""
    while data := os.read(child.stdout.fileno(), 1 << 20):
        count += len(data)
        tail = (tail + data)[-10:]
        if count > size - 100_000:
            time.sleep(0.1)  # and slower at the end, when the process has ended long before
    assert (count, tail) == (size + 3, b"xxxxxxxend")
    assert child.stderr.read() == b"err" and child.wait(60) == 4
    child.stdout.close()
    child.stderr.close()


@pytest.mark.parametrize("way", ["quick", pytest.param("input", marks=soak), pytest.param("init", marks=soak)])
def test_a_reader_that_goes_ends_it(bench: Bench, way: str) -> None:
    before = undrained(bench)
    child = bench.popen(*WAYS[way], bench.plan, "--", "yes", stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stderr is not None
    assert os.read(child.stdout.fileno(), 2) == b"y\n"
    child.stdout.close()
    assert child.wait(60) == 141 and child.stderr.read() == b""
    child.stderr.close()
    assert undrained(bench) == before


@soak
@pytest.mark.parametrize("way", ["quick", "input"])
def test_a_sweep_does_not_wait_for_what_the_dead_have_not_read(bench: Bench, way: str) -> None:
    before = undrained(bench)
    child = bench.popen(*WAYS[way], bench.plan, "--", "yes", stdin=subprocess.DEVNULL)
    assert child.stdout is not None and os.read(child.stdout.fileno(), 2) == b"y\n"
    wait_until("the pipe to be full", lambda: _full(child.stdout), 60, 0.05)  # type: ignore[arg-type]
    child.kill()
    child.wait()
    child.stdout.close()
    bench.ok("rm", "--sweep")
    assert undrained(bench) == before and not bench.left()


def undrained(bench: Bench) -> int:
    """How often a shim has waited in vain, for 10 s, for what a process wrote to be read; containerd 1.7 does not tell."""
    return bench.node.containerd.log_text().count("failed to drain init process")


@soak
@pytest.mark.parametrize("way", ["quick", "input"])
def test_signals_and_limits_hold_while_nobody_reads(bench: Bench, way: str) -> None:
    child = bench.popen(*WAYS[way], bench.plan, "--", "sh", "-c", "trap 'exit 5' TERM; while :; do echo yes; done")
    assert child.stdout is not None and os.read(child.stdout.fileno(), 1)
    wait_until("the pipe to be full", lambda: _full(child.stdout), 60, 0.05)  # type: ignore[arg-type]
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGTERM)
    wait_until("the environment's end", lambda: not bench.ok("ps", "-q").split(), 60)
    assert child.wait(60) in (5, 137, 130)  # 130: told to end twice, once when only the reader was waited for
    child.stdout.close()


def _full(pipe: object) -> bool:
    import array
    import fcntl
    import termios

    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)  # type: ignore[call-overload]
    return count[0] >= 60_000


@soak
def test_a_timeout_comes_though_nobody_reads(bench: Bench) -> None:
    name = bench.ok("run", "-d", "--idle", bench.plan).strip()
    child = bench.popen("exec", "--timeout", "1", name, "--", "sh", "-c", "while :; do echo yes; done")
    assert child.stdout is not None
    wait_until("the command's end", lambda: "echo yes" not in bench.ok("exec", name, "--", "ps"), 60)
    reader = threading.Thread(target=child.stdout.read)
    reader.start()
    assert child.wait(60) == 124
    reader.join()
    child.stdout.close()
    bench.ok("rm", "-f", name)


@soak
def test_much_input_goes_through(bench: Bench) -> None:
    data = os.urandom(1 << 20) * 64
    wanted = hashlib.sha256(data).hexdigest().encode()
    done = bench.call("run", "--rm", "-i", bench.plan, "--", "sha256sum", stdin=data)
    assert (done.returncode, done.stdout.split()[0]) == (0, wanted)
    done = bench.call("run", "--rm", "-i", "--init", bench.plan, "--", "sha256sum", stdin=data)
    assert (done.returncode, done.stdout.split()[0]) == (0, wanted)
    done = bench.call("run", "--rm", "-i", bench.plan, "--", "head", "-c", "1", stdin=data)
    assert (done.returncode, done.stdout) == (0, data[:1])
    for _ in range(5):
        assert bench.ok("run", "--rm", "-i", bench.plan, "--", "cat", stdin=b"") == ""
        assert bench.ok("run", "--rm", "-i", bench.plan, "--", "cat", stdin=b"x") == "x"


@soak
def test_init_reaps_and_ends_as_its_command(bench: Bench) -> None:
    script = "(sh -c 'sleep 0.1 & exit' &) ; sleep 0.5; ps -o stat,ppid,args | grep -c '^Z'; exit 12"
    done = bench.call("run", "--rm", "--init", bench.plan, "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (12, b"0\n")
    assert bench.call("run", "--rm", "--init", bench.plan, "--", "sh", "-c", "kill -9 $$").returncode == 137
    assert bench.call("run", "--rm", "--init", bench.plan, "--", "no-such").returncode == 127
    assert bench.call("run", "--rm", "--init", bench.plan, "--", "/testbed/code").returncode == 126


@soak
def test_an_interrupted_start_in_python_leaves_nothing(bench: Bench) -> None:
    async def one(after: float) -> None:
        task = asyncio.ensure_future(weenv.AsyncEnvironment.start(bench.plan, config=bench.loaded))
        await asyncio.sleep(after)
        task.cancel()
        task.cancel()
        try:
            await (await task).close()
        except asyncio.CancelledError:
            return

    async def go() -> None:
        begin = time.monotonic()
        async with await weenv.AsyncEnvironment.start(bench.plan, config=bench.loaded):
            whole = time.monotonic() - begin
        for n in range(6):
            await one(whole * n / 6)
        assert not bench.left()

    asyncio.run(go())


def test_cancelled_while_its_record_is_made_it_leaves_none(bench: Bench) -> None:
    async def go() -> None:
        async with await weenv.AsyncEnvironment.start(bench.plan, config=bench.loaded):
            pass  # remembered now: the record is the first that containerd hears of the next
        pid = bench.node.containerd.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            task = asyncio.ensure_future(weenv.AsyncEnvironment.start(bench.plan, config=bench.loaded))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.sleep(0.1)
        finally:
            os.kill(pid, signal.SIGCONT)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not bench.left()

    asyncio.run(go())


@soak
def test_a_cancelled_exec_and_close_finish_what_they_began(bench: Bench) -> None:
    async def go() -> None:
        env = await weenv.AsyncEnvironment.start(bench.plan, config=bench.loaded)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await env.exec(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
        assert "sleep" not in (await env.exec(["ps"])).text
        closing = asyncio.ensure_future(env.close())
        await asyncio.sleep(0)
        for _ in range(3):
            closing.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not bench.left()

    asyncio.run(go())


@soak
def test_a_block_that_raises_removes_it(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError), bench.start() as env:
        assert env.exec(["true"]).ok
        raise ZeroDivisionError
    assert not bench.left()


@soak
def test_an_interrupt_of_a_synchronous_caller_is_cleaned_up_after(bench: Bench) -> None:
    for after in (0.05, 0.2):
        timer = threading.Timer(after, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt), bench.start() as env:
            env.exec(["sleep", "1000"])
        timer.join()
        assert not bench.left()
