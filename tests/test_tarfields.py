"""layer/tarfields.py: numbers, times and PAX records of tar headers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.layer.tarfields import (
    bounded_time,
    decimal,
    mistaken_prefix,
    numeric,
    octal,
    pax_records,
    pax_time,
    star_prefix,
)
from weenv_testkit import rawtar


@given(st.integers(0, 8**11 - 1))
def test_octal_round_trip(value: int) -> None:
    assert numeric(rawtar.octal(value, 12)) == value


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_base256_round_trip(value: int) -> None:
    assert numeric(rawtar.base256(value, 12)) == value


@given(st.integers(-(1 << 55), (1 << 55) - 1))
def test_base256_in_eight_bytes(value: int) -> None:
    assert numeric(rawtar.base256(value, 8)) == value


def test_base256_beyond_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="too large"):
        numeric(b"\x80" + b"\x00" * 2 + b"\x80" + bytes(8))
    with pytest.raises(ValueError, match="too large"):
        numeric(b"\xff\xff\xfe" + b"\xff" * 9)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (b"0000644\0", 0o644),
        (b"0000644 ", 0o644),
        (b"   644 \0", 0o644),
        (b"644\0\0\0\0\0", 0o644),
        (b"00000000644", 0o644),
        (bytes(8), 0),
        (b"        ", 0),
        (b"\0\0 12 \0\0", 0o12),
        (b"12\0garbg", 0o12),
    ],
)
def test_octal_edges(field: bytes, value: int) -> None:
    assert octal(field) == value


@pytest.mark.parametrize("field", [b"0000648\0", b"-1\0", b"+1\0", b"1_0\0", b"0o7\0", b"1 2\0", b"x", b"1\xb2"])
def test_octal_refuses_what_int_would_take(field: bytes) -> None:
    with pytest.raises(ValueError, match=r"octal|invalid literal"):
        octal(field)


@pytest.mark.parametrize(("text", "value"), [(b"0", 0), (b"+7", 7), (b"-7", -7), (b"007", 7), (b"%d" % (2**63 - 1), 2**63 - 1)])
def test_decimal(text: bytes, value: int) -> None:
    assert decimal(text) == value


@pytest.mark.parametrize("text", [b"", b"-", b" 1", b"1 ", b"1_0", b"0x1", b"9223372036854775808", b"9" * 5000])
def test_decimal_refuses(text: bytes) -> None:
    with pytest.raises(ValueError, match="not a number"):
        decimal(text)


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [
        (b"1", 10**9),
        (b"1.", 10**9),
        (b"1.5", 1_500_000_000),
        (b"1.000000001", 10**9 + 1),
        (b"1.9999999999", 1_999_999_999),
        (b"-1.5", -1_500_000_000),
        (b"-0.5", -500_000_000),
    ],
)
def test_pax_time(text: bytes, nanoseconds: int) -> None:
    assert pax_time(text) == nanoseconds


@pytest.mark.parametrize("text", [b"", b".5", b"1.x", b"1.-5", b"1,5", b"1.5e3"])
def test_pax_time_refuses(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a (time|number)"):
        pax_time(text)


def test_times_that_containerd_does_not_set_are_1970() -> None:
    assert bounded_time(-1) == (0, 0)
    assert bounded_time(2**63 - 1) == (9_223_372_036, 854_775_807)
    assert bounded_time(2**63) == (0, 0)


@given(
    st.dictionaries(
        st.binary(min_size=1, max_size=20).filter(
            lambda key: b"=" not in key and b"\0" not in key and not key.startswith(b"GNU.sp")
        ),
        st.binary(max_size=200).filter(lambda value: b"\0" not in value),
    )
)
def test_pax_records_round_trip(records: dict[bytes, bytes]) -> None:
    assert pax_records(b"".join(rawtar.record(key, value) for key, value in records.items())) == records


def test_the_last_of_equal_keys_counts() -> None:
    assert pax_records(rawtar.record(b"path", b"a") + rawtar.record(b"path", b"b")) == {b"path": b"b"}


def test_values_may_hold_anything_but_names_no_nul() -> None:
    assert pax_records(rawtar.record(b"SCHILY.xattr.user.x", b"a\0=\nb"))[b"SCHILY.xattr.user.x"] == b"a\0=\nb"
    with pytest.raises(ValueError, match="malformed"):
        pax_records(rawtar.record(b"path", b"a\0b"))
    with pytest.raises(ValueError, match="malformed"):
        pax_records(rawtar.record(b"a\0b", b""))


MALFORMED = [
    b"x",
    b"10 a=bcdef",
    b"5 a=b\n",
    b"99 a=b\n",
    b"-6 a=b\n",
    b"6 a=b\nz",
    b"3 \n",
    b"7 abcd\n",
    b"6 =bc\n",
    b"0 a=b\n",
]


@pytest.mark.parametrize("data", [*MALFORMED, b" a=b\n", bytes(512)])
def test_malformed_records(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"record|number"):
        pax_records(data)


@given(st.binary(max_size=300))
def test_pax_records_only_raise_value_error(data: bytes) -> None:
    try:
        pax_records(data)
    except ValueError:
        return


def test_sparse_format_0_0_becomes_0_1() -> None:
    pairs = [
        (b"GNU.sparse.offset", b"1"),
        (b"GNU.sparse.numbytes", b"2"),
        (b"GNU.sparse.offset", b"3"),
        (b"GNU.sparse.numbytes", b"4"),
    ]
    assert pax_records(b"".join(rawtar.record(*pair) for pair in pairs)) == {b"GNU.sparse.map": b"1,2,3,4"}
    with pytest.raises(ValueError, match="sparse map"):
        pax_records(b"".join(rawtar.record(*pair) for pair in reversed(pairs)))


def test_star_and_old_go_prefixes() -> None:
    field = b"dir".ljust(131, b"\0") + b"00000000001\0" + b"00000000002\0"
    assert star_prefix(field) == b"dir".ljust(131, b"\0")
    with pytest.raises(ValueError, match="octal"):
        star_prefix(b"dir".ljust(131, b"\0") + b"nonsense....")
    assert mistaken_prefix(b"00000000001\0" + b"00000000002\0" + bytes(131)) == b""
    assert mistaken_prefix(b"some/directory".ljust(155, b"\0")) == b"some/directory"
    assert mistaken_prefix(b"some/\xff\xff".ljust(155, b"\0")) == b""
