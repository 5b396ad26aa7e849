"""Where the programs are that :mod:`weenv_testkit.fetch_tools` unpacked, and which containerd is which."""

from __future__ import annotations

import json
import os
import sys

from weenv_testkit.fetch_tools import TOOLS, WANTED

CONTAINERD = {"1.7": "containerd-1.7", "2.1": "containerd-2"}
"""Name of a containerd line -> directory in the cache."""
DOCKER = {"1.7": "docker-26", "2.1": "docker-28"}
"""Name of a containerd line -> directory of the docker that Debian ships with it."""


def tool(directory: str, program: str) -> str:
    """Absolute path of a program in the cache. Raises FileNotFoundError that says what to run."""
    path = TOOLS / directory / "bin" / program
    if not path.exists():
        raise FileNotFoundError(f"{program} is not in {TOOLS}; run: sudo make setup")
    return str(path)


def containerd_bin(line: str) -> str:
    """The directory with containerd, ctr and the shim of a line (``1.7`` or ``2.1``)."""
    return os.path.dirname(tool(CONTAINERD[line], "containerd"))


def docker(line: str, program: str) -> str:
    """``dockerd`` or ``docker`` of the docker that goes with a containerd line."""
    return tool(DOCKER[line], program)


def docker_plugins(line: str) -> str:
    """The directory with the plugins of the ``docker`` command (compose, buildx)."""
    return str(TOOLS / DOCKER[line] / "root" / "usr" / "libexec" / "docker" / "cli-plugins")


def docker_init() -> str:
    """A static tini, which docker calls docker-init."""
    return tool("tini", "tini-static")


def runc() -> str:
    """The runc that both containerd lines use: the machine's own Debian's."""
    return tool("runc", "runc")


def new_runc() -> str:
    """Debian unstable's runc, which knows id-mapped mounts."""
    return tool("runc-new", "runc")


def docker_registry() -> str:
    """Debian's docker-registry (distribution 2.8)."""
    return tool("registry", "docker-registry")


def nginx() -> str:
    """Debian's nginx: serves blobs to which a registry redirects."""
    return tool("nginx", "nginx")


def cosign() -> str:
    """Debian unstable's cosign, to check signatures with and to have some checked."""
    return tool("cosign", "cosign")


def busybox() -> str:
    """A static busybox, the whole content of hand-made images."""
    return os.path.realpath(tool("busybox", "busybox"))


def erofs(program: str) -> str:
    """``mkfs.erofs``, ``fsck.erofs`` or ``dump.erofs`` of erofs-utils >= 1.8."""
    return tool("erofs", program)


def version(directory: str) -> str:
    """Debian's version of the first package of a directory of the cache."""
    names = {item.name: item.packages[0] for item in WANTED}
    for line in (TOOLS / directory / "VERSION").read_text().splitlines():
        package, _, number = line.partition(" ")
        if package == names[directory]:
            return number
    raise KeyError(directory)


def sources() -> dict[str, str]:
    """``mirror``, ``codename`` and ``keyring`` of the machine's own Debian, recorded when the cache was filled."""
    with open(TOOLS / "sources.json") as file:
        found: dict[str, str] = json.load(file)
    return found


def weenv() -> list[str]:
    """The ``weenv`` command of the virtual environment that runs the tests."""
    return [os.path.join(os.path.dirname(sys.executable), "weenv")]
