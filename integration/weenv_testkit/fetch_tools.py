"""Fetch the programs that the tests, the demo and the benchmarks run, without installing them.

``python3 fetch_tools.py`` (standard library only, so that it runs before there is a virtual environment) fills
``${WEENV_TOOLS:-/var/cache/weenv-tools}``, a cache that all clones on a machine share::

    sources.json              where the packages came from: mirror, codename, archive keyring
    <name>/VERSION            package names and versions
    <name>/root/              the packages, unpacked
    <name>/bin/               what to run: links, or wrappers around a private loader and libraries
    apt-<suites>/             private state of apt (lists, downloads); never the machine's own

apt itself downloads and verifies everything, from the mirror that the machine is configured for, with only the suite
changed and with the archive keyring that Debian installed. A directory appears by rename, so an interrupted run is
simply run again. Exit codes: 0, or 1 with one line that says what to do.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(os.environ.get("WEENV_TOOLS") or "/var/cache/weenv-tools")
KEYRINGS = ("/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp")
LAYOUT = 1
"""Changes when the shape of an unpacked tool changes, so that an old cache is not taken for a new one."""


class SetupError(Exception):
    """Something that the person at the keyboard can do something about; the text is one line."""


@dataclass(frozen=True)
class Tool:
    """One directory of the cache.

    ``suites`` is where apt looks, ``"."`` being the machine's own; of several, apt takes the newest version. ``programs``
    are looked for in the packages' ``bin`` and ``sbin``. ``private_libc`` runs them with the loader and the libraries
    unpacked beside them, which is how a program of a newer Debian runs on an older one. ``patched`` writes both into the
    program itself, for one that starts itself again; it needs tool ``patchelf``.
    """

    name: str
    suites: tuple[str, ...]
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    private_libc: bool = False
    patched: bool = False


CONTAINERD = ("containerd", "ctr", "containerd-shim-runc-v2")
DOCKER = ("docker.io", "docker-cli", "docker-compose", "docker-buildx")
EROFS_LIBRARIES = (
    "libc6", "libdeflate0", "liblz4-1", "liblzma5", "libselinux1", "libpcre2-8-0", "libuuid1", "libxxhash0", "libzstd1",
    "zlib1g", "libgcc-s1",
)  # fmt: skip

WANTED = (
    # Debian 13's containerd and the newest one there is (2.x) need glibc 2.34 only, so they run anywhere as they are.
    Tool("containerd-1.7", ("trixie",), ("containerd",), CONTAINERD),
    Tool("containerd-2", ("sid",), ("containerd",), CONTAINERD),
    # Not installed by apt-get: runc would drive out docker-ce's containerd.io, docker-registry and nginx would start services.
    Tool("runc", (".",), ("runc",), ("runc",)),
    # For CRI's pods in user namespaces: containerd 2.x wants id-mapped mounts of runc, which it has from 1.2 on.
    Tool("patchelf", (".",), ("patchelf",), ("patchelf",)),
    Tool("runc-new", ("sid",), ("runc", "libc6", "libseccomp2"), ("runc",), patched=True),
    Tool("registry", (".",), ("docker-registry",), ("docker-registry",)),
    Tool("nginx", (".",), ("nginx",), ("nginx",)),
    Tool("cosign", ("sid",), ("cosign",), ("cosign",)),
    Tool("busybox", (".",), ("busybox-static",), ("busybox",)),
    # As with containerd: Debian 13's docker and the newest there is; their plugins of the command are found in root/.
    Tool("docker-26", ("trixie",), DOCKER, ("dockerd", "docker")),
    Tool("docker-28", ("sid",), DOCKER, ("dockerd", "docker")),
    Tool("tini", ("trixie",), ("tini",), ("tini-static",)),
    Tool(
        "erofs",
        ("trixie",),
        ("erofs-utils", *EROFS_LIBRARIES),
        ("mkfs.erofs", "fsck.erofs", "dump.erofs"),
        private_libc=True,
    ),
)


def say(text: str) -> None:
    print(f"tools: {text}", file=sys.stderr, flush=True)


def run(*argv: str, cwd: Path | None = None) -> str:
    """Run a program; its standard output. Raises SetupError with the last line of what it complained about."""
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        complaints = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("E:")]
        last = complaints or (done.stderr or done.stdout).strip().splitlines() or ["no output"]
        raise SetupError(f"{argv[0]} failed: {last[-1]}")
    return done.stdout


@dataclass(frozen=True)
class Sources:
    """Where this machine gets Debian from."""

    mirror: str
    codename: str
    keyring: str


def machine_sources() -> Sources:
    """Read apt's configuration. Raises SetupError where this is not Debian, or apt knows no Debian mirror."""
    release = dict(re.findall(r'^(\w+)="?([^"\n]*)"?$', Path("/etc/os-release").read_text(), re.MULTILINE))
    codename = release.get("VERSION_CODENAME", "")
    if release.get("ID") != "debian" or not codename:
        raise SetupError(f"this is {release.get('PRETTY_NAME', 'an unknown system')}; the set-up knows Debian 12 and 13 only")
    keyring = next((path for path in KEYRINGS if os.path.exists(path)), None)
    if keyring is None:
        raise SetupError("no Debian archive keyring; run: apt-get install debian-archive-keyring")
    listing = run("apt-get", "indextargets", "--format", "$(REPO_URI)|$(CODENAME)|$(LABEL)", "Created-By: Packages")
    rows = [line.split("|") for line in listing.splitlines()]
    mirrors = [uri for uri, name, label in rows if name == codename and label == "Debian"]
    if not mirrors:
        raise SetupError(f"apt knows no mirror of Debian {codename}; run apt-get update, or look at /etc/apt/sources.list")
    return Sources(mirrors[0], codename, keyring)


class PrivateApt:
    """apt with a source list and a state directory of its own, which knows of no installed package."""

    def __init__(self, sources: Sources, suites: tuple[str, ...]) -> None:
        suites = tuple(sources.codename if suite == "." else suite for suite in suites)
        self.home = TOOLS / ("apt-" + "+".join(suites))
        for folder in ("lists/partial", "cache/archives/partial"):
            (self.home / folder).mkdir(parents=True, exist_ok=True)
        (self.home / "status").touch()
        line = "deb [signed-by={0}] {1} {2} main\n"
        self.list = self.home / "sources.list"
        self.list.write_text("".join(line.format(sources.keyring, sources.mirror, suite) for suite in suites))
        settings = {
            "Dir::Etc::sourcelist": str(self.list),
            "Dir::Etc::sourceparts": "-",
            "Dir::Etc::preferencesparts": "-",
            "Dir::Etc::preferences": "-",
            "Dir::State::lists": str(self.home / "lists"),
            "Dir::State::status": str(self.home / "status"),
            "Dir::Cache": str(self.home / "cache"),
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
            "APT::Sandbox::User": "root",  # the cache is not readable by _apt where /var/cache is strict
        }
        self.options = [part for key, value in settings.items() for part in ("-o", f"{key}={value}")]
        self.fresh = False

    def download(self, packages: tuple[str, ...], into: Path) -> list[Path]:
        """Download .deb files, their hashes checked by apt against the signed index. Returns their paths."""
        self._update()
        run("apt-get", *self.options, "download", *packages, cwd=into)
        return sorted(into.glob("*.deb"))

    def closure(self, *packages: str) -> tuple[str, ...]:
        """Packages and all that they depend on, down to the C library."""
        self._update()
        plan = run("apt-get", *self.options, "--simulate", "--no-install-recommends", "install", *packages)
        return tuple(re.findall(r"^Inst (\S+)", plan, re.MULTILINE))

    def _update(self) -> None:
        if not self.fresh:
            run("apt-get", *self.options, "--error-on=any", "update")
            self.fresh = True


def unpack(tool: Tool, apt: PrivateApt) -> None:
    """Fill one directory of the cache; it appears by rename."""
    final, work = TOOLS / tool.name, TOOLS / f".new-{tool.name}"
    shutil.rmtree(work, ignore_errors=True)
    for folder in ("debs", "root", "bin"):
        (work / folder).mkdir(parents=True)
    debs = apt.download(tool.packages, work / "debs")
    versions = []
    for deb in debs:
        run("dpkg-deb", "--extract", str(deb), str(work / "root"))
        versions.append(run("dpkg-deb", "--show", "--showformat=${Package} ${Version}\n", str(deb)))
    shutil.rmtree(work / "debs")
    for name in tool.programs:
        folders = ("usr/bin", "usr/sbin", "bin", "sbin")
        program = next((f"{folder}/{name}" for folder in folders if (work / "root" / folder / name).is_file()), None)
        if program is None:
            raise SetupError(f"package {tool.packages[0]} no longer has {name}; report this as a bug of the test kit")
        if tool.private_libc:
            (work / "bin" / name).write_text(wrapper(work / "root", final / "root", program))
            (work / "bin" / name).chmod(0o755)
        elif tool.patched:
            loader, libraries = private_loader(work / "root", final / "root")
            shutil.copy(work / "root" / program, work / "bin" / name)
            patchelf = str(TOOLS / "patchelf" / "bin" / "patchelf")
            run(patchelf, "--set-interpreter", str(loader), "--set-rpath", libraries, str(work / "bin" / name))
        else:
            (work / "bin" / name).symlink_to(f"../root/{program}")
    (work / "VERSION").write_text("".join(versions))
    (work / "LAYOUT").write_text(f"{LAYOUT}\n")
    shutil.rmtree(final, ignore_errors=True)
    os.rename(work, final)


def private_loader(root: Path, final: Path) -> tuple[Path, str]:
    """Where the loader and the libraries unpacked in ``root`` will be, once that is called ``final``."""
    loaders = sorted(path for path in root.rglob("ld-linux-*.so.*") if path.is_file())
    if not loaders:
        raise SetupError("libc6 has no loader where one is expected; report this as a bug of the test kit")
    folders = sorted({path.parent for path in root.rglob("lib*.so.*")})
    libraries = ":".join(str(final / folder.relative_to(root)) for folder in folders)
    return final / loaders[0].relative_to(root), libraries


def wrapper(root: Path, final: Path, program: str) -> str:
    """A shell script that starts a program with its own loader and libraries, whatever libc the machine has."""
    loader, libraries = private_loader(root, final)
    return f'#!/bin/sh\nexec {loader} --library-path {libraries} {final / program} "$@"\n'


def present(tool: Tool) -> bool:
    """True where the cache has the tool in today's layout."""
    try:
        return (TOOLS / tool.name / "LAYOUT").read_text() == f"{LAYOUT}\n"
    except OSError:
        return False


def main() -> int:
    """Fill the cache; what is there already is left alone."""
    try:
        if os.geteuid() != 0:
            raise SetupError("needs root; run it with sudo")
        TOOLS.mkdir(parents=True, exist_ok=True)
        with open(TOOLS / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = [tool for tool in WANTED if not present(tool)]
            recorded = TOOLS / "sources.json"
            if missing or not recorded.exists():
                sources = machine_sources()
                apts: dict[tuple[str, ...], PrivateApt] = {}
                for tool in missing:
                    say(f"fetching {tool.name}")
                    apt = apts.setdefault(tool.suites, PrivateApt(sources, tool.suites))
                    unpack(tool, apt)
                temporary = TOOLS / ".sources.json"
                temporary.write_text(json.dumps(sources.__dict__, indent=1))
                os.rename(temporary, recorded)
        for tool in WANTED:
            say(f"{tool.name}: {(TOOLS / tool.name / 'VERSION').read_text().splitlines()[0]}")
    except SetupError as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
