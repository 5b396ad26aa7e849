"""Environments run for real: from the command line and from Python, under both containerd lines."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import weenv
from weenv.environment.arguments import ArgumentError
from weenv.environment.exec import Command, execute
from weenv.environment.images import prepare
from weenv.environment.lifecycle import NoSuchEnvironment, StartError
from weenv.environment.node import Node as RunNode
from weenv.environment.rootfs import FileError
from weenv_testkit import tools
from weenv_testkit.procs import processes_of, signalled, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.running import NAMESPACE, Bench
from weenv_testkit.store import Store

# -- the command line -------------------------------------------------------------------------------------------------


def test_exec_where_the_command_has_ended_says_so(bench: Bench) -> None:
    name = bench.ok("run", "-d", "--entrypoint", "sh", bench.plan).strip()  # a shell without input ends at once
    rows = lambda: json.loads(bench.ok("ps", "--all", "--json"))  # noqa: E731
    wait_until("its end", lambda: next(row for row in rows() if row["name"] == name)["status"] == "stopped")
    done = bench.call("exec", name, "--", "true")
    assert done.returncode == 1
    said = done.stderr.decode()
    assert said.splitlines()[0] == f"weenv: {name} has exited (0): its command ended"
    assert "sleep infinity" in said
    bench.ok("rm", name)


def test_run_gives_streams_and_exit_codes(bench: Bench) -> None:
    assert bench.ok("run", "--rm", bench.plan) == "default 17\n"
    done = bench.call("run", "--rm", bench.plan, "--", "sh", "-c", "echo out; echo err >&2; pwd; exit 42")
    assert (done.returncode, done.stdout, done.stderr) == (42, b"out\n/testbed\n", b"err\n")
    assert bench.call("run", "--rm", bench.plan, "--", "sh", "-c", "kill -TERM $$; sleep 5").returncode in (143, 0)
    done = bench.call("run", "--rm", bench.plan, "--", "no-such-program")
    assert done.returncode == 127 and b"no-such-program" in done.stderr
    assert bench.call("run", "--rm", bench.plan, "--", "/testbed/code").returncode == 126
    done = bench.call("run", "--rm", "-u", "nobody-there", bench.plan)
    assert done.returncode == 1 and b"no user 'nobody-there'" in done.stderr


def test_run_takes_options(bench: Bench) -> None:
    shown = os.path.join(bench.node.home, "shown")
    os.mkdir(shown, 0o777)
    open(os.path.join(shown, "file"), "w").close()
    os.chmod(shown, 0o777)
    out = bench.ok(
        "run", "--rm", "-e", "A=1", "-e", "B=x=y", "-w", "/job/new", "-u", "ann", "-v", f"{shown}:/mnt/p:ro",
        "--cpus", "0.5", "--memory", "64m", "--hostname", "box", bench.plan, "--",
        "sh", "-c", "echo $A $B $HOME; pwd; id -u; id -g; id -G; hostname; ls /mnt/p/file; touch /mnt/p/x 2>&1 | head -1",
    ).splitlines()  # fmt: skip
    assert out[:7] == ["1 x=y /home/ann", "/job/new", "1000", "1001", "1001 50", "box", "/mnt/p/file"]
    assert "Read-only" in out[7]
    both = bench.ok("run", "--rm", "--network", "host", bench.plan, "--", "ls", "/sys/class/net")
    assert sorted(both.split()) == sorted(os.listdir("/sys/class/net"))
    assert bench.ok("run", "--rm", bench.plan, "--", "cat", "/sys/class/net/lo/operstate") in ("unknown\n", "up\n")
    assert bench.call("run", "--rm", "-v", "/no/such/path:/x", bench.plan).returncode == 1


def test_limits_hold(bench: Bench) -> None:
    done = bench.call(
        "run", "--rm", "--memory", "32m", bench.plan, "--", "sh", "-c", "x=$(head -c 100000000 /dev/zero | tr '\\0' x); echo $?"
    )
    assert done.returncode == 137 or b"0\n" not in done.stdout
    done = bench.call(
        "run", "--rm", "--pids", "5", bench.plan, "--", "sh", "-c", "for i in 1 2 3 4 5 6 7 8; do sleep 1 & done; wait"
    )
    assert b"fork" in done.stderr


def test_input_goes_through_and_ends(bench: Bench) -> None:
    data = os.urandom(3_000_000)
    done = bench.call("run", "--rm", "-i", bench.plan, "--", "cat", stdin=data)
    assert (done.returncode, done.stdout == data) == (0, True)
    name = bench.ok("run", "-d", bench.plan, "--", "sleep", "1000").strip()
    try:
        done = bench.call("exec", "-i", name, "--", "cat", stdin=data)
        assert (done.returncode, done.stdout == data) == (0, True)
        assert bench.call("exec", name, "cat", stdin=b"not given").stdout == b""
    finally:
        bench.ok("rm", "-f", name)


def test_detached_exec_ps_logs_stop_rm(bench: Bench) -> None:
    script = "trap 'echo bye; exit 3' TERM; echo started; echo oops >&2; while :; do sleep 0.05; done"
    assert bench.ok("run", "-d", "--name", "trial-1", bench.plan, "--", "sh", "-c", script) == "trial-1\n"
    assert bench.call("run", "-d", "--name", "trial-1", bench.plan).returncode == 1
    wait_until("the log", lambda: bench.call("logs", "trial-1").stdout == b"started\n")
    assert bench.call("logs", "trial-1").stderr == b"oops\n"
    assert bench.ok("exec", "-e", "X=5", "-w", "/", "trial", "--", "sh", "-c", "echo $X $TASK; pwd") == "5 17\n/\n"
    assert bench.call("exec", "trial-1", "--", "sh", "-c", "exit 9").returncode == 9
    assert bench.call("exec", "trial-1", "--", "missing").returncode == 127
    assert bench.ok("exec", "-u", "ann", "trial-1", "id", "-un") == "ann\n"
    (row,) = json.loads(bench.ok("ps", "--json"))
    assert (row["name"], row["plan"], row["status"], row["exit_status"]) == ("trial-1", "trial", "running", None)
    refused = bench.call("rm", "trial-1")
    assert (refused.returncode, refused.stdout) == (1, b"")
    assert refused.stderr == b"weenv: trial-1 runs: stop it first, or use --force\n"
    assert bench.ok("stop", "trial-1") == "trial-1\n"
    assert json.loads(bench.ok("ps", "--json")) == []
    (row,) = json.loads(bench.ok("ps", "-a", "--json"))
    assert (row["status"], row["exit_status"]) == ("stopped", 3)
    assert "trial-1" in bench.ok("ps", "-a")
    assert bench.ok("logs", "-f", "trial-1") == "started\nbye\n"
    assert bench.call("exec", "trial-1", "true").returncode == 1
    assert bench.ok("rm", "trial-1") == "trial-1\n"
    assert bench.call("logs", "trial-1").returncode == 1


def test_a_detached_one_may_only_wait(bench: Bench, store: Store) -> None:
    name = bench.ok("run", "-d", "--rm", "--idle", store.lazy("small")).strip()
    assert bench.ok("exec", name, "--", "echo", "there") == "there\n"
    assert bench.ok("stop", name).strip() == name
    assert name in bench.ok("rm", "--sweep")


def test_signals_reach_it_and_it_is_removed(bench: Bench) -> None:
    script = "trap 'echo caught; exit 7' TERM; echo up; while :; do sleep 0.05; done"
    child = subprocess.Popen(bench.argv("run", "--rm", bench.plan, "--", "sh", "-c", script), stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == 7 and child.stdout.read() == b"caught\n"
    child.stdout.close()
    child = subprocess.Popen(
        bench.argv("run", "--rm", bench.plan, "--", "sh", "-c", "trap '' INT; echo up; sleep 1000"), stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    signalled(child, signal.SIGINT)
    signalled(child, signal.SIGINT)
    assert child.wait(60) == 137
    child.stdout.close()


@pytest.mark.parametrize("after", [0.15, 0.3, 0.45, 0.6, 2.0])
def test_killed_caller_leaves_nothing_after_the_next_command(bench: Bench, after: float) -> None:
    bench.ok("run", "--rm", bench.plan, "--", "true")  # composed now: a lease of composing ends by its own time
    child = subprocess.Popen(bench.argv("run", "--rm", bench.plan, "--", "sleep", "1000"), stdout=subprocess.DEVNULL)
    time.sleep(after)
    child.kill()
    child.wait()
    bench.ok("run", "--rm", bench.plan, "--", "true")
    wait_until("the sweep", lambda: bench.ok("rm", "--sweep") is not None and not bench.left(), 60, 0.2)


PROGRAM = """
import sys, time, weenv
env = weenv.Environment.start(sys.argv[1], config=sys.argv[2])
print(env.id, flush=True)
time.sleep(1000)
"""


ANOTHER = """
import sys, weenv
with weenv.Environment.start(sys.argv[1], config=sys.argv[2]):
    pass
"""


@pytest.mark.parametrize("command", ["ps", "quick", "ordinary", "init", "program"])
def test_what_a_killed_program_leaves_is_gone_after_the_next_command(bench: Bench, command: str) -> None:
    bench.ok("run", "--rm", bench.plan, "--", "true")  # remembered now: the quick way takes it
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, bench.plan, bench.config], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        name = child.stdout.readline().decode().strip()
        assert name in bench.ok("ps", "-q").split(), "its owner lives"
        child.kill()
    if command == "ps":
        assert name not in bench.ok("ps", "-a", "-q").split()
    elif command == "program":
        subprocess.run([sys.executable, "-c", ANOTHER, bench.plan, bench.config], check=True, timeout=120)
    else:
        bench.ok("run", "--rm", *{"quick": (), "ordinary": ("-i",), "init": ("--init",)}[command], bench.plan, "--", "true")
    assert name not in bench.node.containerd.ctr("containers", "ls", "-q", namespace=NAMESPACE).split()


def test_a_plan_file_changes_nothing_but_itself(bench: Bench) -> None:
    out = bench.ok(
        "run", "--rm", bench.plan, "--", "sh", "-c", "echo x > /testbed/code; mkdir /new; ls /run /dev/shm; cat /testbed/code"
    )
    assert out.splitlines()[-1] == "x"
    assert bench.ok("run", "--rm", bench.plan, "--", "sh", "-c", "cat code; ls -d /new 2>/dev/null; true") == "code\n"


# -- Python -----------------------------------------------------------------------------------------------------------


def test_exec_results_are_exact(bench: Bench) -> None:
    with bench.start() as env:
        result = env.exec(["sh", "-c", "printf 'a\\000\\377b'; printf err >&2; exit 200"])
        assert (result.exit_code, result.stdout, result.stderr, result.timed_out, result.ok) == (
            200,
            b"a\0\xffb",
            b"err",
            False,
            False,
        )
        assert env.exec(["sh", "-c", "kill -9 $$"]).exit_code == 137
        assert env.exec(["sh", "-c", "kill -SEGV $$"]).exit_code == 139
        assert env.exec(["cat"], input=b"\0\1\2" * 100_000).stdout == b"\0\1\2" * 100_000
        assert env.exec(["head", "-c1"], input=bytes(5_000_000)).stdout == b"\0"
        assert env.exec(["sh", "-c", "echo $A $TASK; pwd"], env={"A": "b"}, cwd="/tmp").text == "b 17\n/tmp\n"
        assert env.exec(["id", "-u"], user="ann").text == "1000\n"
        missing = env.exec(["no-such"])
        assert missing.exit_code == 127 and b"no-such" in missing.stderr
        big = env.exec(["head", "-c", "30000000", "/dev/zero"], limit=1000)
        assert (big.exit_code, big.stdout, big.dropped) == (0, bytes(1000), 29_999_000)
        whole = env.exec(["head", "-c", "30000000", "/dev/zero"])
        assert len(whole.stdout) == 30_000_000


def test_a_daemon_left_behind_does_not_hold_up_the_result(bench: Bench) -> None:
    with bench.start() as env:
        begin = time.monotonic()
        result = env.exec(["sh", "-c", "sleep 1000 & echo done"])
        assert (result.exit_code, result.stdout) == (0, b"done\n")
        assert time.monotonic() - begin < 30
        assert "sleep 1000" in env.exec(["ps"]).text, "what a command that ended well left running goes on"


HIDING = {
    "children": "sleep 1000 & sleep 1000 & wait",
    "sessions": "setsid sleep 1000 & setsid sh -c 'setsid sleep 1000 & sleep 1000' & sleep 1000",
    "orphans": "sh -c '(setsid sleep 1000 &) ; exit' ; (sh -c 'setsid env -i sleep 1000 &' &); sleep 1000",
    "deaf": "trap '' TERM INT HUP; setsid sh -c \"trap '' TERM; while :; do sleep 1; done\" & while :; do sleep 1; done",
    # What bursts must not be the command itself: a shell that cannot fork ends, perhaps before its time is up.
    "bomb": "b() { sleep 1000 & b & b & sleep 1000; }; b & exec sleep 1000",
}


@pytest.mark.parametrize("how", HIDING)
def test_a_timeout_kills_the_whole_tree(bench: Bench, how: str) -> None:
    with bench.start() as env:
        begin = time.monotonic()
        result = env.exec(["sh", "-c", HIDING[how]], timeout=1.0)
        assert result.timed_out and result.exit_code == 137
        assert time.monotonic() - begin < 60
        left = [line for line in env.exec(["ps"]).text.splitlines() if "sleep" in line or "{sh}" in line]
        assert not left
        assert env.exec(["echo", "fine"]).text == "fine\n"


def test_python_takes_paths_and_says_what_is_missing(bench: Bench) -> None:
    with weenv.Environment.start(Path(bench.plan), config=bench.config) as env:
        with weenv.Environment.attach(env.id, config=Path(bench.config)) as again:
            assert again.exec(["echo", "seen"]).text == "seen\n"
        assert env.exec(["true"]).ok
    assert not bench.left()
    for plan in ("nowhere/plan.yaml", Path("nowhere/plan.yaml")):
        with pytest.raises(weenv.WeenvError, match=r"nowhere/plan\.yaml: cannot be read: No such file"):
            weenv.Environment.start(plan, config=weenv.load_config(bench.config))
    with pytest.raises(weenv.WeenvError, match="no such file: /nowhere"):
        weenv.Environment.start(bench.plan, config="/nowhere/config.toml")
    done = bench.call("run", "--rm", "nowhere/plan.yaml", "--", "true")
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[0] == "weenv: nowhere/plan.yaml: cannot be read: No such file or directory"


def test_python_says_which_argument_is_wrong(bench: Bench) -> None:
    missing = "/nowhere/at/all"
    with pytest.raises(weenv.WeenvError, match=f"^{missing} does not exist$"):
        bench.start(binds=[f"{missing}:/data"])
    with pytest.raises(weenv.WeenvError, match=r"^command must be a list of words"):
        bench.start(command="sleep 3")
    assert not bench.left()
    with bench.start(memory="512m") as env:
        for args in ([], "ls -l", [""]):
            with pytest.raises(weenv.WeenvError, match=r"^args must be a list"):
                env.exec(args)
        assert env.exec(["cat"], input="grüße").stdout == "grüße".encode()
        env.write_file("/tmp/text", "grüße")
        assert env.read_file("/tmp/text") == "grüße".encode()


FORKED = """
import os, sys, weenv

def child(work):
    if not (pid := os.fork()):
        try:
            work()
        except weenv.WeenvError as error:
            print(type(error).__name__, error.hint != "", flush=True)
        except BaseException as error:
            print(repr(error), flush=True)
        os._exit(0)
    print(os.waitpid(pid, 0)[1], flush=True)

def own():
    with weenv.Environment.start(sys.argv[1], config=sys.argv[2]) as env:
        print(env.exec(["echo", "own"]).text, end="", flush=True)

child(own)
with weenv.Environment.start(sys.argv[1], config=sys.argv[2]) as env:
    def used(): env.exec(["true"], timeout=5)
    child(used)
    child(env.close)
    child(own)
    print(env.exec(["echo", "still"]).text, end="", flush=True)
child(own)
try:
    env.exec(["true"])
except weenv.WeenvError as error:
    print(type(error).__name__)
"""


def test_forked_children_are_told_and_leave_their_parents_environments_alone(bench: Bench) -> None:
    """multiprocessing forks by default up to Python 3.13; gRPC hangs or crashes in such a child."""
    argv = [sys.executable, "-c", FORKED, bench.plan, bench.config]
    done = subprocess.run(argv, check=True, capture_output=True, timeout=120)
    told = ["ForkedError True", "0"]
    wanted = ["own", "0", *told, "0", *told, "still", *told, "NoSuchEnvironment"]
    assert done.stdout.decode().splitlines() == wanted, done.stderr
    assert not bench.left()


def test_an_environment_of_another_loop_is_left_to_it(bench: Bench) -> None:
    async def start() -> weenv.AsyncEnvironment:
        return await weenv.AsyncEnvironment.start(bench.plan, config=bench.loaded)

    loop = asyncio.new_event_loop()
    try:
        env = loop.run_until_complete(start())
        for use in (env.exec(["true"]), env.close()):
            with pytest.raises(weenv.WeenvError, match="belongs to another event loop"):
                asyncio.run(use)
        loop.run_until_complete(env.close())
        with pytest.raises(weenv.WeenvError, match="is closed"):
            loop.run_until_complete(env.read_file("/etc/passwd"))
    finally:
        loop.close()
    assert not bench.left()


def test_what_feeds_a_command_and_fails_ends_it(bench: Bench) -> None:
    async def feed(write: Callable[[bytes], Awaitable[None]]) -> None:
        await write(b"some")
        raise LookupError("no more of it")

    async def go() -> None:
        async with await weenv.AsyncEnvironment.start(bench.plan, config=bench.loaded) as env:
            command = Command(("sh", "-c", "cat; sleep 1000 & sleep 1000"), {})
            with pytest.raises(LookupError, match="no more"):
                await execute(env._node, env._container, env.pid, command, feed=feed)
            with pytest.raises(weenv.WeenvError, match="no command to run"):
                await execute(env._node, env._container, env.pid, Command((), {}))
            left = (await env.exec(["ps"])).text
            assert "sleep" not in left and "cat" not in left

    asyncio.run(go())


def test_a_cancelled_exec_kills_the_tree(bench: Bench) -> None:
    async def go() -> None:
        async with await weenv.AsyncEnvironment.start(bench.plan, config=bench.loaded) as env:
            task = asyncio.ensure_future(env.exec(["sh", "-c", "setsid sleep 1000 & sleep 1000"]))
            await asyncio.sleep(1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert "sleep" not in (await env.exec(["ps"])).text

    asyncio.run(go())


def test_a_hundred_at_once(bench: Bench) -> None:
    async def go() -> None:
        async with await weenv.AsyncEnvironment.start(bench.plan, config=bench.loaded, pids=4000) as env:
            # Each needs a dozen for a moment: the runtime that adds it has threads.
            work = [env.exec(["sh", "-c", f"cat; exit {n}"], input=b"%d" % n * 1000) for n in range(100)]
            for n, result in enumerate(await asyncio.gather(*work)):
                assert (result.exit_code, result.stdout) == (n, b"%d" % n * 1000)

    asyncio.run(go())


def test_files(bench: Bench) -> None:
    with bench.start() as env:
        env.write_file("/new/deep/file", b"\0data\n", mode=0o750)
        assert env.read_file("/new/deep/file") == b"\0data\n"
        assert env.exec(["stat", "-c", "%a %u %g", "/new/deep/file"]).text == "750 0 0\n"
        env.write_file("/testbed/code", b"changed")
        assert env.exec(["cat", "/testbed/code"]).stdout == b"changed"
        assert env.exec(["stat", "-c", "%a", "/testbed/code"]).text == "644\n"
        env.write_file("/job/owned", b"", owner=(1000, 1001))
        assert env.exec(["stat", "-c", "%u %g %s", "/job/owned"]).text == "1000 1001 0\n"
        with pytest.raises(FileError):
            env.read_file("/no/such")
        with pytest.raises(weenv.environment.api.lifecycle.WeenvError, match="more than 3 bytes"):
            env.read_file("/testbed/code", limit=3)


@pytest.mark.parametrize("line", ["2.1"], indirect=True)
def test_archives(bench: Bench) -> None:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, mode in ("tools/run", 0o755), ("tools/deep/data", 0o600):
            member = tarfile.TarInfo(name)
            member.size, member.mode, member.uid, member.gid = 3, mode, 1000, 1001
            archive.addfile(member, io.BytesIO(b"abc"))
    with bench.start() as env:
        env.put_archive("/opt", made.getvalue())
        env.put_archive("/mine", io.BytesIO(made.getvalue()), owner=(7, 8))
        told = env.exec(["stat", "-c", "%a %u %g %s", "/opt/tools/run", "/opt/tools/deep/data", "/mine/tools/run"]).text
        assert told.splitlines() == ["755 1000 1001 3", "600 1000 1001 3", "755 7 8 3"]
        env.exec(["ln", "-s", "/proc/1", "/opt/tools/link"])
        with tarfile.open(fileobj=io.BytesIO(env.get_archive("/opt/tools"))) as back:
            assert {item.name: item.linkname for item in back if item.issym()} == {"tools/link": "/proc/1"}
            assert {item.name: item.size for item in back if item.isreg()} == {"tools/deep/data": 3, "tools/run": 3}
        for wrong in "text", 7, io.StringIO("x"):
            with pytest.raises(ArgumentError, match="data must be the bytes of a tar archive"):
                env.put_archive("/opt", wrong)  # type: ignore[arg-type]
        with pytest.raises(FileError):
            env.put_archive("/sys/kernel", made.getvalue())
        with pytest.raises(weenv.WeenvError, match="more than 100 bytes"):
            env.get_archive("/opt", limit=100)


@pytest.mark.parametrize("line", ["1.7"], indirect=True)
def test_what_the_kernel_does_not_execute_says_so(bench: Bench) -> None:
    with bench.start() as env:
        env.write_file("/text", b"no program", mode=0o755)
        cases = [
            (["/tmp"], "it is no file"),
            (["/text"], "no program for this machine"),
            (["echo", "x" * 200_000], "has 200000 bytes"),
            (["echo", *["y" * 1000] * 20_000], "arguments and variables have "),
        ]
        for command, words in cases:
            result = env.exec(command)
            assert (result.exit_code, result.stdout) == (126, b""), (command[0], result)
            text = result.stderr.decode()
            assert text.startswith("weenv: the command cannot be executed: ") and words in text and text.count("\n") == 1
        assert len(env.exec(["echo", *["z" * 1000] * 1500]).stdout) == 1500 * 1001


def test_nothing_leads_out_of_the_root(bench: Bench) -> None:
    outside = "/tmp/escape"
    assert not os.path.exists(outside)
    with bench.start() as env:
        with pytest.raises(FileError):
            env.write_file("/testbed/out/pwned", b"inside")
        env.exec(["mkdir", "/tmp/escape"])
        env.write_file("/testbed/out/pwned", b"inside")  # -> /tmp/escape/pwned of the environment
        assert not os.path.exists(outside)
        assert env.exec(["cat", "/tmp/escape/pwned"]).stdout == b"inside"
        env.write_file("/../../../../tmp/dots", b"inside")
        assert not os.path.exists("/tmp/dots") and env.exec(["cat", "/tmp/dots"]).stdout == b"inside"
        assert env.read_file("/testbed/up/passwd").startswith(b"root:x:0:0::/root"), "the environment's, not the machine's"
        env.exec(
            ["sh", "-c", "ln -s /proc/1/root/tmp/m /tmp/magic; mkfifo /tmp/pipe; ln -s /proc/sys/kernel/hostname /tmp/name"]
        )
        for path in (
            "/tmp/magic",
            "/proc/self/root/etc/passwd",
            "/tmp/pipe",
            "/tmp/name",
            "/proc/sysrq-trigger",
            "/dev/null",
            "/tmp",
        ):
            with pytest.raises(FileError):
                env.write_file(path, b"x")
        assert env.exec(["sh", "-c", "ls /tmp/m 2>&1"]).exit_code == 1
        with pytest.raises(FileError):
            env.read_file("/tmp/pipe")
        # Regular files of the machine's kernel; reading the first one waits until it has something to say, and takes it away.
        env.exec(["sh", "-c", "ln -s /proc/kmsg /tmp/log; ln -s /proc/kcore /tmp/core"])
        for path in ("/tmp/log", "/tmp/core"):
            with pytest.raises(FileError):
                env.read_file(path)


def test_an_image_of_containerds_is_not_taken_where_the_policy_wants_more(bench: Bench, store: Store, tmp_path: Path) -> None:
    def weenv_(*words: str, policy: str = "") -> subprocess.CompletedProcess[str]:
        config = tmp_path / "config.toml"
        with open(bench.config) as file:
            config.write_text(f"{file.read()}[policy]\n{policy}\n" if policy else file.read())
        count = 2 if words[0] == "plan" else 1
        argv = [*tools.weenv(), *words[:count], "--config", str(config), *words[count:]]
        return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)

    ref = store.lazy("small")
    plan = tmp_path / "lone.yaml"
    plan.write_text(f"apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\ngroups: [{json.dumps(ref)}]\n")
    composed = json.loads(weenv_("plan", "compose", "--json", str(plan)).stdout)["name"]
    ctr = bench.node.containerd.ctr
    ctr("images", "tag", composed, ref, namespace=NAMESPACE)  # as anybody's pull would leave it
    run = ("run", "--rm", ref, "--", "echo", "ran")
    try:
        assert weenv_(*run).stdout == "ran\n"
        allow = f'rules = [{{match = "{ref.partition("/")[0]}/**", action = "allow"}}]'
        assert weenv_(*run, policy=f'default = "deny"\n{allow}').stdout == "ran\n"
        done = weenv_(*run, policy='default = "deny"')
        assert (done.returncode, done.stdout) == (1, "")
        assert "the node's policy allows nothing from there" in done.stderr
        assert weenv_("run", "--rm", composed, "--", "echo", "ran", policy='default = "deny"').stdout == "ran\n", "asked before"
    finally:
        ctr("images", "rm", ref, composed, namespace=NAMESPACE)


def test_handles_outlive_their_maker(bench: Bench) -> None:
    kept = bench.start(keep=True, name="kept")
    kept.close()
    with weenv.Environment.attach("kept", config=bench.loaded) as again:
        assert again.exec(["echo", "still"]).text == "still\n"
    bench.ok("rm", "-f", "kept")
    with pytest.raises(NoSuchEnvironment):
        weenv.Environment.attach("kept", config=bench.loaded)


def test_a_failed_start_leaves_nothing(bench: Bench) -> None:
    with pytest.raises(StartError) as caught:
        bench.start(command=["no-such-program"])
    assert caught.value.exit_code == 127
    for _ in range(2):  # the second would be the quick way
        odd = bench.call("run", "--rm", "--name", "Bad Name", bench.plan, "--", "true")
        assert odd.returncode == 1
        assert odd.stderr.startswith(b"weenv: no name for an environment: 'Bad Name'\n")
    assert bench.left() == {}


def test_restart_of_containerd_during_a_run(bench: Bench) -> None:
    child = subprocess.Popen(
        bench.argv("run", "--rm", bench.plan, "--", "sh", "-c", "echo up; sleep 4; echo end; exit 5"), stdout=subprocess.PIPE
    )
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    with bench.start() as env:
        results: list[weenv.ExecResult] = []
        thread = threading.Thread(target=lambda: results.append(env.exec(["sh", "-c", "sleep 3; echo over; exit 6"])))
        thread.start()
        time.sleep(0.7)
        bench.node.containerd.restart()
        thread.join(60)
        assert [(r.exit_code, r.stdout) for r in results] == [(6, b"over\n")]
        assert child.wait(60) == 5 and child.stdout.read() == b"end\n"
        child.stdout.close()
        assert env.exec(["echo", "on"]).text == "on\n"


def test_fifty_started_and_removed_leave_nothing(bench: Bench) -> None:
    async def one(gate: asyncio.Semaphore) -> None:
        async with gate, await weenv.AsyncEnvironment.start(bench.plan, config=bench.loaded) as env:
            assert (await env.exec(["cat", "code"])).stdout == b"code\n"

    async def go() -> None:
        gate = asyncio.Semaphore(8)
        await asyncio.gather(*(one(gate) for _ in range(50)))

    asyncio.run(go())
    assert bench.left() == {}
    home = bench.node.containerd.home
    wait_until("the shims to end", lambda: not [c for c in processes_of(home).values() if "containerd-shim" in c], 60)


def test_a_plan_composed_is_known_to_the_next(bench: Bench, registry: Registry) -> None:
    bench.ok("run", "--rm", bench.plan, "--", "true")
    mark = registry.mark()

    async def go() -> str:
        async with RunNode(bench.loaded) as node:
            return (await prepare(bench.plan, node)).name

    assert asyncio.run(go()).startswith("weenv.local/plan/trial:")
    assert registry.requests(mark) == []
