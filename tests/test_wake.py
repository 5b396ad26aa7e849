"""plugin/nri/wake.py: what the kernel's word costs in descriptors, whatever becomes of those it is about."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from simulator.cgroup import Cgroup
from simulator.elasticnode import BOUNDS, Node

from weenv.plugin.nri.cgroups import CgroupGone, Reader
from weenv.plugin.nri.model import EnvKey, PidsBounds
from weenv.plugin.nri.watch import Found

COUNTED = replace(BOUNDS, pids=PidsBounds(100, 1000))


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """Its kernel tells of everything, by descriptors that are the kernel's own and can be waited for."""
    monkeypatch.setattr(Reader, "trigger", lambda *_: os.eventfd(0, os.EFD_CLOEXEC))
    monkeypatch.setattr(Reader, "notices", lambda *_: os.eventfd(0, os.EFD_CLOEXEC))
    made = Node(tmp_path / "root", version=2)
    async with made.running():
        yield made


def descriptors(node: Node) -> Counter[str]:
    """How many of each kind this process has: files of the node's groups, and what the kernel tells by. Others that it has are
    of tests before, and go when they are collected."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith((f"{node.root}/", "anon_inode:[eventfd]")):
                found[target.rpartition("/")[2]] += 1
    return found


async def test_who_comes_changes_and_goes_leaves_no_descriptor(node: Node) -> None:
    """A container's limit of processes may be set, taken away and set again, by who knows it better each time."""
    found = Found(EnvKey("default", "a"), 7, BOUNDS, name="a")
    other = Found(EnvKey("default", "a"), 8, COUNTED, name="a")
    node.runtime.groups[found.key] = Cgroup(str(node.root / "a"), 2, cpu=BOUNDS.start.cpu, memory=BOUNDS.start.memory)
    node.controller.started(found)
    few = descriptors(node)
    node.controller.started(replace(found, bounds=COUNTED), known=True)
    most = descriptors(node)
    assert sum(most.values()) == sum(few.values()) + 1, "one that tells of refused forks"
    for _ in range(1000):
        for bounds in (BOUNDS, COUNTED, BOUNDS):
            node.controller.started(replace(found, bounds=bounds), known=True)
        assert descriptors(node) == few
        node.controller.started(other)
        assert descriptors(node) == most
        node.controller.ended(found.key, 0)
        node.controller.started(found)
    node.controller.ended(found.key, 0)
    assert sum(descriptors(node).values()) < sum(few.values())


async def test_one_that_is_gone_before_its_limits_are_read_leaves_none(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.add("a")
    before = descriptors(node)
    read = Reader.limits
    again: list[Reader] = []

    def limits(reader: Reader) -> object:
        if reader in again:
            raise CgroupGone("gone")
        again.append(reader)
        return read(reader)

    monkeypatch.setattr(Reader, "limits", limits)
    node.add("b")
    assert descriptors(node) == before
