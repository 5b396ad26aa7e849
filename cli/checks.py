"""What ``weenv doctor`` looks at. Each check returns findings; none of them changes anything.

The checks of containerd's configuration are plain functions over the parsed file. The facts behind them: a proxy plugin
is declared by ``[proxy_plugins.<name>]``; containerd's transfer service (``ctr images pull`` from 2.1 on, CRI by default
there) hands image annotations to a snapshotter only where ``exports.enable_remote_snapshot_annotations`` is the *string*
``"true"``, and needs an ``unpack_config`` entry for it; CRI passes them where ``disable_snapshot_annotations`` is false.
"""

from __future__ import annotations

import os
import re
import socket
import stat
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from weenv.cli import render
from weenv.core import rights

State = Literal["ok", "warn", "fail", "skip"]
_LEAST = 1 << 20
"""Bytes of free disk."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, how it stands, what was seen, and the remedy where there is one."""

    name: str
    state: State
    seen: str
    remedy: str = ""


def walk(table: dict[str, Any], *path: str) -> Any:
    """What is at ``path`` in a parsed file, or None."""
    node: Any = table
    for key in path:
        if not isinstance(node, dict):
            return None
        node = node.get(key)
    return node


def containerd_config(text: str, address: str, name: str = "weenv") -> Iterator[Finding]:
    """Findings about a containerd ``config.toml``. ``address`` is the snapshotter's socket, ``name`` the proxy plugin's."""
    try:
        config = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # not UTF-8, or a number too long, too
        yield Finding(
            "containerd config", "fail", f"not valid TOML: {error}", "mend the file; containerd will not start with it"
        )
        return
    yield from containerd_tables(config, address, name)


def containerd_tables(config: dict[str, Any], address: str, name: str = "weenv") -> Iterator[Finding]:
    """The same of the parsed file, or of what containerd makes of several (systemd/install/containerd.py: ``effective``)."""
    version = config.get("version", 1)
    if type(version) is not int:
        yield Finding("containerd config", "fail", f"version is {version!r}", "make it a number: 3, or 2 for containerd 1.7")
        return
    plugin = walk(config, "proxy_plugins", name)
    if not isinstance(plugin, dict):
        yield Finding(
            "proxy plugin",
            "fail",
            f"no [proxy_plugins.{name}]",
            f'add [proxy_plugins.{name}] with type = "snapshot" and address = "{address}", then restart containerd',
        )
        return
    if plugin.get("type") != "snapshot" or plugin.get("address") != address:
        yield Finding(
            "proxy plugin",
            "fail",
            f"type {plugin.get('type')!r}, address {plugin.get('address')!r}",
            f'set type = "snapshot" and address = "{address}"',
        )
    else:
        yield Finding("proxy plugin", "ok", f"[proxy_plugins.{name}] -> {address}")
    capabilities = plugin.get("capabilities")
    if isinstance(capabilities, list) and "rebase" in capabilities:
        yield Finding(
            "capabilities",
            "fail",
            "rebase is listed",
            "remove it: parallel unpack makes lazy snapshots parentless and loses them",
        )
    exports = plugin.get("exports")
    exports = exports if isinstance(exports, dict) else {}
    if not exports.get("root"):
        yield Finding(
            "exports.root",
            "warn",
            "not set",
            f"set [proxy_plugins.{name}.exports] root to the snapshotter's root directory; kubelet measures the disk there",
        )
    if version >= 3:
        yield from _transfer(config, exports, name)
    yield from _cri(config, version, name)


def id_mapping(capabilities: Collection[str], plane: str) -> Finding:
    """What the running containerd was told of id-mapped mounts, against what ``plane`` (``erofs``, ``fuse`` or unknown) can."""
    name = "user namespaces"
    if "remap-ids" not in capabilities:
        remedy = 'add capabilities = ["remap-ids"] to the proxy plugin where pods have hostUsers: false'
        return Finding(name, "skip", "remap-ids is not advertised: containerd copies an image for each range of ids", remedy)
    if plane == "fuse":
        remedy = "take it out of the proxy plugin's capabilities, or containers in user namespaces do not start"
        return Finding(name, "warn", "remap-ids is advertised, and ids cannot be mapped on the fuse plane", remedy)
    return Finding(name, "ok", "remap-ids is advertised: layers are mounted with mapped ids")


def _transfer(config: dict[str, Any], exports: dict[str, Any], name: str) -> Iterator[Finding]:
    annotations = exports.get("enable_remote_snapshot_annotations")
    if annotations != "true":
        yield Finding(
            "remote annotations",
            "warn",
            f"enable_remote_snapshot_annotations = {annotations!r}",
            f'set it to the string "true" under [proxy_plugins.{name}.exports]: layers are then resolved side by side',
        )
    unpack = walk(config, "plugins", "io.containerd.transfer.v1.local", "unpack_config")
    names = [entry.get("snapshotter") for entry in unpack if isinstance(entry, dict)] if isinstance(unpack, list) else []
    if name not in names:
        yield Finding(
            "transfer service",
            "fail",
            f"no unpack_config entry for {name}",
            f"add [[plugins.'io.containerd.transfer.v1.local'.unpack_config]] with snapshotter = '{name}' (list overlayfs too: "
            "the entries replace the default)",
        )
    else:
        yield Finding("transfer service", "ok", f"unpack_config lists {', '.join(str(n) for n in names)}")
        if "overlayfs" not in names:
            yield Finding(
                "transfer service", "warn", "unpack_config does not list overlayfs", "add it, or overlayfs pulls stop working"
            )


def _cri(config: dict[str, Any], version: int, name: str) -> Iterator[Finding]:
    if version >= 3:
        images = walk(config, "plugins", "io.containerd.cri.v1.images")
    else:
        images = walk(config, "plugins", "io.containerd.grpc.v1.cri", "containerd")
    images = images if isinstance(images, dict) else {}
    if images.get("snapshotter") != name:
        yield Finding(
            "CRI", "skip", f"uses snapshotter {images.get('snapshotter', 'overlayfs')!r}", "only needed for Kubernetes"
        )
    elif version < 3 and images.get("disable_snapshot_annotations", True):
        yield Finding(
            "CRI", "fail", "disable_snapshot_annotations is true", "set it to false, or every CRI pull fetches whole layers"
        )
    else:
        yield Finding("CRI", "ok", f"uses {name}")


def kernel() -> Iterator[Finding]:
    """Findings about the running kernel: version, file systems, /dev/fuse."""
    release = os.uname().release
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    try:
        with open("/proc/filesystems", encoding="ascii") as file:
            known = {line.split()[-1] for line in file}
    except OSError:
        known = set()
    missing = [fs for fs in ("erofs", "fuse", "overlay") if fs not in known]
    if version < (6, 12):
        yield Finding(
            "kernel",
            "warn",
            f"Linux {release}: no file-backed EROFS mounts",
            "layers are served by processes, slower; Linux 6.12 or newer needs none (Debian 13; Debian 12 in its backports)",
        )
    else:
        yield Finding("kernel", "ok", f"Linux {release}")
    if missing:
        yield Finding(
            "file systems",
            "fail" if version >= (6, 12) else "warn",
            f"not loaded: {', '.join(missing)}",
            f"modprobe -a {' '.join(missing)}, and list them in /etc/modules-load.d",
        )
    else:
        yield Finding("file systems", "ok", "erofs, fuse, overlay")
    if os.access("/dev/fuse", os.R_OK | os.W_OK):
        yield Finding("/dev/fuse", "ok", "can be opened")
    else:
        yield Finding("/dev/fuse", "fail", "cannot be opened", "run as root on a host whose device policy allows /dev/fuse")


def unix_socket(name: str, path: str, remedy: str) -> Finding:
    """Whether something listens on a unix socket, and whether others may use it."""
    try:
        mode = os.stat(path).st_mode & 0o777
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(2)
            probe.connect(path)
    except OSError as error:
        if rights.remedy(error):
            return Finding(name, "skip", f"{path}: {error.strerror}, so not tried", "run weenv doctor as root")
        return Finding(name, "fail", f"{path}: {error.strerror or error}", remedy)
    if mode & 0o077:
        return Finding(name, "warn", f"{path}: mode {mode:04o}", f"chmod 600 {path}")
    return Finding(name, "ok", path)


def quiet_socket(name: str, path: str, remedy: str, table: str = "/proc/net/unix") -> Finding:
    """Whether something listens on a unix socket, without connecting: for servers that take who leaves again for a fault."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return Finding(name, "fail", f"{path}: no socket", remedy)
    except (OSError, ValueError) as error:
        return Finding(name, "fail", f"{path}: {getattr(error, 'strerror', '') or error}", rights.remedy(error, remedy))
    try:
        with open(table, "rb") as file:
            if any(_is_listener(line, path) for line in file):
                return Finding(name, "ok", path)
    except OSError:
        return Finding(name, "ok", path)  # there, and nobody says more
    return Finding(name, "fail", f"{path}: nothing listens", remedy)


def _is_listener(line: bytes, path: str) -> bool:
    """Whether a line of /proc/net/unix is about a socket that accepts connections (__SO_ACCEPTCON) at ``path``."""
    fields = line.rstrip(b"\n").split(None, 7)
    if len(fields) < 8 or len(fields[3]) != 8 or fields[3][3:4] != b"1":
        return False
    bound = os.fsdecode(fields[7])  # as it was bound, such as at /var/run, which is a symlink
    same = os.path.basename(bound) == os.path.basename(path)
    return same and os.path.realpath(bound) == os.path.realpath(path)


def nearest(path: str) -> str:
    """``path``, or the directory above it that exists."""
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def disk(root: str, *, low: float = 0.05) -> Finding:
    """Free space where layers are kept; ``low`` is the share below which it is a warning.

    With less than :data:`_LEAST` no snapshot can be noted down.
    """
    stat = os.statvfs(nearest(root))
    free, total = stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize
    share = free / total if total else 0.0
    seen = f"{root}: {render.size(free)} free of {render.size(total)}"
    if stat.f_bfree * stat.f_frsize < _LEAST:  # root's reserve, too
        return Finding("disk", "fail", seen, "make room, or weenv cache prune --to SIZE: nothing can be started")
    if share < low:
        return Finding("disk", "warn", seen, "free some space; with none left layers are served uncached")
    return Finding("disk", "ok", seen)
