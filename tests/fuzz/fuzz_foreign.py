"""Fuzz target: the tables of contents of eStargz and zstd:chunked blobs, which anybody's registry sends.

Whatever the JSON holds, under a right digest, it is refused with FormatError or gives a TOC that can be stored, read back
and made into metadata.

``make fuzz`` runs all targets; weenv_testkit/fuzzing.py says how to run one. tests/test_fuzz_foreign.py runs a short pass.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import random
import tarfile
from typing import Any

import numpy as np
import zstandard

from weenv.core.errors import FormatError
from weenv.layer import erofs
from weenv.layer.foreign.entries import make_toc
from weenv.layer.foreign.formats import ESTARGZ, ZSTD_CHUNKED, ForeignLayer
from weenv.layer.limits import Limits
from weenv.layer.tail import build_tail, parse_tail
from weenv_testkit import fuzzing, rawcorpus
from weenv_testkit.foreign import estargz, zstd_chunked

LIMITS = Limits(max_entries=20_000, max_frames=20_000, max_stream=1 << 32, max_sparse_chunks=50_000)
DIGEST = "sha256:" + "ab" * 32
OFFSET = 1 << 24
"""Where the TOC is said to be."""


def _sha(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def one_input(data: bytes) -> bool:
    """The first byte chooses the format, the rest is the JSON; true where it was accepted."""
    if not data:
        return False
    text = data[1:]
    if data[0] & 1:
        packed = zstandard.compress(text, 1)
        layer = ForeignLayer(ZSTD_CHUNKED, DIGEST, OFFSET * 2, _sha(packed), OFFSET, len(packed), len(text))
    else:
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as archive:
            info = tarfile.TarInfo("stargz.index.json")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))
        packed = gzip.compress(out.getvalue(), 1)
        layer = ForeignLayer(ESTARGZ, DIGEST, OFFSET * 2, _sha(text))
    try:
        toc = make_toc(layer, packed, OFFSET, LIMITS)
    except FormatError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000, error
        return False
    tail = build_tail(toc)
    end = int(toc.frames.compressed_offsets[-1])
    assert end <= OFFSET
    again = parse_tail(tail, layer_size=end + len(tail), toc_offset=end, foreign=True)
    assert np.array_equal(again.frames.content_offsets, toc.frames.content_offsets)
    with contextlib.suppress(FormatError):  # beyond what EROFS can say: refused when the image is built
        erofs.build(toc, limits=LIMITS)
    return True


def seeds() -> tuple[bytes, ...]:
    """TOCs of small layers with all kinds of entries."""
    found = []
    for stream in list(rawcorpus.sound().values())[:40]:
        for number, make in enumerate((estargz, zstd_chunked)):
            try:
                blob = make(stream, chunk=600)
            except (UnicodeDecodeError, KeyError, AssertionError):  # what these formats do not hold
                continue
            if len(blob.entries) > 1:
                found.append(bytes([number]) + json.dumps({"version": 1, "entries": blob.entries}).encode())
    return tuple(found)


SEEDS = seeds()
_VALUES: tuple[Any, ...] = (
    0, 1, -1, 511, 512, 513, 4096, 65_536, 1 << 20, 1 << 26, 1 << 31, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 64, 0.5, True, None,
    "", "/", ".", "..", "a/../..", "\0", "\ufffd", "\ud800", "x" * 300, "a/" * 3000, "reg", "chunk", "hardlink", "dir", "zeros",
    "2024-01-01T00:00:00Z", "9999-12-31T23:59:59.999999999+23:59", "0000-00-00T00:00:00Z", "sha256:" + "0" * 64, [], {}, ["x"],
    {"user.a": "eA=="}, {"security.capability": "eA=="}, {"system.posix_acl_access": ""}, {"user.b": 5},
)  # fmt: skip
_KEYS = (
    "type", "name", "linkName", "mode", "size", "uid", "gid", "modtime", "devMajor", "devMinor", "xattrs", "digest", "offset",
    "innerOffset", "endOffset", "chunkOffset", "chunkSize", "chunkDigest", "chunkType",
)  # fmt: skip


def mutate(data: bytes, dice: random.Random) -> bytes:
    """Change a few fields, entries or bytes."""
    if dice.random() < 0.1:
        raw = bytearray(data)
        for _ in range(dice.choice((1, 2, 8))):
            raw[dice.randrange(1, len(raw))] = dice.randrange(256)
        return bytes(raw)
    try:
        document = json.loads(data[1:])
        entries = document["entries"]
    except (ValueError, KeyError, TypeError):
        return dice.choice(SEEDS)
    for _ in range(dice.choice((1, 1, 2, 5))):
        if not isinstance(entries, list) or not entries:
            break
        at, choice = dice.randrange(len(entries)), dice.randrange(6)
        entry = entries[at]
        if choice == 0:
            del entries[at]
        elif choice == 1:
            entries.insert(dice.randrange(len(entries) + 1), json.loads(json.dumps(entry)))
        elif choice == 2:
            entries[at], entries[-1] = entries[-1], entry
        elif isinstance(entry, dict):
            key = dice.choice(_KEYS)
            old = entry.get(key)
            number = type(old) is int and dice.random() < 0.5
            entry[key] = old + dice.choice((-512, -1, 1, 512)) if number else dice.choice(_VALUES)
    return data[:1] + json.dumps(document).encode()


def run(count: int, seed: int) -> str:
    """``count`` mutations of sound TOCs."""
    return f"{accepted(count, seed)} of them sound"


def accepted(count: int, seed: int) -> int:
    """How many of ``count`` mutations are accepted."""
    dice = random.Random(seed)
    found = 0
    for _ in range(count):
        data = mutate(dice.choice(SEEDS), dice)
        try:
            found += one_input(data)
        except BaseException:
            print(repr(data))
            raise
    return found


def mutator(atheris: Any, data: bytes, max_size: int, seed: int) -> bytes:
    """Half of atheris' own mutations, half of ours."""
    if seed % 2 or not data:
        return bytes(atheris.Mutate(data, max_size))
    return mutate(data, random.Random(seed))[:max_size]


if __name__ == "__main__":
    fuzzing.main(__doc__, one_input, run, mutator)
