"""Mutation layers under real containerd: what a container sees is what was asked for, and only touched frames were fetched."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from weenv.environment.build import compose
from weenv.environment.compose import Composed, register
from weenv.environment.model import GroupUse, Mutation, Plan
from weenv.environment.mutate.mutation import MutationError
from weenv.environment.mutate.mutator import Mutator
from weenv.plugin.containerd.client import Client
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.resolve import Resolver
from weenv_testkit import tools
from weenv_testkit.corpus import noise
from weenv_testkit.images import Member, write_tar
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

PATCH = """--- a/code.py
+++ b/code.py
@@ -1,3 +1,3 @@
 import os
-answer = 41
+answer = 42
 print(answer)
diff --git a/pkg/old.py b/pkg/new.py
rename from pkg/old.py
rename to pkg/new.py
diff --git a/script b/script
old mode 100644
new mode 100755
"""

LIST = "find . | sort | while read -r f; do stat -c '%n %F %a %u:%g' \"$f\"; done"


@pytest.fixture(scope="module")
def refs(store: Store, registry: Registry) -> list[str]:
    """A base image and a repository of two layers, 20 MB, with a large file beside the small ones."""
    os.makedirs(store.directory, exist_ok=True)
    lower = [
        Member.directory("testbed", 0o2775, uid=1000, gid=1001),
        Member("testbed/code.py", b"import os\nanswer = 41\nprint(answer)\n", mode=0o664, uid=1000, gid=1001),
        Member.hardlink("testbed/twin.py", "testbed/code.py", mode=0o664, uid=1000, gid=1001),
        Member("testbed/large.bin", noise(20 << 20)),
        Member("testbed/script", b"#!/bin/sh\necho ran\n", uid=1000, gid=1001),
        Member.symlink("testbed/way", "/testbed/pkg"),
        Member.directory("testbed/pkg", 0o750, uid=1000, gid=1001),
        Member("testbed/pkg/old.py", b"x = 1\n", uid=1000, gid=1001),
        Member.directory("testbed/build"),
        Member("testbed/build/artefact", b"stale"),
    ]
    upper = [Member("testbed/pkg/extra", b"upper\n"), Member("testbed/.wh.nothing")]
    tars = [write_tar(os.path.join(store.directory, f"mutations-{n}.tar"), m) for n, m in enumerate((lower, upper))]
    store.layout.image([store.layout.layer(tar) for tar in tars], "mutations", WorkingDir="/testbed")
    target = f"{registry.host}/mutations/repo:1"
    run(*tools.weenv(), "convert", f"oci:{store.layout.directory}:mutations", target, timeout=120, env=dict(os.environ))
    return [store.lazy("small"), target]


def plan(refs: list[str], *mutations: Mutation, name: str = "m") -> Plan:
    return Plan(name, tuple(GroupUse(ref) for ref in refs), mutations)


async def composed(node: Node, wanted: Plan) -> tuple[Composed, Mutator]:
    async with RegistryClient() as client:
        mutator = Mutator(client, node.root)
        return await compose(wanted, resolver=Resolver(client), root=node.root, mutator=mutator), mutator


def start(node: Node, wanted: Plan, namespace: str = "default") -> tuple[Composed, Mutator]:
    """Compose and register."""

    async def go() -> tuple[Composed, Mutator]:
        image, mutator = await composed(node, wanted)
        async with Client(node.containerd.socket) as client:
            await register(image, client.namespace(namespace))
        return image, mutator

    return asyncio.run(go())


def test_a_container_sees_the_patched_tree_and_nothing_else_changed(node: Node, refs: list[str], registry: Registry) -> None:
    changes = (
        Mutation(patch=PATCH, directory="/testbed"),
        Mutation(files={"/testbed/way/made": b"made\n", "/opt/new/f": b"f"}, mode=0o600),
        Mutation(delete=("/testbed/build",)),
        Mutation(chmod={"/testbed/pkg/extra": 0o777}, owner=None),
        Mutation(symlink={"/testbed/here": "code.py"}),
    )
    plain, _ = start(node, plan(refs))
    mark = registry.mark()
    image, mutator = start(node, plan(refs, *changes))
    assert len(image.layers) == len(plain.layers) + 1
    assert image.layers[-1].ref.size < 4096
    fetched = sum(request.size for request in registry.requests(mark) if request.method == "GET" and request.status == 206)
    assert mutator.frames.fetched[0] == 3, "what is before and behind the large file, and one of the other layer"
    assert mutator.frames.fetched[1] <= fetched < 1 << 20
    listing = LIST + "; cat code.py here twin.py pkg/new.py pkg/made; ./script"
    before = node.shell(plain.name, LIST, "default").splitlines()
    after = node.shell(image.name, listing, "default").splitlines()
    expected = {
        "./code.py regular file 664 1000:1001", "./twin.py regular file 664 1000:1001", "./script regular file 755 1000:1001",
        "./pkg/new.py regular file 644 1000:1001", "./pkg/made regular file 600 1000:1001",
        "./pkg/extra regular file 777 0:0", "./here symbolic link 777 1000:1001", ". directory 2775 1000:1001",
        "./pkg directory 750 1000:1001",
    }  # fmt: skip
    assert expected <= set(after)
    changed = ("./script ", "./pkg/old.py ", "./pkg/extra ", "./build ", "./build/artefact ")
    assert {line for line in before if not line.startswith(changed)} <= set(after)
    assert not [line for line in after if line.startswith(("./build", "./pkg/old.py"))]
    assert after[-12:] == [
        "import os", "answer = 42", "print(answer)", "import os", "answer = 42", "print(answer)", "import os", "answer = 41",
        "print(answer)", "x = 1", "made", "ran",
    ]  # fmt: skip


def test_it_is_made_once_and_survives_a_restart_and_a_lost_layer_directory(node: Node, refs: list[str]) -> None:
    wanted = plan(refs, Mutation(files={"/testbed/kept": b"kept\n"}), name="kept")
    image, first = start(node, wanted, "keep")
    again, second = start(node, wanted, "keep")
    assert (image.digest, first.made, second.made) == (again.digest, 1, 0)
    node.restart()
    assert node.shell(image.name, "cat kept", "keep") == "kept\n"
    node.containerd.remove_image(image.name, "keep")
    node.containerd.collect()
    wait_until("the collection", lambda: not node.containerd.snapshots(SNAPSHOTTER, "keep"), 60)
    wait_until("the layer directory's end", lambda: image.layers[-1].ref.digest not in node.layers(), 60)
    third, made = start(node, wanted, "keep")
    assert made.made == 0, "the blob is still in the store"
    assert node.shell(third.name, "cat kept", "keep") == "kept\n"
    node.containerd.purge("keep", SNAPSHOTTER)


@pytest.mark.parametrize(
    "mutation",
    [
        Mutation(patch=PATCH.replace("41", "40"), directory="/testbed"),
        Mutation(files={"/testbed/way/../../x": b""}),
        Mutation(delete=("/nowhere",)),
    ],
)
def test_what_cannot_be_made_leaves_nothing_in_containerd(node: Node, refs: list[str], mutation: Mutation) -> None:
    with pytest.raises(MutationError):
        start(node, plan(refs, mutation), "none")
    assert not node.containerd.content("none")
    assert not node.containerd.snapshots(SNAPSHOTTER, "none")


def test_the_command_composes_and_says_what_is_wrong(node: Node, refs: list[str], tmp_path: Any) -> None:
    text = "apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\nmetadata: {name: cli}\ngroups:\n"
    text += "".join(f"  - {ref}\n" for ref in refs) + "mutations:\n  - patch: {file: change.diff}\n    directory: /testbed\n"
    (tmp_path / "plan.yaml").write_text(text)
    (tmp_path / "change.diff").write_text(PATCH)
    argv = [*tools.weenv(), "plan", "compose", str(tmp_path / "plan.yaml"), "--containerd", node.containerd.socket]
    argv += ["--config", node.config, "--namespace", "cli"]
    name = run(*argv, timeout=60).strip()
    assert node.shell(name, "./script; tail -n 2 code.py", "cli") == "ran\nanswer = 42\nprint(answer)\n"
    shown = json.loads(run(*tools.weenv(), "plan", "show", "--json", "--config", node.config, str(tmp_path / "plan.yaml")))
    assert shown["name"] == name
    (tmp_path / "plan.yaml").write_text(text + "  - run: make test\n")
    done = subprocess.run([*argv, "--json"], capture_output=True, text=True, timeout=60, check=True)
    assert "weenv: not in the image: 1 run mutation, which" in done.stderr
    assert "(line 10: /bin/sh -c make test)" in done.stderr
    made = json.loads(done.stdout)
    assert made["not_run"] == [{"line": 10, "command": ["/bin/sh", "-c", "make test"], "directory": "/"}]
    assert made["name"] == name, "a command is no part of the image"
    (tmp_path / "plan.yaml").write_text(text)
    node.containerd.purge("cli", SNAPSHOTTER)
    (tmp_path / "change.diff").write_text(PATCH.replace("41", "40"))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "mutations[0] (line 8): code.py: hunk #1 (line 3 of the patch): does not apply" in done.stderr
    assert "line 2 is 'answer = 41', expected 'answer = 40'" in done.stderr


def test_the_layer_unpacks_the_same_without_us(node: Node, refs: list[str], tmp_path: Any) -> None:
    """The blob is an ordinary layer: GNU tar lists what the store made."""
    image, _ = asyncio.run(composed(node, plan(refs, Mutation(patch=PATCH, directory="/testbed"))))
    blob = os.path.join(node.root, "mutations", "blobs", "sha256", image.layers[-1].ref.digest[7:])
    run("zstd", "-q", "-d", "-f", "-o", str(tmp_path / "layer.tar"), blob)
    with tarfile.open(tmp_path / "layer.tar") as archive:
        found = {member.name: (member.mode, member.uid, member.size) for member in archive}
    assert found == {
        "testbed": (0o2775, 1000, 0), "testbed/code.py": (0o664, 1000, 36), "testbed/pkg": (0o750, 1000, 0),
        "testbed/pkg/.wh.old.py": (0, 0, 0), "testbed/pkg/new.py": (0o644, 1000, 6), "testbed/script": (0o755, 1000, 19),
    }  # fmt: skip


def test_a_commit_is_checked_out_and_git_need_not_fetch_the_tree_to_see_that_it_is_clean(
    node: Node, refs: list[str], store: Store, registry: Registry, tmp_path: Path
) -> None:
    target = f"{registry.host}/mutations/history-{node.line}:1"
    work = tmp_path / "testbed"
    work.mkdir()
    environment = {**os.environ, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "safe.directory=*")

    def git(*argv: str, where: str = str(work)) -> str:
        return run("git", *identity, "-C", where, *argv, env=environment).strip()

    git("init", "-q", "-b", "main")
    for step in range(2):
        (work / "code.py").write_text(f"version = {step}\n")
        (work / f"only-{step}").write_text("x")
        (work / "asset").write_bytes(noise(12 << 20, 77))
        if step:
            (work / "only-0").unlink()
        git("add", "-A")
        git("commit", "-q", "-m", str(step))
    for name in ("code.py", "only-1", "asset"):
        os.utime(work / name, (1_700_000_000, 1_700_000_000))
    git("update-index", "-q", "--really-refresh")
    git("repack", "-adq")
    wanted = git("rev-parse", "HEAD~1")
    tar = str(tmp_path / "history.tar")
    run("tar", "--create", "--file", tar, "--owner=0", "--group=0", "--numeric-owner", "-C", str(tmp_path), "testbed")
    tag = f"history-{node.line}"
    store.layout.image([store.layout.layer(tar)], tag, WorkingDir="/testbed")
    run(*tools.weenv(), "convert", f"oci:{store.layout.directory}:{tag}", target, timeout=120, env=dict(os.environ))
    image, mutator = start(node, plan([refs[0], target], Mutation(git_commit=wanted[:12], directory="/testbed"), name="git"))
    assert mutator.frames.fetched[1] < 4 << 20, "of 24 MB: frames of the pack that hold the two commits"
    assert image.layers[-1].ref.size < 4096
    container = node.containerd.run_detached(image.name, "sleep", "1000", snapshotter=SNAPSHOTTER)
    try:
        where = os.path.join(node.rootfs(container, "default"), "testbed")
        mark = registry.mark()
        assert git("status", "--porcelain", where=where) == ""
        assert git("rev-parse", "HEAD", where=where) == wanted
        assert sum(request.size for request in registry.requests(mark)) < 4 << 20, "the asset was not read"
        assert sorted(os.listdir(where)) == [".git", "asset", "code.py", "only-0"]
        with open(os.path.join(where, "asset"), "r+b") as file:
            file.write(b"changed")
        assert git("status", "--porcelain", where=where) == "M asset"
        assert git("fsck", where=where) == ""
    finally:
        node.containerd.remove_container(container)
