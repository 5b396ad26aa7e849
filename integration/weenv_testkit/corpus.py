"""Layers to try: real ones from Debian, PyPI and npm, and hand-made odd ones.

Every function returns paths of uncompressed tar files. Downloads go through the registries' own clients (apt-get, pip,
npm) and are cached beside the tools; npm archives are there only where npm is.
"""

from __future__ import annotations

import gzip
import os
import random
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from weenv_testkit import tools
from weenv_testkit.fetch_tools import TOOLS, PrivateApt, Sources
from weenv_testkit.images import MTIME, Member, write_tar, xattr
from weenv_testkit.procs import run

CORPUS = TOOLS / "corpus"
CAPABILITY = "\x01\0\0\x02\0\x20" + "\0" * 14
"""cap_net_raw=ep as an xattr (struct vfs_cap_data, revision 2)."""
DEBIAN = ("base-files", "dash", "passwd", "iputils-ping", "tzdata", "perl-base", "adduser", "login", "git-man")
PYPI = ("hatchling", "soupsieve", "beautifulsoup4")
"""Their source archives are built by hatchling, which the lock has, so pip needs nothing else to fetch them."""
NPM = ("react", "typescript", "lodash", "esbuild")


def _fill(name: str, make: Callable[[Path], None]) -> list[str]:
    final, work = CORPUS / name, CORPUS / f".new-{name}-{os.getpid()}"
    if not final.exists():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        make(work)
        os.rename(work, final)
    return sorted(str(path) for path in final.glob("*.tar"))


def debian() -> list[str]:
    """The data.tar members of some Debian packages of the machine's own suite."""

    def make(work: Path) -> None:
        for deb in PrivateApt(Sources(**tools.sources()), (".",)).download(DEBIAN, work):
            with open(deb.with_suffix(".tar"), "wb") as sink:
                subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=sink, check=True)
            deb.unlink()

    return _fill("debian", make)


def _gunzip(work: Path, pattern: str) -> None:
    for packed in work.glob(pattern):
        with gzip.open(packed) as source, open(f"{packed}.tar", "wb") as sink:
            shutil.copyfileobj(source, sink)
        packed.unlink()


def pypi() -> list[str]:
    """Some source archives of PyPI."""

    def make(work: Path) -> None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps"]
        run(*pip, "--no-binary=:all:", "--no-build-isolation", "--dest", str(work), *PYPI, env=dict(os.environ))
        _gunzip(work, "*.tar.gz")

    return _fill("pypi", make)


def npm() -> list[str]:
    """Some archives of the npm registry; none where there is no npm."""
    if not (CORPUS / "npm").exists() and shutil.which("npm") is None:
        return []

    def make(work: Path) -> None:
        run("npm", "pack", "--silent", "--pack-destination", str(work), *NPM, env=dict(os.environ), cwd=str(work))
        _gunzip(work, "*.tgz")

    return _fill("npm", make)


# -- hand-made -----------------------------------------------------------------------------------------------------------


def noise(size: int, seed: int = 1) -> bytes:
    """Incompressible bytes, the same every time."""
    return random.Random(seed).randbytes(size)


def base_members() -> list[Member]:
    """What the odd layers change: some directories with things in them."""
    members = [Member.directory("a"), Member.directory("a/b", 0o750, uid=5, gid=6), Member("a/b/keep", b"keep\n")]
    members += [Member("a/b/gone", b"gone\n"), Member("a/replaced", b"old\n"), Member.directory("opaque", 0o711)]
    members += [Member("opaque/lower", b"lower\n"), Member.directory("opaque/dir"), Member("opaque/dir/x", b"x")]
    members += [Member.directory("dirgone"), Member("dirgone/x", b"x"), Member("tofile", b"f"), Member.directory("todir")]
    members += [Member("todir/x", b"x"), Member.directory("xattrs", pax=xattr("user.dir", "of the lower layer"))]
    members += [Member("xattrs/x", b"x")]
    return members


def odd_layers() -> dict[str, list[Member]]:
    """Name -> members, to be stacked in this order on :func:`base_members`."""
    links = [Member("h/one", b"linked\n", mode=0o640, uid=7), Member.hardlink("h/two", "h/one"), Member.directory("h/other")]
    links += [Member.hardlink("h/other/three", "h/two"), Member.symlink("h/sym", "one"), Member.hardlink("h/symtoo", "h/sym")]
    modes = [Member(f"modes/{mode:04o}", b"m", mode=mode) for mode in (0o4755, 0o2755, 0o6711, 0o1777, 0o0000, 0o7777)]
    modes += [Member.directory("modes/sticky", 0o1777), Member.directory("modes/sgid", 0o2775, gid=50)]
    modes += [Member("modes/empty"), Member("modes/big-ids", b"i", uid=3_000_000, gid=4_000_000_000)]
    times = [Member("times/fraction", b"t", mtime=MTIME + 0.123456789), Member("times/zero", b"t", mtime=0)]
    times += [Member("times/future", b"t", mtime=4_200_000_000), Member("times/negative", b"t", mtime=-12345)]
    times += [Member("times/pax", b"t", pax={"mtime": "1700000001.987654321"})]
    xattrs = [Member("x/user", b"x", pax=xattr("user.colour", "blau"))]
    xattrs += [
        Member("x/many", b"x", pax={key: value for n in range(40) for key, value in xattr(f"user.n{n}", "v" * n).items()})
    ]
    xattrs += [
        Member.directory("x/dir", pax=xattr("user.on", "directory")),
        Member("x/same", b"y", pax=xattr("user.colour", "blau")),
    ]
    xattrs += [Member("x/long", b"x", pax=xattr("user.long", "l" * 3000))]
    xattrs.append(
        Member("x/cap", b"x", mode=0o755, pax=xattr("security.capability", CAPABILITY))
    )
    devices = [Member("dev/null", kind=tarfile.CHRTYPE, mode=0o666, device=(1, 3))]
    devices += [Member("dev/wide", kind=tarfile.CHRTYPE, mode=0o600, device=(300, 70_000))]
    devices += [
        Member("dev/loop", kind=tarfile.BLKTYPE, mode=0o660, gid=6, device=(7, 9)),
        Member("dev/fifo", kind=tarfile.FIFOTYPE),
    ]
    names = [
        Member(name, name.encode("utf-8", "surrogateescape")) for name in ("n/\udcff", "n/\udcaa", "n/ü", "n/new\nline", "n/ ")
    ]
    names += [Member("n/" + "l" * 255, b"long"), Member("n/" + "/".join(["deep" * 12] * 20) + "/end", b"deep")]
    names += [
        Member.symlink("n/longlink", "t" * 3000),
        Member.symlink("n/short", "x"),
        Member.symlink("n/dangling", "/no/such"),
    ]
    prefixes = [
        Member.directory("./", 0o700, uid=9),
        Member("./p/dot", b"1"),
        Member("/p/slash", b"2"),
        Member("p//two///x", b"3"),
    ]
    prefixes += [Member("p/./q/../r", b"4"), Member.hardlink("p/linked", "./p/dot"), Member.hardlink("p/linked2", "/p/slash")]
    twice = [
        Member("d/f", b"first"),
        Member("d/f", b"second", mode=0o600),
        Member.directory("d/was-dir"),
        Member("d/was-dir/x", b"x"),
    ]
    twice += [Member("d/was-dir", b"now a file"), Member("d/was-file", b"f"), Member.directory("d/was-file", 0o701)]
    twice += [
        Member("d/was-file/y", b"y"),
        Member.symlink("d/l", "f"),
        Member("d/l", b"no link"),
        Member.directory("d/attr", 0o700),
    ]
    twice += [Member("d/attr/in", b"in"), Member.directory("d/attr", 0o755, uid=3)]
    whiteouts = [
        Member("a/b/.wh.gone"),
        Member("a/replaced", b"new\n"),
        Member(".wh.dirgone"),
        Member.directory("tofile"),
        Member("todir", b"f"),
    ]
    opaque = [
        Member.directory("opaque", 0o755),
        Member("opaque/.wh..wh..opq"),
        Member("opaque/upper", b"u"),
        Member.directory("a/b/.o"),
    ]
    opaque += [Member("a/b/.o/before", b"1"), Member("a/b/.o/.wh..wh..opq"), Member("a/b/.o/after", b"2")]
    implied = [Member("a/b/new/deep/er/file", b"i"), Member("xattrs/added", b"+"), Member("brand/new/tree/x", b"x")]
    long = [Member.directory("long"), *(Member(f"long/entry-{n:05d}", b"%d" % n) for n in range(3000))]
    sizes = [Member(f"s/{n}", noise(n, n)) for n in (1, 511, 512, 513, 4095, 4096, 4097, 65536, 1_000_003, 5_000_000)]
    sizes.append(Member("s/zeros", bytes(3_000_000)))
    return {
        "links": [Member.directory("h"), *links],
        "modes": modes,
        "times": times,
        "xattrs": xattrs,
        "devices": devices,
        "names": names,
        "prefixes": prefixes,
        "twice": twice,
        "whiteouts": whiteouts,
        "opaque": opaque,
        "implied": implied,
        "long": long,
        "sizes": sizes,
        "empty": [],
    }


def odd(scratch: str) -> list[str]:
    """The base and the odd layers as tar files, the lowest first; then GNU tar's own long names."""
    paths = [write_tar(os.path.join(scratch, "00-base.tar"), base_members())]
    for number, (name, members) in enumerate(odd_layers().items(), 1):
        paths.append(write_tar(os.path.join(scratch, f"{number:02d}-{name}.tar"), members))
    return [*paths, sparse(scratch)["gnu-names"]]


SPARSE_FORMS = {
    "gnu-names": ["--format=gnu"],
    "gnu": ["--format=gnu", "--sparse"],
    "pax-0.0": ["--format=posix", "--sparse", "--sparse-version=0.0"],
    "pax-0.1": ["--format=posix", "--sparse", "--sparse-version=0.1"],
    "pax-1.0": ["--format=posix", "--sparse", "--sparse-version=1.0"],
}
"""What GNU tar can write. containerd unpacks the first only: sparse members of any form it refuses (type ``S``)."""


def sparse(scratch: str) -> dict[str, str]:
    """Sparse files and very long names as GNU tar writes them: a layer for each of :data:`SPARSE_FORMS`."""
    source = os.path.join(scratch, "sparse-source")
    os.makedirs(os.path.join(source, "sparse"), exist_ok=True)
    shapes = {"few": ((0, 1 << 20), 3 << 20), "many": (tuple(range(0, 40 << 16, 1 << 16)), 4 << 20), "hole": ((), 1 << 20)}
    for name, (pieces, size) in shapes.items():
        with open(os.path.join(source, "sparse", name), "wb") as file:
            for piece in pieces:
                file.seek(piece)
                file.write(noise(5000, piece))
            file.truncate(size)
    with open(os.path.join(source, "sparse", "n" * 200), "wb") as file:
        file.write(b"long name\n")
    paths = {}
    for form, options in SPARSE_FORMS.items():
        path = os.path.join(scratch, f"sparse-{form}.tar")
        run("tar", "--create", *options, f"--file={path}", "--directory", source, "sparse")
        paths[form] = path
    return paths


def explicit_directories(tar: str) -> set[bytes]:
    """Directories that are members of a layer themselves, relative to its root; the others get the unpack's time."""

    def clean(name: str) -> bytes:
        return os.path.normpath("/" + name).lstrip("/").encode("utf-8", "surrogateescape")

    def members() -> Iterator[tarfile.TarInfo]:
        with tarfile.open(tar, encoding="utf-8", errors="surrogateescape") as archive:
            yield from archive

    return {clean(member.name) for member in members() if member.isdir()}
