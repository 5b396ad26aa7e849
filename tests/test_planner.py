"""What the fetch planner decides, on plain data."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.plugin.snapshotter.fetch.planner import Budget, Extents, ReadAhead, offsets, span
from weenv.plugin.snapshotter.fetch.siblings import Siblings
from weenv_testkit.layers import encode, make_tar
from weenv_testkit.synthetic import make_layer, payload


def starts_of(sizes: list[int]) -> array[int]:
    return array("Q", [0, *np.cumsum(np.array(sizes, dtype=np.uint64)).tolist()])


@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60), wanted=st.sets(st.integers(0, 59)),
    urgent=st.sets(st.integers(0, 59)), frame=st.integers(0, 59), limit=st.integers(1, 5000),
)  # fmt: skip
def test_a_span_is_wanted_contiguous_bounded_and_maximal(
    sizes: list[int], wanted: set[int], urgent: set[int], frame: int, limit: int
) -> None:
    frame %= len(sizes)
    starts = starts_of(sizes)
    first, end = span(frame, starts, wanted.__contains__, urgent.__contains__, limit)
    assert 0 <= first <= frame < end <= len(sizes)
    assert all(one in wanted for one in range(frame + 1, end))
    assert all(one in urgent for one in range(first, frame))
    if end - first > 1:
        assert starts[end] - starts[first] <= limit
    if end < len(sizes) and end in wanted:
        assert starts[end + 1] - starts[frame] > limit or first < frame


def test_offsets_are_plain_integers() -> None:
    table = offsets(np.array([0, 1 << 40], dtype=np.uint64))
    assert list(table) == [0, 1 << 40]


def test_extents_are_the_files_with_frames_of_their_own() -> None:
    target = 16 << 10
    files = [(f"s{i}", payload(3000, i)) for i in range(20)] + [("big", payload(200_000, 99)), ("t", payload(100, 98))]
    layer = make_layer(files, target=target)
    extents = Extents.of(layer.toc)
    assert len(extents.first) == 1
    low, high = extents.first[0], extents.end[0]
    begin = int(layer.toc.entries.aux[layer.toc.lookup(b"big") or 0])
    assert int(layer.frames.content_offsets[low]) == begin
    assert high - low == -(-200_000 // target)
    assert extents.file_of(low) == extents.file_of(high - 1) == (low, high)
    assert extents.file_of(low - 1) == extents.file_of(high) == (0, 0)


class Reader:
    """Drives a ReadAhead as the server does, with everything planned arriving at once; counts what was fetched."""

    def __init__(
        self, sizes: list[int], files: list[tuple[int, int]] | None = None, budget: Budget | None = None, **settings: int
    ) -> None:
        self.starts = starts_of(sizes)
        self.states = bytearray(len(sizes))
        self.ahead = ReadAhead(
            self.starts, self.states, lambda _frame: False, budget=budget or Budget(0.1, 1 << 20), **settings
        )
        if files is not None:
            first, end = array("Q", [low for low, _ in files]), array("Q", [high for _, high in files])
            self.ahead.extents = Extents(first, end, bytearray(len(files)), Siblings.none())
        self.misses = 0

    def read(self, first: int, end: int | None = None) -> list[int]:
        end = first + 1 if end is None else end
        planned = self.ahead.observe(first, end)
        assert not any(self.states[frame] for frame in planned)
        assert len(set(planned)) == len(planned)
        if not all(self.states[first:end]):
            self.misses += 1
        for frame in (*range(first, end), *planned):
            self.states[frame] = 1
        return planned

    @property
    def fetched(self) -> int:
        return sum(self.starts[f + 1] - self.starts[f] for f in range(len(self.states)) if self.states[f])


def test_a_forward_reader_of_a_large_file_misses_twice_and_never_leaves_the_file() -> None:
    reader = Reader([64 << 10] * 600, [(100, 500)])
    for frame in range(100, 500):
        reader.read(frame)
    assert reader.misses <= 3
    assert not any(reader.states[:100])
    assert not any(reader.states[500:])


@pytest.mark.parametrize("files", [[(0, 400)], []])
def test_what_was_evicted_is_read_ahead_again(files: list[tuple[int, int]]) -> None:
    reader = Reader([64 << 10] * 400, files)
    misses = []
    for _ in range(3):
        for frame in range(400):
            reader.read(frame)
        misses.append(reader.misses)
        reader.misses = 0
        reader.states[:] = bytes(400)
        reader.ahead.evicted(range(400))
    assert misses[1] <= misses[0] + 2 and misses[2] <= misses[0] + 2, misses


def test_the_window_grows_and_has_a_limit() -> None:
    reader = Reader([64 << 10] * 2000, [(0, 2000)], window_max=4 << 20)
    longest = max(len(reader.read(frame)) for frame in range(1500))
    assert 16 < longest <= 64
    far = max(frame for frame in range(2000) if reader.states[frame])
    assert far <= 1500 + 64 + 1


def test_two_forward_readers_of_one_file_keep_their_own_windows() -> None:
    reader = Reader([64 << 10] * 2000, [(0, 2000)], window_max=1 << 20)
    for step in range(400):
        reader.read(step)
        reader.read(1000 + step)
    assert reader.misses <= 6


def test_few_random_reads_of_a_large_file_fetch_nothing_else() -> None:
    reader = Reader([64 << 10] * 4000, [(0, 4000)])
    order = random.Random(1).sample(range(0, 4000, 8), 300)
    for frame in order:
        reader.read(frame)
    assert reader.fetched == 300 * (64 << 10)


def test_dense_random_reads_of_a_large_file_complete_their_surroundings() -> None:
    reader = Reader([64 << 10] * 512, [(0, 512)])
    order = random.Random(2).sample(range(512), 512)
    for frame in order:
        reader.read(frame)
    assert reader.misses < 256


@given(st.lists(st.integers(0, 299), min_size=1, max_size=300), st.integers(0, 3))
def test_random_reads_of_a_large_file_fetch_at_most_twice_what_was_asked_for(order: list[int], seed: int) -> None:
    generator = random.Random(seed)
    reader = Reader([generator.randrange(1000, 1001) for _ in range(300)], [(0, 300)], window_min=0, window_max=0, whole_max=0)
    for frame in order:
        reader.read(frame)
    # window 0 leaves the density rule (and one frame of a stream) alone
    asked = len(set(order))
    assert reader.fetched <= 2 * asked * 1000 + 1000 * asked


def test_small_files_in_sequence_are_fetched_ahead() -> None:
    reader = Reader([50 << 10] * 400)
    for frame in range(300):
        reader.read(frame)
    assert reader.misses == 1
    assert reader.fetched <= (300 + 16) * (50 << 10)


def test_the_next_two_frames_come_with_one_that_small_files_share() -> None:
    reader = Reader([50 << 10] * 100)
    assert reader.read(10) == [11, 12]
    assert reader.read(50) == [51, 52]
    assert reader.read(51) == [53, 54, 55]  # the second in sequence: more of them
    assert reader.read(10) == []


def test_a_file_of_a_few_frames_is_fetched_whole() -> None:
    reader = Reader([100 << 10] * 100, [(20, 26), (40, 90)], whole_max=1 << 20)
    assert reader.read(22) == [20, 21, 23, 24, 25, 26, 27]
    assert reader.read(60) == []  # a large one


@given(st.lists(st.integers(0, 999), min_size=1, max_size=400), st.floats(0, 0.3))
def test_guesses_never_exceed_their_budget(order: list[int], waste: float) -> None:
    reader = Reader([1000] * 1000, budget=Budget(waste, 4000))
    for frame in order:
        reader.read(frame)
    asked = len(set(order)) * 1000
    assert reader.ahead.budget.demanded == asked
    assert reader.fetched - asked == reader.ahead.budget.guessed
    assert 0 <= reader.ahead.budget.guessed <= waste * asked + 4000


def test_layers_share_a_budget() -> None:
    budget = Budget(0, 4000)
    one, two = Reader([1000] * 100, budget=budget), Reader([1000] * 100, budget=budget)
    assert len(one.read(10)) + len(two.read(10)) + len(one.read(50)) + len(two.read(50)) == 4
    one.read(11)  # a guess that was right may be made again
    assert budget.guessed == 4000


def test_guesses_stop_at_a_large_file() -> None:
    reader = Reader([50_000] * 100, [(50, 90)], whole_max=1 << 20)
    for frame in range(50):
        reader.read(frame)
    assert not any(reader.states[50:])


def program_reader(frames: int, *, program: bool) -> Reader:
    reader = Reader([64 << 10] * (frames + 100), [(50, 50 + frames)], whole_max=0)
    reader.ahead.extents.program[:] = bytes([program])
    return reader


def test_a_program_is_here_after_a_few_misses_wherever_they_are() -> None:
    reader = program_reader(900, program=True)
    order = random.Random(3).sample(range(50, 950), 300)
    for frame in order:
        reader.read(frame)
    assert reader.misses <= 18  # blocks have a limit: 900 frames are 15 of them
    assert not any(reader.states[:50])
    assert not any(reader.states[950:])


def test_looking_at_the_header_of_a_program_fetches_four_frames() -> None:
    reader = program_reader(900, program=True)
    reader.read(50)
    assert sum(reader.states) == 4


def test_programs_are_told_by_permission_or_name() -> None:
    target = 16 << 10
    modes = {"bin/tool": 0o755, "lib/libx.so.6.1": 0o644, "data.sock": 0o644}
    members = [{"name": name, "mode": mode, "data": payload(100_000, mode)} for name, mode in modes.items()]
    toc = encode(make_tar(members), target=target)[1].toc
    extents = Extents.of(toc)
    found = {}
    for path in modes:
        begin = int(toc.entries.aux[toc.lookup(path.encode()) or 0])
        frame = int(np.searchsorted(toc.frames.content_offsets, begin, side="right")) - 1
        found[path] = extents.is_program(extents.file_of(frame + 1)[0])
    assert found == {"bin/tool": True, "lib/libx.so.6.1": True, "data.sock": False}


def test_a_read_that_begins_in_the_page_before_a_file_is_a_read_of_that_file() -> None:
    reader = Reader([64 << 10] * 40, [(0, 20), (20, 40)], whole_max=2 << 20)
    planned = reader.read(19, 21)
    assert planned
    assert min(planned) >= 21


def test_what_was_guessed_for_a_closed_layer_may_be_guessed_again() -> None:
    budget = Budget(0.0, 1 << 20)
    reader = Reader([64 << 10] * 100, budget=budget)
    reader.read(3)
    assert budget.guessed > 0
    assert budget.left() < 1 << 20
    reader.ahead.forget()
    assert budget.left() == 1 << 20
