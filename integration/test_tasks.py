"""Tasks in SWE-smith's shape, end to end: published, composed, mutated; their tests fail; mended, they pass."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from weenv.environment.build import compose
from weenv.environment.compose import Composed, register
from weenv.environment.model import GroupUse, Mutation, Plan
from weenv.environment.mutate.mutator import Mutator
from weenv.plugin.containerd.client import Client
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.resolve import Resolver
from weenv_testkit import tasks as kit
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store
from weenv_testkit.tasks import Task, Tasks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made() -> Tasks:
    return kit.load(kit.FEW)


@pytest.fixture(scope="module")
def groups(made: Tasks, registry: Registry) -> dict[str, str]:
    return kit.publish(made, registry)


@pytest.fixture(scope="module")
def one_node(home: str, registry: Registry, store: Store) -> Iterator[Node]:
    """One containerd line is enough here."""
    path = os.path.join(home, "tasks")
    os.mkdir(path)
    store.pause()
    with Node("2.1", path, registry=registry.host) as running:
        yield running
        assert not running.complaints()
    shutil.rmtree(path, ignore_errors=True)


def plan(groups: dict[str, str], task: Task, *patches: str, harness: str = "harness-pip") -> Plan:
    """Base, repository, harness, evaluator; one mutation for each patch."""
    uses = tuple(GroupUse(groups[name]) for name in ("base", f"repo-{task.repo}", harness, "evaluator"))
    return Plan(task.id, uses, tuple(Mutation(patch=patch, directory="/testbed") for patch in patches))


async def image_of(node: Node, wanted: Plan, mutator: Mutator, resolver: Resolver) -> Composed:
    image = await compose(wanted, resolver=resolver, root=node.root, mutator=mutator)
    async with Client(node.containerd.socket) as client:
        await register(image, client.namespace("default"))
    return image


def start(node: Node, *plans: Plan) -> list[Composed]:
    async def go() -> list[Composed]:
        async with RegistryClient() as client:
            mutator, resolver = Mutator(client, node.root), Resolver(client)
            return [await image_of(node, wanted, mutator, resolver) for wanted in plans]

    return asyncio.run(go())


def check(made: Tasks) -> None:
    assert len({task.repo for task in made.tasks}) == 3
    assert len({task.patch for task in made.tasks}) == len(made.tasks)
    assert {"evaluator", "harness-pip", "harness-npm"} <= set(made.groups) or shutil.which("npm") is None
    for task in made.tasks:
        changed = [line for line in task.patch.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
        assert 0 < len(changed) <= 14 and task.fail


def test_all_are_small_and_have_a_test_that_fails(made: Tasks) -> None:
    check(made)


@pytest.mark.soak
def test_there_are_enough_of_them_and_the_first_are_the_same() -> None:
    everything = kit.load()
    assert len(everything.tasks) >= 200
    check(everything)
    assert kit.make_tasks("tinydb", 3) == [asdict(task) | {"fail": list(task.fail)} for task in kit.load({"tinydb": 3}).tasks]


@pytest.mark.parametrize("repo", sorted(kit.REPOSITORIES))
def test_a_task_fails_and_mended_passes(one_node: Node, made: Tasks, groups: dict[str, str], repo: str) -> None:
    task = next(task for task in made.tasks if task.repo == repo)
    harness = "harness-npm" if repo == "boltons" and "harness-npm" in groups else "harness-pip"
    broken, mended, untouched = start(
        one_node,
        plan(groups, task, task.patch, harness=harness),
        plan(groups, task, task.patch, task.inverse(), harness=harness),
        plan(groups, task, harness=harness),
    )
    script = f"python3 -m pytest -q --tb=no -p no:cacheprovider {' '.join(task.fail)}; echo code=$?"
    assert one_node.shell(broken.name, script, "default").endswith("code=1\n"), task.id
    assert one_node.shell(mended.name, script, "default").endswith("code=0\n"), task.id
    assert one_node.shell(untouched.name, f"cat {task.file} | md5sum", "default") == one_node.shell(
        mended.name, f"cat {task.file} | md5sum", "default"
    )
    # The repository within says of the broken one what was changed, of the other nothing: by this machine's git.
    for image, expected in ((broken, [task.file]), (untouched, [])):
        container = one_node.containerd.run_detached(image.name, "sleep", "1000", snapshotter=SNAPSHOTTER)
        try:
            where = os.path.join(one_node.rootfs(container, "default"), "testbed")
            git = ["git", "--no-optional-locks", "-c", "safe.directory=*", "-C", where, "diff", "--name-only"]
            assert subprocess.run(git, capture_output=True, text=True, check=True).stdout.split() == expected
        finally:
            one_node.containerd.remove_container(container)


def test_all_tasks_are_layers_of_kilobytes(one_node: Node, made: Tasks, groups: dict[str, str]) -> None:
    async def go() -> tuple[list[Composed], Mutator]:
        async with RegistryClient() as client:
            mutator, resolver = Mutator(client, one_node.root), Resolver(client)
            plans = [plan(groups, task, task.patch) for task in made.tasks]
            images = await asyncio.gather(*(compose(p, resolver=resolver, root=one_node.root, mutator=mutator) for p in plans))
            return list(images), mutator

    images, mutator = asyncio.run(go())
    tops = {image.layers[-1].ref.digest: image.layers[-1].ref.size for image in images}
    assert len(tops) == len(made.tasks)
    source = sum(os.path.getsize(path) for path in made.groups.values())
    assert sum(tops.values()) < 40_000 * len(tops)
    assert mutator.frames.fetched[1] < source / 2
