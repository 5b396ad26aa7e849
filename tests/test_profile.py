"""The text of a read profile: what is written is read back, hostile ones are refused, nothing grows with what they claim."""

from __future__ import annotations

import base64
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weenv.core.errors import FormatError
from weenv.layer.profile import MAX_VALUE, PAUSE, Run, decode, encode, timeline
from weenv.layer.verify import MAX_LABEL, PREFETCH_ANNOTATION, parse_annotations

FRAMES = 5000
needed = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, FRAMES - 1)), max_size=400)


def value(*numbers: int) -> str:
    """A value of these varints."""
    out = bytearray()
    for number in numbers:
        while number > 0x7F:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)
    return "1," + base64.urlsafe_b64encode(out).rstrip(b"=").decode()


def listed(runs: list[Run]) -> list[int]:
    """The frames in order."""
    return [frame for run in runs for frame in range(run.first, run.end)]


@given(needed)
def test_what_fits_comes_back_each_frame_once_in_the_order_of_need(touches: list[tuple[int, int]]) -> None:
    made = encode(touches)
    runs = decode(made.value, FRAMES) if made.value else []
    assert made.cut == 0
    assert len(PREFETCH_ANNOTATION) + len(made.value) <= MAX_LABEL
    frames = listed(runs)
    assert len(frames) == len(set(frames)) == made.frames
    first: dict[int, int] = {}
    for time, frame in sorted(touches):
        first.setdefault(frame, time)
    assert set(frames) == set(first)
    assert [run.time for run in runs] == sorted(run.time for run in runs)
    for run in runs:  # coarsened by less than 3.2 s, and never later than needed
        assert all(0 <= first[frame] - run.time < 32 for frame in range(run.first, run.end))


@given(needed, st.integers(0, 300))
def test_what_does_not_fit_is_cut_at_the_end(touches: list[tuple[int, int]], limit: int) -> None:
    made = encode(touches, limit)
    assert len(made.value) <= limit or not made.value
    whole = encode(touches)
    assert made.frames + made.cut == whole.frames
    if made.value:
        kept = listed(decode(made.value, FRAMES))
        rest = {frame for _, frame in touches} - set(kept)
        earliest = {frame: min(time for time, one in touches if one == frame) // 32 for frame in {f for _, f in touches}}
        assert len(kept) == made.frames
        assert not rest or max(earliest[f] for f in kept) <= min(earliest[f] for f in rest)


def test_a_short_record_keeps_its_order_exactly() -> None:
    made = encode([(0, 7), (0, 8), (3, 2), (3, 3), (9, 100), (10, 101)])
    assert decode(made.value, 200) == [Run(0, 7, 2), Run(3, 2, 2), Run(9, 100, 1), Run(10, 101, 1)]
    assert made.value == value(0, 14, 1, 3, 13, 1, 6, 192, 0, 1, 0, 0)


def test_a_record_of_all_of_a_large_layer_in_any_order_fits_as_far_as_its_times_allow() -> None:
    made = encode([(frame * 7919 % 600, frame) for frame in range(4000)])
    assert len(made.value) <= MAX_VALUE
    assert 0 < made.frames < 4000 == made.frames + made.cut
    assert encode([(frame // 100, frame) for frame in range(4000)]).cut == 0


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "2,AAAA", "1,", "1,!!", "1,A", "1,AA=", value(0, 0), value(0, 0, 0)[:-1] + "\n", " " + value(0, 0, 0),
        value(0, 0, FRAMES),  # beyond the end
        value(0, 2 * FRAMES, 0),  # begins beyond it
        value(0, 1, 0),  # before the first
        value(0, 0, 9, 0, 19, 0),  # the same frame twice: back to where it began
        value(0, 0, 9, 0, 3, 0),  # within the one before
        value(0, 20, 0, 0, 21, 30),  # around the one before
        value(1 << 32, 0, 0),  # later than any time
        *(value((1 << 31) - 1, 0, 0, (1 << 31), 0, 0, 1, 0, 0),),
        "1," + base64.urlsafe_b64encode(b"\xff" * 9 + b"\x01\x00\x00").decode().rstrip("="),  # too long a number
        "1," + base64.urlsafe_b64encode(b"\x00\x00\x80").decode().rstrip("="),  # ends within one
        "1," + "A" * MAX_VALUE,
        "1,ÄÖÜ", "1,\0\0\0\0",
    ],
)  # fmt: skip
def test_what_encode_would_not_write_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match=PREFETCH_ANNOTATION):
        decode(text, FRAMES)


def test_lengths_cost_nothing_before_they_are_checked() -> None:
    hostile = value(*([0, 0, (1 << 34)] * 300))
    tracemalloc.start()
    with pytest.raises(FormatError):
        decode(hostile, 1 << 21)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@given(st.text(alphabet="ABCabc019-_,=\n", max_size=60).map("1,".__add__) | st.text(max_size=40))
def test_any_text_is_frames_of_the_layer_or_an_error(text: str) -> None:
    try:
        runs = decode(text, 100)
    except FormatError:
        return
    frames = listed(runs)
    assert frames and len(frames) == len(set(frames)) and 0 <= min(frames) <= max(frames) < 100


def test_records_of_several_layers_are_put_on_one_timeline_without_the_pauses() -> None:
    weeks = 14 * 86400 * 10
    merged = timeline({"base": [(1000, 5), (1002, 6)], "top": [(1000 + weeks, 1), (1003 + weeks, 0)], "none": []})
    assert merged == {"base": [(0, 5), (2, 6)], "top": [(2 + PAUSE, 1), (5 + PAUSE, 0)], "none": []}
    assert timeline({}) == {}


def test_an_annotation_that_is_too_long_for_a_label_is_none_and_the_layer_as_lazy() -> None:
    digest = "sha256:" + "ab" * 32
    layer = {
        "containerd.io/snapshot/weenv.layer": f"{digest},1000",
        "containerd.io/snapshot/weenv.toc": f"900,100,{digest}",
    }
    fits, too_long = "1," + "A" * (MAX_VALUE - 2), "1," + "A" * (MAX_VALUE - 1)
    found = parse_annotations({**layer, PREFETCH_ANNOTATION: fits})
    assert found is not None and found.prefetch == fits and found.annotations()[PREFETCH_ANNOTATION] == fits
    found = parse_annotations({**layer, PREFETCH_ANNOTATION: too_long})
    assert found is not None and not found.prefetch and PREFETCH_ANNOTATION not in found.annotations()
    assert parse_annotations({PREFETCH_ANNOTATION: fits}) is None, "alone it says nothing"
