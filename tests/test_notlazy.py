"""environment/notlazy.py and composeconfig.py: what is said of groups that are not lazy, and the setting."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from weenv.core.errors import ConfigError
from weenv.environment.composeconfig import compose_config
from weenv.environment.notlazy import LABEL, NotLazyGroup, from_label, line, said, short, to_label

TOOL = NotLazyGroup("r.example/tool:2", 3, 0, 124 << 20, 118 << 20, 12.13)
ODD = NotLazyGroup("r.example/odd:1", 0, 1, 3 << 20, 0, 0.0, "a POSIX ACL")


def test_a_line_says_group_layers_sizes_and_what_to_do() -> None:
    text = line([TOOL, ODD])
    assert text == (
        "not in the lazy format: r.example/tool:2 (124 MiB): 3 layers converted on this node, 118 MiB, took 12.1 s; "
        "r.example/odd:1 (3 MiB): 1 layer fetched and unpacked (a POSIX ACL). Publish it lazily: weenv convert"
    )
    assert "3 layers served from this node's converted copy, 118 MiB;" in said(to_label([TOOL, ODD]))
    assert line([]) == said("") == ""
    assert [short([TOOL, ODD]), short([ODD]), short([])] == ["3 converted, 1 unpacked", "1 unpacked", "lazy"]


GROUPS = st.builds(NotLazyGroup, st.text(max_size=600), *[st.integers(0, 1 << 40)] * 4, st.just(0.0), st.text(max_size=300))


@example([NotLazyGroup("\N{PILE OF POO}" * 600, 1)])
@given(st.lists(GROUPS))
def test_a_label_fits_into_containerds_bound_and_comes_back(groups: list[NotLazyGroup]) -> None:
    text = to_label(groups)
    assert len(LABEL) + len(text.encode()) <= 4096
    assert bool(text) == bool(groups)
    back = from_label(text)
    whole = [group for group in back if not group.group.startswith("and ") or group in groups]
    assert [(g.group, g.converted, g.size, g.reason) for g in whole] == [
        (g.group, g.converted, g.size, g.reason[:200]) for g in groups[: len(whole)]
    ]


@pytest.mark.parametrize("text", ["x", "{}", "[1]", '[{"group":"a","size":"b"}]', "null", "[[]]", '[{"converted":1}]'])
def test_labels_are_anybodys(text: str) -> None:
    assert from_label(text) == []


def test_as_json_without_what_is_zero() -> None:
    assert ODD.to_json() == {"group": "r.example/odd:1", "unpacked": 1, "size": 3 << 20, "reason": "a POSIX ACL"}
    assert TOOL.to_json()["seconds"] == 12.13
    assert "seconds" not in json.loads(to_label([TOOL]))[0]


def test_the_setting() -> None:
    assert compose_config({}).not_lazy == "convert"
    assert compose_config({"compose": {"not_lazy": "refuse", "max_layer": 5}}).max_layer == 5
    for table, match in (
        ({"not_lazy": "ignore"}, "must be convert, unpack or refuse"),
        ({"max_layer": 0}, r"compose\.max_layer must be"),
        ({"converted_limit": -1}, r"compose\.converted_limit must be"),
        ({"nonsense": 1}, "unknown setting"),
    ):
        with pytest.raises(ConfigError, match=match):
            compose_config({"compose": table})
