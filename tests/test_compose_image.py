"""environment/merge.py and compose.py without containerd: configs merged, documents deterministic, conflicts refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.digest import chain_id, sha256
from weenv.core.errors import FormatError, LimitError
from weenv.environment.compose import compose_image
from weenv.environment.merge import ConflictError, join_paths, merge_configs, platform_of
from weenv.environment.model import Amount, Plan, PlanConfig, Resources
from weenv.layer.verify import PREFETCH_ANNOTATION, SOURCE_ANNOTATION, LayerDescriptor
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.creation import asked, said_by
from weenv.plugin.nri.model import Quota
from weenv.registry.groupref.model import LayerRef, ResolvedGroup
from weenv.registry.manifest import OCI_LAYER_ZSTD, Manifest, parse_config, parse_manifest

AMD = "linux/amd64"


def layer(name: str, *, lazy: bool = True) -> LayerRef:
    digest = sha256(name.encode())
    annotations = LayerDescriptor(digest, 100, 60, 40, sha256(b"toc")).annotations() if lazy else {}
    return LayerRef(digest, 100, OCI_LAYER_ZSTD, sha256(b"diff " + name.encode()), annotations)


def group(name: str, layers: int = 1, *, lazy: bool = True, arch: str = "amd64", **config: Any) -> ResolvedGroup:
    refs = tuple(layer(f"{name}{n}", lazy=lazy) for n in range(layers))
    text = json.dumps({"os": "linux", "architecture": arch, "config": config})
    return ResolvedGroup(f"r.example/{name}:1", "r.example", name, sha256(name.encode()), refs, text)


def merged(*groups: ResolvedGroup, **config: Any) -> dict[str, Any]:
    return merge_configs(Plan("p", (), config=PlanConfig(**config)), groups)


def env_of(config: dict[str, Any]) -> dict[str, str]:
    return dict(item.split("=", 1) for item in config["Env"])


def test_a_layers_profile_comes_along_unless_no_label_could_hold_it() -> None:
    ref = layer("a0")
    fits, huge = "1,AAAA", "1," + "A" * 5000
    for value, lazy in ((fits, True), (huge, True), (fits, False)):
        made = replace(ref, annotations={**(ref.annotations if lazy else {}), PREFETCH_ANNOTATION: value})
        low = replace(group("a"), layers=(made,))
        image = compose_image(Plan("p", ()), [low])
        kept = value if value == fits and lazy else None
        parsed = parse_manifest(image.manifest)
        assert isinstance(parsed, Manifest)
        assert parsed.layers[0].annotations.get(PREFETCH_ANNOTATION) == kept
        assert image.layers[0].labels("c").get(PREFETCH_ANNOTATION) == kept


def test_variables_override_and_search_paths_join() -> None:
    config = merged(
        group("a", Env=["PATH=/usr/bin:/bin", "A=1", "B=1"]),
        group("b", Env=["PATH=/opt/b/bin:/usr/bin", "B=2", "PYTHONPATH=/b"]),
        env={"A": "3", "PATH": "/mine", "PYTHONPATH": "/p"},
    )
    assert env_of(config) == {"PATH": "/mine:/opt/b/bin:/usr/bin:/bin", "A": "3", "B": "2", "PYTHONPATH": "/p:/b"}


def test_resources_become_labels_that_creation_reads() -> None:
    given = Resources(Amount(0.5, 8.0), Amount(512 << 20, 8 << 30))
    low = group("a", Labels={"weenv.dev/cpu.max": "64", "x": "1"})
    found = merge_configs(Plan("p", (), resources=given), [low])["Labels"]
    assert found == {
        "x": "1", "weenv.dev/cpu.start": "0.5", "weenv.dev/cpu.max": "8",
        "weenv.dev/memory.start": "536870912", "weenv.dev/memory.max": "8589934592",
    }  # fmt: skip
    bounds = asked(said_by(found), 0.0, 0, ElasticConfig()).bounds
    assert bounds.start == Quota(0.5, 512 << 20) and bounds.ceiling == Quota(8.0, 8 << 30)
    own = PlanConfig(labels={"weenv.dev/cpu.max": "4"})
    half = merge_configs(Plan("p", (), config=own, resources=Resources(cpu=Amount(ceiling=1 / 3))), [group("a")])["Labels"]
    assert half == {"weenv.dev/cpu.max": "4"}
    assert "Labels" not in merged(group("a"))


def test_there_is_always_a_path() -> None:
    assert env_of(merged(group("a")))["PATH"].endswith("/bin")
    default = env_of(merged(group("a")))["PATH"]
    assert env_of(merged(group("a"), group("b", Env=["PATH=/opt/b/bin"])))["PATH"] == f"/opt/b/bin:{default}"
    assert env_of(merged(group("a"), env={"PATH": "/mine"}))["PATH"] == f"/mine:{default}"
    assert env_of(merged(group("a", Env=["PATH=/x"]), group("b", Env=["PATH=/b"])))["PATH"] == "/b:/x", "the base's own"


def test_the_topmost_that_says_it_wins_and_an_entrypoint_drops_the_cmd_below() -> None:
    low = group("a", WorkingDir="/a", Cmd=["sh"], StopSignal="SIGINT", Labels={"x": "1", "y": "1"}, Volumes={"/v": {}})
    config = merged(low, group("b", WorkingDir="/b", Labels={"x": "2"}), group("c", Entrypoint=["run"]))
    assert (config["WorkingDir"], config["StopSignal"], config["Labels"]) == ("/b", "SIGINT", {"x": "2", "y": "1"})
    assert config["Entrypoint"] == ["run"]
    assert "Cmd" not in config
    assert config["Volumes"] == {"/v": {}}
    assert merged(low, cmd=("x", "y"))["Cmd"] == ["x", "y"]
    assert "Cmd" not in merged(low, entrypoint=("e",))
    assert merged(group("c", Entrypoint=["run"], Cmd=["d"]), cmd=("x",)) | {"Env": 0} == {
        "Env": 0,
        "Entrypoint": ["run"],
        "Cmd": ["x"],
    }


def test_two_users_are_a_conflict_unless_the_plan_decides() -> None:
    first, second = group("a", User="1000"), group("b", User="agent")
    with pytest.raises(ConflictError, match=r"runs as user '1000', but r\.example/b:1 as 'agent'"):
        merged(first, second)
    assert merged(first, second, user="7")["User"] == "7"
    assert merged(first, group("b", User="root"))["User"] == "1000"
    assert "User" not in merged(group("a"), group("b", User="0:0"))


@pytest.mark.parametrize("config", [{"Env": "A=1"}, {"Env": ["A"]}, {"Cmd": "sh"}, {"Labels": ["x"]}, {"User": 3}])
def test_a_malformed_config_names_its_group(config: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match=r"r\.example/a:1"):
        merged(group("a", **config))


def test_platforms_must_agree() -> None:
    with pytest.raises(ConflictError, match=r"r\.example/b:1: is for linux/arm64"):
        platform_of(Plan("p", ()), [group("a"), group("b", arch="arm64")], AMD)
    assert platform_of(Plan("p", (), platform="linux/arm64/v8"), [group("b", arch="arm64")], AMD) == ("linux", "arm64", "v8")


def test_the_image_is_the_groups_layers_in_order_with_their_places() -> None:
    groups = [group("a", 2), group("b", 1)]
    image = compose_image(Plan("p", ()), groups, [layer("m")], platform=AMD)
    manifest = parse_manifest(image.manifest)
    assert isinstance(manifest, Manifest)
    assert manifest.config.digest == sha256(image.config) == image.config_digest
    assert sha256(image.manifest) == image.digest
    assert [item.digest for item in manifest.layers] == [layer(name).digest for name in ("a0", "a1", "b0", "m")]
    assert [item.annotations.get(SOURCE_ANNOTATION) for item in manifest.layers] == [
        "r.example/a",
        "r.example/a",
        "r.example/b",
        None,
    ]
    diff_ids = list(parse_config(image.config).diff_ids)
    assert image.chain == image.chains[-1] == chain_id(diff_ids)
    assert image.chains == [chain_id(diff_ids[: n + 1]) for n in range(4)]
    assert image.name == f"weenv.local/plan/p:{image.digest[7:23]}"
    assert image.lazy


def test_a_group_that_is_not_lazy_is_known_beforehand() -> None:
    image = compose_image(Plan("p", ()), [group("a"), group("b", lazy=False)], platform=AMD)
    assert [item.lazy for item in image.layers] == [True, False]
    assert not image.lazy


def test_bounds() -> None:
    with pytest.raises(FormatError, match="no groups"):
        compose_image(Plan("p", ()), [], platform=AMD)
    with pytest.raises(FormatError, match="no layers"):
        compose_image(Plan("p", ()), [group("a", 0)], platform=AMD)
    with pytest.raises(LimitError, match="501 layers"):
        compose_image(Plan("p", ()), [group("a", 501)], platform=AMD)


@given(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=5))
def test_the_same_stack_is_the_same_image(names: list[str]) -> None:
    groups = [group(name, Env=[f"{name}=1", f"PATH=/{name}"]) for name in names]
    first = compose_image(Plan("p", ()), groups, platform=AMD)
    assert first == compose_image(Plan("p", ()), list(groups), platform=AMD)
    other = compose_image(Plan("p", ()), [*groups, group("z")], platform=AMD)
    assert other.digest != first.digest
    assert other.chains[: len(first.chains)] == first.chains


@given(st.lists(st.sampled_from("abcd"), max_size=6), st.lists(st.sampled_from("abcd"), max_size=6))
def test_joined_paths_keep_each_directory_once_and_the_uppers_order(upper: list[str], lower: list[str]) -> None:
    joined = [part for part in join_paths(":".join(upper), ":".join(lower)).split(":") if part]
    assert len(joined) == len(set(joined))
    assert set(joined) == set(upper) | set(lower)
    assert joined[: len(dict.fromkeys(upper))] == list(dict.fromkeys(upper))
