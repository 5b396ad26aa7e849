"""environment/lock.py and conflicts.py: pinning without touching the rest, and who wins which file."""

from __future__ import annotations

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.digest import sha256
from weenv.environment.conflicts import Conflict, find_conflicts
from weenv.environment.lock import lock_text, pin, tag_of
from weenv.environment.plan import parse_plan
from weenv.environment.yamlnodes import PlanError
from weenv.layer.encode import encode_layer
from weenv.layer.toc import Toc
from weenv.registry.groupref.model import ResolvedGroup

D1, D2 = sha256(b"1"), sha256(b"2")
TEXT = f"""# the task
apiVersion: weenv.dev/v1
kind: EnvironmentPlan
groups:
  - "r.example/base:1"   # bottom
  - {{ref: r.example/tool:2@{D1}}}
  - 'debian'
config: {{env: {{A: "{D1}"}}}}
"""


def group(digest: str) -> ResolvedGroup:
    return ResolvedGroup("x", "h", "r", digest, (), "{}")


def test_pinning_changes_the_references_and_nothing_else() -> None:
    text = lock_text(TEXT, "p.yaml", [group(D2), group(D2), group(D2)])
    assert text == TEXT.replace('"r.example/base:1"', f"r.example/base:1@{D2}").replace("'debian'", f"debian@{D2}")
    assert [use.ref for use in parse_plan(text).groups] == [f"r.example/base:1@{D2}", f"r.example/tool:2@{D1}", f"debian@{D2}"]
    assert lock_text(text, "p.yaml", [group(D1)] * 3) == text, "what is pinned stays"


def test_a_moved_tag_is_seen() -> None:
    assert pin(f"r.example/a:1@{D1}", D2).moved
    assert not pin(f"r.example/a:1@{D1}", D1).moved
    assert not pin("r.example/a:1", D1).moved
    assert pin("oci:/x:tag", D1).pinned == f"oci:/x@{D1}"
    assert tag_of(f"r.example/a:1@{D1}") == "r.example/a:1"
    assert tag_of(f"r.example/a@{D1}") == ""
    assert tag_of("r.example/a") == "r.example/a"


def test_an_alias_cannot_be_pinned() -> None:
    text = "apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\ngroups: [&a debian, *a]\n"
    with pytest.raises(PlanError, match="alias"):
        lock_text(text, "p.yaml", [group(D1)] * 2)


def toc(*names: str) -> Toc:
    """A layer: ``name/`` is a directory, ``.wh.`` names as in a tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in names:
            member = tarfile.TarInfo(name.rstrip("/"))
            if name.endswith("/"):
                member.type = tarfile.DIRTYPE
            archive.addfile(member, io.BytesIO())
    return encode_layer(io.BytesIO(out.getvalue()), io.BytesIO()).toc


def test_who_wins_what() -> None:
    found = find_conflicts(
        [
            toc("a", "b", "d/x", "d/y", "e/", "f", "g/h", "only"),
            toc("a", ".wh.b", "d/.wh..wh..opq", "d/y", "e/", "f/", "g"),
            toc("a", "b", "e/new"),
        ]
    )
    assert found == [
        Conflict(b"a", (0, 1, 2), "replaced"),
        Conflict(b"b", (0, 1), "deleted"),
        Conflict(b"d/x", (0, 1), "hidden"),
        Conflict(b"d/y", (0, 1), "hidden"),
        Conflict(b"f", (0, 1), "replaced"),
        Conflict(b"g/h", (0, 1), "hidden"),
    ]


NAMES = st.lists(st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a", ".wh.a", "d/.wh.a", "d/.wh..wh..opq", "d/"]), unique=True)


def overlay(layers: list[Toc]) -> dict[bytes, int]:
    """An independent model: what overlayfs shows, by looking every path up from the top."""
    listings = []
    for layer in layers:
        entries: dict[bytes, tuple[int, int]] = {}
        for number in range(1, len(layer.entries)):
            entries[layer.path(number)] = (int(layer.entries.kind[number]), int(layer.entries.flags[number]))
        listings.append(entries)
    shown = {}
    for path in {path for listing in listings for path in listing}:
        parts = path.split(b"/")
        visible = list(range(len(layers)))
        for depth in range(1, len(parts) + 1):
            prefix = b"/".join(parts[:depth])
            following: list[int] = []
            for number in reversed(visible):
                if prefix not in listings[number]:
                    continue
                kind, flags = listings[number][prefix]
                if flags & 2:
                    break
                if kind != 1:
                    if not following and depth == len(parts):
                        shown[path] = number
                    break
                following.append(number)
                if flags & 1:
                    break
            visible = sorted(following)
    return shown


@given(st.lists(NAMES, min_size=2, max_size=4))
def test_the_winner_is_the_one_that_overlayfs_shows(stacks: list[list[str]]) -> None:
    def sound(names: list[str]) -> list[str]:
        gone = {name.replace(".wh.", "") for name in names if ".wh." in name and "opq" not in name}
        return [name for name in names if name not in gone]

    layers = [toc(*sound(names)) for names in stacks]
    shown = overlay(layers)
    for conflict in find_conflicts(layers):
        if conflict.what == "replaced" and conflict.path in shown:
            assert shown[conflict.path] >= conflict.layers[-1]
        if conflict.path in shown:
            assert shown[conflict.path] in conflict.layers or shown[conflict.path] > conflict.layers[-1]
