"""The bound on images that plans leave: held by many who compose at once, over one that is killed, and never against a user."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import weenv
from weenv.environment import imagebound
from weenv.environment.images import prepare
from weenv.environment.node import Node
from weenv_testkit.procs import wait_until
from weenv_testkit.running import NAMESPACE, Bench

KEEP = 4

_COMPOSE = """
import asyncio, sys, weenv
from weenv.environment import imagebound
from weenv.environment.images import prepare
from weenv.environment.node import Node
imagebound.YOUNG = 0.0
async def go():
    async with Node(weenv.load_config(sys.argv[1])) as node:
        await prepare(sys.argv[2], node)
asyncio.run(go())
"""


def plans(bench: Bench, tmp_path: Path, count: int) -> list[str]:
    """So many plans with a mutation layer each."""
    made = []
    tmp_path.mkdir(exist_ok=True)
    for number in range(count):
        plan = tmp_path / f"plan-{number}.yaml"
        plan.write_text(Path(bench.plan).read_text() + f"mutations: [{{files: {{/task: '{tmp_path.name} {number}'}}}}]\n")
        made.append(str(plan))
    return made


def images(bench: Bench) -> set[str]:
    names = bench.node.containerd.ctr("images", "ls", "-q", namespace=NAMESPACE).split()
    return {name for name in names if name.startswith("weenv.local/")}


def configured(bench: Bench, tmp_path: Path, keep: int) -> str:
    path = tmp_path / f"keep-{keep}.toml"
    path.write_text(Path(bench.config).read_text() + f"[compose]\nkeep_images = {keep}\n")
    return str(path)


def composed(config: str, plans: Sequence[str]) -> list[str]:
    """The names of the plans' images, composed at once."""

    async def go() -> list[str]:
        async with Node(weenv.load_config(config)) as node:
            return [ready.name for ready in await asyncio.gather(*(prepare(plan, node, fresh=True) for plan in plans))]

    return asyncio.run(go())


@pytest.mark.parametrize("line", ["2.1"], indirect=True)
def test_the_bound_is_kept_and_nothing_that_is_used_goes(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    config = configured(bench, tmp_path, KEEP)
    used, leased, *others = plans(bench, tmp_path, 14)
    with weenv.Environment.start(used, config=config) as env:
        assert composed(config, [*others, leased]), "the first minute of each"
        assert len(images(bench)) >= 14, "all were used just now"

        async def hold(keep: bool) -> None:
            async with Node(weenv.load_config(config)) as node:
                if keep:
                    await node.namespace.create_lease("somebody")
                    digest = (await node.namespace.get_image(held)).target.digest
                    await node.namespace.add_lease_resource("somebody", digest, "content")
                else:
                    await node.namespace.delete_lease("somebody", sync=True)

        (held,) = composed(config, [leased])
        (theirs,) = composed(config, [used])
        asyncio.run(hold(True))
        monkeypatch.setattr(imagebound, "YOUNG", 0.0)
        more = plans(bench, tmp_path / "more", 6)
        last = composed(config, more)
        left = images(bench)
        assert {held, theirs} <= left and len(left) <= KEEP + len(more), "those composed at once may all be new"
        (newest,) = composed(config, plans(bench, tmp_path / "last", 1))
        left = images(bench)
        assert {held, theirs, newest} <= left and len(left) <= KEEP and set(last) - left
        assert env.exec(["cat", "/task"]).text == f"{tmp_path.name} 0"
        asyncio.run(hold(False))
    with weenv.Environment.start(others[0], config=config) as env:
        assert env.exec(["cat", "/task"]).text == f"{tmp_path.name} 2", "composed again"


@pytest.mark.parametrize("line", ["1.7"], indirect=True)
def test_who_is_killed_while_it_removes_leaves_the_rest_to_the_next(bench: Bench, tmp_path: Path) -> None:
    many = configured(bench, tmp_path, 1000)
    names = composed(many, plans(bench, tmp_path, 12))
    config = configured(bench, tmp_path, 2)
    (new,) = plans(bench, tmp_path / "new", 1)
    child = subprocess.Popen([sys.executable, "-c", _COMPOSE, config, new])
    wait_until("the first to go", lambda: not set(names) <= images(bench) or child.poll() is not None, 60, 0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    left = images(bench)
    (after,) = plans(bench, tmp_path / "next", 1)
    subprocess.run([sys.executable, "-c", _COMPOSE, config, after], check=True, timeout=120)
    assert len(images(bench)) <= 2 <= len(left), "in bounds again"
    bench.ok("rm", "--sweep")
    with weenv.Environment.start(new, config=config) as env:
        assert env.exec(["cat", "/task"]).text == "new 0"
    marks = os.listdir(os.path.join(bench.node.root, "environments", "used", NAMESPACE))
    assert len(marks) <= len(left) + 3, "what is noted goes with the images"
