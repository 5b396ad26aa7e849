"""From what is on a system to what should be, again and again, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weenv.core.errors import ConfigError
from weenv.systemd.install import record, steps
from weenv.systemd.install.edits import Append, Put
from weenv.systemd.install.files import Item
from weenv.systemd.install.record import Record
from weenv.systemd.install.steps import Amend
from weenv.systemd.install.tree import Tree
from weenv_testkit.trees import contents

ITEMS = [Item("/usr/u/a", b"a\n"), Item("/usr/u/b", b"b\n"), Item("/etc/weenv/config.toml", b"# first\n", keep=True)]
LINKS = {"/etc/wants/a": "/usr/u/a"}
TOML = Amend("/etc/c.toml", "toml", [Append(("imports",), "/x")])
JSON = Amend("/etc/d.json", "json", [Put(("driver",), "weenv")], "")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/c.toml").write_text("# mine\nx = 1\n")
    return Tree(str(tmp_path))


def install(tree: Tree, items: list[Item] = ITEMS, links: dict[str, str] = LINKS, *amends: Amend) -> steps.Plan:
    known = record.load(tree) or Record()
    plan = steps.plan(tree, known, items, links, amends or (TOML, JSON), within=("/usr/u",))
    if not plan.empty:
        steps.begin(tree, known, plan)
        steps.carry_out(tree, known, plan)
        steps.enable(tree, plan.links)
        steps.finish(tree, known)
    return plan


def uninstall(tree: Tree) -> steps.Removal:
    known = record.load(tree)
    assert known is not None
    removal = steps.plan_removal(tree, known)
    steps.remove(tree, known, removal)
    return removal


def test_there_and_back(tree: Tree, tmp_path: Path) -> None:
    before = contents(str(tmp_path))
    plan = install(tree)
    assert not plan.conflicts and tree.read("/usr/u/a") == b"a\n" and tree.link("/etc/wants/a") == "/usr/u/a"
    assert tree.read("/etc/c.toml.before-weenv") == b"# mine\nx = 1\n" and b"# mine" in (tree.read("/etc/c.toml") or b"")
    assert install(tree).empty, "a second run has nothing to do"
    uninstall(tree)
    assert contents(str(tmp_path)) == before


def test_a_copy_is_as_secret_as_the_file(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "etc/c.toml").chmod(0o600)
    install(tree)
    assert (tmp_path / "etc/c.toml.before-weenv").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "etc/c.toml").stat().st_mode & 0o777 == 0o600


def test_a_plan_changes_nothing(tree: Tree, tmp_path: Path) -> None:
    before = contents(str(tmp_path))
    plan = steps.plan(tree, Record(), ITEMS, LINKS, [TOML, JSON], within=("/usr/u",))
    text = "".join(write.diff() for write in plan.writes)
    assert contents(str(tmp_path)) == before
    assert "--- /dev/null\n+++ /usr/u/a\n@@ -0,0 +1 @@\n+a\n" in text and '+imports = ["/x"]' in text and " # mine" in text


def test_the_next_version_replaces_what_is_ours(tree: Tree) -> None:
    install(tree)
    plan = install(tree, [Item("/usr/u/a", b"new\n"), ITEMS[2]], {})
    assert not plan.conflicts and tree.read("/usr/u/a") == b"new\n"
    assert set(plan.stale) == {"/usr/u/b", "/etc/wants/a"}
    assert tree.read("/usr/u/b") is None and tree.link("/etc/wants/a") is None
    assert install(tree, [Item("/usr/u/a", b"new\n"), ITEMS[2]], {}).empty


def test_what_is_not_ours_is_a_conflict(tree: Tree) -> None:
    tree.write("/usr/u/a", b"somebody's\n")
    plan = steps.plan(tree, Record(), ITEMS, LINKS, [], within=())
    assert plan.conflicts == ["/usr/u/a"]
    install(tree, [ITEMS[1]], {})
    tree.write("/usr/u/b", b"edited\n")
    known = record.load(tree)
    assert known is not None
    assert steps.plan(tree, known, [Item("/usr/u/b", b"new\n")], {}, [], within=()).conflicts == ["/usr/u/b"]
    removal = uninstall(tree)
    assert removal.kept == {"/usr/u/b": "it has been changed since"} and tree.read("/usr/u/b") == b"edited\n"


def test_a_configuration_that_is_there_is_kept(tree: Tree) -> None:
    tree.write("/etc/weenv/config.toml", b"[run]\n")
    install(tree)
    assert tree.read("/etc/weenv/config.toml") == b"[run]\n"
    uninstall(tree)
    assert tree.read("/etc/weenv/config.toml") == b"[run]\n"


def test_changes_of_others_after_ours_stay(tree: Tree) -> None:
    install(tree)
    tree.write("/etc/c.toml", (tree.read("/etc/c.toml") or b"") + b"y = 2\n")
    assert install(tree).empty
    uninstall(tree)
    assert tree.read("/etc/c.toml") == b"# mine\nx = 1\ny = 2\n" and tree.read("/etc/c.toml.before-weenv") is None


def test_more_is_asked_for_later(tree: Tree, tmp_path: Path) -> None:
    before = contents(str(tmp_path))
    install(tree)
    more = Amend("/etc/c.toml", "toml", [Append(("imports",), "/x"), Put(("t", "s"), "weenv")])
    plan = install(tree, ITEMS, LINKS, more, JSON)
    assert [write.path for write in plan.writes] == ["/etc/c.toml"]
    uninstall(tree)
    assert contents(str(tmp_path)) == before


@pytest.mark.parametrize("stop", ["begin", "half", "all but the record"])
def test_an_interrupted_installation_is_finished_or_taken_back(tree: Tree, tmp_path: Path, stop: str) -> None:
    before = contents(str(tmp_path))

    def interrupted() -> None:
        known = Record()
        plan = steps.plan(tree, known, ITEMS, LINKS, [TOML, JSON], within=("/usr/u",))
        steps.begin(tree, known, plan)
        if stop == "half":
            plan.writes = plan.writes[::2]
        if stop != "begin":
            steps.carry_out(tree, known, plan)

    interrupted()
    assert install(tree).conflicts == [] and install(tree).empty
    uninstall(tree)
    assert contents(str(tmp_path)) == before
    interrupted()
    uninstall(tree)
    assert contents(str(tmp_path)) == before


def test_records(tree: Tree) -> None:
    assert record.load(tree) is None
    for wrong in ("[]", "{", '{"format": 1, "files": 3}', '{"format": 1, "edits": {"a": {}}}', '{"format": 2}'):
        tree.write(record.PATH, wrong.encode())
        with pytest.raises(ConfigError):
            record.load(tree)
    tree.remove(record.PATH)
    install(tree)
    data = json.loads(tree.read(record.PATH) or b"")
    assert data["format"] == 1 and set(data["files"]) == {item.path for item in ITEMS}
