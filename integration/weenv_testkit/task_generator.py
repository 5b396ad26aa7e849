"""Run by the private environment of :mod:`weenv_testkit.tasks`: bugs by swesmith, kept where a test fails for them.

    python task_generator.py REPOSITORY PACKAGE COUNT SEED WORK TEST... > tasks.json

REPOSITORY is a git work tree, PACKAGE the directory in it that gets the bugs, WORK a scratch directory, TEST what runs for a
module that has no tests of its own. Each candidate is applied with ``git apply``, tests run in a forked process, and it is
taken back. The same seed and versions give the same tasks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from typing import Any

from swesmith.bug_gen.adapters.python import get_entities_from_file_py  # type: ignore[import-not-found]
from swesmith.bug_gen.procedural.python import MODIFIERS_PYTHON  # type: ignore[import-not-found]
from swesmith.bug_gen.utils import generate_patch_fast  # type: ignore[import-not-found]

LINES = 14
"""Lines that a task's patch adds and removes at most."""
CPU, TIMEOUT = 10, 120
"""Seconds of CPU that a candidate's tests may take, so that a busy machine makes the same tasks; and of waiting."""


def candidates(repository: str, package: str, seed: int) -> list[dict[str, str]]:
    """Small patches, in an order that the seed decides."""
    entities: list[Any] = []
    for folder, names, files in os.walk(os.path.join(repository, package)):
        names.sort()
        for name in sorted(files):
            if name.endswith(".py") and "test" not in name:
                get_entities_from_file_py(entities, os.path.join(folder, name))
    found: dict[str, dict[str, str]] = {}
    for number, modifier in enumerate(MODIFIERS_PYTHON):
        modifier.rand = random.Random(seed * 1000 + number)
        for entity in entities:
            if not modifier.can_change(entity):
                continue
            bug = modifier.modify(entity)
            patch = generate_patch_fast(entity, bug, repository) if bug else None
            if not patch:
                continue
            changed = [line for line in patch.splitlines() if re.match(r"[-+](?![-+]{2} )", line)]
            if len(changed) <= LINES:
                path = os.path.relpath(entity.file_path, repository)
                found.setdefault(patch, {"patch": patch, "file": path, "strategy": modifier.name})
    order = list(found.values())
    random.Random(seed).shuffle(order)
    return order


def run_tests(copy: str, wanted: list[str], output: str) -> int:
    """pytest's exit code (0: passed, 1: failed), or -1 where it took too long."""
    pid = os.fork()
    if pid == 0:
        os.setsid()  # whatever a bug does to its process group or terminal, it does to itself
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        signal.alarm(TIMEOUT)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU, CPU))
        os.chdir(copy)
        sys.path.insert(0, copy)
        sys.dont_write_bytecode = True
        code = 3
        try:
            import pytest

            code = int(pytest.main(["-x", "-q", "--tb=no", "-rf", "--assert=plain", "-p", "no:cacheprovider", *wanted]))
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else -1


def check(work: tuple[dict[str, str], str, str, list[str]]) -> dict[str, Any] | None:
    """The candidate with a test that fails for it, or None."""
    candidate, repository, scratch, tests = work
    copy = os.path.join(scratch, f"copy-{os.getpid()}")
    if not os.path.exists(copy):
        shutil.copytree(repository, copy, symlinks=True)
    own = f"tests/test_{os.path.basename(candidate['file'])}"
    wanted = [own] if os.path.exists(os.path.join(copy, own)) else tests
    git = ["git", "-C", copy]
    if subprocess.run([*git, "apply", "-"], input=candidate["patch"], text=True, capture_output=True).returncode:
        return None
    try:
        output = f"{copy}.out"
        if run_tests(copy, wanted, output) != 1:
            return None
        with open(output, errors="replace") as file:
            failed = re.search(r"^FAILED (tests/\S+?)(?: - |$)", file.read(), re.MULTILINE)
        return {**candidate, "fail": [failed[1]]} if failed and "[" not in failed[1] else None
    finally:
        subprocess.run([*git, "checkout", "-q", "."], check=True)


def main(repository: str, package: str, count: str, seed: str, scratch: str, *tests: str) -> None:
    import pytest  # noqa: F401  imported once, before the forks

    order = candidates(repository, package, int(seed))
    print(f"{len(order)} candidates in {repository}", file=sys.stderr)
    tasks: list[dict[str, Any]] = []
    with multiprocessing.Pool(2 * len(os.sched_getaffinity(0))) as pool:
        for task in pool.imap(check, ((candidate, repository, scratch, list(tests)) for candidate in order)):
            if task is not None:
                tasks.append(task)
            if len(tasks) == int(count):
                break
        pool.terminate()
    json.dump(tasks, sys.stdout, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
