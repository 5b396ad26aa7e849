"""Changes to the configuration of others: what is asked for, nothing else, and back."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import ConfigError
from weenv.systemd.install import edits
from weenv.systemd.install.edits import Append, Put

CONFIG = """\
# mine
version = 2   # old
imports = ['/a.toml',   # first
  "/b.toml"]

[plugins]
  [plugins."io.containerd.grpc.v1.cri"] # cri
    sandbox_image = 'pause' # do not touch

[other]
x = 1
"""
IMPORT = Append(("imports",), "/c.toml")
SNAPSHOTTER = Put(("plugins", "io.containerd.grpc.v1.cri", "containerd", "snapshotter"), "weenv")
UNPACK = Append(("plugins", "transfer", "unpack_config"), {"platform": "linux", "snapshotter": "weenv"})


def lost(before: str, after: str) -> list[str]:
    """Lines that are not there any more."""
    kept = after.splitlines()
    return [line for line in before.splitlines() if line not in kept]


def test_toml_keeps_comments_and_spelling() -> None:
    text, undo = edits.edit_toml(CONFIG, [IMPORT, SNAPSHOTTER, UNPACK], "c.toml")
    found = tomllib.loads(text)
    assert found["imports"] == ["/a.toml", "/b.toml", "/c.toml"]
    assert found["plugins"]["io.containerd.grpc.v1.cri"] == {"sandbox_image": "pause", "containerd": {"snapshotter": "weenv"}}
    assert found["plugins"]["transfer"]["unpack_config"] == [{"platform": "linux", "snapshotter": "weenv"}]
    assert len(lost(CONFIG, text)) <= 1, "the line that the list ended on, and no other"
    assert edits.edit_toml(text, [IMPORT, SNAPSHOTTER, UNPACK], "c.toml") == (text, [])
    back = edits.revert_toml(text, json.loads(json.dumps(undo)), "c.toml")
    assert tomllib.loads(back) == tomllib.loads(CONFIG) and not lost(CONFIG, back)


def test_a_value_that_was_there_comes_back() -> None:
    text = '[a]\nsnapshotter = "overlayfs" # mine\n'
    changed, undo = edits.edit_toml(text, [Put(("a", "snapshotter"), "weenv")], "c.toml")
    assert changed == '[a]\nsnapshotter = "weenv" # mine\n'
    assert edits.revert_toml(changed, undo, "c.toml") == text


def test_what_somebody_has_changed_since_stays() -> None:
    changed, undo = edits.edit_toml(CONFIG, [IMPORT, SNAPSHOTTER], "c.toml")
    changed = changed.replace('snapshotter = "weenv"', 'snapshotter = "zfs"').replace("x = 1", "x = 2")
    back = tomllib.loads(edits.revert_toml(changed, undo, "c.toml"))
    assert back["plugins"]["io.containerd.grpc.v1.cri"]["containerd"] == {"snapshotter": "zfs"}
    assert back["imports"] == ["/a.toml", "/b.toml"] and back["other"] == {"x": 2}


def test_tables_that_others_have_filled_meanwhile_stay() -> None:
    changed, undo = edits.edit_toml("", [Put(("a", "b", "c"), 1)], "c.toml")
    back = edits.revert_toml(changed + "d = 2\n", undo, "c.toml")
    assert tomllib.loads(back) == {"a": {"b": {"d": 2}}}
    assert tomllib.loads(edits.revert_toml(changed, undo, "c.toml")) == {}


def test_tables_in_any_order() -> None:
    text = "[plugins.a]\nx = 1\n[other]\ny = 2\n[plugins.b]\nz = 3\n"
    changed, undo = edits.edit_toml(text, [Put(("plugins", "b", "w"), True), IMPORT], "c.toml")
    tables = {"plugins": {"a": {"x": 1}, "b": {"z": 3, "w": True}}, "other": {"y": 2}}
    assert tomllib.loads(changed) == {"imports": ["/c.toml"], **tables}
    assert tomllib.loads(edits.revert_toml(changed, undo, "c.toml")) == tomllib.loads(text)


@pytest.mark.parametrize(
    ("text", "change", "said"),
    [
        ("plugins = 1\n", SNAPSHOTTER, "plugins.* is no table"),
        ("imports = 'x'\n", IMPORT, "imports is no list"),
        ("imports = \n", IMPORT, "not valid TOML"),
        pytest.param("x = " + 5000 * "1", IMPORT, "not valid TOML", id="number"),
        ("a = {b = 1}\na.c = 2\n", IMPORT, "not valid TOML"),
    ],
)
def test_what_cannot_be_edited_is_said(text: str, change: edits.Change, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        edits.edit_toml(text, [change], "c.toml")


def test_json_keeps_order_and_indentation() -> None:
    text = '{\n\t"log-driver": "none",\n\t"storage-driver": "overlay2",\n\t"features": {\n\t\t"buildkit": true\n\t}\n}\n'
    changes = [Put(("features", "containerd-snapshotter"), True), Put(("storage-driver",), "weenv")]
    changed, undo = edits.edit_json(text, changes, "d.json")
    assert json.loads(changed) == {
        "log-driver": "none", "storage-driver": "weenv", "features": {"buildkit": True, "containerd-snapshotter": True},
    }  # fmt: skip
    assert lost(text, changed) == ['\t"storage-driver": "overlay2",', '\t\t"buildkit": true']
    assert edits.edit_json(changed, changes, "d.json") == (changed, [])
    assert edits.revert_json(changed, undo, "d.json") == text
    assert json.loads(edits.edit_json("", changes, "d.json")[0])["storage-driver"] == "weenv"
    for wrong in ("[1]", "{", '{"features": 1}'):
        with pytest.raises(ConfigError):
            edits.edit_json(wrong, changes, "d.json")


NAMES = st.sampled_from(["a", "b", "c.d", "e"])
WORDS = st.sampled_from(["x", "y"])
VALUES = st.one_of(st.booleans(), st.integers(-5, 5), WORDS, st.lists(WORDS, max_size=2))
TREES = st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(tuple)
CHANGES = st.one_of(st.builds(Put, PATHS, st.sampled_from(["x", "w"])), st.builds(Append, PATHS, st.sampled_from(["x", "z"])))


@given(st.dictionaries(NAMES, TREES, max_size=3), st.lists(CHANGES, max_size=3))
def test_every_change_can_be_taken_back(tree: dict[str, Any], changes: list[edits.Change]) -> None:
    text = json.dumps(tree)
    try:
        changed, undo = edits.edit_json(text, changes, "d.json")
    except ConfigError:
        return
    assert edits.edit_json(changed, changes[-1:], "d.json") == (changed, []), "done is done"
    assert json.loads(edits.revert_json(changed, undo, "d.json")) == tree
