"""The program made by hand: run by this machine's kernel, and read by binutils where they are."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from weenv.core.errors import UnsupportedError
from weenv.environment.waiter import RELEASE, held, install, program

known = pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="no program for this machine")


@pytest.fixture
def waiter(tmp_path: Path) -> str:
    path = install(str(tmp_path))
    assert install(str(tmp_path)) == path
    return path


def run(waiter: str, *args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [waiter, *args], capture_output=True, env={"X": "y", "PATH": os.environ["PATH"]}, timeout=60, check=False
    )


@known
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_alone_it_waits_until_it_is_told(waiter: str, number: int) -> None:
    child = subprocess.Popen([waiter])
    time.sleep(0.1)
    assert child.poll() is None
    child.send_signal(number)
    assert child.wait(60) == 0


@known
def test_it_ends_as_its_child_does(waiter: str) -> None:
    done = run(waiter, "/bin/sh", "name", "-c", "echo $0 $1 $X; exit 7", "zero", "one")
    assert (done.returncode, done.stdout) == (7, b"zero one y\n")
    assert run(waiter, "/bin/sh", "sh", "-c", "kill -9 $$").returncode == 137
    assert run(waiter, "/bin/sh", "sh", "-c", "exit 255").returncode == 255
    assert run(waiter, "/no/such", "x").returncode == 127
    assert run(waiter, "/etc/passwd", "x").returncode == 126


@known
@pytest.mark.parametrize(
    ("name", "status", "words"),
    [("", 126, b"permission denied"), ("sub", 126, b"permission denied"), ("none", 127, b"no such file"),
     ("sub/x/y", 127, b"no such file"), ("text", 126, b"no program for this machine"), ("dangling", 127, b"interpreter")],
)  # fmt: skip
def test_it_says_why_a_command_cannot_be_executed(waiter: str, tmp_path: Path, name: str, status: int, words: bytes) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").touch()
    (tmp_path / "text").write_text("no program")
    (tmp_path / "dangling").write_text("#!/no/such\n")
    for file in "text", "dangling":
        (tmp_path / file).chmod(0o755)
    done = run(waiter, str(tmp_path / name), "x")
    assert done.returncode == status
    assert done.stderr.startswith(b"weenv: the command cannot be executed: ") and words in done.stderr
    assert done.stderr.count(b"\n") == 1 and done.stderr.endswith(b"\n")


def caught(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as file:
        mask = next(line.split()[1] for line in file if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (RELEASE - 1) & 1)


def hold(waiter: str, candidates: list[str], args: list[str]) -> subprocess.Popen[bytes]:
    child = subprocess.Popen([waiter, *held(candidates, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"X": "y"})
    end = time.monotonic() + 60
    while not caught(child.pid):
        assert time.monotonic() < end and child.poll() is None
        time.sleep(0.001)
    return child


@known
def test_a_command_held_back_runs_when_it_is_told(waiter: str, tmp_path: Path) -> None:
    (tmp_path / "sh").write_text("no program at all, and nobody may execute it")
    script = 'echo $0 "$1" $X $$; grep -E "Sig(Blk|Ign|Cgt)" /proc/self/status; exit 7'
    candidates = ["/no/such/sh", "/etc/passwd/sh", str(tmp_path / "sh"), "/bin/sh"]
    # As the first process of a container it must neither ignore its children's ends, nor hold any signal back.
    child = hold(waiter, candidates, ["sh", "-c", script, "zero", ""])
    child.send_signal(RELEASE)
    out, err = child.communicate(timeout=60)
    lines = out.decode().splitlines()
    assert (child.returncode, lines[0], err) == (7, f"zero  y {child.pid}", b"")
    masks = {line.split(":")[0]: int(line.split()[1], 16) for line in lines[1:]}
    assert not masks["SigBlk"] >> (RELEASE - 1) & 1 and not masks["SigIgn"] >> (signal.SIGCHLD - 1) & 1


@known
def test_a_command_held_back_may_end_before_and_may_not_be_there(waiter: str, tmp_path: Path) -> None:
    child = hold(waiter, ["/bin/sh"], ["sh", "-c", "echo ran"])
    child.send_signal(signal.SIGTERM)
    assert child.communicate(timeout=60) == (b"", b"") and child.returncode == 0
    for candidates, status in (["/no/such", "/nor/this"], 127), (["/etc/passwd", "/no/such"], 126), ([], 127):
        child = hold(waiter, candidates, ["x"])
        child.send_signal(RELEASE)
        assert child.communicate(timeout=60)[1].startswith(b"weenv: the command cannot be executed: ")
        assert child.returncode == status


@known
def test_a_parent_that_ignores_children_does_not_hide_the_command_from_it(waiter: str) -> None:
    shell = ["/bin/sh", "-c", 'trap "" CHLD; exec "$@"', "sh", waiter, "/bin/sh", "sh", "-c", "exit 7"]
    assert subprocess.run(shell, timeout=60, check=False).returncode == 7


@known
@pytest.mark.skipif(os.geteuid() != 0, reason="a limit of processes for somebody else")
def test_it_ends_where_it_cannot_fork() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        path = install(directory)
        nobody_else = 1 << 30 | os.getpid()  # who has another process is not let into a program by this limit

        def nobody() -> None:
            resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
            os.setresgid(nobody_else, nobody_else, nobody_else)
            os.setresuid(nobody_else, nobody_else, nobody_else)

        assert subprocess.run([path, "/bin/true", "true"], preexec_fn=nobody, timeout=60, check=False).returncode == 126


@known
def test_orphans_of_its_child_are_its_own(waiter: str, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    script = f"(setsid env -i sh -c 'echo $$ > {note}; exec sleep 20' &); sleep 20"
    child = subprocess.Popen([waiter, "/bin/sh", "sh", "-c", script])
    try:
        end = time.monotonic() + 60
        while not (note.exists() and note.read_text().strip()) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.05)
        orphan = int(note.read_text())
        with open(f"/proc/{orphan}/stat") as file:
            assert int(file.read().rpartition(")")[2].split()[1]) == child.pid
        os.kill(orphan, signal.SIGKILL)
    finally:
        with open(f"/proc/{child.pid}/task/{child.pid}/children") as file:
            for pid in file.read().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        assert child.wait(60) == 137


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs binutils")
@pytest.mark.parametrize(("machine", "name"), [("x86_64", "X86-64"), ("aarch64", "AArch64")])
def test_both_programs_are_elf(tmp_path: Path, machine: str, name: str) -> None:
    path = tmp_path / machine
    path.write_bytes(program(machine))
    text = subprocess.run(["readelf", "-hlW", str(path)], capture_output=True, text=True, check=True)
    assert name in text.stdout and "R E" in text.stdout and not text.stderr


def test_other_machines_are_told() -> None:
    with pytest.raises(UnsupportedError, match="riscv64"):
        program("riscv64")
