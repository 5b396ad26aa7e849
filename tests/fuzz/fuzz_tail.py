"""Fuzz target: a layer's tail as a registry may send it.

``make fuzz`` runs all targets; weenv_testkit/fuzzing.py says how to run one. tests/test_fuzz_tail.py runs a short pass.

Whatever the bytes are, the parsers return or raise FormatError, and what they return can be used.
"""

from __future__ import annotations

import hashlib
import io
import random
import struct
import tarfile
from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard

from weenv.core.errors import FormatError
from weenv.layer import codec, seekable
from weenv.layer.encode import encode_layer
from weenv.layer.limits import Limits
from weenv.layer.tail import TOC_FRAME_MAGIC, build_tail, decode_frames, locate_tail, parse_tail
from weenv.layer.zframe import skippable
from weenv_testkit import fuzzing

LIMITS = Limits(max_entries=100_000, max_frames=100_000, max_toc_content=32 << 20, max_toc_compressed=8 << 20)
"""Small enough that no single input takes long."""


def one_input(data: bytes) -> bool:
    """Feed ``data`` to every parser of tails; true where it was accepted as a TOC."""
    if len(data) < 6:
        return False
    toc_offset = int.from_bytes(data[:6], "little")
    tail = data[6:]
    accepted = False
    try:
        toc = parse_tail(tail, layer_size=toc_offset + len(tail), toc_offset=toc_offset, limits=LIMITS)
    except FormatError:
        pass
    else:
        accepted = True
        for entry in range(len(toc.entries)):
            toc.path(entry)
            toc.xattr_items(entry)
            toc.sparse_rows(entry)
            if toc.entries.kind[entry] == 2:
                toc.target(entry)
            toc.frames.covering(int(toc.entries.aux[entry]), int(toc.entries.size[entry]))
        build_tail(toc, LIMITS)
    for call in (
        lambda: decode_frames(tail, layer_size=toc_offset + len(tail), toc_offset=toc_offset, limits=LIMITS),
        lambda: locate_tail(tail, toc_offset + len(tail), LIMITS),
        lambda: seekable.parse(tail),
        lambda: codec.decode_toc(tail, LIMITS),
    ):
        try:
            call()
        except FormatError:
            continue
    return accepted


def seed_blob() -> tuple[int, bytes]:
    """The tail of a small layer with all kinds of entries, and its offset."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(12):
            info = tarfile.TarInfo(f"d{number % 3}/file{number}")
            info.size = number * 700
            info.pax_headers = {"SCHILY.xattr.user.n": str(number % 4)}
            tar.addfile(info, io.BytesIO(bytes(info.size)))
        for name, kind, link in (
            ("l", tarfile.SYMTYPE, "d0/file0"),
            ("h", tarfile.LNKTYPE, "d0/file3"),
            ("c", tarfile.CHRTYPE, ""),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.devmajor, info.devminor = kind, link, 1, 3
            tar.addfile(info)
        tar.addfile(tarfile.TarInfo("d1/.wh.gone"))
        tar.addfile(tarfile.TarInfo("d2/.wh..wh..opq"))
    blob = io.BytesIO()
    layer = encode_layer(io.BytesIO(out.getvalue()), blob, target=4096, threads=1)
    return layer.toc_offset, blob.getvalue()[layer.toc_offset :]


def packed(offset: int, head: bytes, tree: bytes, frames: tuple[np.ndarray, np.ndarray]) -> bytes:
    """A fuzz input whose two TOC parts are compressed rightly, so that mutations of what is within get through."""
    compress = zstandard.ZstdCompressor(level=1).compress
    frame = skippable(TOC_FRAME_MAGIC, codec.MAGIC + compress(head) + compress(tree))
    table = seekable.build(np.append(frames[0], np.uint32(len(frame))), np.append(frames[1], np.uint32(0)))
    return offset.to_bytes(6, "little") + frame + table


def mutations(seed: int, blob: tuple[int, bytes] | None = None) -> Callable[[], bytes]:
    """A deterministic source of inputs: noise on the raw tail, and on the decompressed TOC under right framing."""
    rng = random.Random(seed)
    offset, tail = blob or seed_blob()
    toc = parse_tail(tail, layer_size=offset + len(tail), toc_offset=offset)
    head, tree = codec.encode_content(toc)
    frames = (toc.frames.compressed_sizes, toc.frames.content_sizes)
    words = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF)

    def mutate(data: bytes) -> bytes:
        out = bytearray(data)
        for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
            at = rng.randrange(len(out))
            choice = rng.randrange(6)
            if choice == 0:
                out[at] ^= 1 << rng.randrange(8)
            elif choice == 1:
                out[at] = rng.randrange(256)
            elif choice == 2:
                out[at : at + 4] = struct.pack("<I", rng.choice(words))
            elif choice == 3:
                out[at : at + 8] = struct.pack("<Q", rng.choice(words) << rng.choice((0, 32)))
            elif choice == 4:
                out[at : at + rng.randrange(9)] = b""
            else:
                out[at:at] = rng.randbytes(rng.randrange(9))
            if not out:
                out = bytearray(b"\0")
        return bytes(out)

    def head_with_digits() -> bytes:
        """The JSON header with a number changed and its length kept right."""
        length = int.from_bytes(head[:4], "little")
        text = bytearray(head[4 : 4 + length])
        digits = [i for i, c in enumerate(text) if 0x30 <= c <= 0x39]
        for _ in range(rng.choice((1, 2))):
            text[rng.choice(digits)] = rng.choice(b"0123456789-e")
        return head[:4] + bytes(text) + head[4 + length :]

    def following() -> bytes:
        choice = rng.randrange(5)
        if choice == 0:
            return mutate(offset.to_bytes(6, "little") + tail)
        if choice == 1:
            return packed(offset, mutate(head), tree, frames)
        if choice == 2:
            return packed(offset, head_with_digits(), tree, frames)
        fixed = mutate(tree)
        return packed(offset, head, fixed[: len(tree)].ljust(len(tree), b"\0"), frames)

    return following


def run(runs: int, seed: int = 1) -> tuple[int, str]:
    """``runs`` mutations: how many were accepted, and a digest of all inputs (for reproducibility)."""
    source = mutations(seed)
    accepted, seen = 0, hashlib.sha256()
    for _ in range(runs):
        data = source()
        seen.update(data)
        accepted += one_input(data)
    return accepted, seen.hexdigest()


SEED = seed_blob()


def mutator(atheris: Any, data: bytes, max_size: int, seed: int) -> bytes:
    """Half of atheris' own mutations, half of ours, which get past framing and compression."""
    if seed % 2:
        return bytes(atheris.Mutate(data, max_size))
    return mutations(seed, SEED)()[:max_size]


def told(runs: int, seed: int) -> str:
    """:func:`run` with its result in words."""
    accepted, digest = run(runs, seed)
    return f"{accepted} of them sound TOCs, {digest[:16]}"


if __name__ == "__main__":
    fuzzing.main(__doc__, one_input, told, mutator)
