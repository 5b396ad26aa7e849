"""What programs give to the API: the right things as they are, everything else named, and by a WeenvError."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import weenv
from weenv.core.errors import WeenvError
from weenv.environment import arguments
from weenv.environment.arguments import ArgumentError
from weenv.environment.spec import Bind, Limits


@pytest.mark.parametrize(
    ("check", "value", "says"),
    [
        (arguments.words, "ls -l", 'x must be a list of words such as ["ls", "-l"], not \'ls -l\''),
        (arguments.words, b"ls", "x must be a list of words"),
        (arguments.words, {"ls": "-l"}, "x must be a list of words"),
        (arguments.words, 5, "x must be a list of words"),
        (arguments.words, ["sleep", 3], "x[1] must be a text, not 3"),
        (arguments.words, ["a\0b"], "x[0] has a zero byte: 'a\\x00b'"),
        (arguments.words, ["\udc80"], "x[0] is not UTF-8: '\\udc80'"),
        (arguments.arguments, [], "x must be a list that begins with a program, not []"),
        (arguments.arguments, [""], "x must be a list that begins with a program"),
        (arguments.variables, ["A=b"], 'x must be a mapping such as {"LANG": "C"}, not [\'A=b\']'),
        (arguments.variables, {"A": 1}, "x['A'] must be a text, not 1"),
        (arguments.variables, {1: "A"}, "a name in x must be a text, not 1"),
        (arguments.data, 5, "x must be bytes, not 5"),
        (arguments.data, ["a"], "x must be bytes, not ['a']"),
        (arguments.data, "\ud800", "x must be bytes, or a text that UTF-8 can encode"),
        (arguments.number, "2", "x must be a number, not '2'"),
        (arguments.number, True, "x must be a number, not True"),
        (arguments.number, float("nan"), "x must be a number, not nan"),
        (arguments.whole, -1, "x must be a whole number, not -1"),
        (arguments.whole, 1.5, "x must be a whole number, not 1.5"),
        (arguments.whole, "5", "x must be a whole number, not '5'"),
        (arguments.whole, 1 << 63, "x must be a whole number"),
        (arguments.amount, "1 foot", "x must be bytes, or a text such as \"512m\", not '1 foot'"),
        (arguments.amount, None, "x must be a whole number, not None"),
        (arguments.network, "bridge", 'x must be "none" or "host", not \'bridge\''),
        (arguments.mode, "644", "x must be a whole number from 0 to 4095, not '644'"),
        (arguments.owner, ("root", "root"), "x[0] must be a whole number"),
        (arguments.owner, 0, "x must be two numbers, of a user and a group, not 0"),
        (arguments.text, None, "x must be a text, not None"),
        (arguments.path, b"/a", "x must be a path, not b'/a'"),
        (arguments.path, "/a\0b", "x must be a path, not '/a\\x00b'"),
        (arguments.path, "\ud800", "x must be a path"),
        (arguments.binds, "/tmp:/x:ro", "x must be a list of words"),
    ],
)
def test_what_is_wrong_is_named(check: Callable[[str, Any], Any], value: Any, says: str) -> None:
    with pytest.raises(ArgumentError) as error:
        check("x", value)
    assert str(error.value).startswith(says)


def test_what_is_right_is_taken() -> None:
    assert arguments.arguments("x", (word for word in ("cat", Path("/a")))) == ("cat", "/a")
    assert arguments.variables("x", None) == {} and arguments.variables("x", {"A": "b"}) == {"A": "b"}
    assert arguments.data("x", "ü") == arguments.data("x", bytearray("ü".encode())) == b"\xc3\xbc"
    assert arguments.limits(1, "1g", 5) == Limits(1.0, 1 << 30, 5)
    assert arguments.limits(0.5, 2e9, 0) == Limits(0.5, 2_000_000_000)
    assert arguments.network("x", None) == "" and arguments.network("x", "host") == "host"
    assert arguments.path("x", Path("/a")) == "/a" and arguments.path("x", "/a\udcff") == "/a\udcff"
    assert arguments.mode("x", None) is None and arguments.mode("x", 0o4755) == 0o4755
    assert arguments.owner("x", None) is None and arguments.owner("x", [0, 5]) == (0, 5)


def test_a_bind_has_a_source_and_a_fault_says_which(tmp_path: Path) -> None:
    assert arguments.binds("binds", [f"{tmp_path}:/x:ro"]) == (Bind(str(tmp_path), "/x", True),)
    with pytest.raises(WeenvError, match=f"^{tmp_path}/none does not exist$"):
        arguments.binds("binds", [f"{tmp_path}/none:/x"])


def test_a_start_says_it_before_anything_is_made(tmp_path: Path) -> None:
    for options, name in (
        ({"command": "sleep 3"}, "command"), ({"binds": "/tmp:/x:ro"}, "binds"), ({"cpus": "2"}, "cpus"),
        ({"memory": "lots"}, "memory"), ({"env": ["A=b"]}, "env"), ({"pids": -1}, "pids"), ({"name": 7}, "name"),
        ({"network": "bridge"}, "network"), ({"config": 3}, "config"), ({"cwd": b"/"}, "cwd"),
    ):  # fmt: skip
        with pytest.raises(WeenvError, match=f"^{name} must be "):
            asyncio.run(weenv.AsyncEnvironment.start("plan.yaml", **{"config": weenv.load_config(), **options}))
    with pytest.raises(WeenvError, match=r"^plan must be a path, not 5"):
        asyncio.run(weenv.AsyncEnvironment.start(5, config=weenv.load_config()))  # type: ignore[arg-type]


_anything = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)


@given(value=_anything | st.lists(_anything, max_size=3) | st.dictionaries(st.text(max_size=2), _anything, max_size=2))
def test_nothing_but_a_weenv_error_comes_of_anything(value: Any) -> None:
    checks = (
        arguments.words, arguments.arguments, arguments.variables, arguments.data, arguments.number, arguments.whole,
        arguments.amount, arguments.network, arguments.mode, arguments.owner, arguments.text, arguments.path, arguments.binds,
    )  # fmt: skip
    for check in checks:
        try:
            check("x", value)
        except WeenvError as error:
            assert "\n" not in str(error)
