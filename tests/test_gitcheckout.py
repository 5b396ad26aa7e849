"""git: {commit: …}: the tree is what git checkout leaves, git status is clean, and it need not read the files to know."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator.turns import turns

from weenv.core.errors import FormatError, NotFoundInSource, WeenvError
from weenv.environment.compose import StackedLayer
from weenv.environment.model import Mutation
from weenv.environment.mutate import changes, gitcheckout
from weenv.environment.mutate.gitformat import PackIndex, pack_entry, read_index, tree_entries, write_index
from weenv.environment.mutate.gitrepo import parse_config
from weenv.environment.mutate.mutation import MutationError
from weenv.environment.mutate.mutator import Mutator
from weenv.layer.toc import DIRECTORY, SYMLINK
from weenv.registry.client import RegistryClient
from weenv_testkit.stacks import Stack, Tree, seen

ENV = {
    "PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C", "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b", "GIT_ADVICE": "0",
    "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
}  # fmt: skip
OLD = 1_600_000_000


def git(cwd: Path | str, *argv: str, check: bool = True) -> str:
    done = subprocess.run(["git", *argv], cwd=cwd, capture_output=True, text=True, env=ENV, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout.strip()


class History:
    """A repository with four commits, checked out at the third."""

    def __init__(self, path: Path, *init: str) -> None:
        self.path = path
        path.mkdir()
        git(path, "init", "-q", "-b", "main", *init, ".")
        rand = random.Random(1)
        self.commits: list[str] = []
        text = [f"line {n}\n" for n in range(3000)]
        for step in range(4):
            text[rand.randrange(3000)] = f"changed in {step}\n"
            self.write("big.txt", "".join(text))
            self.write("same/for/ever.txt", "same\n")
            self.write(f"only/in/{step}.txt", f"{step}\n" * 10)
            for gone in range(step):
                (path / f"only/in/{gone}.txt").unlink(missing_ok=True)
            self.write("tool", "#!/bin/sh\n")
            os.chmod(path / "tool", 0o755 if step % 2 else 0o644)
            (path / "link").unlink(missing_ok=True)
            if step == 2:
                self.write("link", "a file now\n")
            else:
                os.symlink(f"only/in/{step}.txt", path / "link")
            if step == 3:
                (path / "same/for/ever.txt").unlink()
                (path / "same/for").rmdir()
                self.write("same/for", "a file where a directory was\n")
            git(path, "add", "-A")
            git(path, "commit", "-q", "-m", str(step))
            self.commits.append(git(path, "rev-parse", "HEAD"))
        git(path, "checkout", "-q", "main")
        git(path, "reset", "-q", "--hard", self.commits[2])
        git(path, "update-ref", "refs/keep", self.commits[3])
        self.settle()

    def write(self, name: str, data: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).write_text(data)

    def settle(self) -> None:
        """Files of a while ago, and an index that knows it: as in an image that was built the other day."""
        for folder, _, files in os.walk(self.path):
            for name in files:
                if ".git" not in folder:
                    os.utime(os.path.join(folder, name), (OLD, OLD), follow_symlinks=False)
        git(self.path, "update-index", "-q", "--really-refresh")

    def tar(self) -> bytes:
        """The repository as a layer with everything at /testbed, owned by 1000:1000."""
        out = BytesIO()

        def owned(info: tarfile.TarInfo) -> tarfile.TarInfo:
            info.uid = info.gid = 1000
            info.mtime = int(info.mtime)
            info.uname = info.gname = ""
            return info

        with tarfile.open(fileobj=out, mode="w") as archive:
            archive.add(self.path, "testbed", filter=owned)
        return out.getvalue()

    def copy(self, target: Path) -> History:
        """The same repository elsewhere."""
        other = object.__new__(History)
        other.path, other.commits = target, self.commits
        shutil.copytree(self.path, target, symlinks=True)
        return other


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, History]:
    """Repositories that are made once."""
    return {}


def original(originals: dict[str, History], kind: str, factory: pytest.TempPathFactory) -> History:
    if kind not in originals:
        made = History(factory.mktemp("git") / kind, *(("--object-format=sha256",) if kind == "sha256" else ()))
        if kind != "loose":
            git(made.path, "repack", "-adq", "--depth=50")
            git(made.path, "pack-refs", "--all")
            assert not list((made.path / ".git/objects").glob("??/*"))
        originals[kind] = made
    return originals[kind]


@pytest.fixture(params=["loose", "packed", "sha256"])
def history(
    request: pytest.FixtureRequest, originals: dict[str, History], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> History:
    return original(originals, request.param, tmp_path_factory).copy(tmp_path / "repo")


@pytest.fixture
def loose(originals: dict[str, History], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> History:
    return original(originals, "loose", tmp_path_factory).copy(tmp_path / "repo")


async def mutated(history: History, root: Path, *mutations: Mutation) -> tuple[Tree, Mutator]:
    stack = Stack(str(root / "layout"))
    stack.add(history.tar(), threads=1)
    async with RegistryClient() as client:
        mutator = Mutator(client, str(root / "node"))
        refs = await mutator.mutate(mutations, stack.layers)
        fetched = list(mutator.frames.fetched)
        layers = [*stack.layers, *(StackedLayer(ref, f"oci:{root}/node/mutations", True) for ref in refs)]
        view = await mutator.view(layers)
        tree = await seen(view, lambda inode: mutator.read(view, layers, inode))
        mutator.frames.fetched = fetched
        return tree, mutator


def extract(tree: Tree, target: Path) -> Path:
    """The tree on a disk."""
    for path, node in sorted(tree.items()):
        where = os.path.join(os.fsencode(target), *path)
        if node.kind == DIRECTORY:
            os.makedirs(where, exist_ok=True)
        elif node.kind == SYMLINK:
            os.symlink(node.content, where)
            os.utime(where, (node.mtime, node.mtime), follow_symlinks=False)
        else:
            with open(where, "wb") as file:
                file.write(node.content)
            os.chmod(where, node.mode)
            os.utime(where, (node.mtime, node.mtime))
    return target / "testbed"


def work_tree(path: Path) -> dict[str, tuple[str, str]]:
    found = {}
    for folder, names, files in os.walk(path):
        if ".git" in names:
            names.remove(".git")
        for name in [*files, *(name for name in names if os.path.islink(os.path.join(folder, name)))]:
            full = os.path.join(folder, name)
            link = os.path.islink(full)
            mode = "link" if link else oct(os.stat(full).st_mode & 0o100)
            found[os.path.relpath(full, path)] = (mode, os.readlink(full) if link else Path(full).read_text())
        for name in names:
            found.setdefault(os.path.relpath(os.path.join(folder, name), path), ("directory", ""))
    return found


@pytest.mark.parametrize("to", [0, 1, 2, 3])
async def test_it_is_what_git_checkout_leaves(history: History, tmp_path: Path, to: int) -> None:
    commit = history.commits[to]
    short = commit[:10] if to % 2 else commit
    tree, _ = await mutated(history, tmp_path, Mutation(git_commit=short, directory="/testbed"))
    ours = extract(tree, tmp_path / "ours")
    git(history.path, "checkout", "-q", commit)
    assert work_tree(ours) == work_tree(history.path)
    assert git(ours, "status", "--porcelain") == ""
    assert git(ours, "rev-parse", "HEAD") == commit
    assert git(ours, "fsck", "--no-dangling") == ""
    assert git(ours, "ls-files", "-s") == git(history.path, "ls-files", "-s")
    assert git(ours, "diff", "--stat") == ""
    owners = {(node.uid, node.gid) for path, node in tree.items() if path[1:2] != (b".git",)}
    assert owners == {(1000, 1000)}, "also of what is new"


async def test_git_status_need_not_read_a_file_and_sees_what_changes_later(history: History, tmp_path: Path) -> None:
    patch = "--- a/tool\n+++ b/tool\n@@ -1 +1 @@\n-#!/bin/sh\n+#!/bin/zh\n"
    checkout = Mutation(git_commit=history.commits[1], directory="/testbed")
    tree, _ = await mutated(history, tmp_path, checkout)
    ours = extract(tree, tmp_path / "ours")
    for name in ("big.txt", "same/for/ever.txt", "only/in/1.txt"):
        status = os.stat(ours / name)
        (ours / name).write_bytes(bytes(status.st_size))  # nobody who reads it could call it clean
        os.utime(ours / name, (status.st_mtime, status.st_mtime))
    assert git(ours, "status", "--porcelain") == ""
    tree, _ = await mutated(history, tmp_path / "2", checkout, Mutation(patch=patch, directory="/testbed"))
    patched = extract(tree, tmp_path / "patched")
    assert git(patched, "status", "--porcelain") == "M tool", "of the same size, made in the same layer"
    assert "+#!/bin/zh" in git(patched, "diff")


async def test_only_what_differs_is_fetched(loose: History, tmp_path: Path) -> None:
    history = loose
    for number in range(40):
        (history.path / f"data{number}").write_bytes(random.Random(number).randbytes(100_000))
    git(history.path, "add", "-A")
    git(history.path, "commit", "-q", "-m", "data")
    head = git(history.path, "rev-parse", "HEAD")
    history.write("big.txt", "all new\n")
    git(history.path, "commit", "-qam", "big")
    git(history.path, "repack", "-adq", "--depth=50")
    history.settle()
    tree, mutator = await mutated(history, tmp_path, Mutation(git_commit=head, directory="/testbed"))
    assert tree[b"testbed", b"big.txt"].content.startswith(b"line 0\n")
    assert mutator.frames.fetched[1] < 600_000, "of 8 MB"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("local", "local changes"), ("staged", "the index has other changes"), ("untracked", "does not know"),
        ("merge", "merge"), ("eol", "convert"), ("autocrlf", "line endings"), ("noindex", "missing"), ("gitfile", "linked"),
        ("alternates", "borrows"), ("damaged", "damaged"),
    ],
)  # fmt: skip
async def test_what_cannot_be_checked_out_is_said(loose: History, tmp_path: Path, change: str, text: str) -> None:
    history = loose
    to = history.commits[0]
    repo = history.path
    if change == "local":
        history.write("big.txt", "mine\n")
    elif change == "staged":
        history.write("big.txt", "mine\n")
        git(repo, "add", "big.txt")
    elif change == "untracked":
        history.write("only/in/0.txt", "mine\n")
    elif change == "merge":
        git(repo, "checkout", "-q", "-b", "other", history.commits[0])
        history.write("big.txt", "other\n")
        git(repo, "commit", "-qam", "other")
        git(repo, "merge", "-q", "main", check=False)
    elif change == "eol":
        history.write(".gitattributes", "*.txt eol=crlf\n")
        git(repo, "add", "-A")
        git(repo, "commit", "-qm", "attributes")
        history.write("big.txt", "x\n")
        git(repo, "commit", "-qam", "more")
        to = git(repo, "rev-parse", "HEAD~1")
    elif change == "autocrlf":
        git(repo, "config", "core.autocrlf", "true")
    elif change == "noindex":
        (repo / ".git/index").unlink()
    elif change == "gitfile":
        (repo / ".git").rename(tmp_path / "git")
        history.write(".git", f"gitdir: {tmp_path}/git\n")
    elif change == "alternates":
        history.write(".git/objects/info/alternates", "/elsewhere\n")
    else:
        tree = git(repo, "rev-parse", f"{to}^{{tree}}")
        blob = repo / ".git/objects" / tree[:2] / tree[2:]
        os.chmod(blob, 0o644)
        other = git(repo, "rev-parse", f"{history.commits[1]}^{{tree}}")
        blob.write_bytes((repo / ".git/objects" / other[:2] / other[2:]).read_bytes())
    with pytest.raises(MutationError) as caught:
        await mutated(history, tmp_path, Mutation(git_commit=to, directory="/testbed"))
    assert text in str(caught.value)


def made_tree(repo: Path, *rows: str) -> str:
    given = "".join(f"{row}\0" for row in rows)
    done = subprocess.run(["git", "mktree", "-z"], cwd=repo, input=given, text=True, capture_output=True, env=ENV, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("kind", ["trees", "blobs", "deep"])
async def test_a_small_repository_does_not_ask_for_much(
    loose: History, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees that hold one another many times over, and one large file under many names; others have their turns meanwhile."""
    repo = loose.path
    if kind == "blobs":
        monkeypatch.setattr(changes, "MAX_DATA", 16 << 20)
        (repo / "zeros").write_bytes(b"\0" * (4 << 20))
        blob = git(repo, "hash-object", "-w", "zeros")
        (repo / "zeros").unlink()
        tree = made_tree(repo, *(f"100644 blob {blob}\tf{number}" for number in range(50)))
    else:
        monkeypatch.setattr(gitcheckout, "_MAX_CHANGES", 20_000)
        width, levels, name = (10, 12, "d") if kind == "trees" else (1, 40, "d" * 120)
        tree = made_tree(repo)
        for _ in range(levels):
            tree = made_tree(repo, *(f"040000 tree {tree}\t{name}{number}" for number in range(width)))
    commit = git(repo, "commit-tree", "-m", "x", tree)
    async with turns(0.001) as others:
        with pytest.raises(WeenvError, match=r"more than|deeper than"):
            await mutated(loose, tmp_path, Mutation(git_commit=commit, directory="/testbed"))
    assert others.count > 5


@pytest.mark.parametrize("commit", ["0" * 40, "0123456", "ffff" * 16])
async def test_a_commit_that_is_not_there(history: History, tmp_path: Path, commit: str) -> None:
    with pytest.raises(WeenvError) as caught:
        await mutated(history, tmp_path, Mutation(git_commit=commit, directory="/testbed"))
    assert isinstance(caught.value, NotFoundInSource | MutationError)
    assert str(caught.value).startswith("mutations[0]")


async def test_local_changes_elsewhere_stay(history: History, tmp_path: Path) -> None:
    history.write("same/for/ever.txt", "mine\n")
    history.write("build/artefact.o", "x")
    tree, _ = await mutated(history, tmp_path, Mutation(git_commit=history.commits[1], directory="/testbed"))
    ours = extract(tree, tmp_path / "ours")
    assert git(ours, "status", "--porcelain").split("\n") == ["M same/for/ever.txt", "?? build/"]


# -- the formats


def test_an_index_is_written_as_git_writes_it(history: History) -> None:
    width = 32 if "sha256" in (history.path / ".git/config").read_text() else 20
    for version in ("2", "3", "4"):
        git(history.path, "update-index", "--force-write-index", "--index-version", version)
        data = (history.path / ".git/index").read_bytes()
        entries = read_index(data, width)
        assert sorted(map(os.fsdecode, entries)) == git(history.path, "ls-files").splitlines()
        again = read_index(write_index(entries.values(), width), width)
        assert {path: (e.mode, e.name, e.mtime, e.size) for path, e in again.items()} == {
            path: (e.mode, e.name, e.mtime, e.size) for path, e in entries.items()
        }
        (history.path / ".git/index").write_bytes(write_index(entries.values(), width))
        assert git(history.path, "status", "--porcelain") == ""


def test_configuration() -> None:
    text = (
        b'[core]\n\tbare = false # no\n[filter "lfs"] smudge = git-lfs smudge\n[extensions]\nobjectFormat=sha256\n[x]\nflag\n'
    )
    assert parse_config(text) == {
        "core.bare": "false", "filter.lfs.smudge": "git-lfs smudge", "extensions.objectformat": "sha256", "x.flag": "true"
    }  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([20, 32]))
def test_any_bytes_are_read_or_refused(data: bytes, width: int) -> None:
    readers: list[Any] = [
        lambda: read_index(b"DIRC\0\0\0\2\0\0\0\1" + data, width),
        lambda: read_index(b"DIRC\0\0\0\4\0\0\0\3" + data, width),
        lambda: PackIndex(b"\xfftOc\0\0\0\2" + data + bytes(1100), width, "x").find(b"\0" * width, 4),
        lambda: PackIndex(b"\xfftOc\0\0\0\2" + bytes(1020) + b"\0\0\0\1" + data, width, "x").offset(b"\0" * width),
        lambda: pack_entry(data, width, "x"),
        lambda: tree_entries(b"100644 a\0" + data, width, "x"),
    ]
    for reader in readers:
        try:
            reader()
        except FormatError:
            continue
