"""Tasks in SWE-smith's shape, made from the registries: three repositories, at least 200 bugs, two harnesses, one evaluator.

A repository is a PyPI source archive with its tests, as a git repository of one commit at ``/testbed``; a task a patch of a
few lines by swesmith's own generators that makes one of the repository's tests fail; a harness an agent's command below
``/opt/harness``; the evaluator pytest below ``/opt/evaluator``. Made once per machine, and the same for the same versions::

    ${WEENV_TOOLS:-/var/cache/weenv-tools}/tasks-<version>/
        repo-<name>.tar, harness-<name>.tar, evaluator.tar     layers: deterministic, root's, one time stamp
        tasks.json                                             [{"id", "repo", "patch", "file", "strategy", "fail"}]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from weenv.environment.mutate.gitformat import read_index, write_index
from weenv_testkit import images, tools
from weenv_testkit.fetch_tools import TOOLS
from weenv_testkit.images import MTIME
from weenv_testkit.procs import run
from weenv_testkit.registry import Registry
from weenv_testkit.store import PACKAGES, Store

VERSION = 1
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


def load() -> Tasks:
    """The tasks of this machine, made now where they are not there yet (minutes)."""
    final = TOOLS / f"tasks-{VERSION}"
    if not (final / "tasks.json").exists():
        work = TOOLS / f".new-tasks-{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        try:
            _make(work)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(work / "out", final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    rows = json.loads((final / "tasks.json").read_text())
    return Tasks(final, tuple(Task(**{**row, "fail": tuple(row["fail"])}) for row in rows))


def publish(tasks: Tasks, store: Store, registry: Registry) -> dict[str, str]:
    """Convert all groups into the registry; name -> reference. ``base`` is a Debian with Python."""
    tars = {"base": images.debian_tar(PACKAGES), **tasks.groups}
    found = {}
    for name, tar in tars.items():
        store.layout.image([store.layout.layer(tar, "none")], f"tasks-{name}", **_config(name))
        target = f"{registry.host}/tasks/{name}:1"
        run(*tools.weenv(), "convert", f"oci:{store.layout.directory}:tasks-{name}", target, timeout=600, env=dict(os.environ))
        found[name] = target
    return found


def _config(name: str) -> dict[str, object]:
    if name.startswith("repo-"):
        return {"WorkingDir": "/testbed", "Env": ["PYTHONPATH=/testbed", "PYTHONDONTWRITEBYTECODE=1"]}
    if name.startswith("harness-"):
        return {"Env": ["PATH=/opt/harness/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]}
    if name == "evaluator":
        return {"Env": ["PYTHONPATH=/opt/evaluator"]}
    return {}


# -- making them ---------------------------------------------------------------------------------------------------------


def _pip(python: str) -> list[str]:
    return [python, "-m", "pip", "--disable-pip-version-check", "-q", "--no-input"]


def _make(work: Path) -> None:
    environment = dict(os.environ)
    out = work / "out"
    out.mkdir()
    run(sys.executable, "-m", "venv", str(work / "venv"), timeout=120)
    python = str(work / "venv/bin/python")
    run(*_pip(python), "install", *GENERATOR, timeout=600, env=environment)
    rows: list[dict[str, object]] = []
    for name, (requirement, package, count, tests) in REPOSITORIES.items():
        archives = work / f"sdist-{name}"
        distribution = requirement.partition("==")[0]
        run(
            *_pip(python), "download", "--no-deps", f"--no-binary={distribution}", "--dest", str(archives), requirement,
            timeout=300, env=environment,
        )  # fmt: skip
        repository = work / name
        _repository(next(archives.glob("*.tar.gz")), repository)
        scratch = work / f"scratch-{name}"
        scratch.mkdir()
        generator = str(Path(__file__).with_name("task_generator.py"))
        made = json.loads(
            run(
                python, generator, str(repository), package, str(count), str(SEED), str(scratch), *tests, timeout=3600,
                env={**environment, **_GIT, "PYTHONHASHSEED": "0"},
            )
        )  # fmt: skip
        rows += [{"id": f"{name}-{number:03d}", "repo": name, **row} for number, row in enumerate(made)]
        _tar(out / f"repo-{name}.tar", repository, "testbed")
    for name, packages in (("evaluator", EVALUATOR), ("harness-pip", (HARNESSES["pip"],))):
        target = work / name
        flags = ["--no-deps"] if name != "evaluator" else []
        run(*_pip(python), "install", "--no-compile", *flags, "--target", str(target), *packages, timeout=300, env=environment)
        _tar(out / f"{name}.tar", target, "opt/evaluator" if name == "evaluator" else "opt/harness/lib")
    if shutil.which("npm"):
        run(
            "npm",
            "pack",
            "--silent",
            "--pack-destination",
            str(work),
            HARNESSES["npm"],
            timeout=300,
            env=environment,
            cwd=str(work),
        )
        target = work / "npm"
        with tarfile.open(next(work.glob("*.tgz"))) as archive:
            archive.extractall(target, filter="data")
        _tar(out / "harness-npm.tar", target / "package", "opt/harness/npm")
    (out / "tasks.json").write_text(json.dumps(rows, indent=1))


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
