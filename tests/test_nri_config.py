"""The [nri] table, from the file and from what a runtime hands to a plugin."""

from __future__ import annotations

import pytest

from weenv.core.errors import ConfigError
from weenv.plugin.nri.config import ElasticConfig
from weenv.plugin.nri.nriconfig import NriConfig, from_tables, from_text


def test_tables() -> None:
    assert from_tables({}) == NriConfig() and from_tables({"elastic": {}}, socket="/x").socket == "/x"
    found = from_tables({"nri": {"index": "07", "namespaces": ["rl"], "strict": True, "answer_within": 1}})
    assert (found.index, found.namespaces, found.strict, found.answer_within) == ("07", frozenset({"rl"}), True, 1.0)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"index": "7"}, "two digits"),
        ({"index": "٠٧"}, "two digits"),
        ({"name": "a/b"}, "letters"),
        ({"name": ""}, "letters"),
        ({"socket": "nri.sock"}, "absolute"),
        ({"socket": "/" + "x" * 120}, "107 bytes"),
        ({"answer_within": 0}, "between 0.05 and 60"),
        ({"reconnect_after": -1.0}, "between"),
        ({"reconnect_at_most": float("nan")}, "between"),
        ({"nmae": "x"}, "unknown setting nri.nmae"),
        ({"strict": "yes"}, "must be a bool"),
    ],
)
def test_nonsense_is_named(values: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        from_tables({"nri": values})


def test_what_a_runtime_hands_over() -> None:
    nri, elastic = NriConfig(name="a"), ElasticConfig(start_cpu=3.0)
    assert from_text("[nri]\nstrict = true\n", nri, elastic) == (NriConfig(strict=True), elastic)
    assert from_text("[elastic]\nstart_cpu = 2\n", nri, elastic) == (nri, ElasticConfig(start_cpu=2.0))
    for text, said in (
        ("[x]\n", r"unknown table \[x\]"),
        ("[", "no TOML"),
        ("x = " + 5000 * "1", "no TOML"),
        ("nri = 3\n", "must be a table"),
    ):
        with pytest.raises(ConfigError, match=said):
            from_text(text, nri, elastic)
