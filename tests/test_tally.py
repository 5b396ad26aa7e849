"""cache/tally.py: counters by layer that stay bounded and lose nothing."""

from __future__ import annotations

import threading

from weenv.plugin.snapshotter.cache.tally import OTHER, Latencies, Tallies, Tally


def reads(tally: Tally) -> int:
    """All hits."""
    return sum(count for count, _ in tally.hits.values())


def test_threads_count_beside_each_other() -> None:
    tally = Tally()

    def run(number: int) -> None:
        for _ in range(20_000):
            tally.hit(number, 3)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reads(tally) == 80_000
    assert sum(size for _, size in tally.hits.values()) == 240_000


def test_a_layer_keeps_its_tally_while_it_is_known_and_then_is_one_of_the_others() -> None:
    tallies = Tallies(most=2)
    first = tallies.of("sha256:aaa")
    first.hit(0, 5)
    first.waits, first.waited, first.fetched, first.stored, first.evicted = 1, 2, 3, 4, 5
    first.errors["eio"] = 6
    assert tallies.of("sha256:aaa") is first
    tallies.of("sha256:bbb")
    tallies.of("sha256:ccc").errors["eio"] = 1
    rows = dict(tallies.rows())
    assert list(rows) == ["bbb", "ccc", OTHER]
    rest = rows[OTHER]
    assert (reads(rest), rest.waits, rest.waited, rest.fetched, rest.stored, rest.evicted, rest.errors) == (
        1, 1, 2, 3, 4, 5, {"eio": 6},
    )  # fmt: skip
    assert tallies.of("sha256:aaa") is not first
    assert reads(tallies.rest) == 1


def test_open_layers_keep_theirs_and_one_too_many_is_counted_with_the_others() -> None:
    tallies = Tallies(lambda digest: digest != "sha256:bbb", most=2)
    tallies.of("sha256:aaa"), tallies.of("sha256:bbb")
    tallies.of("sha256:ccc")
    assert [label for label, _ in tallies.rows()] == ["aaa", "ccc", OTHER]
    assert tallies.of("sha256:ddd") is tallies.rest


def test_labels_that_somebody_made_equal_are_one_series() -> None:
    tallies = Tallies()
    for tail in "xyz":
        tallies.of(f"sha256:0123456789ab{tail}").hit(0, 2)
    rows = tallies.rows()
    assert [label for label, _ in rows] == ["0123456789ab", OTHER]
    assert reads(rows[0][1]) == 3
    assert reads(tallies.of("sha256:0123456789abx")) == 1, "each still counts by itself"


def test_latencies() -> None:
    found = Latencies((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 7.0):
        found.observe(seconds)
    assert (found.counts, round(found.total, 2)) == ([2, 1, 1], 7.65)
