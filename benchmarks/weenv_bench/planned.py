"""Plans on a node: composing, mutation layers, ``weenv run`` against ``ctr run``, resolving a thousand references."""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import subprocess
import tarfile
import time
from collections.abc import Iterable
from typing import Any

from weenv.environment.build import compose
from weenv.environment.compose import register, stack
from weenv.environment.model import Mutation, Plan, PlanConfig
from weenv.environment.mutate.mutator import Mutator
from weenv.environment.plan import load_plan
from weenv.layer.toc import Toc
from weenv.plugin.containerd.client import Client
from weenv.registry.client import RegistryClient
from weenv.registry.config import RegistryConfig
from weenv.registry.groupref.cache import MappingCache
from weenv.registry.groupref.resolve import Resolver
from weenv_bench import reads
from weenv_bench.image import BenchError, Image
from weenv_bench.taskset import HARNESSES, Stage, compressed, push_image
from weenv_testkit import tasks
from weenv_testkit.registry import Registry

TESTBED = "repo/sympy"
"""Where the benchmark's image has its repository."""


def compose_latency(stage: Stage) -> dict[str, Any]:
    """Milliseconds from a plan to an image that containerd has, the groups known to the node, one plan after the other.

    ``plain``: a new plan of known groups; ``new``: a task, its mutation made on the way; ``task``: a task whose mutation
    was made before, its layer now mounted for the first time; ``again``: what is composed already. ``bytes`` of blobs
    that were fetched for all but ``new``, counted by the registry.
    """
    return asyncio.run(_compose_latency(stage, stage.node.root, stage.node.containerd.socket))


async def _compose_latency(stage: Stage, root: str, socket: str) -> dict[str, Any]:
    npm, pip = ([load_plan(stage.plan(task, kind)) for task in stage.made.tasks] for kind in HARNESSES)
    times: dict[str, list[float]] = {"plain": [], "new": [], "task": [], "again": []}
    fetched: dict[str, int] = {}
    layers: dict[str, int] = {}
    async with Client(socket) as client, RegistryClient(_http(stage.registry)) as registry:
        namespace = client.namespace("default")
        resolver = Resolver(registry, MappingCache(f"{root}/mapping.db"), max_age=3600)
        mutator = Mutator(registry, root)

        async def series(kind: str, plans: Iterable[Plan]) -> None:
            mark = stage.registry.mark()
            for plan in plans:
                begin = time.perf_counter()
                made = await compose(plan, resolver=resolver, root=root, mutator=mutator)
                await register(made, namespace)
                times[kind].append((time.perf_counter() - begin) * 1000)
                if plan.mutations:
                    layers[made.layers[-1].ref.digest] = made.layers[-1].ref.size
            fetched[kind] = sum(stage.registry.blob_bytes(mark).values())

        # Known to the node: some environment has used every group.
        await series("new", {plan.groups: Plan("known", plan.groups) for plan in (*npm, *pip)}.values())
        times["new"].clear()
        await series("plain", [Plan(plan.name, plan.groups, (), PlanConfig({"TASK": plan.name})) for plan in (*npm, *pip)])
        await series("new", npm)
        for plan in pip:
            await compose(plan, resolver=resolver, root=root, mutator=mutator)
        await series("task", pip)
        await series("again", (*npm, *pip))
    quiet = sum(size for kind, size in fetched.items() if kind != "new")
    return {"ms": times, "bytes": quiet, "fetched": fetched, "layers": len(layers), "layer_bytes": sum(layers.values())}


def _http(registry: Registry) -> RegistryConfig:
    return RegistryConfig(plain_http=frozenset({registry.host}))


# --- mutation layers ----------------------------------------------------------------------------------------------------


def ten_lines(name: str, text: str, number: int) -> str:
    """A patch that changes ten lines of a file: five replaced, at places that ``number`` decides."""
    old = text.splitlines(keepends=True)
    places = [line for line, content in enumerate(old[:-1]) if content.strip() and content.endswith("\n")]
    step = len(places) // 5
    new = list(old)
    for which in range(5):
        line = places[which * step + number % step]
        new[line] = f"{old[line].rstrip()}  # {number}\n"
    return "".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}"))


def sources(made: Image, count: int) -> dict[str, str]:
    """Python files of the image's repository, spread over it: path in the repository -> text, each of 50 lines or more."""
    with tarfile.open(made.layers[3].path) as archive:
        members = [m for m in archive if m.isreg() and m.name.startswith(f"{TESTBED}/sympy/") and m.name.endswith(".py")]
        members = [member for member in members if 4_000 < member.size < 60_000]
        found = {}
        for member in members[:: max(1, len(members) // count)][:count]:
            content = archive.extractfile(member)
            assert content is not None
            text = content.read().decode()
            if text.count("\n") > 50 and "\r" not in text:
                found[member.name.removeprefix(f"{TESTBED}/")] = text
    return found


def mutation_latency(made: Image, layout: str, tocs: list[Toc], directory: str, count: int) -> dict[str, Any]:
    """Milliseconds of making a mutation layer of a patch of ten lines, each of a file that was never touched before
    (``first``) and then once more (``warm``), and the bytes fetched for the first round against the frames of the files.
    """
    return asyncio.run(_mutation_latency(made, layout, tocs, directory, count))


async def _mutation_latency(made: Image, layout: str, tocs: list[Toc], directory: str, count: int) -> dict[str, Any]:
    texts = sources(made, count)
    os.mkdir(f"{directory}/mutations-registry")
    with Registry(f"{directory}/mutations-registry") as registry:
        reference = push_layout(registry, layout, "image")
        async with RegistryClient(_http(registry)) as client:
            mutator = Mutator(client, f"{directory}/mutations-root")
            layers = stack([await Resolver(client).resolve(reference)])
            begin = time.perf_counter()
            await mutator.view(layers)
            opened = time.perf_counter() - begin
            times: dict[str, list[float]] = {"first": [], "warm": []}
            fetched = {}
            size = 0
            for number, kind in enumerate(times):
                mark = registry.mark()
                for name, text in texts.items():
                    mutation = Mutation(patch=ten_lines(name, text, number), directory=f"/{TESTBED}")
                    begin = time.perf_counter()
                    (layer,) = await mutator.mutate([mutation], layers)
                    times[kind].append((time.perf_counter() - begin) * 1000)
                    size += layer.size
                fetched[kind] = sum(registry.blob_bytes(mark).values())
    frames, _, _ = reads.frames_of([f"{TESTBED}/{name}" for name in texts], tocs)
    return {
        "ms": times, "fetched": fetched, "frames": frames, "files": len(texts), "open_s": opened,
        "layer_bytes": size / (len(times["first"]) + len(times["warm"])),
    }  # fmt: skip


def push_layout(registry: Registry, layout: str, repository: str) -> str:
    """Push the one image of an OCI layout; its reference."""
    blobs = f"{layout}/blobs/sha256"
    with open(f"{layout}/index.json") as file:
        entry = json.load(file)["manifests"][0]
    with open(f"{blobs}/{entry['digest'][7:]}", "rb") as file:
        data = file.read()
    manifest = json.loads(data)
    for blob in (manifest["config"], *manifest["layers"]):
        registry.push_blob(repository, blob["digest"], f"{blobs}/{blob['digest'][7:]}")
    registry.push_manifest(repository, "1", data, entry["mediaType"])
    return f"{registry.host}/{repository}:1"


# --- weenv run against ctr run ------------------------------------------------------------------------------------------


def run_latency(stage: Stage, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of ``weenv run --rm PLAN -- true`` and of ``ctr run --rm IMAGE true``, taking turns.

    The image has the plan's layers, unpacked for overlayfs on the same containerd; the runc is the same.
    """
    containerd = stage.node.containerd
    task = stage.made.tasks[0]
    plan = stage.plan(task, "pip")
    layers = [stage.plain(name) for name in tasks.stack(task, "pip")]
    for layer in layers:
        stage.registry.push_blob("plain", layer.digest, f"{stage.blobs}/{layer.digest[7:]}")
    push_image(stage.registry, stage.blobs, "plain", "1", layers, Env=["PATH=/usr/bin:/bin"])
    plain = f"{stage.registry.host}/plain:1"
    containerd.pull(plain, snapshotter="overlayfs")
    contenders = {"weenv": stage.run_argv(plan, "true")}
    times: dict[str, list[float]] = {"weenv": [], "ctr": []}
    for number in range(rounds + 3):
        contenders["ctr"] = containerd.run_argv(plain, containerd.new_id("b"), ["true"], snapshotter="overlayfs")
        for name in ("weenv", "ctr") if number % 2 else ("ctr", "weenv"):
            environment = stage.environment() if name == "weenv" else containerd.environment()
            begin = time.perf_counter()
            done = subprocess.run(contenders[name], env=environment, capture_output=True, check=False)
            seconds = time.perf_counter() - begin
            if done.returncode:
                raise BenchError(f"{name}: {done.stderr.decode(errors='replace')[-800:]}")
            if number >= 3:  # the first three warm the programs and whatever they remember
                times[name].append(seconds * 1000)
    return times


# --- resolving ----------------------------------------------------------------------------------------------------------


def resolve_latency(directory: str, count: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds for ``count`` tags of as many manifests and configs: ``cold`` against the registry, nothing known;
    ``cached`` by a resolver that has resolved them; ``restarted`` by a new one with only the mapping cache on disk;
    ``asked`` where every tag is asked about again.
    """
    os.mkdir(f"{directory}/resolve-registry")
    with Registry(f"{directory}/resolve-registry") as registry:
        references = _many(registry, f"{directory}/resolve-blobs", count)
        return asyncio.run(_resolve_latency(registry, references, directory, rounds))


def _many(registry: Registry, blobs: str, count: int) -> list[str]:
    """References of so many images of one tiny layer, each with a config of its own."""
    os.mkdir(blobs)
    with open(f"{blobs}/layer.tar", "wb") as file:
        file.write(bytes(1024))
    layer = compressed(f"{blobs}/layer.tar", blobs)
    registry.push_blob("many", layer.digest, f"{blobs}/{layer.digest[7:]}")
    for number in range(count):
        push_image(registry, blobs, "many", f"n{number}", [layer], Labels={"number": str(number)})
    return [f"{registry.host}/many:n{number}" for number in range(count)]


async def _resolve_latency(registry: Registry, references: list[str], directory: str, rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"cold": [], "cached": [], "restarted": [], "asked": []}
    for number in range(rounds):
        path = f"{directory}/resolve-{number}.db"
        for kind, age in (("cold", 3600.0), ("cached", 3600.0), ("restarted", 3600.0), ("asked", 0.0)):
            if kind != "cached":
                client = RegistryClient(_http(registry))
                cache = MappingCache(path)
                resolver = Resolver(client, cache, max_age=age)
            begin = time.perf_counter()
            found = await resolver.resolve_all(references)
            times[kind].append((time.perf_counter() - begin) * 1000)
            if len({group.digest for group in found}) != len(references):
                raise BenchError("not every reference has a manifest of its own")
            if kind != "cold":
                await client.close()
                cache.close()
    return times
