"""environment/plan.py: what a plan may say, and where every fault in one is."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import WeenvError
from weenv.environment.model import Amount, GroupUse
from weenv.environment.plan import MAX_GROUPS, load_plan, parse_plan
from weenv.environment.yamlnodes import MAX_FAULTS, PlanError

HEAD = "apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\n"
WHOLE = (
    HEAD
    + """metadata: {name: task-17, trainer: grpo}
platform: linux/amd64
groups:
  - registry.example/base/debian:12
  - ref: localhost:5000/repo@sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
mutations:
  - patch: |
      --- a/x
      +++ b/x
      @@ -1 +1 @@
      -a
      +b
    directory: /testbed/
    strip: 0
  - files: {/etc/motd: hello, /etc/fix: {file: fix.txt}}
    mode: 0640
    owner: 1000:100
  - delete: [/a//b]
  - chmod: {/usr/bin/x: "4755"}
  - symlink: {/usr/bin/y: x}
  - run: [make, -j2]
  - run: make install
  - git: {commit: deadbeef}
config: {env: {TASK: "17", N: 3}, workdir: /testbed, user: "1000:users", entrypoint: [], cmd: [bash, -l], labels: {a: b}}
resources: {cpu: {start: 500m, max: 8}, memory: {start: 512Mi, max: 8G}, pids: 4096}
"""
)


def test_a_whole_plan(tmp_path: object) -> None:
    with open(f"{tmp_path}/plan.yaml", "w") as file:
        file.write(WHOLE)
    with open(f"{tmp_path}/fix.txt", "wb") as file:
        file.write(b"\xff\0fix")
    plan = load_plan(f"{tmp_path}/plan.yaml")
    assert (plan.name, plan.metadata, plan.platform) == ("task-17", {"trainer": "grpo"}, "linux/amd64")
    assert plan.groups[0] == GroupUse("registry.example/base/debian:12", 6)
    assert plan.groups[1].line == 7
    patch, files, delete, chmod, symlink, run, shell, git = plan.mutations
    assert (patch.patch, patch.directory, patch.strip) == ("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "/testbed", 0)
    assert files.files == {"/etc/motd": b"hello", "/etc/fix": b"\xff\0fix"}
    assert (files.mode, files.owner) == (0o640, (1000, 100))
    assert (delete.delete, chmod.chmod, symlink.symlink) == (("/a/b",), {"/usr/bin/x": 0o4755}, {"/usr/bin/y": "x"})
    assert (run.run, shell.run) == (("make", "-j2"), ("/bin/sh", "-c", "make install"))
    assert git.git_commit == "deadbeef"
    assert plan.config.env == {"TASK": "17", "N": "3"}
    assert (plan.config.entrypoint, plan.config.cmd) == ((), ("bash", "-l"))
    assert plan.resources.cpu == Amount(0.5, 8.0)
    assert plan.resources.memory == Amount(512 * 2**20, 8e9)


def test_the_name_defaults_to_the_files(tmp_path: object) -> None:
    with open(f"{tmp_path}/My Task.yaml", "w") as file:
        file.write(HEAD + "groups: [debian]\n")
    assert load_plan(f"{tmp_path}/My Task.yaml").name == "my-task"


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "", "empty"),
        ("a: [", "1:", "not YAML"),
        ("- x", "1:1", "must be a mapping"),
        ("kind: EnvironmentPlan\ngroups: [a]", "1:1", "apiVersion is missing"),
        (HEAD.replace("v1", "v9") + "groups: [a]", "1:13", "apiVersion is 'weenv.dev/v9'"),
        (HEAD, "1:1", "no groups"),
        (HEAD + "groups: []", "3:9", "no groups"),
        (HEAD + "groups: [a]\ngrups: [b]", "4:1", "unknown field 'grups'"),
        (HEAD + "groups: [a]\ngroups: [b]", "4:1", "stands twice"),
        (HEAD + "groups:\n- a\n- A", "5:3", "groups[1]"),
        (HEAD + "groups: [null]", "3:10", "must be a string"),
        (HEAD + "groups: [a]\nmutations: [{patch: x, run: y}]", "4:13", "exactly one of"),
        (HEAD + "groups: [a]\nmutations: [{directory: /x}]", "4:13", "exactly one of"),
        (HEAD + "groups: [a]\nmutations: [{delete: [etc/x]}]", "4:22", "not an absolute path"),
        (HEAD + "groups: [a]\nmutations: [{delete: [/a/../b]}]", "4:22", "not an absolute path"),
        (HEAD + "groups: [a]\nmutations: [{files: {/x: {file: ../../etc/passwd}}}]", "4:26", "outside the plan's directory"),
        (HEAD + "groups: [a]\nmutations: [{chmod: {/x: 888}}]", "4:26", "octal mode"),
        (HEAD + "groups: [a]\nmutations: [{git: {commit: HEAD}}]", "4:19", "hex name"),
        (HEAD + "groups: [a]\nconfig: {workdir: x}", "4:19", "must be absolute"),
        (HEAD + "groups: [a]\nconfig: {env: {A=B: x}}", "4:15", "not a variable's name"),
        (HEAD + "groups: [a]\nconfig: {user: 'a b'}", "4:16", "USER[:GROUP]"),
        (HEAD + "groups: [a]\nresources: {cpu: 0}", "4:18", "number of CPUs"),
        (HEAD + "groups: [a]\nresources: {memory: 1Qi}", "4:21", "must be a size"),
        (HEAD + "groups: [a]\nresources: {cpu: {start: 4, max: 2}}", "4:18", "above its max"),
        (HEAD + "groups: [a]\nplatform: windows", "4:11", "OS/ARCH"),
        (HEAD + "groups: &g [a, *g]", "3:", "cycle"),
        (HEAD + "groups: [a]\nmetadata: {name: Upper}", "4:18", "is no name"),
    ],
)
def test_every_fault_has_a_place(text: str, place: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(text, "p.yaml")
    assert f"p.yaml:{place}" in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_groups_are_counted() -> None:
    several = [f"r.example/g{number}" for number in range(MAX_GROUPS + 1)]
    assert len(parse_plan(f"{HEAD}groups: {several[:-1]}", "p.yaml").groups) == MAX_GROUPS
    with pytest.raises(PlanError, match=f"{MAX_GROUPS + 1} groups, more than"):
        parse_plan(f"{HEAD}groups: {several}", "p.yaml")


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weenv.environment.plan.MAX_FILE", 1000)
    (tmp_path / "fix").write_bytes(b"x" * 1000)
    text = f"{HEAD}groups: [a]\nmutations: [{{files: {{/x: {{file: fix}}}}}}]"
    parse_plan(text, str(tmp_path / "p.yaml"))
    (tmp_path / "fix").write_bytes(b"x" * 1001)
    with pytest.raises(PlanError, match="is larger than"):
        parse_plan(text, str(tmp_path / "p.yaml"))


def test_all_faults_are_told_in_the_order_of_the_document() -> None:
    text = HEAD.replace("v1", "v9") + (
        "groups: [a, A, {reff: b}]\n"
        "mutations:\n"
        "- {patch: x, run: y, strip: z, owner: me}\n"
        "- {files: {b: c, /d: [e]}, mode: 9}\n"
        "- {delete: [f, g]}\n"
        "config: {env: {A=B: x}, workdir: x, user: 'a b', cmd: bash}\n"
        "resources: {cpu: none, memory: {start: 2, max: 1}, pids: 0}\n"
        "metadata: {name: Upper, a: [b]}\n"
        "platform: windows\n"
        "colour: red\n"
    )
    with pytest.raises(PlanError) as caught:
        parse_plan(text, "p.yaml")
    faults = [caught.value, *caught.value.also]
    assert all(isinstance(fault, PlanError) for fault in faults)
    assert [(fault.line, fault.column) for fault in faults if isinstance(fault, PlanError)] == [
        (1, 13), (3, 13), (3, 16), (3, 17),
        (5, 3), (5, 11), (5, 29), (5, 39), (6, 11), (6, 22), (6, 34), (7, 12), (7, 12),
        (8, 15), (8, 34), (8, 43), (8, 55), (9, 18), (9, 32), (9, 58), (10, 18), (10, 28), (11, 11), (12, 1),
    ]  # fmt: skip
    for fault in faults:
        assert str(fault).startswith("p.yaml:")
        assert "\n" not in str(fault)


def test_faults_beyond_fifty_are_not_told() -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(HEAD + "groups: [" + "A, " * 400 + "a]\n")
    assert len(caught.value.also) == MAX_FAULTS - 1
    assert "groups[49]" in str(caught.value.also[-1])


def test_aliases_stand_for_what_they_name_and_cannot_explode() -> None:
    plan = parse_plan(HEAD + "groups: [debian]\nmutations:\n- files: {/a: &x text}\n- files: {/b: *x}\n")
    assert plan.mutations[1].files == {"/b": b"text"}
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    began = time.monotonic()
    with pytest.raises(PlanError):
        parse_plan("\n".join(lines))
    assert time.monotonic() - began < 20


@given(st.text(max_size=300) | st.binary(max_size=300))
def test_any_text_is_a_plan_or_a_fault(text: str | bytes) -> None:
    try:
        parse_plan(text)
    except WeenvError as error:
        assert "\n" not in str(error)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["groups", "mutations", "config", "env", "ref", "cpu", "files"]), inner, max_size=3
            )
        ),
        max_leaves=12,
    )
)
def test_any_value_in_any_field_is_a_plan_or_a_fault(value: object) -> None:
    for field in ("groups", "mutations", "config", "resources", "metadata", "platform"):
        document = {"apiVersion": "weenv.dev/v1", "kind": "EnvironmentPlan", "groups": ["debian"], field: value}
        try:
            parse_plan(yaml.safe_dump(document))
        except WeenvError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("patch", "hint"),
    [
        ("bug.patch", "{file: bug.patch}"),
        ("\"--- a\\n+++ b\\n\"", "diff -u"),
        ("''", "diff -u"),
        ("{file: bug.patch}", "diff -u"),
    ],
)
def test_a_patch_without_a_diff_is_found_before_anything_runs(patch: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "bug.patch").write_text("see the other file\n")
    text = HEAD + f"groups: [a]\nmutations: [{{patch: {patch}}}]"
    with pytest.raises(PlanError, match=r"plan.yaml:4:21: mutations\[0\]\.patch holds no diff") as caught:
        parse_plan(text, f"{tmp_path}/plan.yaml")
    assert hint in caught.value.hint
    (tmp_path / "bug.patch").write_text("diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n")
    parse_plan(HEAD + "groups: [a]\nmutations: [{patch: {file: bug.patch}}]", f"{tmp_path}/plan.yaml")


def test_a_file_that_is_a_pipe_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    text = "apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\ngroups: [r.example/a:1]\n"
    text += "mutations: [{files: {/a: {file: pipe}}}]\n"
    with pytest.raises(PlanError, match="cannot be read: pipe: it is a pipe, not a file"):
        parse_plan(text, str(tmp_path / "plan.yaml"))
