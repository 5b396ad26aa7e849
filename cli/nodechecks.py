"""What ``weenv doctor`` looks at besides the kernel and containerd's configuration: the disk, the policy, docker, NRI, cgroups.

Each check returns findings, as those of cli/checks.py; none of them changes anything. The facts behind them:

- Evicting needs holes and write leases (cache/evict.py), snapshots need ``trusted.*`` attributes for overlayfs.
- dockerd before 29 uses a snapshotter only with ``features.containerd-snapshotter``; then it is its ``storage-driver``.
- NRI is off by default in containerd 1.7 and on from 2.0; plugin/nri/wire/versions.py says which containerd has which NRI,
  and which NRI can stop CRI for good.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from weenv.cli.checks import Finding, nearest, quiet_socket, walk
from weenv.cli.render import counted
from weenv.core.errors import ConfigError, WeenvError
from weenv.core.regular import read_whole, regular
from weenv.plugin.nri.wire.versions import Runtime, parse

_PIECE = 64 << 10
_FULL = (errno.ENOSPC, errno.EDQUOT)
_MAX_DOCKER = 4 << 20
_CAP_SYS_RESOURCE = 24
"""include/uapi/linux/capability.h"""


# -- the disk --------------------------------------------------------------------------------------------------------


def disk_abilities(root: str) -> Iterator[Finding]:
    """What the file system under ``root`` can do, tried on a file that never has a name, and whether inodes are left."""
    place = nearest(root)
    try:
        fd = os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            yield Finding("disk abilities", "skip", f"{place}: {error.strerror}, so not tried", "run weenv doctor as root")
        elif error.errno in _FULL:
            yield Finding("disk abilities", "skip", f"{place}: {error.strerror}, so not tried", "make room first")
        else:
            yield Finding("disk abilities", "skip", f"{place}: no unnamed files ({error.strerror}), so not tried")
        return
    try:
        lacking = [(what, cost) for what, test, cost in _ABILITIES if not _can(test, fd)]
    except OSError as error:
        yield Finding("disk abilities", "skip", f"{place}: {error.strerror}, so not tried", "make room first")
        return
    finally:
        os.close(fd)
    if lacking:
        seen = f"{place}: no {', no '.join(what for what, _ in lacking)}"
        remedy = f"set [snapshotter] root to a directory on ext4, xfs or btrfs; without them {'; '.join(c for _, c in lacking)}"
        vital = any(what == "trusted.* attributes" for what, _ in lacking)
        yield Finding("disk abilities", "fail" if vital else "warn", seen, remedy)
    else:
        yield Finding("disk abilities", "ok", "sparse files, holes, leases, attributes")
    stat = os.statvfs(place)
    if stat.f_files and stat.f_favail / stat.f_files < 0.05:
        seen = f"{root}: {stat.f_favail} of {stat.f_files} inodes are free"
        yield Finding("inodes", "warn", seen, "remove unused images and containers, or use a file system with more inodes")


def _can(test: Callable[[int], bool], fd: int) -> bool:
    """Raises OSError where the disk is full, which says nothing of what it can do."""
    try:
        return test(fd)
    except OSError as error:
        if error.errno in _FULL:
            raise
        return False


def _sparse(fd: int) -> bool:
    os.ftruncate(fd, 0)
    os.ftruncate(fd, _PIECE * 16)
    return os.fstat(fd).st_blocks * 512 < _PIECE * 16


def _punches(fd: int) -> bool:
    os.pwrite(fd, b"x" * _PIECE, 0)
    os.fsync(fd)
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.fallocate(fd, 3, ctypes.c_int64(0), ctypes.c_int64(_PIECE)) == 0 and os.pread(fd, 1, 0) == b"\0"


def _leases(fd: int) -> bool:
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return True


def _attributes(fd: int) -> bool:
    if os.geteuid() != 0:
        return True  # only root may; that it is needed is said elsewhere
    os.setxattr(fd, "trusted.weenv", b"1")
    return os.getxattr(fd, "trusted.weenv") == b"1"


_ABILITIES: tuple[tuple[str, Callable[[int], bool], str], ...] = (
    ("sparse files", _sparse, "a layer takes all of its size on disk at once"),
    ("holes punched into files", _punches, "the cache cannot be limited"),
    ("leases", _leases, "the cache cannot be limited"),
    ("trusted.* attributes", _attributes, "overlayfs cannot be used"),
)


def settings(root: str, blobs: str, blobfs_root: str, mountpoint: str) -> Iterator[Finding]:
    """Whether the two daemons' settings are about the same directories."""
    for name, ours, theirs in (("root", root, blobfs_root), ("blobs", blobs, mountpoint)):
        if os.path.normpath(ours) != os.path.normpath(theirs):
            other = "root" if name == "root" else "mountpoint"
            seen = f"[snapshotter] {name} is {ours}, [blobfs] {other} is {theirs}"
            yield Finding("settings", "fail", seen, "set both to the same directory")


def cache(answer: dict[str, Any] | None) -> Iterator[Finding]:
    """How the cache stands, as the running blobfs says."""
    state = (answer or {}).get("cache")
    if not isinstance(state, dict):
        return
    seen = f"{state.get('data', 0) / 2**30:.2f} GiB"
    if state.get("high") is not None:
        seen += f"; evicted from {state['high'] / 2**30:.2f} GiB on"
    if state.get("stuck"):
        yield Finding("cache", "warn", f"{seen}; nothing can be evicted", "see weenv cache ls and blobfs's log")
    else:
        yield Finding("cache", "ok", seen)


def resend(release: str) -> Finding | None:
    """Whether the kernel sends requests again that a blobfs took and did not answer (FUSE_NOTIFY_RESEND, Linux 6.9)."""
    match = re.match(r"(\d+)\.(\d+)", release)
    if match and (int(match[1]), int(match[2])) >= (6, 9):
        return None
    remedy = "use Linux 6.9 or newer, or the plane fuse; else stop containers before blobfs is restarted"
    return Finding("FUSE resend", "warn", f"Linux {release}: readers wait for ever where blobfs is killed", remedy)


# -- the policy ------------------------------------------------------------------------------------------------------


def policy(tables: Mapping[str, Any]) -> Finding:
    """Whether the node's policy can be used, keys and all; with one that cannot nothing is run, composed or resolved."""
    from weenv.registry.groupref.policy import policy_from_tables

    try:
        found = policy_from_tables(tables)
    except WeenvError as error:
        return Finding("policy", "fail", str(error), error.hint or "mend [policy] in the configuration (docs/groups.md)")
    if found is None:
        return Finding("policy", "ok", "none: weenv accepts every group and image")
    keys = {key.fingerprint for rule in found.rules for key in rule.keys}
    rules = f"{counted(len(found.rules), 'rule')}, {counted(len(keys), 'key')}"
    return Finding("policy", "ok", f"{rules}; what no rule matches: {found.default}")


# -- docker ----------------------------------------------------------------------------------------------------------


def docker(path: str, address: str, name: str = "weenv") -> Iterator[Finding]:
    """dockerd's configuration, where there is one that is about us. ``address`` is containerd's socket."""
    try:
        with open(path, "rb", opener=regular) as file:
            config = json.loads(read_whole(file, _MAX_DOCKER) or b"{}")
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except FileNotFoundError:
        return
    except ConfigError as error:
        yield Finding("docker", "warn", str(error), "more of it is not read; docker is not checked")
        return
    except (OSError, ValueError, RecursionError) as error:
        yield Finding("docker", "fail", f"{path}: {error}", "mend the file; dockerd does not start with it")
        return
    driver = config.get("storage-driver")
    if driver != name:
        remedy = f'only for docker: "storage-driver": "{name}" in {path}'
        yield Finding("docker", "skip", f"storage-driver is {driver!r}", remedy)
        return
    features = config.get("features")
    if not (isinstance(features, dict) and features.get("containerd-snapshotter") is True):
        remedy = f'add "features": {{"containerd-snapshotter": true}} to {path}; docker before 29 does not start without it'
        yield Finding("docker", "fail", f"storage-driver is {name}, containerd-snapshotter is not on", remedy)
        return
    theirs = config.get("containerd", "")
    if theirs and theirs.removeprefix("unix://") != address:
        seen = f"uses the containerd at {theirs}, weenv run that at {address}"
        yield Finding("docker", "warn", seen, "both should be the one that has the weenv plugin")
        return
    if features.get("embedded-containerd") is True:
        yield Finding("docker", "fail", "embedded-containerd is on", "switch it off: it has no proxy plugins")
        return
    yield Finding("docker", "ok", f"storage-driver {name}")


# -- NRI, cgroups, pressure: what elastic provisioning needs -----------------------------------------------------------


def nri(config: dict[str, Any], version: str, socket: str) -> Iterator[Finding]:
    """NRI as containerd's configuration (parsed) and its ``version`` have it; ``socket`` is where our plugin goes.

    Only pods of CRI need it. Nothing here keeps an image from being lazy, so nothing is worse than a warning.
    """
    own = parse(version)
    found = walk(config, "plugins", "io.containerd.nri.v1.nri")
    table = found if isinstance(found, dict) else {}
    off = table.get("disable", own is None or own < (2, 0, 0))
    if off:
        remedy = "only for pods: set disable = false under [plugins.'io.containerd.nri.v1.nri'], and restart containerd"
        yield Finding("NRI", "skip", "disabled: pods start with their own limits", remedy)
        return
    path = str(table.get("socket_path", "/var/run/nri/nri.sock"))
    if path != socket:
        yield Finding("NRI", "warn", f"containerd has it at {path}, [nri] socket is {socket}", f'set [nri] socket = "{path}"')
        return
    # who connects to NRI's socket and leaves is an error in containerd's log
    listens = quiet_socket("NRI", path, "does containerd's CRI plugin run? NRI starts with it")
    if listens.state == "fail":
        yield Finding("NRI", "warn", listens.seen, listens.remedy)
        return
    runtime = Runtime("containerd", version, _nri_of(own))
    seen = f"on, at {path}"
    if not runtime.takes_updates:
        seen += "; its UpdateContainers can stop CRI for good (containerd issue 13733): WeEnv does not call it, others might"
    yield Finding("NRI", "ok", seen)


def _nri_of(own: tuple[int, int, int] | None) -> str:
    """NRI's version, where this containerd's is known to have it in a version that tells; else empty, as it is told then."""
    return "v0.12.0" if own is not None and own >= (2, 3, 0) else ""


def control_groups(
    root: str = "/sys/fs/cgroup", pressure: str = "/proc/pressure", status: str = "/proc/self/status"
) -> Iterator[Finding]:
    """Which control groups there are, whether pressure is told, and whether this process may ask for it often."""
    if os.path.exists(f"{root}/cgroup.controllers"):
        kind = "v2"
    elif os.path.isdir(f"{root}/unified"):
        kind = "v1, with v2 beside it"
    elif os.path.isdir(f"{root}/cpu") or os.path.isdir(f"{root}/memory"):
        kind = "v1"
    else:
        yield Finding("cgroups", "warn", f"none at {root}", "mount them; weenv elastic changes limits there")
        return
    yield Finding("cgroups", "ok", kind)
    try:
        with open(f"{pressure}/cpu", "rb") as file:
            file.read(200)
        told = kind != "v1"
        why = "" if told else "control groups of v1 alone tell of none"
    except OSError as error:
        told, why = False, f"{pressure}/cpu: {error.strerror}"
    if not told:
        remedy = "boot with psi=1 (CONFIG_PSI) and cgroup v2; until then weenv elastic looks at all environments as often"
        yield Finding("pressure", "warn", why, remedy)
        return
    if _capable(status):
        yield Finding("pressure", "ok", "told, at any interval")
        return
    remedy = "give weenv elastic serve CAP_SYS_RESOURCE; without it the kernel wakes it every 2 s at most"
    yield Finding("pressure", "warn", "told, but without CAP_SYS_RESOURCE not within a window of less than 2 s", remedy)


def _capable(path: str) -> bool:
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:  # the process is gone: it cannot do anything
        for line in file:
            if line.startswith(b"CapEff:"):
                return bool(int(line.split()[1], 16) >> _CAP_SYS_RESOURCE & 1)
    return False
