"""The tree comparison sees every kind of difference; what it could not see, no test would prove."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest

from weenv_testkit.procs import run
from weenv_testkit.trees import differences, read_tree


def build(path: str) -> str:
    os.makedirs(f"{path}/d/e")
    for name, text in (("d/f", "one"), ("d/g", "two"), ("h", "three")):
        with open(f"{path}/{name}", "w") as file:
            file.write(text)
    os.link(f"{path}/h", f"{path}/d/h2")
    os.symlink("d/f", f"{path}/link")
    os.setxattr(f"{path}/d/g", "user.x", b"1")
    os.setxattr(f"{path}/d/e", "trusted.overlay.opaque", b"y")
    run("mknod", f"{path}/null", "c", "1", "3")
    run("find", path, "-exec", "touch", "-h", "-d", "@1700000000.123456789", "{}", "+")
    return path


CHANGES: dict[str, Callable[[str], object]] = {
    "mode": lambda p: os.chmod(f"{p}/d/f", 0o4755),
    "uid": lambda p: os.chown(f"{p}/d/f", 1, 0),
    "mtime_ns": lambda p: os.utime(f"{p}/d/f", ns=(0, 1_700_000_000_123_456_788)),
    "content": lambda p: run("sh", "-c", f"printf eno > {p}/d/f; touch -d @1700000000.123456789 {p}/d/f"),
    "size": lambda p: os.truncate(f"{p}/d/f", 2),
    "nlink": lambda p: os.unlink(f"{p}/d/h2"),
    "first": lambda p: run("sh", "-c", f"rm {p}/d/h2; cp -p {p}/h {p}/d/h2; ln {p}/h {p}/x; mv {p}/x {p}/h3"),
    "xattrs": lambda p: os.setxattr(f"{p}/d/e", "trusted.overlay.opaque", b"n"),
    "rdev": lambda p: run("sh", "-c", f"rm {p}/null; mknod {p}/null c 1 5"),
    "missing": lambda p: os.unlink(f"{p}/link"),
    "not expected": lambda p: os.mkdir(f"{p}/new"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_is_seen(kind: str, home: str) -> None:
    left, right = build(f"{home}/{kind}-1"), build(f"{home}/{kind}-2")
    expected = read_tree(left)
    assert differences(expected, read_tree(right)) == []
    CHANGES[kind](right)
    assert any(kind in line for line in differences(expected, read_tree(right)))
    shutil.rmtree(left)
