"""docs/plan.schema.json says the same as the code, by another library's judgement."""

from __future__ import annotations

import json
import os
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core import units
from weenv.core.errors import WeenvError
from weenv.environment import plan
from weenv.environment.plan import parse_plan

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with open(os.path.join(ROOT, "docs/plan.schema.json"), encoding="utf-8") as _file:
    SCHEMA: dict[str, Any] = json.load(_file)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

BASE = {"apiVersion": "weenv.dev/v1", "kind": "EnvironmentPlan", "groups": ["debian"]}
SECTIONS: list[dict[str, Any]] = [
    {"platform": "linux/arm64/v8"},
    {"metadata": {"name": "a-1", "n": 3}},
    {"groups": [{"ref": "localhost:5000/a/b:1"}, "debian"]},
    {"mutations": [{"patch": "--- a\n+++ b\n@@ -1 +1 @@\n-a\n+b\n", "directory": "/x", "strip": 0}]},
    {"mutations": [{"files": {"/a": "x", "/b": 3}, "mode": "0755", "owner": "1:2"}]},
    {"mutations": [{"delete": ["/a"]}, {"chmod": {"/a": "4755"}}, {"symlink": {"/a": "b"}}]},
    {"mutations": [{"run": "make"}, {"run": ["make", "-j", 2]}, {"git": {"commit": "deadbeef"}}]},
    {"config": {"env": {"A": 1}, "workdir": "/x", "user": "1000:10", "entrypoint": [], "cmd": ["a"], "labels": {"a": "b"}}},
    {"resources": {"cpu": 2, "memory": "512Mi", "pids": 10}},
    {"resources": {"cpu": {"start": "500m", "max": 4}, "memory": {"start": 1024, "max": "2G"}}},
]
WRONG: list[dict[str, Any]] = [
    {"groups": []}, {"groups": [[]]}, {"groups": [{"name": "x"}]}, {"group": ["x"]}, {"kind": "Plan"}, {"platform": "Linux"},
    {"metadata": {"name": "Upper"}}, {"mutations": {}}, {"mutations": [{}]}, {"mutations": [{"patch": "x", "run": "y"}]},
    {"mutations": [{"delete": ["a"]}]}, {"mutations": [{"delete": ["/a/../b"]}]}, {"mutations": [{"chmod": {"/a": "9"}}]},
    {"mutations": [{"git": {}}]}, {"mutations": [{"git": {"commit": "HEAD"}}]}, {"mutations": [{"run": []}]},
    {"mutations": [{"files": {"/a": {"path": "x"}}}]}, {"mutations": [{"delete": ["/a"], "owner": "root"}]},
    {"config": {"workdir": "x"}}, {"config": {"cmd": "a b"}}, {"config": {"env": []}}, {"config": {"shell": "x"}},
    {"resources": {"cpu": "many"}}, {"resources": {"memory": "1Q"}}, {"resources": {"pids": 0}},
    {"resources": {"cpu": {"min": 1}}},
]  # fmt: skip


def by_code(document: Any) -> bool:
    try:
        parse_plan(yaml.safe_dump(document))
    except WeenvError:
        return False
    return True


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_every_field_of_the_code_is_in_the_schema() -> None:
    assert set(SCHEMA["properties"]) == plan._TOP
    assert set(SCHEMA["$defs"]["mutation"]["properties"]) == plan._MUTATION
    assert {entry["required"][0] for entry in SCHEMA["$defs"]["mutation"]["oneOf"]} == set(plan._CHANGES)
    assert SCHEMA["properties"]["groups"]["maxItems"] == plan.MAX_GROUPS
    assert set(units._SUFFIXES) - {""} == set(
        SCHEMA["$defs"]["size"]["oneOf"][1]["pattern"].split("(")[-1].split(")")[0].split("|")
    )


@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_what_is_right_is_right_for_both(section: dict[str, Any]) -> None:
    document = BASE | section
    assert by_code(document)
    VALIDATOR.validate(document)


@pytest.mark.parametrize("section", WRONG, ids=str)
def test_what_is_wrong_is_wrong_for_both(section: dict[str, Any]) -> None:
    document = BASE | section
    assert not by_code(document)
    assert not VALIDATOR.is_valid(document)


def test_the_example_of_the_documentation_is_a_plan() -> None:
    with open(os.path.join(ROOT, "docs/plans.md"), encoding="utf-8") as file:
        text = file.read().split("```yaml\n", 1)[1].split("```", 1)[0]
    text = text.replace("sha256:…", "sha256:" + "a" * 64).replace("{file: bug.patch}", "'@@ -1 +1 @@'")
    parse_plan(text)
    VALIDATOR.validate(yaml.safe_load(text))


@settings(max_examples=150)
@given(st.data())
def test_no_field_takes_a_value_of_another_shape_in_one_and_not_in_the_other(data: st.DataObject) -> None:
    section = data.draw(st.sampled_from(SECTIONS))
    key = data.draw(st.sampled_from(sorted(section)))
    shape = data.draw(st.sampled_from([None, [], {}, [[]], {"x": {}}]))
    document = BASE | {key: shape}
    if (key == "mutations" and shape in ([],)) or (key in ("metadata", "config", "resources") and shape == {}):
        assert by_code(document)
    assert by_code(document) == VALIDATOR.is_valid(document)
