"""docs/example.md and docs/python.md as they are written: all blocks, in the order of the pages, in one root shell."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from weenv.core import procfs
from weenv_testkit import tools
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import clean_environment, end_processes, pids
from weenv_testkit.store import Store

DOCS = Path(__file__).parents[1] / "docs"
PID = os.getpid()
ADDRESS = f"127.{100 + (PID >> 16)}.{PID >> 8 & 255}.{PID & 255}"
"""This session's own, so that the port that the page names is free."""


@pytest.fixture(scope="module", params=["2.1"])
def line(request: pytest.FixtureRequest) -> str:
    """The pages say nothing of containerd's lines."""
    return str(request.param)


def blocks(page: str, language: str) -> list[str]:
    """What the page has between fences of that language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)


def instead(text: str, replaced: dict[str, str]) -> str:
    """``text`` with each key replaced, which has to be there: what a page names and a test has elsewhere."""
    for name, value in replaced.items():
        assert name in text, name
        text = text.replace(name, value)
    return text


def script(debian: str) -> str:
    """The pages as a shell's input; before each block a line says its number."""
    sh = blocks("example.md", "sh")
    alternative = "weenv convert registry.example/python:3.11 127.0.0.1:5055/base/debian:12"
    assert f"`{alternative}`" in (DOCS / "example.md").read_text()
    sh[0] = instead(sh[0], {"apt-get install --yes docker-registry debootstrap\n": ""})
    sh[1] = instead(sh[1], {
        "debootstrap --variant=minbase --include=python3 bookworm base\n": "",
        "weenv group build 127.0.0.1:5055/base/debian:12 --from base --kind base --version 12 --cmd bash\n": f"{alternative}\n",
    })  # fmt: skip
    sh[1] = instead(sh[1], {"registry.example/python:3.11": debian})
    python = instead("\n".join(blocks("python.md", "python")), {'"rollouts"': f'"rollouts-{PID}"'})
    sh.insert(-1, f"cat > page.py <<'PAGE'\n{python}PAGE\n{sys.executable} page.py\nweenv rm calc-kept\n")
    numbered = (f"echo '== {number}'\n{block}" for number, block in enumerate(sh))
    return "set -e\n" + "".join(numbered).replace("127.0.0.1:5055", f"{ADDRESS}:5055")


def of_session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for pid in pids():
        with contextlib.suppress(OSError):
            if procfs.stat(pid).session == leader:
                found.append(pid)
    return found


@pytest.mark.timeout(900)
def test_they_work_as_they_are_written(module_node: Node, store: Store, home: str) -> None:
    debian = store.lazy("debian")
    os.makedirs(f"{home}/etc/weenv")
    os.makedirs(f"{home}/bin")
    shutil.copy(module_node.run_config(f"pages-{PID}"), f"{home}/etc/weenv/config.toml")
    with open(f"{home}/bin/weenv", "w") as file:
        file.write(f'#!/bin/sh\nexec {" ".join(tools.weenv())} "$@"\n')
    os.chmod(f"{home}/bin/weenv", 0o755)
    os.symlink(tools.docker_registry(), f"{home}/bin/docker-registry")
    at = 'mount -t overlay overlay -o "lowerdir=$HOME/etc:/etc" /etc && exec bash -c "$0"'  # /etc/weenv, seen by it alone
    environment = {**clean_environment(), "HOME": home, "PATH": f"{home}/bin:{os.environ['PATH']}"}
    shell = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "slave", "sh", "-c", at, script(debian)], env=environment, cwd=home, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = shell.communicate(timeout=600)  # on a machine that is busy with other things, too
    finally:
        end_processes(of_session(shell.pid))  # the registry, where the page was not read to its end
    assert shell.returncode == 0, out
    said = dict(part.split("\n", 1) for part in out.split("== ")[1:])
    _, _, repository, plan, run, session, graded, python, _ = said.values()
    assert "repository" in repository and "/testbed" in repository
    assert "task.yaml: 2 groups, 1 mutation" in plan
    assert "FAILED (errors=1)" in run and "the test fails, as it should: 1" in run
    assert "3.0\n" in session and re.search(r"calc-1 .*running", session)
    assert "OK\n" in graded and graded.endswith("solved\n")
    assert "FAILED (errors=1)" in python and "0 0" in python and "'3 3'" in python and "no such file" in python.lower()
    assert not os.path.exists(f"{home}/weenv-example")
    assert not module_node.complaints()
    for namespace in (f"pages-{PID}", f"rollouts-{PID}"):
        assert module_node.containerd.ctr("containers", "ls", "-q", namespace=namespace) == ""
        module_node.containerd.purge(namespace, SNAPSHOTTER)
