"""environment/recall.py: what is remembered of a plan, and when it is not believed any more."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from weenv.environment.images import _sealed
from weenv.environment.recall import Ready, key, recall, remember, seal
from weenv.registry.groupref.keys import generate, write_key_pair
from weenv.registry.groupref.policy import files_of, policy_from_tables

PLAN = b"apiVersion: weenv.dev/v1\n"
READY = Ready("weenv.local/plan/x:1", {"config": {}}, "sha256:" + "0" * 64, "x", runs=((("true",), "/"),))


def name(tables: dict[str, Any], text: bytes = PLAN, path: str = "/plan.yaml") -> str:
    return key(text, path, tables, "default", "weenv")


def test_what_is_remembered_comes_back(tmp_path: Path) -> None:
    at, entry = str(tmp_path), name({})
    assert recall(at, entry) is None
    for until, there in ((0.0, True), (time.time() + 60, True), (time.time() - 1, False), (time.time() + 7200, False)):
        remember(at, entry, READY, until, [])
        found = recall(at, entry)
        assert (found is not None) == there
        if found is not None:
            assert (found.name, found.chain, found.runs, found.recalled) == (READY.name, READY.chain, READY.runs, True)
    for damaged in ("", "[]", "{}", '{"until": 0, "policy": [["/x"]]}', '{"until": 0, "policy": 5}'):
        (tmp_path / entry).write_text(damaged)
        assert recall(at, entry) is None


def test_an_entry_is_for_one_file_configuration_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = {"match": "r.example/**", "keys": ["team.pub"]}
    policies: list[dict[str, Any]] = [
        {}, {"policy": {"default": "allow"}}, {"policy": {"default": "deny"}}, {"policy": {"rules": [rule]}},
        {"policy": {"rules": [{**rule, "identity": ["other/**"]}]}}, {"policy": {"file": "policy.yaml"}},
    ]  # fmt: skip
    entries = [name(tables) for tables in policies]
    assert len(set(entries)) == len(entries) and all(entries)
    assert name({}, PLAN + b"#") != name({}) != name({}, path="/other.yaml")
    assert name({}, b"patch: {file: x}") == "" == name({}, b'{"file": "x"}')
    monkeypatch.chdir(tmp_path)
    moved = [name(tables) for tables in policies]
    assert moved[0] == entries[0] and not set(moved[1:]) & set(entries), "relative names of keys mean other files there"


@pytest.mark.parametrize("form", ["inline", "yaml", "toml"])
def test_it_holds_as_long_as_the_policy_and_its_keys_do(tmp_path: Path, form: str) -> None:
    at, team, other = str(tmp_path / "plans"), str(tmp_path / "team"), str(tmp_path / "other")
    for prefix in (team, other):
        write_key_pair(prefix, generate())
    inline: dict[str, Any] = {"default": "deny", "rules": [{"match": "r.example/**", "keys": [f"{team}.pub", f"{other}.pub"]}]}
    file = tmp_path / f"policy.{form}"
    if form == "yaml":
        file.write_text(json.dumps(inline))
    elif form == "toml":
        file.write_text('default = "deny"\n[[rules]]\nmatch = "r.example/**"\nkeys = ["team.pub", "other.pub"]\n')
    tables = {"policy": inline if form == "inline" else {"file": str(file)}}
    policy = policy_from_tables(tables)
    assert policy is not None
    sealed = _sealed(tables, policy)
    assert sealed is not None
    own = [] if form == "inline" else [str(file)]
    assert [path for path, _ in sealed] == [*own, f"{other}.pub", f"{team}.pub"] == files_of(tables, policy)
    remember(at, name(tables), READY, 0, sealed)
    assert recall(at, name(tables)) is not None
    kept = Path(f"{team}.pub").read_bytes()
    Path(f"{team}.pub").write_bytes(Path(f"{other}.pub").read_bytes())
    assert recall(at, name(tables)) is None, "another key"
    os.unlink(f"{team}.pub")
    assert recall(at, name(tables)) is None, "no key"
    Path(f"{team}.pub").write_bytes(kept)
    assert recall(at, name(tables)) is not None
    if form != "inline":
        file.write_text(file.read_text().replace("r.example/**", "r.example/*"))
        assert recall(at, name(tables)) is None, "another policy"


def test_a_policy_that_changes_meanwhile_is_not_sealed(tmp_path: Path) -> None:
    write_key_pair(str(tmp_path / "a"), generate())
    write_key_pair(str(tmp_path / "b"), generate())
    tables = {"policy": {"rules": [{"match": "**", "keys": [str(tmp_path / "a.pub")]}]}}
    loaded = policy_from_tables(tables)
    os.replace(tmp_path / "b.pub", tmp_path / "a.pub")
    assert _sealed(tables, loaded) is None
    os.unlink(tmp_path / "a.pub")
    assert _sealed(tables, loaded) is None
    assert _sealed({}, None) == [] == seal([])
