"""What blobfs takes from a layer's tail, and what it does not: hostile ones cost the process that serves all layers."""

from __future__ import annotations

import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest

from weenv.core import digest as digests
from weenv.core.errors import LimitError, VerificationError
from weenv.layer.tail import build_tail, content_size
from weenv.layer.toc import FILE, NO_DATA
from weenv.plugin.snapshotter.blobfs.daemon import read_extents
from weenv_testkit.synthetic import make_layer, payload

MADE = make_layer([("large", payload(5 << 20))], target=64 << 10)


def test_a_table_of_millions_of_files_is_not_looked_at_for_the_sake_of_read_ahead() -> None:
    """One of 950 MB, in a tail of 4 MB, took 3.5 GB of memory and 11 s."""
    count, width = 300_000, 30
    toc = MADE.toc
    columns = {}
    for column in fields(toc.entries):
        old = getattr(toc.entries, column.name)
        columns[column.name] = np.concatenate([old[:1], np.zeros(count, old.dtype)])
    columns["name_off"][1:] = np.arange(count) * width
    columns["name_len"][1:] = width
    columns["kind"][1:] = FILE
    columns["aux"][1:] = NO_DATA
    pool = b"".join(b"%0*d" % (width, number) for number in range(count))
    tail = build_tail(replace(toc, entries=replace(toc.entries, **columns), pool=pool))
    assert len(tail) < 1 << 20 < content_size(tail)
    source = replace(
        MADE.source(), size=MADE.source().toc_offset + len(tail), toc_length=len(tail), toc_digest=digests.sha256(tail)
    )  # fmt: skip
    tracemalloc.start()
    try:
        with pytest.raises(LimitError, match="bytes") as caught:
            read_extents(tail, source, 1 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert "layers_memory" in caught.value.hint


def test_large_files_are_found_where_the_table_is_of_a_usual_size() -> None:
    tail, source = MADE.tail, MADE.source()
    assert len(read_extents(tail, source, content_size(tail)).first) == 1
    with pytest.raises(LimitError):
        read_extents(tail, source, content_size(tail) - 1)
    with pytest.raises(VerificationError):
        read_extents(tail[:-1] + b"!", source, content_size(tail))
