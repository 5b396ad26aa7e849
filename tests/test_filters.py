"""containerd's filter language."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator.turns import turns

from weenv.core.errors import InvalidRequest
from weenv.plugin.containerd.types import Kind, SnapshotInfo
from weenv.plugin.snapshotter import filters
from weenv.plugin.snapshotter.filters import MAX_FILTER, Selector, compile_filters, parse

INFO = SnapshotInfo(
    "sha256:aa",
    "ns/1/parent",
    Kind.COMMITTED,
    0,
    0,
    {"containerd.io/snapshot.ref": "sha256:aa", "plain": "x y", "a.b.c": "dotted", "empty": ""},
)


async def matches(text: str, info: SnapshotInfo = INFO) -> bool:
    found = compile_filters([text])
    await found.decide([info])
    return found(info)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name==sha256:aa",
        'name=="sha256:aa"',
        "name!=other",
        "parent==ns/1/parent",
        "kind==committed",
        "kind",
        "labels.plain",
        "labels.empty",
        'labels."containerd.io/snapshot.ref"==sha256:aa',
        'labels."containerd.io/snapshot.ref"==sha256:aa,parent=="ns/1/parent"',
        'labels.plain=="x y"',
        r'labels.plain=="x\x20y"',
        r'labels.plain=="x\u0020\x79"',
        r'labels.plain=="x\040y"',
        "labels.a.b.c==dotted",
        'labels."a.b.c"==dotted',
        "labels.missing!=anything",
        "name~=^sha256:a+$",
        "name~=/^sha256:[a-z]{2}$/",
        r"parent~=|^ns/\d+/|",
        "name == sha256:aa , kind == committed",
    ],
)
async def test_matches(text: str) -> None:
    assert await matches(text)


@pytest.mark.parametrize(
    "text",
    [
        "name==sha256:a",
        "name!=sha256:aa",
        'parent==""',
        "kind==active",
        "labels.missing",
        "labels.missing==x",
        "labels",
        "nonsense",
        "nonsense==x",
        "name==sha256:aa,kind==view",
        "name~=^a",
    ],
)
async def test_does_not_match(text: str) -> None:
    assert not await matches(text)


@pytest.mark.parametrize(
    "text",
    [
        "name=",
        "name=x",
        "name===x",
        "name==",
        "==x",
        "name==x,",
        ",name==x",
        "name==x y",
        'name=="x',
        'name=="x\n"',
        r'name=="\q"',
        r'name=="\xzz"',
        r'name=="\UFFFFFFFF"',
        "name.==x",
        ".name==x",
        "name~=[",
        "name~=" + "(" * 500,
        "name~=/x",
        "name==|x|y",
        "naïve==x",
        "x" * (MAX_FILTER + 1),
        "name~=" + "a" * 2000,
    ],
)
def test_malformed_filters_are_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        compile_filters([text])


def test_several_filters_are_alternatives() -> None:
    assert compile_filters([])(INFO)
    assert compile_filters(["name==x", "kind==committed"])(INFO)
    assert not compile_filters(["name==x", "kind==active"])(INFO)
    with pytest.raises(InvalidRequest):
        compile_filters(["name"] * 100)


def test_selectors_that_an_index_can_serve() -> None:
    found = compile_filters(['labels."containerd.io/snapshot.ref"==sha256:aa,parent=="p"'])
    assert found.required(("labels", "containerd.io/snapshot.ref")) == "sha256:aa"
    assert found.required(("parent",)) == "p"
    assert found.required(("name",)) is None
    assert compile_filters(["name==a", "name==b"]).required(("name",)) is None
    assert compile_filters(["name!=a"]).required(("name",)) is None


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        matches = compile_filters([text])
    except InvalidRequest:
        return
    if not any(s.operator == "~=" for selectors in matches.alternatives for s in selectors):
        assert matches(INFO) in (True, False)


async def test_a_regular_expression_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused, and the loop runs on meanwhile: Python's own matcher would hold the whole process."""
    monkeypatch.setattr(filters, "REGEX_SECONDS", 1)
    found = compile_filters(["name~=(a+)+$"])
    async with turns(0.01) as others:
        with pytest.raises(InvalidRequest, match="too long"):
            await found.decide([SnapshotInfo("a" * 100 + "!", "", Kind.ACTIVE, 0, 0, {})])
    assert others.count > 20
    await found.decide([INFO])
    assert found(INFO), "what comes after is served"


_names = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=8)


@given(st.lists(st.tuples(_names, st.sampled_from(["==", "!="]), st.text(max_size=20)), min_size=1, max_size=4))
def test_what_is_written_quoted_is_read_back(parts: list[tuple[str, str, str]]) -> None:
    def quote(value: str) -> str:
        return '"' + "".join(f"\\U{ord(char):08x}" if char in '"\\\n' or ord(char) < 32 else char for char in value) + '"'

    text = ",".join(f"labels.{quote(name)}{operator}{quote(value)}" for name, operator, value in parts)
    assert parse(text) == [Selector(("labels", name), operator, value) for name, operator, value in parts]
