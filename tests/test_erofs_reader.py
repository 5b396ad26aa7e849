"""The reader of metadata images against the kit's own, which shares no line with it; and against damaged images."""

from __future__ import annotations

import random
import stat
from dataclasses import replace

import pytest

from weenv.core.errors import FormatError
from weenv.layer.erofs import build
from weenv.layer.erofs.reader import HOLE, Image, Piece
from weenv.layer.toc import CHAR, HARDLINK, NO_DATA, SYMLINK
from weenv_testkit import erofs_reader
from weenv_testkit.tocs import Node, directory, golden_tree, make_toc

Tree = dict[bytes, Node]


def many() -> Tree:
    """Long and short directories, names around the dots, symlinks and xattr sets of many lengths, sparse files."""
    tree: Tree = {b"long/%s%05d" % (b"n" * (number % 200), number): Node(mtime=number) for number in range(2000)}
    dots = (b"!", b"-", b".#lock", b".-", b"...", b"..a", b".a", b"\x01", b".\x01", b"..\x01", b"\xff\xfe")
    tree |= {b"dots/" + name: Node() for name in dots}
    for length in (1, 32, 383, 384, 416, 417, 511, 512, 513, 1024, 4095):
        tree[b"links/l%04d" % length] = Node(kind=SYMLINK, target=b"t" * length, mode=0o777)
    for number in range(40):
        shared = {b"user.shared": b"same", b"trusted.own": b"%d" % number * number, b"security.x": bytes(number)}
        tree[b"marked/%02d" % number] = Node(xattrs=shared if number % 3 else {b"user.shared": b"same"})
    for size in range(24, 46):
        tree |= {b"s%d/%d" % (size, child): Node() for child in range(size)}
    tree[b"sparse"] = Node(size=1 << 20, sparse=((4096, 1024, 8192), (65536, 9216, 512), (66048, 9728, 1024)))
    tree[b"holes"] = Node(size=5_000_000, offset=NO_DATA)
    tree[b"file"] = Node(size=3001, offset=20480)
    tree[b"again"] = Node(kind=HARDLINK, target=b"file")
    tree[b"device"] = Node(kind=CHAR, device=(4095, 70_000))
    return tree


def image_of(tree: Tree, size: int = 1 << 20) -> bytes:
    return bytes(build(make_toc(tree, stream_size=size, diff_id="sha256:" + "ab" * 32)))


@pytest.fixture(scope="module")
def large() -> bytes:
    return image_of(many())


def walk(image: Image) -> dict[bytes, int]:
    """Every path but the dots', with its nid; cookies lead on from wherever they were given."""
    found = {b"": image.root}
    pending = [(b"", image.root)]
    while pending:
        path, nid = pending.pop()
        inode = image.inode(nid)
        entries = list(image.entries(inode))
        assert {b".", b".."} <= {name for _, _, name in entries}
        for position in {0, 1, len(entries) // 2, len(entries) - 1}:
            assert list(image.entries(inode, entries[position][0])) == entries[position + 1 :]
        for _, child, name in entries:
            assert image.lookup(inode, name) == child
            if name not in (b".", b".."):
                full = path + b"/" + name if path else name
                found[full] = child
                if stat.S_ISDIR(image.inode(child).mode):
                    pending.append((full, child))
    return found


@pytest.mark.parametrize("tree", [golden_tree(), {}, {b"one": Node()}, many()], ids=["golden", "empty", "one", "many"])
def test_it_reads_what_the_independent_reader_reads(tree: Tree) -> None:
    data = image_of(tree)
    ours, theirs = Image(data), erofs_reader.Image(data).walk()
    paths = walk(ours)
    assert set(paths) == set(theirs)
    for path, nid in paths.items():
        have, want = ours.inode(nid), theirs[path]
        assert (have.nid, have.mode, have.size, have.nlink, have.uid, have.gid) == (
            want.nid, want.mode, want.size, want.nlink, want.uid, want.gid,
        )  # fmt: skip
        assert have.mtime_ns == want.mtime * 10**9 + want.mtime_ns
        if stat.S_ISCHR(have.mode) or stat.S_ISBLK(have.mode):
            major, minor = want.rdev >> 32, want.rdev & 0xFFFFFFFF
            assert have.rdev == (major << 8 | minor & 0xFF | (minor & ~0xFF) << 12)
        else:
            assert have.rdev == 0
        assert ours.xattrs(have) == want.xattrs
        if stat.S_ISLNK(have.mode):
            assert ours.target(have) == want.data
        elif stat.S_ISREG(have.mode):
            extents = [(block * 512 if block is not None else HOLE, length) for _, block, length in want.extents]
            assert joined(extents) == [tuple(piece) for piece in ours.pieces(have, 0, 1 << 62)]


def joined(extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for stream, length in extents:
        before = found[-1] if found else None
        if before and stream == (HOLE if before[0] == HOLE else before[0] + before[1]):
            found[-1] = before[0], before[1] + length
        else:
            found.append((stream, length))
    return found


def test_pieces_of_any_range(large: bytes) -> None:
    image = Image(large)
    stream = random.Random(1).randbytes(1 << 20)
    for name, size in ((b"sparse", 1 << 20), (b"holes", 5_000_000), (b"file", 3001)):
        inode = image.inode(image.lookup(image.inode(image.root), name))

        def content(offset: int, length: int, inode=inode) -> bytes:  # type: ignore[no-untyped-def]
            parts = image.pieces(inode, offset, length)
            return b"".join(bytes(n) if at == HOLE else stream[at : at + n] for at, n in parts)

        whole = content(0, size)
        assert len(whole) == size
        dice = random.Random(2)
        for _ in range(300):
            offset, length = dice.randrange(size + 10), dice.choice([0, 1, 511, 4096, 100_000])
            assert content(offset, length) == whole[offset : offset + length]
        assert image.pieces(inode, size, 10) == image.pieces(inode, 1 << 50, 1) == []
    assert image.pieces(image.inode(image.lookup(image.inode(image.root), b"holes")), 0, 9) == [Piece(HOLE, 9)]


def test_names_that_are_not_there(large: bytes) -> None:
    image = Image(large)
    for path in (b"", b"long", b"dots", b"s24", b"s45"):
        folder = image.inode(image.lookup(image.inode(image.root), path) if path else image.root)
        for name in (b"\x00", b"\xff\xff", b"zzzz", b"n" * 199, b"0" * 255, b"..b", b".."[:1] + b"/"):
            assert image.lookup(folder, name) == 0


def test_what_is_no_image_is_refused(large: bytes) -> None:
    damaged = bytearray(large)
    damaged[1030] ^= 1
    for data in (b"", bytes(4096), large[:-512], large + bytes(512), large[:1500], bytes(damaged)):
        with pytest.raises(FormatError):
            Image(data)


def test_damage_is_an_error_and_never_anything_else(large: bytes) -> None:
    """Bytes that a disk has changed or lost: whatever comes of it, it ends, and is a FormatError or an answer."""
    dice = random.Random(3)
    refused = 0
    for number in range(150):
        data = bytearray(large)
        for _ in range(dice.choice([1, 5, 40])):
            at = dice.randrange(1536, len(data))  # the super block has a checksum of its own
            data[at : at + 8] = dice.choice([bytes(8), b"\xff" * 8, dice.randbytes(8)])
        if number % 5 == 0:
            begin = dice.randrange(1536, len(data)) // 512 * 512
            data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
        image = Image(bytes(data)) if _root_is_sound(data) else None
        if image is None:
            continue
        seen = 0
        pending, known = [image.root], {image.root}
        while pending and seen < 500:
            seen += 1
            try:
                inode = image.inode(pending.pop())
                image.xattrs(inode)
                image.pieces(inode, 0, 1 << 16)
                if stat.S_ISLNK(inode.mode):
                    image.target(inode)
                if stat.S_ISDIR(inode.mode):
                    image.lookup(inode, b"n00001")
                    for count, (_, nid, _) in enumerate(image.entries(inode)):
                        if nid not in known:
                            known.add(nid)
                            pending.append(nid)
                        if count > 3000:
                            break
            except FormatError:
                refused += 1
    assert refused > 20


def _root_is_sound(data: bytearray) -> bool:
    try:
        Image(bytes(data))
    except FormatError:
        return False
    return True


def test_a_whiteout_and_an_opaque_directory() -> None:
    tree = {b"gone": Node(kind=CHAR, flags=2, mode=0), b"new": replace(directory(), flags=1)}
    image = Image(image_of(tree))
    root = image.inode(image.root)
    gone = image.inode(image.lookup(root, b"gone"))
    assert stat.S_ISCHR(gone.mode) and gone.rdev == 0
    assert image.xattrs(image.inode(image.lookup(root, b"new"))) == {b"trusted.overlay.opaque": b"y"}
