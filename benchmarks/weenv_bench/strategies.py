"""Three ways of having an environment for every task and harness: artifacts and bytes in a registry, and what an update costs.

1. An image per task and harness, in three grades of good building: the harness installed last, on top of each task's image
   (task images come from a data set, the harness is one's own); the task last, so that a build cache reuses what is below;
   and every layer reproducible to the byte, which needs more than a Dockerfile.
2. An image per repository with everything in it, built anew per harness; tasks are applied when a container has started.
3. WeEnv: groups, plans, mutations.

The images are real: gzip -6 layers as ``docker push`` makes them, pushed to a registry of their own that is then weighed.
What a ``RUN`` line installs gets the time of its build, so its layer is another one each time; that is all that we do
of a build (no package is resolved, downloaded or compiled), so the times are the least that a rebuild can take. Only
of the first grade not all images are built: a sample, and the rest is taken to be like it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from weenv_bench.image import BenchError, say
from weenv_bench.taskset import HARNESSES, Blob, Stage, compressed, push_image, stored, tagged
from weenv_testkit import tasks
from weenv_testkit.images import MTIME
from weenv_testkit.procs import run
from weenv_testkit.registry import Registry
from weenv_testkit.tasks import Task

IMAGES = "images"
"""The repository of a strategy's images: one, so that every blob is sent once, as with mounts between repositories."""


def rebuilt(source: str, target: str, when: int) -> None:
    """A layer's tar as a build at that time would make it."""
    with tarfile.open(source) as old, tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as new:
        for member in old:
            member.mtime = when
            new.addfile(member, old.extractfile(member) if member.isreg() else None)


class Builder:
    """Builds and pushes the images of one strategy, as many at a time as there are cores.

    ``whole`` adds up the bytes of all images, each by itself: layers, config and manifest.
    """

    def __init__(self, stage: Stage, home: str, registry: Registry) -> None:
        self.stage = stage
        self.home = home
        self.registry = registry
        self.whole = 0
        self.blobs = stage.blobs
        self._names = itertools.count()
        self._made: dict[str, Blob] = {}
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._lock = threading.Lock()

    def _layer(self, step: str, write: Callable[[str], None]) -> Blob:
        """What a build step left; the same step comes from the build cache."""
        with self._lock:
            lock = self._locks[step]
        with lock:
            if step not in self._made:
                path = f"{self.home}/{next(self._names)}.tar"
                write(path)
                self._made[step] = self._send(compressed(path, self.blobs))
                os.unlink(path)
        return self._made[step]

    def _send(self, blob: Blob) -> Blob:
        self.registry.push_blob(IMAGES, blob.digest, f"{self.blobs}/{blob.digest[7:]}")
        return blob

    def plain(self, name: str) -> Blob:
        """A group's tar as it is: the same layer for ever."""
        with self._lock:
            lock = self._locks[name]
        with lock:
            if name not in self._made:
                self._made[name] = self._send(self.stage.plain(name))
        return self._made[name]

    def fresh(self, step: str, group: str) -> Blob:
        """A group's content, installed by a build step."""
        return self._layer(step, lambda path: rebuilt(self.stage.tars[group], path, self._time()))

    def task(self, step: str, task: Task, when: int = 0) -> Blob:
        """A task's patch, applied by a build step."""
        return self._layer(step, lambda path: patched(self.stage, task, path, when or self._time()))

    def _time(self) -> int:
        return 1_800_000_000 + next(self._names)

    def push(self, name: str, layers: Sequence[Blob]) -> None:
        """Make and push an image of layers that are pushed."""
        about = push_image(self.registry, self.blobs, IMAGES, name, layers, WorkingDir="/testbed")
        with self._lock:
            self.whole += sum(layer.size for layer in layers) + about

    def build(self, wanted: Mapping[str, Callable[[], Sequence[Blob]]]) -> Added:
        """Make the images of these names; what that added."""
        before, begin = stored(self.registry).size, time.perf_counter()
        whole, images = self.whole, tagged(self.registry)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda name: self.push(name, wanted[name]()), wanted))
        seconds = time.perf_counter() - begin
        return Added(tagged(self.registry) - images, self.whole - whole, stored(self.registry).size - before, seconds)


@dataclass(frozen=True)
class Added:
    """What building some images added: images, bytes of each by itself, bytes stored, seconds."""

    images: int
    whole: int
    stored: int
    seconds: float


def patched(stage: Stage, task: Task, path: str, when: int) -> None:
    """A tar of the file that a task's patch changes, changed."""
    work = f"{path}.d"
    os.makedirs(os.path.dirname(f"{work}/{task.file}"))
    try:
        with tarfile.open(stage.tars[f"repo-{task.repo}"]) as source:
            member = source.getmember(f"testbed/{task.file}")
            content = source.extractfile(member)
            assert content is not None
            with open(f"{work}/{task.file}", "wb") as file:
                file.write(content.read())
        done = subprocess.run(["git", "apply", "-"], cwd=work, input=task.patch, text=True, capture_output=True, check=False)
        if done.returncode:
            raise BenchError(f"{task.id}: git apply: {done.stderr[-300:]}")
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
            member.mtime, member.size = when, os.path.getsize(f"{work}/{task.file}")
            member.pax_headers = {}
            with open(f"{work}/{task.file}", "rb") as file:
                archive.addfile(member, file)
    finally:
        shutil.rmtree(work)


@contextmanager
def builder(stage: Stage, name: str) -> Iterator[Builder]:
    """A builder with an empty registry."""
    home = f"{stage.directory}/{name}"
    os.makedirs(f"{home}/registry")
    try:
        with Registry(f"{home}/registry") as registry:
            yield Builder(stage, home, registry)
    finally:
        shutil.rmtree(home)


@dataclass(frozen=True)
class Cost:
    """One strategy: all of its images, what a registry stores for them, and an update of one harness."""

    artifacts: int
    whole: int
    stored: int
    update: Added
    extrapolated: str = ""


def task_last(stage: Stage, harness: str, *, reproducible: bool) -> Cost:
    """An image per task and harness, all of them, the task's patch on top; then an update of one harness."""
    with builder(stage, "task-last") as build:

        def layers(task: Task, kind: str, release: str = "") -> list[Blob]:
            step, group = f"{task.repo}-{kind}{release}", f"harness-{kind}{release}"
            below = [build.plain("base"), build.plain(f"repo-{task.repo}")]
            if reproducible:
                return [*below, build.plain(group), build.plain("evaluator"), build.task(task.id, task, MTIME)]
            installed = [build.fresh(step, group), build.fresh(f"{step}-evaluator", "evaluator")]
            return [*below, *installed, build.task(f"{task.id}-{kind}{release}", task)]

        every = [(task, kind) for task in stage.made.tasks for kind in HARNESSES]
        added = build.build({f"{task.id}-{kind}": partial(layers, task, kind) for task, kind in every})
        size = stored(build.registry).size
        new = build.build({f"{task.id}-{harness}-new": partial(layers, task, harness, "-new") for task in stage.made.tasks})
    return Cost(added.images, added.whole, size, new)


def harness_last(stage: Stage, harness: str) -> Cost:
    """An image per task and harness, the harness installed on top of each task's: a sample, the rest taken to be like it."""
    of_each = {name: [task for task in stage.made.tasks if task.repo == name] for name in tasks.REPOSITORIES}
    sample = {name: found[0] for name, found in of_each.items()}
    with builder(stage, "harness-last") as build:

        def layers(task: Task, kind: str, release: str = "") -> list[Blob]:
            below = [build.plain("base"), build.plain(f"repo-{task.repo}"), build.task(task.id, task), build.plain("evaluator")]
            return [*below, build.fresh(f"{task.id}-{kind}{release}", f"harness-{kind}{release}")]

        for name in ("base", "evaluator", *(f"repo-{name}" for name in of_each)):
            build.plain(name)  # stored once, however many tasks there are
        whole, size = 0, stored(build.registry).size
        for name, task in sample.items():
            for kind in HARNESSES:
                added = build.build({f"{task.id}-{kind}": partial(layers, task, kind)})
                whole, size = whole + added.whole * len(of_each[name]), size + added.stored * len(of_each[name])
        # All at once, so that every core has one to build; a harness is as large in every repository's images.
        new = build.build({f"{task.id}-new": partial(layers, task, harness, "-new") for task in sample.values()})
    factor = len(stage.made.tasks) / len(sample)
    update = Added(len(stage.made.tasks), 0, int(new.stored * factor), new.seconds * factor)
    about = "one task of each repository built per harness; the others taken to be like these"
    return Cost(len(stage.made.tasks) * len(HARNESSES), whole, size, update, about)


def per_repository(stage: Stage, harness: str) -> Cost:
    """An image per repository and harness, everything in it."""
    with builder(stage, "per-repository") as build:

        def layers(name: str, kind: str, release: str = "") -> list[Blob]:
            step = f"{name}-{kind}{release}"
            below = [build.plain("base"), build.plain(f"repo-{name}"), build.plain("evaluator")]
            return [*below, build.fresh(step, f"harness-{kind}{release}")]

        every = [(name, kind) for name in tasks.REPOSITORIES for kind in HARNESSES]
        added = build.build({f"{name}-{kind}": partial(layers, name, kind) for name, kind in every})
        size = stored(build.registry).size
        new = build.build({f"{name}-{harness}-new": partial(layers, name, harness, "-new") for name in tasks.REPOSITORIES})
    return Cost(added.images, added.whole, size, new)


@dataclass(frozen=True)
class Update:
    """What a new release of a harness cost here: groups pushed, bytes the registry grew by, seconds; and who runs it."""

    groups: int
    stored: int
    seconds: float
    plans: int
    """Plans started before and after."""
    updated: int
    """Of these, how many ran the new release at their next start."""


BELIEVED = 60.0
"""Seconds for which a node believes a tag (weenv.registry.groupref.resolve)."""


def _release(stage: Stage, plan: str) -> str:
    """Start a plan and say which release of the npm harness runs in it: its version, and the digest of its program."""
    script = "cat package.json; echo; sha256sum cli.js"
    out = run(*stage.run_argv(plan, "sh", "-c", f"cd /opt/harness/npm && {script}"), env=stage.environment())
    found = re.search(r'"version": "([^"]+)"', out)
    return f"{found[1] if found else '?'} {out.split()[-2]}"


def _expected(tar: str) -> str:
    with tarfile.open(tar) as archive:
        program, about = (archive.extractfile(f"opt/harness/npm/{name}") for name in ("cli.js", "package.json"))
        assert program is not None and about is not None
        return f"{json.load(about)['version']} {hashlib.file_digest(program, 'sha256').hexdigest()}"  # type: ignore[arg-type]


def before_update(stage: Stage, per_repository: int) -> tuple[list[str], float]:
    """Start plans of all repositories with the old release; the plans, and when the last one asked for its groups."""
    plans = [
        stage.plan(task, "npm")
        for name in tasks.REPOSITORIES
        for task in [task for task in stage.made.tasks if task.repo == name][:per_repository]
    ]
    old = _expected(stage.tars["harness-npm"])
    for plan in plans:
        if _release(stage, plan) != old:
            raise BenchError(f"{plan} does not run the release that was published")
    return plans, time.monotonic()


def update(stage: Stage, plans: list[str], asked: float) -> Update:
    """Publish the new release under the same tag; then start the same plans again."""
    time.sleep(max(0.0, asked + BELIEVED - time.monotonic()))  # a tag is asked about again when it is that old
    size, mark = stored(stage.registry).size, stage.registry.mark()
    begin = time.perf_counter()
    tasks.publish_one(stage.registry, "harness-npm", stage.tars["harness-npm-new"])
    seconds = time.perf_counter() - begin
    pushed = {r.path for r in stage.registry.requests(mark) if r.method == "PUT" and "/manifests/" in r.path}
    new = _expected(stage.tars["harness-npm-new"])
    updated = sum(_release(stage, plan) == new for plan in plans)
    return Update(len(pushed), stored(stage.registry).size - size, seconds, len(plans), updated)


def measure(stage: Stage) -> dict[str, Any]:
    """Everything: a row per strategy, and the update in detail."""
    count = len(stage.made.tasks)
    plans, asked = before_update(stage, 2)
    ours = {"name": "groups, plans, mutations", "artifacts": stage.artifacts, "whole": stage.stored.size,
            "stored": stage.stored.size}  # fmt: skip
    rows: list[dict[str, Any]] = []
    strategies: list[tuple[str, Callable[[], Cost]]] = [
        ("an image per task and harness; harness on top of the task", partial(harness_last, stage, "npm")),
        ("… the same, task on top, build cache", partial(task_last, stage, "npm", reproducible=False)),
        ("… the same, every layer reproducible", partial(task_last, stage, "npm", reproducible=True)),
        ("an image per repository and harness", partial(per_repository, stage, "npm")),
    ]
    for name, work in strategies:
        cost = work()
        say(f"{name}: {cost}")
        rows.append({
            "name": name, "artifacts": cost.artifacts, "whole": cost.whole, "stored": cost.stored,
            "update_artifacts": cost.update.images, "update_bytes": cost.update.stored, "update_s": cost.update.seconds,
            "extrapolated": cost.extrapolated,
        })  # fmt: skip
    done = update(stage, plans, asked)
    say(f"update of a harness: {done}")
    ours |= {"update_artifacts": done.groups, "update_bytes": done.stored, "update_s": done.seconds, "extrapolated": ""}
    return {"tasks": count, "harnesses": len(HARNESSES), "strategies": [*rows, ours], "update": asdict(done),
            "limit": len(tasks.REPOSITORIES) + 2 + len(HARNESSES)}  # fmt: skip
