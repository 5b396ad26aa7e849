"""Layers by hand for the comparison with containerd's unpack: one for each way a tar can be odd, and random ones.

:func:`sound` are those that containerd unpacks, :func:`refused` those that it does not; both by the kind of oddity, with
the public issue where users met it.
"""

# ruff: noqa: E501 -- a table: one kind of layer is one expression

from __future__ import annotations

import random
from typing import Any

from weenv_testkit import rawtar
from weenv_testkit.rawtar import END, GNU, USTAR, V7, directory, file, header, long_name, padded, pax

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")
ROOT_CAPABILITY = bytes.fromhex("0100000300200000000000000000000000000000") + bytes(4)
_X = b"SCHILY.xattr."


def symlink(name: bytes, target: bytes, **fields: object) -> bytes:
    """A symlink; its mode means nothing."""
    return header(name, b"2", link=target, **fields)  # type: ignore[arg-type]


def link(name: bytes, target: bytes, **fields: object) -> bytes:
    """A hard link."""
    return header(name, b"1", link=target, **fields)  # type: ignore[arg-type]


def sound() -> dict[str, bytes]:
    """Kind -> stream that containerd unpacks."""
    xattrs = {_X + b"user.a": b"1", _X + b"security.foo": b"\0\xff", _X + b"trusted.t": b"3", _X + b"other.x": b"4"}
    xattrs |= {
        _X + b"noname": b"5",
        _X + b"user.empty": b"",
        b"LIBARCHIVE.xattr.user.z": b"eA==",
        b"SCHILY.acl.access": b"user::r",
    }
    capability, root_capability = {_X + b"security.capability": CAPABILITY}, {_X + b"security.capability": ROOT_CAPABILITY}
    deep = b"/".join([b"d" * 200] * 17)
    both: dict[str, Any] = {"uid": -1, "gid": -1}
    sgid = directory(b"s", 0o2775, gid=50)
    sparse = {b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0", b"GNU.sparse.name": b"s", b"GNU.sparse.realsize": b"5000"}
    old_sparse = {b"GNU.sparse.numblocks": b"2", b"GNU.sparse.size": b"5000", b"GNU.sparse.map": b"512,512,4096,904"}
    streams = {
        "empty stream": b"",
        "absolute names without directories (stargz 217)": file(b"/a/b/f", b"x"),
        "root entry (storage 2191)": directory(b"./", 0o700, uid=9, mtime=5) + file(b"./f") + directory(b"/") + link(b".", b"nothing"),
        "empty layer (stargz 2137)": b"",
        "names that are not UTF-8 (crfs 43)": file(b"\xff") + file(b"\xaa") + file("ü".encode()) + symlink(b"l", b"\xfe"),
        "hard links (nydus 552)": file(b"d/a", b"x") + link(b"b", b"d/a", mode=0o600, uid=4, mtime=9) + link(b"e/c", b"./b"),
        "hard link with missing parents (apple 1797)": file(b"f", b"x") + link(b"new/dir/l", b"/f"),
        "duplicate entries (stargz 219)": file(b"f", b"1", mode=0o600) + file(b"f", b"22", uid=3) + directory(b"d")
        + file(b"d/x") + file(b"d/y/z") + file(b"d", b"now") + file(b"e") + directory(b"e") + file(b"e/x"),
        "exact attributes (nydus a295c542, buildkit 2703)": pax({b"uid": b"3000000", b"mtime": b"1700000001.987654321"}) + file(b"big")
        + file(b"suid", b"x", mode=0o4755) + file(b"zero") + symlink(b"l", b"abc", mode=0o644) + file(b"all", mode=0o7777),
        "spellings": file(b"./a/x", b"1") + file(b"/a/y") + file(b"a//z") + file(b"./b/../a/./w") + file(b"../../x/../y"),
        "long names": pax({b"path": b"n" * 255}) + header(b"x") + pax({b"path": deep + b"/f"}) + header(b"x") + long_name(b"g" * 200)
        + header(b"x", magic=GNU) + header(b"name", prefix=b"p" * 155) + pax({b"linkpath": b"t" * 4095}) + symlink(b"l", b"-"),
        "times": b"".join(file(b"t%d" % n, mtime=n) for n in (0, -1, 2**33, 9_223_372_036, 9_223_372_037, 2**62))
        + pax({b"mtime": b"9223372036.854775807"}) + file(b"p1") + pax({b"mtime": b"-1.5"}) + file(b"p2"),
        "ids": file(b"a", uid=2**32 - 1, gid=2**32 + 5) + sgid + file(b"s/f", **both) + directory(b"s/d", **both) + file(b"s/new/deep/f")
        + header(b"s/.wh.w", **both) + directory(b"t", uid=4, gid=5) + directory(b"t", **both),
        "devices": header(b"c", b"3", device=(300, 70000)) + header(b"b", b"4", device=(4097, 1 << 20 | 7)) + header(b"p", b"6")
        + header(b"z", b"3", mode=0o600),
        "whiteouts": file(b"a/.wh.gone", uid=5, mtime=9) + symlink(b".wh.x", b"y") + file(b".wh.f") + file(b"f", b"back") + file(b".wh.d")
        + directory(b"d") + file(b"d/x") + file(b".wh.t/x") + directory(b".wh..wh.plnk") + file(b".wh..wh.aufs"),
        "opaque": directory(b"d", 0o700) + file(b"d/.wh..wh..opq") + file(b"d/x") + file(b"e/.wh..wh..opq") + file(b".wh..wh..opq")
        + file(b"g/.wh..wh..opq") + file(b"g") + directory(b"g") + file(b"h/.wh..wh..opq") + directory(b"h", 0o711),
        "links to what is no file": symlink(b"s", b"t") + link(b"l", b"s", mode=0o600, uid=4) + header(b"z", b"3", device=(1, 3))
        + link(b"a", b"z", mode=0o666) + file(b".wh.w") + link(b"v", b"w", uid=3),
        "link outlives its target": file(b"f", b"old") + link(b"l", b"f") + file(b"f", b"new") + file(b"d/f", b"x") + link(b"m", b"d/f")
        + file(b"d", b"y"),
        "links and capabilities": pax(capability) + file(b"f") + link(b"l", b"f") + pax(capability) + file(b"g") + pax(capability)
        + link(b"m", b"g") + pax(root_capability) + file(b"h") + pax(capability) + directory(b"d") + directory(b"d"),
        "xattrs": b"".join(pax(xattrs) + member for member in (file(b"f"), directory(b"d"), symlink(b"l", b"t"), header(b"p", b"6")))
        + pax({_X + b"user.b": b"2"}) + directory(b"d", 0o750) + pax({_X + b"user.b": b"2"}) + link(b"n", b"f"),
        "symlinked parents": symlink(b"lib", b"usr/lib") + file(b"lib/x", b"1") + directory(b"usr/lib", 0o711) + file(b"lib/d/y")
        + symlink(b"a", b"/b") + symlink(b"b", b"../../c") + file(b"a/x") + link(b"k", b"lib/x") + directory(b"lib/e", mtime=3),
        "replaced symlinks": symlink(b"l", b"a") + file(b"l/x") + symlink(b"l", b"b") + file(b"l/y") + directory(b"l") + file(b"l/z"),
        "symlinks that are followed late": directory(b"d") + symlink(b"d/l", b"../e/f") + symlink(b"e", b"g/h") + file(b"d/l/x")
        + symlink(b"q", b"d/l/../r") + file(b"q/y"),
        "times of replaced directories": directory(b"d", mtime=7) + file(b"d", mtime=3) + directory(b"e", mtime=1)
        + directory(b"m", mtime=8) + symlink(b"m", b"e"),
        "global headers": file(b"a/f") + file(b"g") + pax({b"comment": b"x"}, b"g", name=b"tmp/GlobalHead.1") + pax({b"c": b"x"}, b"g", name=b"g")
        + pax({b"uid": b"9"}, b"g") + file(b"after") + pax({b"uid": b"4"}) + pax({b"c": b"x"}, b"g") + file(b"lost"),
        "formats": header(b"v7/", b"\0", magic=V7) + header(b"v7/f", b"\0", magic=V7, size=3) + padded(b"abc") + header(b"s", signed_sum=True)
        + header(b"star", prefix=b"dir".ljust(131, b"\0") + b"00000000001\0" * 2, tail=bytes(8) + b"tar\0")
        + header(b"oldgo", magic=GNU, prefix=b"some/dir") + header(b"sized", b"5", size=5000) + header(b"spaces", mode=b"   644 \0"),
        "PAX sparse": pax(sparse) + file(b"x", padded(b"2\n512\n512\n4096\n904\n") + b"a" * 512 + b"b" * 904)
        + pax(old_sparse) + file(b"t", b"a" * 512 + b"b" * 904),
    }  # fmt: skip
    streams = {kind: stream + (END if stream else b"") for kind, stream in streams.items()}
    streams["empty layer (stargz 2137)"] = END
    streams["no end marker"] = file(b"a", b"x")
    streams["half an end marker"] = file(b"a", b"x") + bytes(512)
    streams["trailing data"] = file(b"a", b"x") + END + file(b"b") + b"garbage"
    return streams


def refused() -> dict[str, bytes]:
    """Kind -> stream that containerd fails on."""
    streams = {
        "hard link to a lower layer (cvmfs 4286)": link(b"l", b"lower/file"),
        "hard link to a directory": directory(b"d") + link(b"l", b"d"),
        "hard link to the root": link(b"l", b""),
        "hard link to itself": file(b"f") + link(b"f", b"f"),
        "file as a parent": file(b"f") + file(b"f/x"),
        "whiteout as a parent": file(b".wh.d") + file(b"d/x"),
        "whiteout of the same layer": file(b"f") + file(b".wh.f"),
        "whiteout twice": file(b".wh.f") + file(b".wh.f"),
        "whiteout of nothing": file(b".wh."),
        "whiteout of the parent": file(b"a/.wh..."),
        "directory gone in the end": directory(b"d") + directory(b"d/e") + file(b"d"),
        "symlinks in circles": symlink(b"a", b"b") + symlink(b"b", b"a") + file(b"a/x"),
        "symlink to nothing": symlink(b"l", b""),
        "name too long": pax({b"path": b"n" * 256}) + header(b"x"),
        "malformed capability": pax({_X + b"security.capability": b"bad"}) + file(b"f"),
        "xattr without a name": pax({_X + b"user.": b"1"}) + file(b"f"),
        "xattr name too long": pax({_X + b"user." + b"n" * 251: b"1"}) + file(b"f"),
        "xattr value too long": pax({_X + b"user.a": bytes(65_537)}) + file(b"f"),
        "unknown type": header(b"f", b"V"),
        "checksum": header(b"f", checksum=b"0000000\0"),
        "octal": header(b"f", uid=b"00009\0"),
        "PAX record": pax(b"12 path=x\n") + file(b"f"),
        "PAX number": pax({b"uid": b"x"}) + file(b"f"),
        "PAX time": pax({b"atime": b"x"}) + file(b"f"),
        "negative size": header(b"f", size=-1),
        "zero block between members": file(b"a") + bytes(512) + file(b"b"),
        "sparse map": pax({b"GNU.sparse.numblocks": b"1", b"GNU.sparse.size": b"5", b"GNU.sparse.map": b"0,6"})
        + file(b"f", b"x" * 6),
        "link with payload": link(b"l", b"f", size=600) + b"x" * 1024,
    }
    streams = {kind: stream + END for kind, stream in streams.items()}
    streams["truncated payload"] = file(b"f", b"x" * 600)[:1000]
    streams["truncated header"] = file(b"f")[:300]
    streams["truncated extension"] = pax({b"path": b"f" * 100})[:600]
    return streams


def random_layer(seed: int) -> bytes:
    """A layer of up to 15 members with few names, so that they meet; about half of them are sound."""
    return _Random(seed).layer()


class _Random:
    """Makes one random layer."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made: list[bytes] = []

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def path(self) -> bytes:
        choice = self.random.choice
        parts = [
            choice(b"a b c d l".split()) if self.chance(0.8) else choice(b"e f g h".split())
            for _ in range(choice((1, 2, 2, 3, 4)))
        ]
        if self.chance(0.1):
            parts[self.random.randrange(len(parts))] = choice([b".", b"..", b"", b"\xff\xfe", b"x" * 255])
        prefix = choice([b"./", b"/", b"../", b"/../"]) if self.chance(0.1) else b""
        return prefix + b"/".join(parts) + (b"/" if self.chance(0.05) else b"")

    def whiteout(self, name: bytes) -> bytes:
        parent, slash, base = name.rstrip(b"/").rpartition(b"/")
        odd = [b".wh." + base, b".wh.", b".wh...", b".wh..wh.plnk"]
        usual = [b".wh." + base, b".wh..wh..opq", b".wh.q", b".wh.r"]
        return parent + slash + self.random.choice(odd if self.chance(0.15) else usual)

    def records(self, name: bytes, target: bytes) -> dict[bytes, bytes]:
        choice = self.random.choice
        records: dict[bytes, bytes] = {}
        if len(name) > 100 or self.chance(0.1):
            records[b"path"] = name
        if len(target) > 100 or self.chance(0.05):
            records[b"linkpath"] = target
        if self.chance(0.12):
            for _ in range(choice((1, 1, 2))):
                key = choice(
                    [b"user.a", b"user.b", b"security.capability", b"security.foo", b"trusted.foo", b"foo", b"system.foo"]
                )
                value = choice((CAPABILITY, ROOT_CAPABILITY)) if b"cap" in key else choice((b"", b"x", b"yy\0z", b"=\n="))
                records[_X + key] = value
        if self.chance(0.1):
            records[b"mtime"] = choice(
                (b"1.5", b"1700000000.123456789123", b"-1.5", b"9223372036.854775808", b"12", b"1.", b"")
            )
        if self.chance(0.03):
            records[choice((b"uid", b"gid"))] = choice((b"5", b"4294967295", b"4294967296", b"-1", b"+7", b""))
        return records

    def member(self) -> bytes:
        choice = self.random.choice
        typeflag = bytes([choice(b"00000000005555511111222222346\0\0g")])
        name = choice(self.made) if self.made and self.chance(0.1) else self.path()
        if typeflag == b"g":
            return pax(choice([{b"comment": b"x"}, {b"path": self.path()}]), b"g", name=self.path())
        if self.chance(0.1):
            name = self.whiteout(name)
        elif typeflag in b"0234":
            self.made.append(name)
        target = b""
        if typeflag == b"1":
            target = choice(self.made) if self.made and self.chance(0.9) else self.path()
        elif typeflag == b"2":
            target = (
                self.path()
                if self.chance(0.5)
                else choice([b"..", b".", b"a", b"../a", b"/b", b"/", b"../../c", b"b/..", b"l", b"//c//d"])
            )
        data = bytes([self.random.randrange(256)]) * choice((0, 1, 511, 512, 513, 3000)) if typeflag in b"0\0" else b""
        ids = (0, 0, 0, 0, 1, 1000, 0o7777777, -1, 2**32 - 1, 2**32 + 5, 3_000_000)
        out = b""
        records = self.records(name, target)
        if records:
            out += pax(records)
        elif self.chance(0.05):
            out += long_name(name)
        return out + header(
            name, typeflag, mode=choice((0o644, 0o755, 0o4755, 0o2775, 0o2775, 0o1777, 0, 0o7777, 0o100644)), uid=choice(ids),
            gid=choice(ids), size=len(data), mtime=choice((0, 1, 1_700_000_000, 2**33, -5, 9_223_372_036, 9_223_372_037)), link=target,
            magic=choice((USTAR, USTAR, GNU, V7)), device=choice(((0, 0), (1, 3), (300, 70000), (4096, 1), (0, 1))),
        ) + padded(data)  # fmt: skip

    def sparse(self) -> bytes:
        choice = self.random.choice
        at, pieces = 0, []
        for _ in range(choice((0, 1, 3, 30))):
            at += choice((0, 512, 4096))
            pieces.append((at, choice((0, 512, 2048))))
            at += pieces[-1][1]
        size = at + choice((0, 512, 5000))
        data = b"".join(bytes([65 + number % 26]) * length for number, (_, length) in enumerate(pieces))
        if self.chance(0.1):
            data = data[:-1]
        count, name = b"%d" % len(pieces), self.path()
        if self.chance(0.5):
            records = {
                b"GNU.sparse.major": b"1",
                b"GNU.sparse.minor": b"0",
                b"GNU.sparse.name": name,
                b"GNU.sparse.realsize": b"%d" % size,
            }
            return pax(records) + file(b"x", padded(count + b"\n" + b"".join(b"%d\n%d\n" % piece for piece in pieces)) + data)
        records = {b"GNU.sparse.size": b"%d" % size, b"GNU.sparse.numblocks": count, b"GNU.sparse.name": name}
        records[b"GNU.sparse.map"] = b",".join(b"%d,%d" % piece for piece in pieces)
        return pax(records) + file(b"x", data)

    def layer(self) -> bytes:
        members = [
            self.sparse() if self.chance(0.04) else self.member() for _ in range(self.random.choice((1, 2, 3, 5, 8, 15)))
        ]
        out = b"".join(members)
        kind = self.random.random()
        if kind < 0.9:
            return out + END
        if kind < 0.95:
            return out[: len(out) - self.random.randrange(600)]
        return out + END + b"trailing" * 100


__all__ = ["link", "random_layer", "rawtar", "refused", "sound", "symlink"]
