"""The images of a session: built, pushed and converted when first asked for, and then shared by all tests.

=============  ==================================================================================================
name           what it is
=============  ==================================================================================================
``debian``     three layers: a debootstrapped Debian with Python; hard links, suid and xattrs on top; then whiteouts
``small``      busybox, one layer
``pair``       busybox and a layer with some files
``solo``       one layer that no other image has
``deep``       busybox and 126 more layers, each adding a file, changing one and deleting one
``corpus``     everything of :mod:`weenv_testkit.corpus` that containerd unpacks, one layer each
=============  ==================================================================================================
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable

from weenv_testkit import corpus, images, tools
from weenv_testkit.containerd import PAUSE
from weenv_testkit.images import Image, Layout, Member, write_tar, xattr
from weenv_testkit.procs import run
from weenv_testkit.registry import Registry

PACKAGES = ("python3", "attr", "libcap2-bin", "iputils-ping")
DEEP = 127
"""Layers of ``deep``: overlayfs takes 500, image builders and docker stop at 127."""


class Store:
    """``directory`` holds one layout with all images; ``registry`` is where they are pushed to."""

    def __init__(self, directory: str, registry: Registry) -> None:
        self.directory = directory
        self.registry = registry
        self.layout = Layout(os.path.join(directory, "layout"))
        self._images: dict[str, Image] = {}
        self._tars: dict[str, list[str]] = {}
        self._refs: dict[str, str] = {}

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def tars(self, name: str) -> list[str]:
        """The uncompressed layers of an image, the lowest first."""
        if name not in self._tars:
            build: dict[str, Callable[[], list[str]]] = {
                "debian": self._debian,
                "small": self._small,
                "pair": self._pair,
                "solo": self._solo,
                "deep": self._deep,
                "corpus": self._corpus,
            }
            self._tars[name] = build[name]()
        return self._tars[name]

    def image(self, name: str) -> Image:
        """The ordinary image (gzip layers), tagged ``name`` in the layout."""
        if name not in self._images:
            self._images[name] = self.layout.image([self.layout.layer(tar) for tar in self.tars(name)], name)
        return self._images[name]

    def plain(self, name: str) -> str:
        """Reference of the ordinary image in the registry."""
        key = f"plain/{name}"
        if key not in self._refs:
            self.image(name)
            self._refs[key] = self.layout.push(name, self.registry, f"test/{name}", "plain")
        return self._refs[key]

    def lazy(self, name: str) -> str:
        """Reference of the converted image in the registry: what ``weenv convert`` made of the layout."""
        key = f"lazy/{name}"
        if key not in self._refs:
            self.image(name)
            target = f"{self.registry.host}/test/{name}:lazy"
            run(*tools.weenv(), "convert", f"oci:{self.layout.directory}:{name}", target, timeout=600, env=dict(os.environ))
            self._refs[key] = target
        return self._refs[key]

    def pause(self) -> str:
        """The sandbox image."""
        if "pause" not in self._refs:
            layout = Layout(self._path("pause"))
            images.pause(layout, self.directory)
            repository, _, tag = PAUSE.partition(":")
            self._refs["pause"] = layout.push(tag, self.registry, repository)
        return self._refs["pause"]

    # -- the images -----------------------------------------------------------------------------------------------

    def _small(self) -> list[str]:
        return [write_tar(self._path("small.tar"), images.busybox_members())]

    def _solo(self) -> list[str]:
        members = [*images.busybox_members(), Member("etc/weenv-release", b"solo\n")]
        return [write_tar(self._path("solo.tar"), members)]

    def _pair(self) -> list[str]:
        files = [Member(f"data/{n}", corpus.noise(50_000, 500 + n)) for n in range(20)]
        top = [Member.directory("data"), *files, Member("etc/weenv-release", b"pair\n")]
        return [self.tars("small")[0], write_tar(self._path("pair.tar"), top)]

    def _debian(self) -> list[str]:
        base = images.debian_tar(PACKAGES)
        with tarfile.open(base) as archive:
            member = archive.extractfile("./usr/bin/id")
            assert member is not None
            program = member.read()
        middle = [
            Member.directory("opt/weenv"),
            Member("opt/weenv/data.bin", corpus.noise(24 << 20), mode=0o644),
            Member("opt/weenv/log", b"first line\n"),
            Member("opt/weenv/gone", b"deleted by the layer above\n"),
            Member("opt/weenv/one", b"linked\n"),
            Member.hardlink("opt/weenv/two", "opt/weenv/one"),
            Member.directory("opt/weenv/sub", 0o2775, gid=1000),
            Member.hardlink("opt/weenv/sub/three", "opt/weenv/one"),
            Member("opt/weenv/suid-id", program, mode=0o4755),
            Member("opt/weenv/marked", b"x\n", pax=xattr("user.colour", "blau")),
            Member("opt/weenv/capable", program, mode=0o755, pax=xattr("security.capability", corpus.CAPABILITY)),
            Member.directory("opt/weenv/opaque"),
            Member("opt/weenv/opaque/below", b"hidden by the layer above\n"),
            Member("opt/weenv/fifo", kind=tarfile.FIFOTYPE),
            Member("opt/weenv/null", kind=tarfile.CHRTYPE, mode=0o666, device=(1, 3)),
            *(Member(f"opt/weenv/many/{n:04d}", b"%d\n" % n * 50) for n in range(2000)),
        ]
        top = [
            Member("opt/weenv/.wh.gone"),
            Member.directory("opt/weenv/opaque", 0o711),
            Member("opt/weenv/opaque/.wh..wh..opq"),
            Member("opt/weenv/opaque/above", b"seen\n"),
            Member("etc/weenv-release", b"top\n"),
        ]
        middle_tar = write_tar(self._path("debian-middle.tar"), middle)
        return [base, middle_tar, write_tar(self._path("debian-top.tar"), top)]

    def _deep(self) -> list[str]:
        tars = [self.tars("small")[0]]
        for number in range(1, DEEP):
            members = [Member(f"deep/{number:03d}", b"%d\n" % number), Member("deep/last", b"%d\n" % number)]
            if number > 1:
                members.append(Member(f"deep/.wh.temporary-{number - 1}"))
            members.append(Member(f"deep/temporary-{number}", b"x"))
            tars.append(write_tar(self._path(f"deep-{number:03d}.tar"), members))
        return tars

    def _corpus(self) -> list[str]:
        scratch = self._path("odd")
        os.makedirs(scratch, exist_ok=True)
        return [*corpus.odd(scratch), *corpus.debian(), *corpus.pypi(), *corpus.npm()]
