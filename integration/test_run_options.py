"""What a plan and the options of ``weenv run`` ask for, against what the kernel says; logs that are followed; odd files."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import weenv
from weenv.core.errors import WeenvError
from weenv_testkit import tools
from weenv_testkit.running import Bench

WAYS = {"quick": (), "input": ("-i",), "init": ("--init",)}


def groups_of(pid: int) -> dict[str, str]:
    """The control group directories of a process, by controller; all the same where there is one hierarchy."""
    found = {}
    with open(f"/proc/{pid}/cgroup") as file:
        for line in file.read().splitlines():
            _, names, path = line.split(":", 2)
            for name in names.split(","):
                found[name] = f"/sys/fs/cgroup/{names}{path}" if names else f"/sys/fs/cgroup{path}"
    return found


def text(*parts: str) -> str:
    return Path(*parts).read_text().strip()


def mutated(bench: Bench, tmp_path: Path, *commands: object) -> str:
    """The bench's plan with commands of its own."""
    plan = tmp_path / "plan.yaml"
    plan.write_text(Path(bench.plan).read_text() + "mutations: " + json.dumps([{"run": item} for item in commands]) + "\n")
    return str(plan)


def test_limits_are_the_control_groups(bench: Bench) -> None:
    name = bench.ok("run", "-d", "--idle", "--cpus", "0.75", "--memory", "96m", "--pids", "77", bench.plan).strip()
    (row,) = json.loads(bench.ok("ps", "--json"))
    groups = groups_of(row["pid"])
    if "memory" in groups:
        quota, period = (int(text(groups["cpu"], f"cpu.cfs_{what}_us")) for what in ("quota", "period"))
        memory = text(groups["memory"], "memory.limit_in_bytes")
        pids = text(groups["pids"], "pids.max")
    else:
        quota, period = map(int, text(groups[""], "cpu.max").split())
        memory, pids = text(groups[""], "memory.max"), text(groups[""], "pids.max")
    assert (quota / period, int(memory), int(pids)) == (0.75, 96 << 20, 77)
    assert f"/{bench.cgroup}/{name}" in groups.get("pids", groups.get("", "")), "where the configuration says"
    bench.ok("rm", "-f", name)


@pytest.mark.parametrize("way", WAYS)
def test_mounts_users_and_networks_are_the_kernels(bench: Bench, way: str, tmp_path: Path) -> None:
    shown = tmp_path / "with space"
    shown.mkdir()
    (shown / "file").write_text("theirs\n")
    out = bench.ok(
        "run", "--rm", *WAYS[way], "-v", f"{shown}:/mnt/rw", "-v", f"{shown / 'file'}:/mnt/one:ro", "-u", "1234:4321",
        "-w", "/mnt",
        "-e", "EMPTY=", "-e", "LINES=a\nb", "-e", "FROM_HERE", "--network", "host", bench.plan, "--",
        "sh", "-c", 'cat /proc/mounts; echo =; id; pwd; printf "%s|" "$EMPTY" "$LINES" "${FROM_HERE-unset}"; cat one; '
        "echo =; readlink /proc/self/ns/net",
    )  # fmt: skip
    mounts, said, network = (part.strip() for part in out.split("=\n"))
    at = {line.split()[1]: line.split()[3].split(",")[0] for line in mounts.splitlines()}
    assert (at["/mnt/rw"], at["/mnt/one"], at["/"]) == ("rw", "ro", "rw")
    assert said == "uid=1234 gid=4321\n/mnt\n|a\nb|unset|theirs"
    assert network == os.readlink("/proc/self/ns/net")
    alone = bench.ok("run", "--rm", *WAYS[way], bench.plan, "--", "sh", "-c", "readlink /proc/self/ns/net; cat /proc/net/dev")
    assert alone.splitlines()[0] != network and [x.split(":")[0].strip() for x in alone.splitlines()[3:]] == ["lo"]


def test_a_plans_own_commands_come_first(bench: Bench, tmp_path: Path) -> None:
    noisy = "echo first > /made; echo noise; echo more noise >&2"
    plan = mutated(bench, tmp_path, noisy, ["sh", "-c", "cat /made /made > /twice"])
    done = bench.call("run", "--rm", plan, "--", "sh", "-c", "cat /twice; echo err >&2; exit 7")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"first\nfirst\n", b"err\n"), "only the command's own output"
    assert bench.ok("run", "--rm", "-i", plan, "--", "cat", "-", "/made", stdin=b"in\n") == "in\nfirst\n"
    name = bench.ok("run", "-d", "--idle", plan).strip()
    assert bench.ok("exec", name, "--", "cat", "/made") == "first\n"
    bench.ok("rm", "-f", name)


def ended(bench: Bench, name: str) -> dict[str, object] | None:
    """The row of an environment when it does not run any more; None where it is gone."""
    end = time.monotonic() + 60
    while True:
        assert time.monotonic() < end
        rows = [row for row in json.loads(bench.ok("ps", "--all", "--json")) if row["name"] == name]
        if not rows or rows[0]["status"] == "stopped":
            return rows[0] if rows else None


@pytest.mark.parametrize("line", ["2.1"], indirect=True)
def test_a_detached_command_comes_after_the_plans_own(bench: Bench, tmp_path: Path) -> None:
    program = "#!/bin/sh\necho out $$ $(cat /made) \"$1\"; echo err >&2; (exit 3); exit 7\n"
    making = f"printf %s '{program}' > /bin/late; chmod +x /bin/late; echo x > /made"
    plan = mutated(bench, tmp_path, making, ["sh", "-c", "kill -0 1"])
    name = bench.ok("run", "-d", plan, "--", "late", "a b").strip()
    done = bench.call("logs", "-f", name)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out 1 x a b\n", b"err\n"), "as the first process"
    row = ended(bench, name)
    assert row is not None and (row["exit_status"], row["command"]) == (7, ["late", "a b"])
    bench.ok("rm", name)
    assert ended(bench, bench.ok("run", "-d", "--rm", plan, "--", "late").strip()) is None
    assert not bench.left()
    script = "trap 'echo told; exit 5' TERM; : > /ready; while :; do sleep 0.1; done"
    stays = bench.ok("run", "-d", plan, "--", "sh", "-c", script)
    bench.ok("exec", stays.strip(), "--", "sh", "-c", "until [ -e /ready ]; do sleep 0.05; done")
    bench.ok("stop", stays.strip())
    row = ended(bench, stays.strip())
    assert row is not None and row["exit_status"] == 5 and bench.ok("logs", stays.strip()) == "told\n"
    bench.ok("rm", stays.strip())
    missing = bench.call("run", "-d", plan, "--", "nowhere")
    assert missing.returncode == 127
    assert missing.stderr.startswith(b"weenv: the command cannot be executed: 'nowhere' is not in /")
    assert not bench.left()


@pytest.mark.parametrize("line", ["1.7"], indirect=True)
def test_a_command_from_python_comes_after_the_plans_own(bench: Bench, tmp_path: Path) -> None:
    plan = mutated(bench, tmp_path, "echo 9 > /made")
    with weenv.Environment.start(plan, config=bench.loaded, command=["sh", "-c", "exit $(cat /made)"]) as env:
        assert env.wait() == 9
    assert not bench.left()


@pytest.mark.parametrize("flags", [("--rm",), (), ("-d",)])
def test_a_plans_command_that_fails_is_one_line(bench: Bench, tmp_path: Path, flags: tuple[str, ...]) -> None:
    plan = mutated(bench, tmp_path, "true", "echo out; echo 'no such thing' >&2; exit 3", "touch /never")
    done = bench.call("run", *flags, plan, "--", "echo", "never")
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("weenv: the plan's command ") and line.endswith(" ended with 3: no such thing")
    silent = bench.call("run", *flags, mutated(bench, tmp_path, "exit 3"), "--", "echo", "never")
    assert silent.returncode == 1 and silent.stderr.decode().endswith(" ended with 3 and wrote nothing\n")
    assert not bench.left()
    missing = bench.call("run", *flags, mutated(bench, tmp_path, ["no-such-program"]), "--", "echo", "never")
    assert missing.returncode == 1 and b"no-such-program" in missing.stderr and b"127" in missing.stderr
    assert len(missing.stderr.splitlines()) == 1 and not bench.left()


@pytest.mark.parametrize("line", ["2.1"], indirect=True)
@pytest.mark.parametrize("way", ["quick", "init", pytest.param("input", marks=pytest.mark.soak)])
def test_a_command_may_have_a_time(bench: Bench, way: str) -> None:
    script = "trap '' TERM; echo begun; (sleep 1000 & sleep 1000)"
    done = bench.call("run", "--rm", *WAYS[way], "--timeout", "1.5", bench.plan, "--", "sh", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (124, b"begun\n", b"")
    assert bench.call("run", "--rm", *WAYS[way], "--timeout", "600", bench.plan, "--", "sh", "-c", "exit 3").returncode == 3
    assert not bench.left()


@pytest.mark.parametrize("line", ["2.1"], indirect=True)
@pytest.mark.parametrize("way", ["quick", "init", pytest.param("input", marks=pytest.mark.soak)])
def test_what_cannot_be_run_is_one_clear_line(bench: Bench, way: str) -> None:
    cases = ("nosuch", 127, b"'nosuch' is not in /"), ("/tmp", 126, b""), ("/etc/nosuch", 127, b"no such file")
    for command, code, words in cases:
        done = bench.call("run", "--rm", *WAYS[way], bench.plan, "--", command)
        assert done.returncode == code, done
        (line,) = done.stderr.splitlines()
        assert line.startswith(b"weenv: the command cannot be executed: ") and words in line
    for wrong in ("--cpus=1e6", "--memory=1m", "--pids=-1"):
        done = bench.call("run", "--rm", *WAYS[way], wrong, bench.plan, "--", "true")
        assert done.returncode == 1 and done.stderr.startswith(f"weenv: {wrong[2:].partition('=')[0]}: ".encode()), done
    assert not bench.left()


@pytest.mark.parametrize("line", ["2.1"], indirect=True)
def test_a_program_whose_bytes_cannot_be_read_is_told_from_one_that_is_wrong(bench: Bench, tmp_path: Path) -> None:
    """A file system whose end is missing: the kernel finds the file, and answers EIO to who reads or executes it."""
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "program").write_bytes(os.urandom(100_000))
    (tmp_path / "tree" / "program").chmod(0o755)
    image, where = str(tmp_path / "image"), str(tmp_path / "mounted")
    subprocess.run([tools.erofs("mkfs.erofs"), image, str(tmp_path / "tree")], check=True, capture_output=True)
    os.truncate(image, 4096)
    os.mkdir(where)
    subprocess.run(["mount", "-t", "erofs", "-o", "loop,ro", image, where], check=True)
    try:
        for way in WAYS.values():
            done = bench.call("run", "--rm", *way, "-v", f"{where}/program:/mnt/program", bench.plan, "--", "/mnt/program")
            assert done.returncode in (1, 126, 255) and b"input/output error" in done.stderr.lower(), done
            assert b"weenv status" in done.stderr and done.stderr.splitlines()[-1].startswith((b"weenv: ", b"  ")), done
    finally:
        subprocess.run(["umount", where], check=True)
    assert not bench.left()


@pytest.mark.parametrize("line", ["2.1"], indirect=True)
@pytest.mark.parametrize("way", ["quick", pytest.param("input", marks=pytest.mark.soak)])
def test_who_waits_for_a_command_that_heeds_no_signal_is_told(bench: Bench, way: str) -> None:
    command = ("run", "--rm", *WAYS[way], bench.plan, "--", "sh", "-c", "trap '' INT; echo up; while :; do sleep 1; done")
    with bench.popen(*command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL) as child:
        assert child.stdout is not None and child.stderr is not None and child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGINT)
        assert child.stderr.readline().startswith(b"weenv: SIGINT was handed on, and it has not ended; it is killed in 9 s")
        child.send_signal(signal.SIGINT)
        assert child.wait(60) == 137


def test_logs_are_followed_to_the_end(bench: Bench) -> None:
    script = "trap 'echo last; echo oops >&2; exit 0' TERM; echo first; while :; do sleep 0.05; done"
    name = bench.ok("run", "-d", bench.plan, "--", "sh", "-c", script).strip()
    child = bench.popen("logs", "-f", name, stderr=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"first\n"
    assert child.poll() is None
    bench.ok("stop", name)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (0, b"last\n", b"oops\n")
    bench.ok("rm", name)


def test_following_ends_by_a_signal_and_leaves_the_environment(bench: Bench) -> None:
    name = bench.ok("run", "-d", bench.plan, "--", "sh", "-c", "echo up; exec sleep 1000").strip()
    child = bench.popen("logs", "-f", name)
    assert child.stdout is not None and child.stdout.readline() == b"up\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) in (143, -signal.SIGTERM)
    child.stdout.close()
    assert bench.ok("exec", name, "--", "echo", "there") == "there\n"
    bench.ok("rm", "-f", name)


def test_odd_names_and_large_files(bench: Bench) -> None:
    data = os.urandom(1 << 20) * 64
    with bench.start() as env:
        for name in (" leading and trailing ", "new\nline", "ünïcode", "-rf", "*", "$(id)", "b\udcff\udcfe", "n" * 255):
            path = f"/tmp/{name}/{name}"
            env.write_file(path, name.encode("utf-8", "surrogateescape"))
            assert env.read_file(path) == name.encode("utf-8", "surrogateescape")
            if "\udcff" not in name:
                assert env.exec(["cat", path]).stdout == name.encode()
            else:
                with pytest.raises(WeenvError, match="not UTF-8"):  # JSON, as runtimes read, cannot say it
                    env.exec(["cat", path])
        env.write_file("/tmp/large", data)
        assert env.exec(["sha256sum", "/tmp/large"]).text.split()[0] == hashlib.sha256(data).hexdigest()
        assert env.read_file("/tmp/large") == data
        env.write_file("/tmp/large", b"short")
        assert env.read_file("/tmp/large") == b"short"

