"""environment/planref.py: plans as artifacts, whole in themselves, in layouts; registries are tried in integration/."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.cli.main import cli
from weenv.core.errors import LimitError, UnsupportedError, VerificationError, WeenvError
from weenv.environment.plan import load_plan, parse_plan
from weenv.environment.planref import ARTIFACT_TYPE, PLAN_TYPE, pull_plan, push_plan, self_contained
from weenv.environment.yamlnodes import PlanError
from weenv.registry.client import RegistryClient
from weenv.registry.groupref.policy import parse_policy
from weenv.registry.layout import Layout
from weenv.registry.manifest import Manifest, parse_manifest
from weenv.registry.reference import parse_location

HEAD = "apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\ngroups: [registry.example/base:1]\n"
ODD = "\"q\" \\ tab\tnel\x85 ls\u2028 ps\u2029 bom\ufeff del\x7f \U0001f600 \u00fc\r\n\n # no: comment\n"


def same(one: str, two: str, source: str) -> bool:
    left, right = parse_plan(one, source), parse_plan(two, source, files=False)
    without = [tuple(replace(m, line=0) for m in plan.mutations) for plan in (left, right)]
    return without[0] == without[1] and left.config == right.config and left.name == right.name


@pytest.mark.parametrize(
    "mutations",
    [
        "- patch:\n    file: a\n  directory: /x\n- delete: [/y]\n",
        "- patch: {file: a}   # why\n  directory: /x\n",
        "- patch: {file: a}\n  strip: 0\n- files: {/a: {file: b}, /b: text, /c:\n      {file: 'a'}}\n",
        "- files:\n    /a:\n      file: b\n    /b: |\n      text\n  mode: 0600\n",
        "- files:\n    /a:\n      # before\n      file: b # after\n",
        "- {files: {/a: {file: b}}, mode: 0600}\n",
    ],
)
def test_files_are_written_into_the_text_and_the_rest_stays(mutations: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+" + ODD, newline="")
    (tmp_path / "b").write_bytes(b"\x01\xff\xfe not text " + ODD.encode())
    text = HEAD + "# a comment\nmutations:\n" + "".join(f"  {line}\n" for line in mutations.splitlines())
    source = str(tmp_path / "p.yaml")
    made = self_contained(text, source)
    assert same(text, made, source)
    assert "# a comment" in made
    assert self_contained(made, source) == made
    made.encode()


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60))
def test_any_file_can_be_written_into_a_plan(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "b").write_bytes(data)
        text = HEAD + "mutations:\n  - files:\n      /a: {file: b}\n"
        if b"\0" in data:
            with pytest.raises(PlanError, match="NUL"):
                self_contained(text, f"{folder}/p.yaml")
            return
        made = self_contained(text, f"{folder}/p.yaml")
        assert parse_plan(made.encode(), files=False).mutations[0].files == {"/a": data}


def test_what_cannot_be_written_in_is_said(tmp_path: Path) -> None:
    (tmp_path / "b").write_text("x")
    text = HEAD + "mutations:\n  - files: {/a: &f {file: b}, /b: *f}\n"
    with pytest.raises(PlanError, match="cannot be written into it"):
        self_contained(text, str(tmp_path / "p.yaml"))
    with pytest.raises(PlanError, match="stands twice"):
        self_contained(HEAD + "mutations:\n  - files: {/a: {file: b}, //a: {file: b}}\n", str(tmp_path / "p.yaml"))
    with pytest.raises(PlanError, match="another machine"):
        parse_plan(HEAD + "mutations:\n  - patch: {file: b}\n", str(tmp_path / "p.yaml"), files=False)


async def test_a_plan_is_an_artifact_and_comes_back(tmp_path: Path) -> None:
    location = parse_location(f"oci:{tmp_path}/l:x")
    (tmp_path / "b").write_text("x")
    text = HEAD + "metadata: {name: me}\nmutations:\n  - files: {/a: {file: b}}\n"
    async with RegistryClient() as client:
        first = await push_plan(client, location, text, str(tmp_path / "p.yaml"))
        assert await push_plan(client, location, text, str(tmp_path / "p.yaml")) == first, "the same plan, the same digest"
        body, digest = await pull_plan(client, location)
        assert digest == first.digest
        assert parse_plan(body, files=False).mutations[0].files == {"/a": b"x"}
        found = parse_manifest(Layout(f"{tmp_path}/l").read_blob(first), first.media_type)
        assert isinstance(found, Manifest)
        assert not found.is_image
        assert (found.artifact_type, [layer.media_type for layer in found.layers]) == (ARTIFACT_TYPE, [PLAN_TYPE])
        assert found.layers[0].annotations == {"org.opencontainers.image.title": "me.yaml"}
        with pytest.raises(LimitError):
            await pull_plan(client, location, limit=10)
        policy = parse_policy({"default": "deny"})
        with pytest.raises(VerificationError, match="policy"):
            await pull_plan(client, location, policy=policy)


async def test_what_is_no_plan_is_said(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path / "l"))
    layout.create()
    empty = layout.put(b"{}", "application/vnd.oci.empty.v1+json")
    for number, (kind, layers) in enumerate((("", []), (ARTIFACT_TYPE, []), (ARTIFACT_TYPE, [empty.to_json()]))):
        manifest = {
            "schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json", "artifactType": kind,
            "config": empty.to_json(), "layers": layers,
        }  # fmt: skip
        layout.set_tag(layout.put(json.dumps(manifest).encode(), manifest["mediaType"]), f"t{number}")  # type: ignore[arg-type]
        async with RegistryClient() as client:
            with pytest.raises(WeenvError, match="no plan" if not kind else "unknown form") as told:
                await pull_plan(client, parse_location(f"oci:{tmp_path}/l:t{number}"))
            assert isinstance(told.value, UnsupportedError) == (not kind)


def test_push_and_pull(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(HEAD)
    target = f"oci:{tmp_path}/l:x"
    done = CliRunner().invoke(cli, ["plan", "push", str(tmp_path / "p.yaml"), target, "--json"], catch_exceptions=False)
    assert json.loads(done.output)["descriptor"]["digest"].startswith("sha256:")
    done = CliRunner().invoke(cli, ["plan", "pull", target, "-o", str(tmp_path / "q.yaml")], catch_exceptions=False)
    assert (done.exit_code, (tmp_path / "q.yaml").read_text()) == (0, HEAD)
    assert load_plan(str(tmp_path / "q.yaml")).groups
    done = CliRunner().invoke(cli, ["plan", "pull", target], catch_exceptions=False)
    assert done.output == HEAD
