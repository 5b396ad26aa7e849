"""Id mappings: what containerd's labels say, and the user namespace that carries them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import InvalidRequest, MountError
from weenv.plugin.snapshotter import idmap
from weenv.plugin.snapshotter.idmap import LABEL_GID_MAPPING, LABEL_UID_MAPPING, IdMapping, mapping_of

LAST = (1 << 32) - 2


@pytest.mark.parametrize(("text", "host"), [("0:1000:65536", 1000), ("5:1:2,0:7:1", 7), (f"0:{LAST}:1", LAST)])
def test_mapped_roots(text: str, host: int) -> None:
    assert IdMapping.parse(text, "0:1:1").root == (host, 1)


@pytest.mark.parametrize(
    "text",
    ["", "0:1", "0:x:1", "0:5:0", "0:99999999999:1", f"0:{LAST + 1}:1", f"0:1:{1 << 32}", "0:1:1,", "0:-1:1", " 0:1:1", "0:١:1",
     ",".join(f"{n}:{n}:1" for n in range(341))],
)  # fmt: skip
def test_malformed_mappings(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not of the form"):
        IdMapping.parse("0:1:1", text)


def test_a_mapping_without_root_has_no_root() -> None:
    mapping = IdMapping.parse("1:2:3", "0:1:1")
    with pytest.raises(InvalidRequest, match="does not map id 0"):
        _ = mapping.root


def test_labels_ask_for_both_or_for_nothing() -> None:
    assert mapping_of({"containerd.io/snapshot.ref": "x"}) is None
    assert mapping_of({LABEL_UID_MAPPING: "0:1:2", LABEL_GID_MAPPING: "0:3:4"}) == IdMapping(((0, 1, 2),), ((0, 3, 4),))
    with pytest.raises(InvalidRequest):
        mapping_of({LABEL_UID_MAPPING: "0:1:2"})


@given(st.text(alphabet="0123456789:,-x", max_size=60))
def test_any_text_is_a_mapping_or_refused(text: str) -> None:
    try:
        mapping = IdMapping.parse(text, text)
    except InvalidRequest:
        return
    assert ",".join(":".join(map(str, extent)) for extent in mapping.uids).count(",") == text.count(",")
    assert all(length > 0 and outside + length <= LAST + 1 for _, outside, length in mapping.uids)


def test_a_node_without_the_helper_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping = IdMapping.parse("0:1:1", "0:1:1")
    monkeypatch.setattr(idmap, "_HELPER", ("weenv-no-such-program",))
    with pytest.raises(MountError, match="cannot run weenv-no-such-program"), idmap.user_namespace(mapping):
        pass
    monkeypatch.setattr(idmap, "_HELPER", ("sh", "-c", "echo no more namespaces >&2; exit 1"))
    with pytest.raises(MountError, match="no more namespaces") as caught, idmap.user_namespace(mapping):
        pass
    assert "max_user_namespaces" in caught.value.hint
