"""Layer groups with real parts: Debian's docker-registry, skopeo and containers/storage, the kernel's overlayfs, containerd."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from weenv.cli.main import cli
from weenv.core.errors import WeenvError
from weenv_testkit import corpus, tools
from weenv_testkit.images import Layout as KitLayout
from weenv_testkit.images import Member, busybox_members, write_tar
from weenv_testkit.node import Node
from weenv_testkit.procs import run
from weenv_testkit.registry import Registry
from weenv_testkit.skopeo import skopeo
from weenv_testkit.trees import Entry, differences, read_tree


def group(*arguments: str) -> Any:
    """``weenv group ... --json``, in this process: starting Python a hundred times tells nothing. Raises its WeenvError."""
    environment = {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent"}
    done = CliRunner().invoke(cli, ["group", *arguments, "--json"], env=environment, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


class Unpacked:
    """An image unpacked by containers/storage, the library under podman and CRI-O; a context manager."""

    def __init__(self, policy: str, source: str, storage: str, *flags: str) -> None:
        self._storage = storage
        skopeo(policy, "copy", *flags, source, "containers-storage:x:y", storage=storage)
        layers = json.loads(Path(storage, "overlay-layers", "layers.json").read_text())
        parents = {layer.get("parent", ""): layer["id"] for layer in layers}
        self.layers: list[str] = []
        """Directories of the layers, bottom first."""
        at = ""
        while at in parents:
            at = parents[at]
            self.layers.append(os.path.join(storage, "overlay", at, "diff"))

    def __enter__(self) -> Unpacked:
        return self

    def __exit__(self, *error: object) -> None:
        run("umount", os.path.join(self._storage, "overlay"), check=False)  # it bind-mounts its home
        shutil.rmtree(self._storage)


def made_by_the_unpack(tree: dict[bytes, Entry]) -> set[bytes]:
    """Directories that no member is: they have the time of the unpack."""
    return {path for path in tree if 0 <= time.time_ns() - tree[path].mtime_ns < 3600 * 10**9}


@pytest.fixture(scope="module")
def odd(home: str) -> list[str]:
    """Tars of hand-made odd layers: links, whiteouts, devices, capabilities, xattrs, names, sparse files."""
    scratch = os.path.join(home, "odd")
    os.makedirs(scratch)
    # containers/storage refuses a name that is in a layer twice.
    return [tar for tar in corpus.odd(scratch) if not tar.endswith(("twice.tar", "prefixes.tar"))]


def overlaid(layers: Sequence[str], at: str) -> dict[bytes, Entry]:
    """What the kernel's overlayfs shows of directories, bottom first."""
    os.mkdir(at)
    # Through links: the option string has room for a page only.
    names = []
    for number, layer in enumerate(layers):
        os.symlink(layer, os.path.join(at, str(number)))
        names.append(str(number))
    os.mkdir(os.path.join(at, "m"))
    subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", "ro,lowerdir=" + ":".join(reversed(names)), "m"], cwd=at, check=True
    )
    try:
        return read_tree(os.path.join(at, "m"))
    finally:
        run("umount", os.path.join(at, "m"))


def test_odd_trees_survive(odd: list[str], policy: str, home: str) -> None:
    """Tars go in, through the tree and sorted out again; containers/storage unpacks the same from both."""
    layout = KitLayout(os.path.join(home, "plain"))
    layout.image([layout.layer(tar) for tar in odd], "odd")
    built = group("build", f"oci:{home}/odd-group:1", *(word for tar in odd for word in ("--from", tar)))
    assert built["lazy"] and len(built["layers"]) == len(odd)
    before = Unpacked(policy, f"oci:{layout.directory}:odd", os.path.join(home, "s1"))
    after = Unpacked(policy, f"oci:{home}/odd-group:1", os.path.join(home, "s2"))
    with before, after:
        assert len(before.layers) == len(after.layers) == len(odd)
        for name, one, two in zip(odd, before.layers, after.layers, strict=True):
            tree = read_tree(one)
            assert differences(tree, read_tree(two), times_free=made_by_the_unpack(tree)) == [], name


def squash_differences(shown: dict[bytes, Entry], squashed: dict[bytes, Entry]) -> list[str]:
    """What differs between a stack as mounted and its squash.

    A directory that no member of the top layer is gets root's defaults from containers/storage; here, as from containerd,
    it keeps what lower layers say, which is what the squash has. overlayfs counts links per layer.
    """
    implied = {path for path in made_by_the_unpack(shown) if stat.S_ISDIR(shown[path].mode)}
    same = {path: entry for path, entry in shown.items() if path not in implied}
    lines = differences(same, {path: entry for path, entry in squashed.items() if path not in implied}, ignore=("nlink",))
    return lines + [f"no directory: {path!r}" for path in implied if not stat.S_ISDIR(squashed[path].mode)]


def test_squashed_is_what_the_kernel_shows(odd: list[str], policy: str, home: str) -> None:
    layout = KitLayout(os.path.join(home, "stack"))
    layout.image([layout.layer(tar, ("gzip", "zstd", "none")[n % 3]) for n, tar in enumerate(odd)], "odd")
    whole = ("--from-image", f"oci:{layout.directory}:odd", "--squash", "--kind", "base")
    built = group("build", f"oci:{home}/squashed:1", *whole)
    assert len(built["layers"]) == 1
    stack = Unpacked(policy, f"oci:{layout.directory}:odd", os.path.join(home, "s3"))
    one = Unpacked(policy, f"oci:{home}/squashed:1", os.path.join(home, "s4"))
    with stack, one:
        shown = overlaid(stack.layers, os.path.join(home, "o1"))
        (layer,) = one.layers
        assert squash_differences(shown, read_tree(layer)) == []
        image = ("--from-image", f"oci:{layout.directory}:odd", "--layers", "2..", "--squash")
        assert len(group("build", f"oci:{home}/squashed:2", *image)["layers"]) == 1
        with Unpacked(policy, f"oci:{home}/squashed:2", os.path.join(home, "s5")) as rest:
            both = overlaid([stack.layers[0], *rest.layers], os.path.join(home, "o2"))
            assert squash_differences(shown, both) == []


@pytest.fixture(scope="module")
def tree(home: str) -> str:
    """A directory made by hand, as root: what a build host's disk may hold."""
    at = os.path.join(home, "tree")
    os.makedirs(os.path.join(at, "sub/deep"))
    long = "l" * 200
    for name in ("plain", "ünïcode", b"\xff\xfe", long, "sub/deep/file"):
        with open(os.path.join(os.fsencode(at), os.fsencode(name)), "wb") as file:
            file.write(os.urandom(5000))
    with open(os.path.join(at, "sparse"), "wb") as file:
        file.seek(3 << 20)
        file.write(b"end")
    os.mknod(os.path.join(at, "char"), 0o20640, os.makedev(300, 70_000))
    os.mkfifo(os.path.join(at, "fifo"))
    os.link(os.path.join(at, "plain"), os.path.join(at, "sub/linked"))
    os.symlink(long, os.path.join(at, "sub/symlink"))
    os.chown(os.path.join(at, "sub"), 3_000_000, 70_000)
    os.chown(os.path.join(at, "sub/symlink"), 5, 6, follow_symlinks=False)
    os.chmod(os.path.join(at, "sub"), 0o2775)
    os.chmod(os.path.join(at, "sparse"), 0o4711)
    os.setxattr(os.path.join(at, "plain"), "user.note", b"\0binary\xff")
    capability = bytes.fromhex("0100000200200000000000000000000000000000")
    os.setxattr(os.path.join(at, "sparse"), "security.capability", capability)
    for folder, _, files in os.walk(os.fsencode(at), topdown=False):
        for number, name in enumerate([*files, b"."]):
            os.utime(os.path.join(folder, name), ns=(0, 10**18 + number * 123_456_789), follow_symlinks=False)
    return at


def test_a_directory_comes_back_as_it_was(tree: str, registry: Registry, policy: str, home: str) -> None:
    """Built straight into a registry, twice from different places: one digest. Unpacked by containers/storage: the tree."""
    ref = f"{registry.host}/group/tree:1"
    first = group("build", ref, "--from", tree, "--kind", "tools", "--version", "1")
    copied = os.path.join(home, "copied")
    run("cp", "-a", tree, copied)
    mark = registry.mark()
    second = group("build", f"{registry.host}/group/tree:again", "--from", copied, "--kind", "tools", "--version", "1")
    assert second["descriptor"] == first["descriptor"] and second["layers"][0]["reused"]
    assert not [r for r in registry.requests(mark) if r.method in ("POST", "PATCH")], "nothing is sent again"
    seen = json.loads(skopeo(policy, "inspect", "--tls-verify=false", f"docker://{ref}"))
    assert seen["Digest"] == first["descriptor"]["digest"]
    raw = json.loads(skopeo(policy, "inspect", "--raw", "--tls-verify=false", f"docker://{ref}"))
    assert raw["artifactType"] == "application/vnd.weenv.group.v1"
    with Unpacked(policy, f"docker://{ref}", os.path.join(home, "s6"), "--src-tls-verify=false") as unpacked:
        want, have = read_tree(tree), read_tree(unpacked.layers[0])
        # containers/storage makes the root itself, and unpacks symlinks without their time.
        lines = differences(want, have, times_free={b".", b"sub/symlink"})
        assert [line for line in lines if not line.startswith("b'.'")] == []
    plain = subprocess.run(
        ["sh", "-c", 'zstd -q -d -c "$1" | tar --list --verbose --numeric-owner', "sh",
         registry.blob_path(first["layers"][0]["digest"])], capture_output=True, check=True,
    )  # fmt: skip
    assert not plain.stderr and len(plain.stdout.splitlines()) == len(want) - 1


def test_copied_by_skopeo_it_is_still_the_group(tree: str, registry: Registry, policy: str, home: str) -> None:
    """Another tool's copy keeps digest, annotations and so laziness; ours mounts blobs across repositories."""
    ref = f"{registry.host}/group/original:1"
    how = ("--prefix", "/opt/x", "--split", "/opt/x/sub", "--owner", "0:0", "--kind", "harness")
    built = group("build", ref, "--from", tree, *how)
    digest = built["descriptor"]["digest"]
    assert len(built["layers"]) == 2
    skopeo(policy, "copy", "--preserve-digests", "--src-tls-verify=false", f"docker://{ref}", f"oci:{home}/by-skopeo:1")
    shown = group("show", f"oci:{home}/by-skopeo:1")
    assert (shown["digest"], shown["kind"], [layer["lazy"] for layer in shown["layers"]]) == (digest, "harness", [True, True])
    mark = registry.mark()
    moved = group("copy", ref, f"{registry.host}/group/elsewhere:2")
    assert moved["descriptor"]["digest"] == digest
    # Both layers are mounted; docker-registry answers a mount with 201 and takes no body.
    assert moved["blobs"]["mounted"]["count"] == 3 and moved["blobs"]["copied"]["count"] == 0
    assert all(r.status == 201 for r in registry.requests(mark) if r.method == "POST" and "mount=" in r.path)
    assert not [r for r in registry.requests(mark) if r.method == "GET" and r.blob]
    assert group("tag", f"{registry.host}/group/elsewhere:2", "stable")["descriptor"]["digest"] == digest
    assert group("tags", f"{registry.host}/group/elsewhere") == ["2", "stable"]
    assert {"group/elsewhere", "group/original"} <= set(group("ls", registry.host))
    with pytest.raises(WeenvError, match="stable means the same"):
        group("delete", f"{registry.host}/group/elsewhere:2")
    gone = group("delete", "--force", f"{registry.host}/group/elsewhere:2")
    assert gone == {"digest": digest, "tags": ["2", "stable"], "manifest": True}
    with pytest.raises(WeenvError, match="does not hold"):
        group("show", f"{registry.host}/group/elsewhere:stable")
    group("pull", ref, f"oci:{home}/pulled:1")
    group("push", f"oci:{home}/pulled:1", f"{registry.host}/group/back:1")
    assert group("show", f"{registry.host}/group/back:1")["digest"] == digest


def test_show_is_for_people(home: str, tree: str) -> None:
    ref = f"oci:{home}/people:1"
    settings = ("--env", "A=1", "--env", "B=[x] y", "--cmd", "sh", "--cmd", "it's", "--workdir", "/w")
    group("build", ref, "--from", os.path.join(tree, "sub"), *settings)
    done = CliRunner().invoke(cli, ["group", "show", ref], catch_exceptions=False)
    lines = done.output.splitlines()
    for line in ("Env       A=1", "Env       B=[x] y", 'Cmd       ["sh", "it\'s"]', "WorkingDir /w"):
        assert line in lines, done.output


def test_the_command_says_in_one_line_what_is_wrong(registry: Registry, tree: str) -> None:
    """As a process: exit codes and what a person sees."""
    for arguments, code, text in (
        (["show", f"{registry.host}/group/none:1"], 1, "weenv: "),
        (["build", f"{registry.host}/group/x:1", "--from", tree, "--owner", "root"], 1, "weenv: not an owner"),
        (["build", f"{registry.host}/group/x:1"], 2, "Usage: "),
        (["push", tree, tree], 1, "weenv: push goes from a layout to a registry"),
    ):
        done = subprocess.run([*tools.weenv(), "group", *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (code, "") and done.stderr.startswith(text), done.stderr
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 4


def test_what_changed_between_versions(registry: Registry, home: str) -> None:
    at = os.path.join(home, "versions")
    os.makedirs(os.path.join(at, "lib"))
    for name, size in (("lib/big", 2 << 20), ("code", 10), ("old", 1)):
        Path(at, name).write_bytes(os.urandom(size))
    one = f"{registry.host}/group/v:1"
    group("build", one, "--from", at, "--split", "lib")
    Path(at, "code").write_bytes(b"another text")
    Path(at, "new").write_bytes(b"")
    os.unlink(os.path.join(at, "old"))
    mark = registry.mark()
    two = f"{registry.host}/group/v:2"
    group("build", two, "--from", at, "--split", "lib")
    sent = [r for r in registry.requests(mark) if r.method == "PUT"]
    assert len(sent) == 3, "the changed layer, config and manifest"
    mark = registry.mark()
    found = group("diff", "--files", one, two)
    assert found["files"] == {"added": ["new"], "removed": ["old"], "changed": ["code"]}
    assert [len(found[name]) for name in ("removed", "added", "shared")] == [1, 1, 1]
    assert sum(registry.blob_bytes(mark).values()) < 20_000, "tables of contents only"


@pytest.mark.parametrize("algorithm", ["ecdsa-p256", "ed25519"])
def test_signed_in_a_real_registry(tree: str, registry: Registry, home: str, policy: str, algorithm: str) -> None:
    ref = f"{registry.host}/signed/{algorithm}:1"
    digest = group("build", ref, "--from", tree, "--kind", "evaluator")["descriptor"]["digest"]
    key = os.path.join(home, f"key-{algorithm}")
    group("keygen", key, "--algorithm", algorithm)
    rules = {"default": "deny", "rules": [{"match": f"{registry.host}/signed/**", "keys": [f"{key}.pub"]}]}
    Path(home, f"{algorithm}.yaml").write_text(json.dumps(rules))
    check = ("verify", "--policy", f"{home}/{algorithm}.yaml")
    with pytest.raises(WeenvError, match="is not signed"):
        group(*check, ref)
    done = group("sign", ref, "--key", f"{key}.key")
    assert (done["digest"], done["stored"]) == (digest, "tag"), "docker-registry 2.8 has no referrers API"
    assert group(*check, ref)["accepted"]
    # As cosign finds it: the tag, one layer, the payload, the signature in the annotation; openssl is the judge.
    raw = json.loads(
        skopeo(policy, "inspect", "--raw", "--tls-verify=false", f"docker://{ref.rpartition(':')[0]}:sha256-{digest[7:]}.sig")
    )
    (layer,) = raw["layers"]
    files = [os.path.join(home, f"{name}-{algorithm}") for name in ("payload", "signature")]
    shutil.copy(registry.blob_path(layer["digest"]), files[0])
    Path(files[1] + ".b64").write_text(layer["annotations"]["dev.cosignproject.cosign/signature"])
    run("openssl", "base64", "-d", "-A", "-in", files[1] + ".b64", "-out", files[1])
    hashed = ["-digest", "sha256"] if algorithm == "ecdsa-p256" else []
    how = ("-rawin", *hashed, "-in", files[0], "-sigfile", files[1], "-pubin", "-inkey", f"{key}.pub")
    run("openssl", "pkeyutl", "-verify", *how)
    payload = json.loads(Path(files[0]).read_text())
    assert payload["critical"]["image"]["docker-manifest-digest"] == digest
    assert payload["critical"]["identity"]["docker-reference"] == f"{registry.host}/signed/{algorithm}"
    # Replayed: image and signature copied, byte for byte, under another name that the policy covers, too.
    other = f"{registry.host}/signed/other-{algorithm}"
    group("copy", ref, f"{other}:1")
    group("copy", f"{ref.rpartition(':')[0]}:sha256-{digest[7:]}.sig", f"{other}:sha256-{digest[7:]}.sig")
    with pytest.raises(WeenvError, match="signed for another repository"):
        group(*check, f"{other}:1")


def test_a_group_starts_lazily(node: Node, registry: Registry, home: str) -> None:
    """A base group and a harness group cut and built here are ordinary lazy images to containerd."""
    base = write_tar(os.path.join(home, f"base-{node.line}.tar"), busybox_members())
    noise = os.path.join(home, f"noise-{node.line}.tar")
    write_tar(noise, [Member.directory("opt"), Member("opt/large", os.urandom(8 << 20)), Member("opt/small", b"small one\n")])
    ref = f"{registry.host}/group/start-{node.line}:1"
    built = group("build", ref, "--from", base, "--from", noise, "--kind", "base", "--env", "PATH=/bin", "--cmd", "sh")
    cut = f"{registry.host}/group/start-{node.line}:cut"
    again = group("build", cut, "--from-image", ref, "--layers", "..2", "--no-config", "--cmd", "sh", "--env", "PATH=/bin")
    assert [x["digest"] for x in again["layers"]] == [x["digest"] for x in built["layers"]], "kept byte for byte"
    mark = registry.mark()
    namespace = node.pull(cut)
    assert node.shell(cut, "cat /opt/small; ls /opt", namespace).split("\n") == ["small one", "large", "small", ""]
    fetched = registry.blob_bytes(mark)
    assert fetched[built["layers"][1]["digest"]] < 2 << 20, "the large file was not fetched"
    node.remove_image(cut, namespace)
