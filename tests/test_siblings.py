"""Files of one name in neighbouring directories: which are found, and when they are asked for."""

from __future__ import annotations

from bisect import bisect_right

from hypothesis import given
from hypothesis import strategies as st

from weenv.layer.toc import Toc
from weenv.plugin.snapshotter.fetch.planner import Extents, ReadAhead, offsets
from weenv.plugin.snapshotter.fetch.siblings import Siblings
from weenv_testkit.layers import encode, make_tar
from weenv_testkit.synthetic import payload

TARGET = 16 << 10


def installation(packages: int = 90) -> list[tuple[str, bytes]]:
    """Python-like: packages with a directory of metadata each, so large that two never share a frame."""
    files = []
    for number in range(packages):
        files.append((f"site/p{number:02}.dist-info/entry_points.txt", payload(100, number)))
        files.append((f"site/p{number:02}/code.bin", payload(5 * TARGET, 1000 + number)))
    return files


def toc_of(files: list[tuple[str, bytes]]) -> Toc:
    tar = make_tar([{"name": name, "data": data} for name, data in files])
    return encode(tar, target=TARGET)[1].toc


def where(toc: Toc, path: str) -> tuple[int, int]:
    entry = toc.lookup(path.encode())
    assert entry is not None
    return int(toc.entries.aux[entry]), int(toc.entries.size[entry])


def test_only_files_that_share_a_name_and_a_grandparent_are_grouped() -> None:
    files = [*installation(12), *((f"other/d{n}/entry_points.txt", payload(50, n)) for n in range(4)), ("lone", b"x")]
    found = Siblings.of(toc_of(files))
    assert len(found.first) == 2  # one group: four elsewhere are too few, and code.bin is too large
    assert list(found.first) == [0, 12]
    assert list(found.members) == sorted(found.members) == list(found.begin)


def test_large_files_and_long_names_take_no_part() -> None:
    files = [(f"a/d{n}/big", payload(65_537, n)) for n in range(6)] + [(f"b/d{n}/{'n' * 25}", b"x") for n in range(6)]
    assert len(Siblings.of(toc_of(files)).begin) == 0


class Walker:
    """Reads files of a layer through a ReadAhead; what was planned arrives at once."""

    def __init__(self, files: list[tuple[str, bytes]]) -> None:
        self.toc = toc_of(files)
        self.starts = offsets(self.toc.frames.compressed_offsets)
        self.contents = offsets(self.toc.frames.content_offsets)
        self.states = bytearray(len(self.toc.frames))
        self.ahead = ReadAhead(self.starts, self.states, lambda _frame: False, contents=self.contents)
        self.ahead.budget.waste, self.ahead.budget.floor = 0.0, 0  # neighbours off
        self.ahead.extents = Extents.of(self.toc)
        self.misses = 0

    def read(self, path: str) -> list[int]:
        begin, size = where(self.toc, path)
        offset = begin // 4096 * 4096
        end_offset = -(-(begin + size) // 4096) * 4096
        end_offset = min(end_offset, self.contents[-1])
        covering = [f for f in range(len(self.states)) if self.contents[f] < end_offset and self.contents[f + 1] > offset]
        if not all(self.states[f] for f in covering):
            self.misses += 1
        planned = self.ahead.observe(covering[0], covering[-1] + 1, offset, end_offset - offset)
        assert not set(planned) & set(covering)
        assert len(set(planned)) == len(planned)
        for frame in (*covering, *planned):
            self.states[frame] = 1
        return planned

    @property
    def fetched(self) -> int:
        return sum(self.states)


def test_a_walk_in_order_misses_only_until_the_row_is_seen() -> None:
    walker = Walker(installation(90))
    for number in range(90):
        walker.read(f"site/p{number:02}.dist-info/entry_points.txt")
    assert walker.misses <= 5


def test_reads_in_no_order_guess_nothing() -> None:
    walker = Walker(installation(90))
    for number in (50, 10, 70, 30, 80, 20, 60, 40, 0):
        path = f"site/p{number:02}.dist-info/entry_points.txt"
        near = bisect_right(walker.contents, where(walker.toc, path)[0]) - 1
        assert all(abs(frame - near) < 8 for frame in walker.read(path))  # its own neighbours at most


def test_a_few_siblings_are_fetched_together_in_any_order() -> None:
    files = []
    for number in range(20):
        files.append((f"site/lib/sub{number:02}/__pycache__/__init__.pyc", payload(200, number)))
        files.append((f"site/lib/sub{number:02}/__pycache__/rest.bin", payload(2 * TARGET, 500 + number)))
    walker = Walker(files)
    for number in (13, 2, 7, 19, 0, 11, 5):
        walker.read(f"site/lib/sub{number:02}/__pycache__/__init__.pyc")
    assert walker.misses == 3


def test_guesses_stop_at_their_budget_and_go_on_when_they_are_used() -> None:
    walker = Walker(installation(90))
    walker.ahead.rows.waste, walker.ahead.rows.floor = 0.0, 3 * walker.starts[-1] // len(walker.states)
    for number in range(3):
        planned = walker.read(f"site/p{number:02}.dist-info/entry_points.txt")
    assert planned
    assert walker.ahead.rows.guessed <= walker.ahead.rows.floor
    assert len(planned) < 16


@given(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=60))
def test_any_reads_are_answered_with_members_of_the_layer(reads: list[tuple[int, int]]) -> None:
    toc = toc_of(installation(10))
    found = Siblings.of(toc)
    members = set(found.members)
    for offset, length in reads:
        assert {begin for begin, _ in found.observe(offset % toc.stream_size, length % 200_000)} <= members
