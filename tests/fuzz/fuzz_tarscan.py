"""Fuzz target: the tar scan and the tree it makes.

``make fuzz`` runs all targets; weenv_testkit/fuzzing.py says how to run one.

Whatever the bytes, the scan ends with columns that keep the TOC's promises, or with a FormatError; fed in pieces it
comes to the same end.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from weenv.core.errors import FormatError
from weenv.layer.limits import Limits
from weenv.layer.toc import CHAR, DIRECTORY, FILE, FLAG_SPARSE, HARDLINK, NO_DATA, SYMLINK
from weenv.layer.tree import Scan, scan_tar
from weenv_testkit import fuzzing, rawtar

LIMITS = Limits(max_entries=2000, max_pax_header=1 << 16, max_sparse_chunks=2000, max_stream=1 << 40)


def check(scan: Scan) -> None:
    """What layer/toc.py promises of a tree; AssertionError where it is broken."""
    e, pool, n = scan.columns.entries, scan.columns.pool, len(scan.columns.entries)
    assert n >= 1
    assert e.kind[0] == DIRECTORY
    assert np.all(np.diff(e.parent.astype(np.int64)) >= 0)
    assert np.all(e.kind[e.parent] == DIRECTORY)
    assert np.all(e.parent[1:] < np.arange(1, n))
    names = [pool[off : off + length] for off, length in zip(e.name_off.tolist(), e.name_len.tolist(), strict=True)]
    for entry in range(1, n):
        assert names[entry] not in (b"", b".", b"..")
        assert not {0, 47} & {*names[entry]}
        assert len(names[entry]) <= 255
        if entry > 1 and e.parent[entry] == e.parent[entry - 1]:
            assert names[entry - 1] < names[entry]
    assert np.all(e.mode <= 0o7777)
    assert np.all((e.mtime >= 0) & (e.mtime_ns < 10**9))
    rows = scan.columns.sparse
    for entry in range(n):
        kind, size, aux = int(e.kind[entry]), int(e.size[entry]), int(e.aux[entry])
        if kind == FILE and e.flags[entry] & FLAG_SPARSE:
            mine = np.flatnonzero(rows.entry == entry)
            assert len(mine)
            assert mine[0] == aux
            reached = 0
            for row in mine:
                logical, stream, length = int(rows.logical[row]), int(rows.stream[row]), int(rows.length[row])
                assert logical % 512 == stream % 512 == 0
                assert length > 0
                assert reached <= logical
                reached = logical + length
                assert length % 512 == 0 or reached == size
                assert stream + length <= scan.stream_size
            assert reached <= size
        elif kind == FILE and aux != NO_DATA:
            assert size > 0
            assert aux % 512 == 0
            assert aux + size <= scan.stream_size
        elif kind == HARDLINK:
            assert e.kind[aux] not in (HARDLINK, DIRECTORY)
            assert not (e.mode[entry] or e.uid[entry] or e.gid[entry] or e.mtime[entry] or size or e.xattr_set[entry])
        elif kind == SYMLINK:
            assert 0 < size == len(pool[aux : aux + size])
        elif kind not in (FILE, CHAR):
            assert size == 0
    assert int(e.xattr_set.max()) <= len(scan.columns.xattrs)


def outcome(data: bytes, chunk: int) -> Scan | str:
    """The scan, or the text of the error."""
    try:
        return scan_tar(io.BytesIO(data), LIMITS, chunk)
    except FormatError as error:
        assert "\n" not in str(error)
        return str(error)


def one_input(data: bytes) -> None:
    """What a fuzzer calls."""
    whole = outcome(data, 1 << 20)
    pieces = outcome(data, 1 + len(data) // 3 % 700)
    if isinstance(whole, str) or isinstance(pieces, str):
        assert whole == pieces
        return
    check(whole)
    assert whole.columns.pool == pieces.columns.pool
    assert np.array_equal(whole.columns.entries.aux, pieces.columns.entries.aux)


def seeds() -> list[bytes]:
    """Archives with every feature."""
    xattr = {b"SCHILY.xattr.user.a": b"1", b"SCHILY.xattr.security.b": b"\0", b"mtime": b"1.5", b"path": b"a/b/c"}
    sparse = {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0", b"GNU.sparse.name": b"s", b"GNU.sparse.realsize": b"2048"}
    old = {b"GNU.sparse.numblocks": b"2", b"GNU.sparse.size": b"2048", b"GNU.sparse.map": b"0,512,1024,512"}
    table = rawtar.padded(b"2\n0\n512\n1024\n512\n")
    files = rawtar.directory(b"a/") + rawtar.file(b"a/f", b"x" * 600) + rawtar.pax(xattr) + rawtar.file(b"f", b"y")
    links = rawtar.file(b"d/f", b"q") + rawtar.header(b"l", b"2", link=b"d") + rawtar.header(b"h", b"1", link=b"./l/f")
    links += rawtar.header(b"m", b"2", link=b"../l/e") + rawtar.file(b"m/x") + rawtar.header(b"l", b"2", link=b"b")
    links += rawtar.header(b"c", b"3", device=(1, 3)) + rawtar.header(b"p", b"6")
    whiteouts = rawtar.file(b"a/.wh.x") + rawtar.file(b"a/.wh..wh..opq") + rawtar.pax({b"comment": b"x"}, b"g")
    gnu = rawtar.long_name(b"n" * 150) + rawtar.long_name(b"t" * 150, b"K")
    gnu += rawtar.header(b"n", b"2", magic=rawtar.GNU, uid=-1)
    holes = rawtar.pax(sparse) + rawtar.file(b"s", table + b"z" * 1024) + rawtar.pax(old) + rawtar.file(b"t", b"z" * 1024)
    old_form = bytearray(rawtar.header(b"s", b"S", magic=rawtar.GNU, size=512))
    old_form[386:410] = rawtar.octal(512, 12) * 2
    old_form[482:495] = b"\1" + rawtar.octal(1024, 12)
    holes += fix_sum(bytes(old_form)) + bytes(512) + b"w" * 512
    return [part + rawtar.END for part in (files, links, whiteouts, gnu, holes, files + links + whiteouts + gnu + holes)] + [
        b""
    ]


def fix_sum(block: bytes) -> bytes:
    """A header block with the right checksum."""
    total = sum(block[:148]) + 8 * 32 + sum(block[156:])
    return block[:148] + b"%06o\0 " % total + block[156:]


INTERESTING = [
    b"\0",
    b"/",
    b".",
    b"..",
    b"\xff" * 8,
    b"\x80" + bytes(7),
    b"7777777\0",
    b"0000000\0",
    b" ",
    b"=",
    b"\n",
    b".wh.",
]


def mutate(data: bytes, random_: random.Random) -> bytes:
    """Change a few bytes or blocks; then usually put the checksums right, or nothing behind them would be reached."""
    out = bytearray(data)
    for _ in range(random_.choice([1, 1, 2, 4])):
        if not out:
            break
        at = random_.randrange(len(out))
        block = at - at % 512
        action = random_.randrange(6)
        if action == 0:
            out[at] ^= 1 << random_.randrange(8)
        elif action == 1:
            text = random_.choice(INTERESTING)
            out[at : at + len(text)] = text
        elif action == 2:
            field = block + random_.choice([0, 100, 108, 116, 124, 136, 156, 157, 257, 329, 345])
            text = random_.choice(INTERESTING)
            out[field : field + len(text)] = text
        elif action == 3:
            del out[block : block + 512]
        elif action == 4:
            out[block:block] = out[random_.randrange(0, len(out), 512) :][:512]
        else:
            del out[at:]
    if random_.random() < 0.8:
        for block in range(0, len(out) - 511, 512):
            if out[block + 257 : block + 262] == b"ustar" or out[block + 148 : block + 155].rstrip(b"\0").isdigit():
                out[block : block + 512] = fix_sum(bytes(out[block : block + 512]))
    return bytes(out)


def run(count: int, seed: int, target: Callable[[bytes], None] = one_input) -> None:
    """``count`` mutations, each of a seed or of an earlier mutation."""
    random_ = random.Random(seed)
    pool = seeds()
    for data in pool:
        assert not isinstance(outcome(data, 512), str), "the archives to begin with are sound"
        target(data)
    for number in range(count):
        data = mutate(random_.choice(pool), random_)
        try:
            target(data)
        except BaseException:
            print(f"run {number} of seed {seed}, {len(data)} bytes: {data.hex()}", file=sys.stderr)
            raise
        if random_.random() < 0.02 and len(pool) < 200:
            pool.append(data)


SEEDS = seeds()


def mutator(atheris: Any, data: bytes, max_size: int, seed: int) -> bytes:
    """Half of atheris' own mutations, half of ours, which put checksums right; now and then an archive with every feature."""
    if seed % 2:
        return bytes(atheris.Mutate(data, max_size))
    random_ = random.Random(seed)
    return mutate(random_.choice(SEEDS) if random_.random() < 0.1 or not data else data, random_)[:max_size]


if __name__ == "__main__":
    fuzzing.main(__doc__, one_input, run, mutator)
