"""The small encoder against protobuf itself, both ways."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.wire import WireError, decode, encode
from weenv.plugin.containerd.fields import TABLES
from weenv.plugin.containerd.schema import SCHEMA

text = st.text(max_size=12)
labels = st.dictionaries(text, text, max_size=3)
any_ = st.fixed_dictionaries({}, optional={"type_url": text, "value": st.binary(max_size=40)})
mounts = st.lists(
    st.fixed_dictionaries({}, optional={"type": text, "source": text, "options": st.lists(text, max_size=3)}), max_size=3
)
container = st.fixed_dictionaries(
    {},
    optional={
        "id": text, "labels": labels, "runtime": st.fixed_dictionaries({"name": text}, optional={"options": any_}),
        "spec": any_,
        "created_at": st.fixed_dictionaries({"seconds": st.integers(-(2**63), 2**63 - 1), "nanos": st.integers(-5, 10**9)}),
        "extensions": st.dictionaries(text, any_, max_size=2),
    },
)  # fmt: skip


def message(name: str, values: dict[str, Any]) -> Any:
    """By protobuf's own hands."""
    made = SCHEMA[name]()
    for field, value in values.items():
        kind = TABLES[name][field][1]
        target = getattr(made, field)
        if kind.startswith("map<") and not kind.endswith("string>"):
            for key, item in value.items():
                target[key].MergeFrom(SCHEMA[".google.protobuf.Any"](**item))
        elif isinstance(value, dict) and not kind.startswith("map<"):
            target.SetInParent()
            target.MergeFrom(message(kind, value) if not kind.startswith(".") else SCHEMA[kind](**value))
        elif kind.startswith("repeated ") and value and isinstance(value[0], dict):
            for item in value:
                target.add().MergeFrom(message(kind[9:], item))
        elif isinstance(value, list):
            target.extend(value)
        elif isinstance(value, dict):
            target.update(value)
        else:
            setattr(made, field, value)
    return made


@given(values=container)
def test_containers_as_protobuf_has_them(values: dict[str, Any]) -> None:
    encoded = encode(TABLES, "Container", values)
    assert SCHEMA["Container"].FromString(encoded) == message("Container", values)
    again = decode(TABLES, "Container", message("Container", values).SerializeToString())
    assert SCHEMA["Container"].FromString(encode(TABLES, "Container", again)) == message("Container", values)


@given(values=st.fixed_dictionaries({"container_id": text, "rootfs": mounts, "terminal": st.booleans(), "options": any_}))
def test_requests_as_protobuf_has_them(values: dict[str, Any]) -> None:
    assert SCHEMA["CreateTaskRequest"].FromString(encode(TABLES, "CreateTaskRequest", values)) == message(
        "CreateTaskRequest", values
    )


@given(status=st.integers(0, 2**32 - 1), nanos=st.integers(-(2**31), 2**31 - 1))
def test_numbers(status: int, nanos: int) -> None:
    made = SCHEMA["WaitResponse"](exit_status=status)
    made.exited_at.nanos = nanos
    found = decode(TABLES, "WaitResponse", made.SerializeToString())
    assert found.get("exit_status", 0) == status and found["exited_at"].get("nanos", 0) == nanos


@given(data=st.binary(max_size=60), name=st.sampled_from(["Container", "WaitResponse", "PrepareSnapshotResponse"]))
def test_any_bytes_are_read_or_refused(data: bytes, name: str) -> None:
    try:
        found = decode(TABLES, name, data)
    except WireError:
        return
    assert isinstance(found, dict)


def test_what_is_refused() -> None:
    for data in (b"\x08", b"\x0a\x05ab", b"\x0b", b"\x0a\xff\xff\xff\xff\x0f", b"\x80" * 11, b"\x0a\x01\xff"):
        with pytest.raises(WireError):
            decode(TABLES, "Container", data)
    with pytest.raises(KeyError):
        encode(TABLES, "Container", {"nothing": 1})
    assert json_format.MessageToDict(SCHEMA["Container"].FromString(encode(TABLES, "Container", {"id": ""}))) == {}
