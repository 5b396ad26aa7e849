"""What one server leaves for the next, in a memfd."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from weenv.core.errors import FormatError
from weenv.plugin.snapshotter.blobfs.mountstate import MountState

NAME = "ab" * 32


@pytest.fixture
def state() -> Iterator[MountState]:
    made = MountState.create()
    yield made
    made.close()


def again(state: MountState) -> MountState:
    """What a process that gets a copy of the descriptor finds; the copy is closed."""
    fd = os.dup(state.fd)
    try:
        return MountState.load(fd)
    finally:
        os.close(fd)


def test_a_new_mount_has_none(state: MountState) -> None:
    assert (again(state).nodes, again(state).init) == ({}, None)
    assert not os.get_inheritable(state.fd)


def test_what_is_remembered_is_found_and_the_last_init_counts(state: MountState) -> None:
    state.remember_init({"minor": 38, "flags": 1})
    for number in range(2000):
        state.remember_node(number + 2, f"{number:064x}")
    state.remember_init({"minor": 39, "flags": 2})
    found = again(state)
    assert found.nodes == state.nodes == {number + 2: f"{number:064x}" for number in range(2000)}
    assert found.init == state.init == {"minor": 39, "flags": 2}


def test_every_torn_end_is_cut_off_and_written_over(state: MountState) -> None:
    state.remember_node(2, NAME)
    whole = os.fstat(state.fd).st_size
    state.remember_node(3, "cd" * 32)
    for length in range(os.fstat(state.fd).st_size - 1, whole - 1, -1):
        os.ftruncate(state.fd, length)
        assert again(state).nodes == {2: NAME}
        assert os.fstat(state.fd).st_size == whole
        os.pwrite(state.fd, b'{"node":[3,"' + b"x" * (length - whole), whole)
    successor = MountState.load(os.dup(state.fd))
    successor.remember_node(4, NAME)
    successor.close()
    assert again(state).nodes == {2: NAME, 4: NAME}


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"node":["x","y"]}', b'{"node":[1]}', b'{"init":1}', b"\xff", b'{"what":1}'])
def test_what_no_server_wrote_is_refused(state: MountState, line: bytes) -> None:
    os.pwrite(state.fd, line + b"\n", 0)
    with pytest.raises(FormatError, match="state"):
        again(state)


def test_a_file_of_any_size_is_not_read_into_memory(state: MountState) -> None:
    os.ftruncate(state.fd, 1 << 40)
    with pytest.raises(FormatError, match="bytes"):
        again(state)
