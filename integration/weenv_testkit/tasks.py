"""Tasks in SWE-smith's shape, made from the registries: three repositories, at least 200 bugs, two harnesses, one evaluator.

A repository is a PyPI source archive with its tests, as a git repository of one commit at ``/testbed``; a task a patch of a
few lines by swesmith's own generators that makes one of the repository's tests fail; a harness an agent's command below
``/opt/harness``; the evaluator pytest below ``/opt/evaluator``. Made once per machine, and the same for the same versions::

    ${WEENV_TOOLS:-/var/cache/weenv-tools}/tasks-<version>/
        repo-<name>.tar, harness-<name>.tar, evaluator.tar     layers: deterministic, root's, one time stamp
        <repository>.json      [{"id", "repo", "patch", "file", "strategy", "fail"}], as many as were ever asked for
        generator/             a virtual environment with swesmith, made when the first task is

Making all of them takes minutes, a few of them seconds: :data:`FEW` are enough to see that everything works.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weenv.environment.mutate.gitformat import read_index, write_index
from weenv_testkit import images, tools
from weenv_testkit.fetch_tools import TOOLS
from weenv_testkit.images import MTIME
from weenv_testkit.procs import run
from weenv_testkit.registry import Registry
from weenv_testkit.store import PACKAGES

VERSION = 2
"""Changes with anything below that changes the tasks."""
SEED = 24
"""swesmith's own default."""

REPOSITORIES = {
    "boltons": ("boltons==26.2.0", "boltons", 140, ("tests",)),
    "sqlparse": ("sqlparse==0.6.1", "sqlparse", 40, ("tests/test_parse.py", "tests/test_grouping.py", "tests/test_split.py")),
    "tinydb": ("tinydb==4.9.0", "tinydb", 30, ("tests/test_queries.py", "tests/test_tables.py", "tests/test_tinydb.py")),
}
"""Name -> (source archive, the directory that gets the bugs, tasks, tests for modules that have none of their own).

swesmith has a profile of each."""
GENERATOR = (
    "swesmith==0.0.9", "astor", "libcst", "python-dotenv", "unidiff", "pytest==9.0.1", "tree-sitter", "tree-sitter-c",
    "tree-sitter-cpp", "tree-sitter-c-sharp", "tree-sitter-go", "tree-sitter-java", "tree-sitter-javascript", "tree-sitter-php",
    "tree-sitter-ruby", "tree-sitter-rust", "tree-sitter-typescript",
)  # fmt: skip
"""swesmith without its extras, which bring docker and model clients: the procedural generators need these."""
ALL = {name: count for name, (_, _, count, _) in REPOSITORIES.items()}
FEW = dict.fromkeys(REPOSITORIES, 4)
"""Tasks of each repository, for tests that need some."""
EVALUATOR = ("pytest==9.0.1",)
HARNESSES = {"pip": "mini-swe-agent==1.14.0", "npm": "@anthropic-ai/claude-code@1.0.128"}

_DATE = {"GIT_AUTHOR_DATE": f"{MTIME} +0000", "GIT_COMMITTER_DATE": f"{MTIME} +0000"}
_GIT = {
    **_DATE, "GIT_AUTHOR_NAME": "kit", "GIT_AUTHOR_EMAIL": "kit@localhost", "GIT_COMMITTER_NAME": "kit",
    "GIT_COMMITTER_EMAIL": "kit@localhost", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """One task: ``patch`` breaks the repository so that the tests in ``fail`` fail."""

    id: str
    repo: str
    patch: str
    file: str
    strategy: str
    fail: tuple[str, ...]

    def inverse(self) -> str:
        """The patch that mends it."""
        swapped = []
        for line in self.patch.splitlines():
            if line.startswith(("--- ", "+++ ", "diff ", "index ")):
                swapped.append(line)
            elif line.startswith("@@ "):
                _, old, new, rest = line.split(" ", 3)
                swapped.append(f"@@ -{new[1:]} +{old[1:]} {rest}")
            else:
                swapped.append({"-": "+", "+": "-"}.get(line[:1], line[:1]) + line[1:])
        return "\n".join(swapped) + "\n"


@dataclass(frozen=True)
class Tasks:
    """Everything, on disk: ``directory`` holds the tars."""

    directory: Path
    tasks: tuple[Task, ...]

    @property
    def groups(self) -> dict[str, str]:
        """Name of a group -> its layer's tar."""
        return {path.stem: str(path) for path in sorted(self.directory.glob("*.tar"))}


def load(counts: Mapping[str, int] = ALL) -> Tasks:
    """So many tasks of each repository, made now where they are not there yet; the first ones are the same for any number."""
    final = TOOLS / f"tasks-{VERSION}"
    if not final.exists():
        work = TOOLS / f".new-tasks-{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            _make_groups(work)
            os.rename(work / "out", final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    rows: list[dict[str, Any]] = []
    for name, count in counts.items():
        path = final / f"{name}.json"
        found = json.loads(path.read_text()) if path.exists() else []
        if len(found) < count:
            found = make_tasks(name, count)
            path.with_suffix(".tmp").write_text(json.dumps(found, indent=1))
            os.rename(path.with_suffix(".tmp"), path)
        rows += found[:count]
    return Tasks(final, tuple(Task(**{**row, "fail": tuple(row["fail"])}) for row in rows))


VERSIONS = {
    "base": "12",
    "evaluator": EVALUATOR[0].rpartition("=")[2],
    **{f"repo-{name}": row[0].rpartition("=")[2] for name, row in REPOSITORIES.items()},
    "harness-pip": HARNESSES["pip"].rpartition("=")[2],
    "harness-npm": HARNESSES["npm"].rpartition("@")[2],
}


def publish(tasks: Tasks, registry: Registry, names: Iterable[str] = ()) -> dict[str, str]:
    """Build groups (all of them, or these) in the registry; name -> reference. ``base`` is a Debian with Python."""
    wanted = list(names) or ["base", *tasks.groups]
    return {name: publish_one(registry, name, base() if name == "base" else tasks.groups[name]) for name in wanted}


def base() -> str:
    """The lowest group's tar."""
    return images.debian_tar(PACKAGES)


def publish_one(registry: Registry, name: str, tar: str, version: str = "") -> str:
    """``weenv group build`` of one group from its tar, under the tag ``1``; its reference."""
    target = f"{registry.host}/tasks/{name}:1"
    run(*build_argv(target, name, tar, version), timeout=600, env=dict(os.environ))
    return target


def build_argv(target: str, name: str, tar: str, version: str = "") -> list[str]:
    """The command that publishes a group."""
    kind = {"repo": "repository"}.get(name.partition("-")[0], name.partition("-")[0])
    about = ["--kind", kind, "--version", version or VERSIONS[name]]
    return [*tools.weenv(), "group", "build", target, "--from", tar, *about, *_settings(name)]


def _settings(name: str) -> list[str]:
    path = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if name == "base":
        return ["--env", f"PATH={path}", "--cmd", "/bin/sh"]
    if name.startswith("repo-"):
        return ["--workdir", "/testbed", "--env", "PYTHONPATH=/testbed", "--env", "PYTHONDONTWRITEBYTECODE=1"]
    if name.startswith("harness-"):
        return ["--env", "PATH=/opt/harness/bin"]
    return ["--env", "PYTHONPATH=/opt/evaluator"]


def stack(task: Task, harness: str) -> list[str]:
    """Names of a task's groups, bottom to top; ``harness`` is ``pip`` or ``npm``."""
    return ["base", f"repo-{task.repo}", f"harness-{harness}", "evaluator"]


def plan_text(name: str, groups: Iterable[str], *patches: str) -> str:
    """A plan: references of groups, and patches of ``/testbed``."""
    lines = ["apiVersion: weenv.dev/v1", "kind: EnvironmentPlan", f"metadata: {{name: {name}}}", "groups:"]
    lines += [f"  - {group}" for group in groups]
    if patches:
        lines.append("mutations:")
    for patch in patches:
        lines += [f"  - patch: {json.dumps(patch)}", "    directory: /testbed"]
    return "\n".join(lines) + "\n"


# -- making them ---------------------------------------------------------------------------------------------------------


def _pip(python: str) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check", "-q", "--no-input"]


def _generator(final: Path) -> str:
    """Python with swesmith."""
    home = final / "generator"
    python = str(home / "bin/python")
    if not (home / "complete").exists():
        shutil.rmtree(home, ignore_errors=True)
        run(sys.executable, "-m", "venv", str(home), timeout=120)
        run(*_pip(python), "install", *GENERATOR, timeout=600, env=dict(os.environ))
        (home / "complete").touch()
    return python


def make_tasks(name: str, count: int) -> list[dict[str, Any]]:
    """The first tasks of a repository whose group is there, made now."""
    final = TOOLS / f"tasks-{VERSION}"
    _, package, _, tests = REPOSITORIES[name]
    python = _generator(final)
    generator = str(Path(__file__).with_name("task_generator.py"))
    environment = {**os.environ, **_GIT, "PYTHONHASHSEED": "0"}
    with tempfile.TemporaryDirectory(prefix=f".tasks-{name}-", dir=TOOLS) as work:
        with tarfile.open(final / f"repo-{name}.tar") as archive:
            archive.extractall(work, filter="data")
        os.mkdir(f"{work}/scratch")
        argv = [python, generator, f"{work}/testbed", package, str(count), str(SEED), f"{work}/scratch", *tests]
        made = json.loads(run(*argv, timeout=3600, env=environment))
    return [{"id": f"{name}-{number:03d}", "repo": name, **row} for number, row in enumerate(made)]


def _make_groups(work: Path) -> None:
    environment = dict(os.environ)
    out = work / "out"
    out.mkdir()
    for name, (requirement, *_) in REPOSITORIES.items():
        archives = work / f"sdist-{name}"
        distribution = requirement.partition("==")[0]
        run(
            *_pip(sys.executable), "download", "--no-deps", f"--no-binary={distribution}", "--dest",
            str(archives), requirement, timeout=300, env=environment,
        )  # fmt: skip
        repository = work / name
        _repository(next(archives.glob("*.tar.gz")), repository)
        _tar(out / f"repo-{name}.tar", repository, "testbed")
    target = work / "evaluator"
    run(*_pip(sys.executable), "install", "--no-compile", "--target", str(target), *EVALUATOR, timeout=300, env=environment)
    _tar(out / "evaluator.tar", target, "opt/evaluator")
    pip_harness(HARNESSES["pip"], out / "harness-pip.tar")
    if shutil.which("npm"):
        npm_harness(HARNESSES["npm"], out / "harness-npm.tar")


def pip_harness(requirement: str, out: Path) -> None:
    """The tar of an agent from PyPI."""
    with tempfile.TemporaryDirectory() as work:
        argv = [*_pip(sys.executable), "install", "--no-compile", "--no-deps", "--target", f"{work}/lib", requirement]
        run(*argv, timeout=300, env=dict(os.environ))
        _tar(out, Path(work, "lib"), "opt/harness/lib")


def npm_harness(package: str, out: Path) -> None:
    """The tar of an agent from npm, as packed there."""
    with tempfile.TemporaryDirectory() as work:
        argv = ["npm", "pack", "--silent", "--pack-destination", work, package]
        run(*argv, timeout=300, env=dict(os.environ), cwd=work)
        with tarfile.open(next(Path(work).glob("*.tgz"))) as archive:
            archive.extractall(f"{work}/x", filter="data")
        _tar(out, Path(work, "x/package"), "opt/harness/npm")


def _repository(archive: Path, target: Path) -> None:
    """The archive's tree as a git repository of one commit, the same bytes every time."""
    with tarfile.open(archive) as source:
        source.extractall(target.with_suffix(".x"), filter="data")
    os.rename(next(target.with_suffix(".x").iterdir()), target)
    git = ["git", "-C", str(target)]
    environment = {**os.environ, **_GIT}
    run(*git, "init", "-q", "-b", "main", env=environment)
    shutil.rmtree(target / ".git/hooks", ignore_errors=True)
    _settle(target)
    run(*git, "add", "-A", env=environment)
    run(*git, "commit", "-q", "-m", archive.name, env=environment)
    run(*git, "-c", "pack.threads=1", "repack", "-adq", env=environment)
    run(*git, "update-index", "-q", "--really-refresh", env=environment)
    _index(target)


def _index(target: Path) -> None:
    """Take out of the index what it says of this machine: inode numbers, change times."""
    path = target / ".git/index"
    entries = read_index(path.read_bytes(), 20).values()
    path.write_bytes(write_index((e.stat(mtime=MTIME, mtime_ns=0, uid=0, gid=0, size=e.size) for e in entries), 20))


def _settle(target: Path) -> None:
    for folder, _, files in os.walk(target):
        for name in files:
            os.utime(os.path.join(folder, name), (MTIME, MTIME), follow_symlinks=False)


def _tar(path: Path, directory: Path, prefix: str) -> None:
    """A directory as a layer at ``prefix``: sorted, root's, one time stamp; no compiled files and nothing of this machine."""

    def plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        base = os.path.basename(info.name)
        if base == "__pycache__" or base.endswith(".pyc"):
            return None
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        # The index is younger than the files that it lists, or git would look at them all.
        info.mtime = MTIME + 1 if info.name.endswith(".git/index") else MTIME
        return info

    def members(folder: str) -> list[str]:
        found = []
        for name in sorted(os.listdir(folder)):
            full = os.path.join(folder, name)
            found.append(full)
            if os.path.isdir(full) and not os.path.islink(full):
                found += members(full)
        return found

    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        steps = prefix.split("/")
        for depth in range(1, len(steps) + 1):
            info = tarfile.TarInfo("/".join(steps[:depth]))
            info.type, info.mode, info.mtime = tarfile.DIRTYPE, 0o755, MTIME
            archive.addfile(info)
        for full in members(str(directory)):
            name = f"{prefix}/{os.path.relpath(full, directory)}"
            if "/__pycache__" not in name:
                archive.add(full, name, recursive=False, filter=plain)
