"""layer/tarscan.py: what members come out of a tar stream, byte for byte and as GNU tar and Python's tarfile see it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError, UnsupportedError
from weenv.layer.limits import Limits
from weenv.layer.tarscan import GLOBAL, UNCHANGED_ID, Member, TarScanner, show
from weenv.layer.toc import BLOCK, CHAR, DIRECTORY, FIFO, FILE, HARDLINK, NO_DATA, SYMLINK
from weenv_testkit import rawtar
from weenv_testkit.rawtar import END, GNU, USTAR, V7


def scan(data: bytes, limits: Limits | None = None, chunk: int = 1 << 20) -> list[Member]:
    """All members of a stream that is fed ``chunk`` bytes at a time."""
    return scan_all(data, limits, chunk)[0]


def scan_all(data: bytes, limits: Limits | None = None, chunk: int = 1 << 20) -> tuple[list[Member], list[tuple[int, int]]]:
    """Members and payloads."""
    members: list[Member] = []
    scanner = TarScanner(members.append, limits or Limits())
    for at in range(0, len(data), chunk):
        scanner.feed(data[at : at + chunk])
    scanner.close()
    assert scanner.offset == len(data)
    assert scanner.ended
    return members, scanner.payloads


def one(data: bytes) -> Member:
    """The only member of an archive."""
    (member,) = scan(data + END)
    return member


# -- formats


@pytest.mark.parametrize("magic", [USTAR, GNU, V7])
def test_a_plain_file_in_every_format(magic: bytes) -> None:
    header = rawtar.header(b"a/b", mode=0o4755, uid=1000, gid=2000, size=3, mtime=1_700_000_000, magic=magic)
    member = one(header + rawtar.padded(b"xyz"))
    assert member == Member(b"a/b", FILE, 0o4755, 1000, 2000, 1_700_000_000, 0, 3, b"", 0, None, 512, None)


KINDS = {
    b"0": FILE,
    b"\0": FILE,
    b"7": FILE,
    b"1": HARDLINK,
    b"2": SYMLINK,
    b"3": CHAR,
    b"4": BLOCK,
    b"5": DIRECTORY,
    b"6": FIFO,
}


@pytest.mark.parametrize(("typeflag", "kind"), KINDS.items())
def test_types(typeflag: bytes, kind: int) -> None:
    member = one(rawtar.header(b"n", typeflag, link=b"target", device=(8, 1)))
    assert member.kind == kind
    assert member.link == (b"target" if kind in (HARDLINK, SYMLINK) else b"")
    assert member.rdev == (8 << 32 | 1 if kind in (CHAR, BLOCK) else 0)
    assert member.offset == NO_DATA


def test_a_v7_directory_is_a_name_with_a_slash() -> None:
    assert one(rawtar.header(b"d/", b"\0", magic=V7, size=77)).kind == DIRECTORY
    assert one(rawtar.header(b"f/", b"0", magic=V7)).kind == FILE


@pytest.mark.parametrize("typeflag", [b"V", b"M", b"D", b"A", b"8", b"\xff"])
def test_types_that_containerd_does_not_unpack_are_refused(typeflag: bytes) -> None:
    with pytest.raises(UnsupportedError, match=r"odd: tar member type"):
        scan(rawtar.header(b"odd", typeflag))


@pytest.mark.parametrize("typeflag", b"123456")
def test_what_has_no_payload_has_none_whatever_its_size_says(typeflag: int) -> None:
    first, second = scan(rawtar.header(b"n", bytes([typeflag]), size=5000) + rawtar.file(b"next") + END)
    assert (first.size, second.name) == (0, b"next")


def test_ustar_prefix() -> None:
    assert one(rawtar.header(b"name", prefix=b"some/dir")).name == b"some/dir/name"


def test_star_prefix_ends_before_its_times() -> None:
    prefix = b"dir".ljust(131, b"\0") + b"00000000001\0" + b"00000000002\0"
    assert one(rawtar.header(b"n", prefix=prefix, tail=bytes(8) + b"tar\0")).name == b"dir/n"


def test_gnu_times_are_no_prefix_but_old_go_wrote_one() -> None:
    times = b"14700000000\0" * 2
    assert one(rawtar.header(b"n", magic=GNU, prefix=times)).name == b"n"
    assert one(rawtar.header(b"n", magic=GNU, prefix=b"some/dir")).name == b"some/dir/n"


def test_names_are_bytes() -> None:
    members = scan(rawtar.file(b"\xff") + rawtar.file(b"\xaa") + rawtar.file("ü\n".encode()) + END)
    assert [member.name for member in members] == [b"\xff", b"\xaa", "ü\n".encode()]


def test_a_name_may_fill_its_field() -> None:
    assert one(rawtar.header(b"n" * 100, b"2", link=b"l" * 100)).name == b"n" * 100
    assert one(rawtar.header(b"n" * 100, b"2", link=b"l" * 100)).link == b"l" * 100


# -- numbers


def test_large_ids_and_devices() -> None:
    member = one(rawtar.header(b"n", uid=3_000_000, gid=4_000_000_000, magic=GNU))
    assert (member.uid, member.gid) == (3_000_000, 4_000_000_000)
    member = one(rawtar.header(b"n", b"4", device=(4096 + 5, (1 << 20) + 7)))
    assert member.rdev == 5 << 32 | 7, "mknod(2) keeps 12 and 20 bits"


@pytest.mark.parametrize("uid", [-1, 2**32 - 1])
def test_minus_one_is_no_owner(uid: int) -> None:
    assert one(rawtar.header(b"n", uid=uid)).uid == UNCHANGED_ID


def test_an_owner_is_modulo_2_32() -> None:
    assert one(rawtar.header(b"n", uid=2**32 + 5)).uid == 5


@pytest.mark.parametrize("device", [(-1, 0), (0, -1), (2**32, 0), (0, 2**32)])
def test_device_numbers_out_of_range(device: tuple[int, int]) -> None:
    with pytest.raises(FormatError, match=r"dev: device number"):
        scan(rawtar.header(b"dev", b"3", device=device))


@pytest.mark.parametrize(
    ("mtime", "expected"),
    [(0, 0), (-1, 0), (2**33, 2**33), (9_223_372_036, 9_223_372_036), (9_223_372_037, 0), (2**62, 0), (-(2**62), 0)],
)
def test_times_outside_of_what_containerd_sets(mtime: int, expected: int) -> None:
    assert one(rawtar.header(b"n", mtime=mtime)).mtime == expected


@pytest.mark.parametrize("field", ["mode", "uid", "gid", "size", "mtime"])
def test_malformed_numbers_name_the_member(field: str) -> None:
    with pytest.raises(FormatError, match=r"bad/one: malformed tar header"):
        scan(rawtar.header(b"bad/one", **{field: b"12x45"}))  # type: ignore[arg-type]


def test_malformed_device_numbers_matter_for_files_too() -> None:
    with pytest.raises(FormatError, match="octal"):
        scan(rawtar.header(b"f", device=(b"garbage", 0)))
    assert one(rawtar.header(b"f", device=(b"garbage", 0), magic=V7)).kind == FILE


def test_negative_size() -> None:
    with pytest.raises(FormatError, match=r"f: .*negative size"):
        scan(rawtar.header(b"f", size=-1))
    assert one(rawtar.header(b"d", b"5", size=-1)).kind == DIRECTORY


# -- checksums


def test_checksums() -> None:
    assert one(rawtar.header(b"\xff\xfe", signed_sum=True)).name == b"\xff\xfe"
    for wrong in (b"0000000\0", b"        ", b"garbage!", b"7777777\0"):
        with pytest.raises(FormatError, match="checksum"):
            scan(rawtar.header(b"f", checksum=wrong))
    with pytest.raises(FormatError, match=r"checksum .*after good"):
        scan(rawtar.file(b"good") + rawtar.header(b"f", checksum=b"0000000\0"))


@given(st.integers(0, 511), st.integers(1, 255))
def test_a_changed_byte_is_noticed(at: int, change: int) -> None:
    block = bytearray(rawtar.header(b"name", uid=5, mtime=17))
    block[at] ^= change
    try:
        members = scan(rawtar.header(b"name", uid=5, mtime=17) + block + END)
    except FormatError:
        return
    # Only the padding of the checksum field is not covered by it.
    assert 148 <= at < 156
    assert members[0] == members[1]._replace(offset=members[0].offset)


# -- extension headers


def test_pax_records_override_the_header() -> None:
    records = {
        b"path": b"long/" * 60 + b"n",
        b"uid": b"3000000",
        b"gid": b"+7",
        b"mtime": b"1700000001.987654321999",
        b"size": b"4",
    }
    member = one(rawtar.pax(records) + rawtar.header(b"short", size=9) + rawtar.padded(b"data"))
    assert member[:9] == (b"long/" * 60 + b"n", FILE, 0o644, 3_000_000, 7, 1_700_000_001, 987_654_321, 4, b"")
    assert member.offset == 3 * 512


def test_empty_pax_values_keep_what_the_header_has_but_empty_xattrs_are_set() -> None:
    records = {b"path": b"", b"uid": b"", b"SCHILY.xattr.user.empty": b""}
    member = one(rawtar.pax(records) + rawtar.header(b"n", uid=5))
    assert (member.name, member.uid, member.xattrs) == (b"n", 5, {b"user.empty": b""})


def test_only_schily_xattrs_count() -> None:
    value = b"\1\0\0\2\0=\n"
    records = {
        b"SCHILY.xattr.security.capability": value,
        b"LIBARCHIVE.xattr.user.x": b"eA==",
        b"SCHILY.acl.access": b"user::rwx",
    }
    assert one(rawtar.pax(records) + rawtar.header(b"n")).xattrs == {b"security.capability": value}


@pytest.mark.parametrize(
    "record", [(b"uid", b"x"), (b"size", b"1.5"), (b"mtime", b"soon"), (b"atime", b"x"), (b"path", b"a\0b")]
)
def test_malformed_pax_values(record: tuple[bytes, bytes]) -> None:
    with pytest.raises(FormatError, match="malformed PAX header"):
        scan(rawtar.pax(dict([record])) + rawtar.header(b"n"))


def test_a_second_pax_header_replaces_the_first() -> None:
    member = one(rawtar.pax({b"path": b"first", b"uid": b"1"}) + rawtar.pax({b"gid": b"2"}) + rawtar.header(b"n"))
    assert (member.name, member.uid, member.gid) == (b"n", 0, 2)


def test_pax_headers_apply_to_one_member() -> None:
    first, second = scan(rawtar.pax({b"uid": b"1"}) + rawtar.file(b"a") + rawtar.file(b"b") + END)
    assert (first.uid, second.uid) == (1, 0)


def test_global_headers_are_members_that_change_nothing_else() -> None:
    data = rawtar.pax({b"uid": b"1"}) + rawtar.pax({b"gid": b"9", b"comment": b"x"}, b"g", name=b"pax_global_header")
    first, second = scan(data + rawtar.file(b"a") + END)
    assert first[:2] == (b"pax_global_header", GLOBAL)
    assert (second.name, second.uid, second.gid) == (b"a", 0, 0), "records pending before a global header are lost"
    assert one(rawtar.pax({b"path": b"other"}, b"g", name=b"n")).name == b"other"


def test_gnu_long_names() -> None:
    name, link = b"n" * 300, b"l" * 300
    data = rawtar.long_name(b"ignored") + rawtar.long_name(name) + rawtar.long_name(link, b"K")
    member = one(data + rawtar.header(b"short", b"2", link=b"l", magic=GNU))
    assert (member.name, member.link) == (name, link)
    first, second = scan(rawtar.long_name(name) + rawtar.file(b"a") + rawtar.file(b"b") + END)
    assert (first.name, second.name) == (name, b"b")


def test_gnu_long_name_wins_over_pax() -> None:
    assert one(rawtar.pax({b"path": b"pax"}) + rawtar.long_name(b"gnu") + rawtar.header(b"n")).name == b"gnu"


def test_extension_headers_without_member_at_the_end_mean_nothing() -> None:
    assert scan(rawtar.pax({b"path": b"n"}) + END) == []


def test_extension_headers_have_a_limit() -> None:
    with pytest.raises(LimitError, match="extension header of 600 bytes"):
        scan(rawtar.pax(bytes(600)), Limits(max_pax_header=512))
    with pytest.raises(LimitError, match="extended attributes"):
        many = {b"SCHILY.xattr.user.%d" % n: b"" for n in range(5)}
        scan(rawtar.pax(many) + rawtar.header(b"n"), Limits(max_xattrs_per_entry=4))


# -- sparse files


def pax_sparse(version: str, pieces: list[tuple[int, int]], size: int, data: bytes, **more: bytes) -> bytes:
    """A sparse member in one of GNU tar's PAX forms, its name ``s``."""
    count = b"%d" % len(pieces)
    if version == "1.0":
        table = count + b"\n" + b"".join(b"%d\n%d\n" % piece for piece in pieces)
        records = {
            b"GNU.sparse.major": b"1",
            b"GNU.sparse.minor": b"0",
            b"GNU.sparse.name": b"s",
            b"GNU.sparse.realsize": b"%d" % size,
        }
        return rawtar.pax(records) + rawtar.file(b"GNUSparseFile.0/s", rawtar.padded(table) + data)
    body = [(b"GNU.sparse.size", b"%d" % size), (b"GNU.sparse.numblocks", count)]
    if version == "0.0":
        for at, length in pieces:
            body += [(b"GNU.sparse.offset", b"%d" % at), (b"GNU.sparse.numbytes", b"%d" % length)]
    else:
        body += [(b"GNU.sparse.map", b",".join(b"%d,%d" % piece for piece in pieces)), (b"GNU.sparse.name", b"s")]
    return rawtar.pax(b"".join(rawtar.record(*pair) for pair in body)) + rawtar.file(b"s", data)


def old_sparse(pieces: list[tuple[int, int]], size: int, data: bytes, *, more: bool = False) -> bytes:
    """GNU tar's old form, with as many extension blocks as it takes, and one without entries where ``more``."""

    def entry(piece: tuple[int, int]) -> bytes:
        return rawtar.octal(piece[0], 12) + rawtar.octal(piece[1], 12)

    blocks = [pieces[at : at + 21] for at in range(4, len(pieces), 21)] + ([[]] if more else [])
    fields = b"".join(map(entry, pieces[:4])).ljust(96, b"\0") + (b"\1" if blocks else b"\0") + rawtar.octal(size, 12)
    head = bytearray(rawtar.header(b"s", b"S", size=len(data), magic=GNU))
    head[386 : 386 + len(fields)] = fields
    total = sum(head[:148]) + 8 * 32 + sum(head[156:])
    head[148:156] = b"%06o\0 " % total
    out = bytes(head)
    for number, block in enumerate(blocks, 1):
        out += b"".join(map(entry, block)).ljust(504, b"\0") + (b"\1" if number < len(blocks) else b"\0") + bytes(7)
    return out + rawtar.padded(data)


PIECES = [(512, 1024), (4096, 512), (8192, 100)]
DATA = b"a" * 1024 + b"b" * 512 + b"c" * 100


@pytest.mark.parametrize("version", ["0.0", "0.1", "1.0", "old"])
def test_sparse_files(version: str) -> None:
    made = old_sparse(PIECES, 8292, DATA) if version == "old" else pax_sparse(version, PIECES, 8292, DATA)
    data = made + rawtar.file(b"next") + END
    (member, following), payloads = scan_all(data)
    assert (member.name, member.kind, member.size, member.offset) == (b"s", FILE, 8292, NO_DATA)
    assert member.sparse is not None
    assert [(at, length) for at, _, length in member.sparse] == PIECES
    assert b"".join(data[start : start + length] for _, start, length in member.sparse) == DATA
    assert following.name == b"next"
    stored = 512 if version == "1.0" else 0
    assert payloads == [(member.sparse[0][1] - stored, len(DATA) + stored)]


def test_old_sparse_extension_blocks() -> None:
    pieces = [(at * 1024, 512) for at in range(60)]
    data = old_sparse(pieces, 60 * 1024, bytes(range(60)) * 512, more=True) + rawtar.file(b"next") + END
    (member, following), payloads = scan_all(data)
    assert member.sparse is not None
    assert len(member.sparse) == 60
    assert member.sparse[0][1] == 5 * 512 == payloads[0][0], "behind the header and four extension blocks"
    assert following.name == b"next"


def test_a_long_sparse_map_in_band() -> None:
    pieces = [(at * 1024, 512) for at in range(500)]
    data = pax_sparse("1.0", pieces, 500 * 1024, bytes(500 * 512)) + END
    for chunk in (1 << 20, 100, 512):
        member = scan(data, chunk=chunk)[0]
        assert member.sparse is not None
        assert len(member.sparse) == 500


def test_touching_pieces_are_one_and_a_hole_is_no_data() -> None:
    (member,) = scan(pax_sparse("0.1", [(0, 100), (100, 412), (512, 0), (512, 88)], 600, bytes(600)) + END)
    assert (member.offset, member.sparse) == (3 * 512, None), "all of the file: no sparse file at all"
    (member,) = scan(pax_sparse("0.1", [(1000, 0)], 1000, b"") + END)
    assert (member.size, member.offset, member.sparse) == (1000, NO_DATA, None)


@pytest.mark.parametrize("pieces", [[(100, 512)], [(0, 100), (512, 512)], [(0, 100)], [(0, 512), (1024, 88)]])
def test_pieces_that_are_not_blocks_are_unsupported(pieces: list[tuple[int, int]]) -> None:
    with pytest.raises(UnsupportedError, match=r"s: a sparse member whose pieces"):
        scan(pax_sparse("1.0", pieces, 5000, bytes(sum(length for _, length in pieces))) + END)


@pytest.mark.parametrize("version", ["0.0", "0.1", "1.0", "old"])
@pytest.mark.parametrize(
    ("pieces", "size", "stored"),
    [
        ([(0, 512), (0, 512)], 5000, 1024),  # overlap
        ([(1024, 512), (0, 512)], 5000, 1024),  # out of order
        ([(0, 1024)], 1000, 1024),  # beyond the end
        ([(0, 512)], 5000, 511),  # less data than pieces
        ([(0, 512)], 5000, 513),  # more
    ],
)
def test_sparse_maps_that_lie(version: str, pieces: list[tuple[int, int]], size: int, stored: int) -> None:
    data = old_sparse(pieces, size, bytes(stored)) if version == "old" else pax_sparse(version, pieces, size, bytes(stored))
    with pytest.raises(FormatError, match=r"s: malformed sparse map"):
        scan(data + END)


@pytest.mark.parametrize(
    "table",
    [b"x\n", b"-1\n", b"\n", b"1\n0\n", b"1\n0\nx\n", b"9999999999999999999999\n", b"1" * 1024, b"1000\n0\n512\n", b"2\n1\n"],
)
def test_malformed_maps_in_band(table: bytes) -> None:
    records = {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0", b"GNU.sparse.name": b"s", b"GNU.sparse.realsize": b"5000"}
    with pytest.raises(FormatError, match=r"s: .*sparse map"):
        scan(rawtar.pax(records) + rawtar.file(b"x", rawtar.padded(table)) + END)


def test_sparse_maps_have_limits() -> None:
    pieces = [(at * 1024, 512) for at in range(60)]
    limits = Limits(max_sparse_chunks=59)
    for made in (pax_sparse("1.0", pieces, 60 * 1024, bytes(60 * 512)), old_sparse(pieces, 60 * 1024, bytes(60 * 512))):
        with pytest.raises(LimitError, match=r"sparse map of"):
            scan(made, limits)
    with pytest.raises(LimitError, match="sparse map of more than"):
        endless = rawtar.padded(b"100000\n" + b"0\n" * 100_000)
        records = {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0"}
        scan(rawtar.pax(records) + rawtar.file(b"x", endless), Limits(max_pax_header=2048))


def test_sparse_types_that_are_none() -> None:
    with pytest.raises(FormatError, match="not GNU tar's"):
        scan(rawtar.header(b"s", b"S", magic=USTAR))
    with pytest.raises(FormatError, match="without payload"):
        records = {
            b"GNU.sparse.major": b"0",
            b"GNU.sparse.minor": b"1",
            b"GNU.sparse.numblocks": b"0",
            b"GNU.sparse.size": b"0",
        }
        scan(rawtar.pax(records) + rawtar.directory(b"d"))
    unknown = {b"GNU.sparse.major": b"2", b"GNU.sparse.minor": b"0", b"GNU.sparse.map": b"0,512"}
    assert one(rawtar.pax(unknown) + rawtar.file(b"n", b"data")).size == 4


# -- the end of the stream


def test_empty_archives() -> None:
    for data in (b"", bytes(512), END, bytes(10240)):
        assert scan(data) == []


def test_no_end_marker_and_half_of_one() -> None:
    for end in (b"", bytes(512), END):
        assert [member.name for member in scan(rawtar.file(b"a", b"x") + end)] == [b"a"]


def test_what_follows_the_end_marker_is_kept_and_means_nothing() -> None:
    data = rawtar.file(b"a", b"x") + END + rawtar.file(b"b", b"y") + b"trailing garbage"
    assert [member.name for member in scan(data)] == [b"a"]


def test_a_zero_block_between_members() -> None:
    with pytest.raises(FormatError, match=r"one zero block and then another header .after a"):
        scan(rawtar.file(b"a") + bytes(512) + rawtar.file(b"b") + END)


def test_truncation_names_the_member() -> None:
    data = rawtar.file(b"first", b"x" * 600) + rawtar.file(b"second/one", b"y" * 2000)
    for cut in range(len(data)):
        if cut in (0, 1536):
            scan(data[:cut])  # nothing, or between members: that is an end
            continue
        if cut < 512 or 1536 < cut < 2048:
            expected, error = "within a header", FormatError
        else:
            expected = "first: .*" if cut < 1536 else "second/one: .*"
            padding = 1112 <= cut < 1536 or cut >= 2048 + 2000
            expected, error = (
                expected + ("padding" if padding else "bytes before"),
                UnsupportedError if padding else FormatError,
            )
        with pytest.raises(error, match=expected):
            scan(data[:cut])


def test_truncated_extension_header() -> None:
    for cut in (513, 600, 1023):
        with pytest.raises(FormatError, match=r"extension header|PaxHeaders"):
            scan(rawtar.pax({b"path": b"n" * 600})[:cut])


def test_the_stream_has_a_limit() -> None:
    with pytest.raises(LimitError, match="longer than 1000 bytes"):
        scan(rawtar.file(b"a", bytes(600)), Limits(max_stream=1000))
    with pytest.raises(LimitError, match="more than 2 members"):
        scan(rawtar.file(b"a") * 3, Limits(max_entries=2))


# -- feeding


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 7, 511, 512, 513, 1024, 5000]), min_size=1, max_size=6))
def test_how_a_stream_is_cut_makes_no_difference(steps: list[int]) -> None:
    pieces = [(0, 512), (1024, 512)]
    stream = rawtar.file(b"a", b"x" * 700) + rawtar.pax({b"path": b"p" * 150}) + rawtar.file(b"b", b"y" * 512)
    stream += rawtar.long_name(b"l" * 200) + rawtar.directory(b"d") + pax_sparse("1.0", pieces, 1536, bytes(1024))
    stream += old_sparse([(at * 1024, 512) for at in range(30)], 30 * 1024, bytes(30 * 512)) + END + b"tail"
    members: list[Member] = []
    scanner = TarScanner(members.append)
    at = 0
    for step in itertools.cycle(steps):
        scanner.feed(memoryview(stream)[at : at + step])
        at += step
        if at >= len(stream):
            break
    scanner.close()
    expected, payloads = scan_all(stream)
    assert (members, scanner.payloads) == (expected, payloads)


def test_payloads_are_known_when_the_header_is() -> None:
    scanner = TarScanner(lambda member: None)
    scanner.feed(rawtar.header(b"big", size=1 << 30))
    assert scanner.payloads == [(512, 1 << 30)]
    scanner = TarScanner(lambda member: None, min_payload=1000)
    scanner.feed(rawtar.file(b"small", bytes(999)) + rawtar.pax({b"path": b"x"}) + rawtar.header(b"y", size=1000))
    assert [length for _, length in scanner.payloads] == [1000]


def test_payload_is_skipped_not_kept() -> None:
    scanner = TarScanner(lambda member: None)
    scanner.feed(rawtar.header(b"big", size=1 << 33, magic=GNU))
    block = bytes(1 << 20)
    for _ in range(1 << 13):
        scanner.feed(block)
    scanner.feed(END)
    scanner.close()
    assert scanner.offset == 512 + (1 << 33) + 1024
    assert not scanner._held


def test_show_is_one_printable_line() -> None:
    assert show("a/ü".encode()) == "a/ü"
    assert show(b"a\n\x1b[31m\xff") == "a\\x0a\\x1b[31m\\xff"
    assert len(show(b"x" * 5000)) == 200


@pytest.mark.parametrize("typeflag", [b"0", b"\0", b"7", b"S"])
@pytest.mark.parametrize("size", [(1 << 40) + 1, (1 << 63) - 1])
def test_a_length_beyond_the_limit_is_refused_at_the_header(typeflag: bytes, size: int) -> None:
    """No consumer may plan for a payload that cannot be: before this, one header cost all memory there was."""
    scanner = TarScanner(lambda member: None)
    with pytest.raises(LimitError, match="liar"):
        scanner.feed(rawtar.header(b"liar", typeflag, size=rawtar.base256(size, 12), magic=GNU))
    assert scanner.payloads == []
