"""The queue in which urgent items overtake."""

from __future__ import annotations

import threading

from weenv.plugin.snapshotter.fetch.twoqueues import TwoQueues


def test_urgent_items_come_first_and_each_kind_keeps_its_order() -> None:
    queue: TwoQueues[int] = TwoQueues()
    for item in (1, 2, 3):
        queue.put(item)
    for item in (10, 11):
        queue.put(item, urgent=True)
    assert [queue.get() for _ in range(5)] == [10, 11, 1, 2, 3]


def test_no_item_is_lost_or_seen_twice_among_threads() -> None:
    queue: TwoQueues[int] = TwoQueues()
    found: list[int] = []

    def take() -> None:
        while (item := queue.get()) >= 0:
            found.append(item)

    def give(start: int) -> None:
        for number in range(start, start + 5000):
            queue.put(number, urgent=number % 3 == 0)

    takers = [threading.Thread(target=take) for _ in range(4)]
    givers = [threading.Thread(target=give, args=(start,)) for start in (0, 5000)]
    for thread in takers + givers:
        thread.start()
    for thread in givers:
        thread.join()
    for _ in takers:
        queue.put(-1)
    for thread in takers:
        thread.join()
    assert sorted(found) == list(range(10_000))
