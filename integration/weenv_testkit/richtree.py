"""A tree with everything that GNU tar can carry, and GNU tar itself."""

from __future__ import annotations

import os
import random
import stat

from weenv_testkit.procs import run


def extract(tar: str, target: str, *options: str) -> None:
    """GNU tar's own idea of what is in a tar; directories get their times when everything is in them."""
    os.mkdir(target)
    exact = ["--same-owner", "--same-permissions", "--numeric-owner", "--delay-directory-restore"]
    run("tar", "--extract", *exact, *options, f"--file={tar}", "--directory", target)


def _write(path: str, data: bytes) -> str:
    with open(path, "wb") as file:
        file.write(data)
    return path


def make_rich_tree(root: str) -> None:
    """Files of all sizes around blocks, long and odd names, links, devices, xattrs, times of all sorts, below ``root``."""
    rng = random.Random(7)
    os.makedirs(os.path.join(root, "many"))
    for number in range(2500):
        name = f"{'n' * rng.randrange(1, 120)}{number}"
        with open(os.path.join(root, "many", name), "wb") as file:
            file.write(rng.randbytes(rng.choice([0, 1, 100, 511, 512, 513, 4095, 4096, 4097, 20_000])))
    deep = root
    for depth in range(60):
        deep = os.path.join(deep, f"d{depth}")
        os.mkdir(deep)
    files = os.path.join(root, "files")
    os.mkdir(files)
    _write(f"{files}/large", rng.randbytes(9_000_001))
    _write(f"{files}/suid", b"#!/bin/sh\n")
    os.chown(f"{files}/suid", 1234, 70_000)
    os.chmod(f"{files}/suid", 0o6755)
    os.chmod(_write(f"{files}/sticky", b""), 0o1000)
    os.chown(_write(f"{files}/far", b"x"), 4_000_000_000, 3_000_000_000)
    for name in ("!", ".#lock", "...", ".hidden", "caf\u00e9", "-", "~", "a" * 255):
        _write(os.path.join(files, name), name.encode())
    _write(os.fsencode(files).decode() + "/plain", b"p")
    os.rename(f"{files}/plain".encode(), files.encode() + b"/\xff\xfe")
    for name in ("one", "sub/two", "sub/three"):
        path = os.path.join(root, "links", name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if name == "one":
            _write(path, b"linked" * 1000)
        else:
            os.link(os.path.join(root, "links/one"), path)
    for length in (1, 31, 32, 33, 200, 383, 384, 385, 415, 416, 417, 450, 511, 512, 513, 1000, 4000):
        os.symlink("t" * length, f"{root}/links/s{length}")
    devices = os.path.join(root, "devices")
    os.mkdir(devices)
    os.mkfifo(f"{devices}/pipe", 0o640)
    for number, (major, minor) in enumerate([(1, 3), (0, 0), (8, 255), (8, 256), (259, 1_048_575), (4095, 70_000)]):
        os.mknod(f"{devices}/c{number}", stat.S_IFCHR | 0o660, os.makedev(major, minor))
        os.mknod(f"{devices}/b{number}", stat.S_IFBLK | 0o600, os.makedev(major, minor))
    marked = os.path.join(root, "xattrs")
    os.mkdir(marked)
    for number in range(40):
        path = _write(f"{marked}/f{number:02d}", b"x")
        os.setxattr(path, "user.shared", b"the same everywhere" * 5)
        os.setxattr(path, "user.own", b"%d" % number * (number % 30))
        if number % 3 == 0:
            os.setxattr(path, "trusted.test", b"\0\x01binary\xff")
            os.setxattr(path, "security.capability", bytes.fromhex("010000020004000000000000000000000000000000"[:40]))
    os.setxattr(marked, "user.long", b"v" * 3000)
    os.setxattr(marked, "user." + "n" * 250, b"")
    for number, (folder, folders, names) in enumerate(os.walk(root)):
        for name in names + folders:
            when = rng.randrange(-(10**9), 4 * 10**9)
            os.utime(os.path.join(folder, name), ns=(0, when * 10**9 + rng.randrange(10**9)), follow_symlinks=False)
        os.utime(folder, ns=(0, number * 10**9 + 123_456_789))
