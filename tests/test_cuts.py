"""Where frames begin."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.layer.cuts import HUGE, Cutter

TARGET = 8192


def up(size: int) -> int:
    return -(-size // 512) * 512


def cut(payloads: list[tuple[int, int]], size: int, *, step: int = 1 << 40) -> list[int]:
    """All boundaries, the cutter told of the stream ``step`` bytes at a time."""
    cutter = Cutter(TARGET)
    cuts: list[int] = []
    position, todo = 0, list(payloads)
    while position < size:
        position = min(position + step, size)
        while todo and todo[0][0] <= position:
            cuts += cutter.payload(*todo.pop(0))
        cuts += cutter.known(min(position, todo[0][0]) if todo else position)
    return cuts + cutter.finish(size)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    position, payloads = 0, []
    for _ in range(draw(st.integers(0, 25))):
        position += 512 * draw(st.sampled_from([1, 1, 1, 2, 3, 9, 40]))
        length = draw(
            st.one_of(st.integers(1, 3000), st.integers(1, 6 * TARGET), st.integers(TARGET, 12 * TARGET), st.just(TARGET))
        )
        payloads.append((position, length))
        position += up(length)
    return payloads, position + draw(st.sampled_from([0, 1024, 10_240, 100_000, 17]))


@settings(deadline=None)
@given(streams(), st.integers(100, 60_000))
def test_frames(stream: tuple[list[tuple[int, int]], int], step: int) -> None:
    payloads, size = stream
    cuts = cut(payloads, size)
    assert cuts == sorted(set(cuts))
    assert (cuts[-1] if cuts else 0) == size
    begins = [0, *cuts[:-1]] if cuts else []
    assert max((end - begin for begin, end in zip(begins, cuts, strict=True)), default=0) <= TARGET * 7 // 2 + 4096
    for offset, length in payloads:
        inside = [at for at in begins if offset < at < offset + length]
        if length < TARGET:
            assert inside == []
        else:
            assert offset in begins
            piece = TARGET if length < HUGE * TARGET else 2 * TARGET
            assert inside == [offset + piece * i for i in range(1, len(inside) + 1)]
            assert piece // 2 - 512 < length - piece * len(inside) <= piece * 3 // 2
            # Nothing but the next header follows in its last frame.
            assert (
                min((at for at in cuts if at >= offset + length), default=0) <= offset + up(length) + 4096
                or size - offset - length <= TARGET
            )
    assert cut(payloads, size, step=step) == cuts


def test_small_files_fill_frames() -> None:
    payloads = [(i * 1024 + 512, 512) for i in range(1000)]
    cuts = cut(payloads, 1_024_000)
    sizes = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
    assert set(sizes[:-1]) == {TARGET}


def test_large_files_do_not_make_frames_of_their_headers() -> None:
    payloads = [(512 + i * (TARGET + 512), TARGET) for i in range(10)]
    cuts = cut(payloads, 512 + 10 * (TARGET + 512) + 512)
    assert cuts[:2] == [512, 512 + TARGET + 512]
    assert len(cuts) == 11


def test_huge_files_have_frames_of_twice_the_size_and_their_neighbours_do_not() -> None:
    sizes = [HUGE * TARGET - 512, HUGE * TARGET, HUGE * TARGET - 512]
    payloads, position = [], 512
    for size in sizes:
        payloads.append((position, size))
        position += size + 512
    cuts = cut(payloads, position)
    frames = {
        offset: [b - a for a, b in zip([0, *cuts], cuts, strict=False) if offset <= a < offset + length]
        for offset, length in payloads
    }
    first, huge, last = (frames[offset] for offset, _ in payloads)
    assert first[:-1] == last[:-1] == [TARGET] * (HUGE - 1)
    assert huge == [2 * TARGET] * (HUGE // 2 - 1) + [2 * TARGET + 512]


def test_a_long_run_without_payload_is_cut_while_it_lasts() -> None:
    cutter = Cutter(TARGET)
    assert cutter.known(TARGET * 10)[:2] == [TARGET, 2 * TARGET]


@pytest.mark.parametrize("target", [0, 511, 513, -512])
def test_targets(target: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        Cutter(target)


def test_a_claimed_length_costs_nothing() -> None:
    """A header may claim any length: boundaries are made for bytes that have come, not for those that are promised."""
    cutter = Cutter(TARGET)
    assert cutter.payload(512, 1 << 62) == [512]
    assert cutter.known(512 + 7 * TARGET) == [512 + 2 * TARGET, 512 + 4 * TARGET, 512 + 6 * TARGET]
