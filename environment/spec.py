"""An image's config and what is asked for, as an OCI runtime specification. Pure: no file is read here.

Fields: opencontainers/runtime-spec config.md and config-linux.md, version 1.0.2 (which runc 1.0 and later and crun read).
Defaults are those users know from docker (capabilities, masked and read-only paths, mounts): moby's
``oci/defaults.go`` and ``oci/caps/defaults.go``, v28.5.2.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from weenv.core.errors import FormatError, WeenvError
from weenv.environment.users import User
from weenv.environment.waiter import held

VERSION = "1.0.2"
PERIOD = 100_000
"""Microseconds in which a CPU quota is given (the kernel's own default, Documentation/scheduler/sched-bwc.rst)."""

MOST_SHARES = 1 << 18
"""Largest weight of a control group's CPU, MAX_SHARES of kernel/sched/sched.h; a core is 1024."""

MOST_TEXT = 1 << 17
"""Bytes of one argument or variable with its zero byte, MAX_ARG_STRLEN of include/uapi/linux/binfmts.h with pages of 4 KiB."""
MOST_ARGUMENTS = 6 << 20
"""Bytes of all of them, with a pointer each, whatever the stack's limit is (fs/exec.c, bprm_stack_limits)."""
_LONG = "write it into a file, or give it as input"

CAPABILITIES = tuple(
    "CAP_" + name
    for name in (
        "CHOWN", "DAC_OVERRIDE", "FSETID", "FOWNER", "MKNOD", "NET_RAW", "SETGID", "SETUID", "SETFCAP", "SETPCAP",
        "NET_BIND_SERVICE", "SYS_CHROOT", "KILL", "AUDIT_WRITE",
    )
)  # fmt: skip

MASKED = (
    "/proc/asound", "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/kmsg", "/proc/latency_stats",
    "/proc/timer_list", "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi", "/sys/firmware",
    "/sys/devices/virtual/powercap",
)  # fmt: skip
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INIT = "/dev/weenv-init"
"""Where weenv.environment.waiter's program is seen: on the container's own /dev, so the image stays as it is."""


@dataclass(frozen=True, slots=True)
class Bind:
    """A directory or file of the machine, absolute, shown at ``target``."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits: cores, bytes, processes; 0: none. ``swap``: whether the kernel accounts swap, which is then not given."""

    cpus: float = 0.0
    memory: int = 0
    pids: int = 0
    swap: bool = False


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for besides the image. Empty or None: as the image's config says."""

    args: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    user: str = ""
    binds: tuple[Bind, ...] = ()
    limits: Limits = field(default_factory=Limits)
    network: str = "none"
    """``none`` (a network of its own with loopback only) or ``host``."""
    hostname: str = ""
    terminal: bool = False
    init: str = ""
    """The program of :mod:`weenv.environment.waiter`, shown at INIT, through which commands are added."""
    waits: bool = False
    """That program is the first process, in place of the image's command."""
    held: bool = False
    """That program is the first process until it is released (exec.py): the command comes after the plan's own commands."""
    read_only: bool = False
    new_privileges: bool = True
    """False: programs cannot gain privileges (set-user-id has no effect)."""
    rlimits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """``NOFILE`` and the like -> (soft, hard)."""
    oom_score_adj: int | None = None
    shm: int = 64 << 20
    """Bytes of /dev/shm."""
    role: str = ""
    """What it is for, as admission orders them: ``task``, ``evaluation`` or ``service``; empty: a task."""


def parse_bind(text: str) -> Bind:
    """``SOURCE:TARGET[:ro|rw]``. Raises FormatError."""
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source.startswith("/") or not target.startswith("/") or mode not in ("", "ro", "rw") or "\0" in text:
        raise FormatError(f"not a bind mount: {text[:200]!r}", hint="write /ON/THIS/MACHINE:/IN/THE/ENVIRONMENT[:ro]")
    if ".." in target.split("/"):
        raise FormatError(f"the target of a bind mount must not have '..': {target[:200]!r}")
    target = posixpath.normpath("/" + target.lstrip("/"))
    if target == "/":
        raise FormatError("a bind mount cannot replace the root")
    return Bind(posixpath.normpath(source), target, mode == "ro")


def command(config: Mapping[str, Any], options: Options) -> list[str]:
    """The arguments of the first process: entrypoint, then what is asked for or the image's Cmd. Empty: nobody says."""
    entrypoint = list(options.entrypoint if options.entrypoint is not None else config.get("Entrypoint") or ())
    # Another entrypoint does not take the image's Cmd as its arguments, as docker run has it.
    cmd = [] if options.entrypoint is not None else list(config.get("Cmd") or ())
    return entrypoint + (list(options.args) or cmd)


def environment(config: Mapping[str, Any], options: Options, user: User) -> list[str]:
    """Variables as NAME=VALUE: defaults, the image's, those asked for."""
    found = {"PATH": DEFAULT_PATH, "HOSTNAME": options.hostname, "HOME": user.home}
    if options.terminal:
        found["TERM"] = "xterm"
    for item in config.get("Env") or ():
        name, equals, value = str(item).partition("=")
        if name and equals:
            found[name] = value
    found.update(options.env)
    return [f"{name}={value}" for name, value in found.items() if name != "HOSTNAME" or value]


def check_variables(env: Mapping[str, str]) -> None:
    """Raise FormatError for what cannot be a variable."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise FormatError(f"not an environment variable: {name[:60]!r}")
    _check_text(*env, *env.values())


def _check_text(*texts: str) -> None:
    """Raise FormatError for bytes that are not UTF-8: runtimes, reading JSON, would put other characters in their place."""
    for text in texts:
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise FormatError(f"not UTF-8: {text[:60]!r}", hint="a command's words and variables have to be")


def _capabilities(user: User) -> dict[str, list[str]]:
    names = list(CAPABILITIES)
    # execve(2) gives none to other users than root; they are bounded all the same.
    return {"bounding": names, "permitted": names, "effective": names} if user.uid == 0 else {"bounding": names}


def process(config: Mapping[str, Any], options: Options, user: User) -> dict[str, Any]:
    """The ``process`` object of a container's first process. Raises WeenvError where there is nothing to run."""
    args = [INIT] if options.waits else command(config, options)
    variables = environment(config, options, user)
    if not args or not args[0]:
        raise WeenvError("the image has no command of its own", hint="say what to run: -- COMMAND")
    if any("\0" in arg for arg in args):
        raise FormatError("an argument has a zero byte in it")
    _check_text(*args, options.cwd)
    check_variables(options.env)
    cwd = options.cwd or str(config.get("WorkingDir") or "") or "/"
    if not cwd.startswith("/") or "\0" in cwd:
        raise FormatError(f"the working directory must be absolute, not {cwd[:200]!r}")
    if options.held and not options.waits:
        path = dict(item.partition("=")[::2] for item in variables)["PATH"]
        args = [INIT, *held(_candidates(args[0], path), args)]
    check_length(args, variables)
    made: dict[str, Any] = {
        "terminal": options.terminal,
        "user": _user(user),
        "args": args,
        "env": variables,
        "cwd": cwd,
        "capabilities": _capabilities(user),
        "noNewPrivileges": not options.new_privileges,
    }
    if options.rlimits:
        made["rlimits"] = [
            {"type": f"RLIMIT_{name.upper().removeprefix('RLIMIT_')}", "soft": soft, "hard": hard}
            for name, (soft, hard) in sorted(options.rlimits.items())
        ]
    if options.oom_score_adj is not None:
        made["oomScoreAdj"] = options.oom_score_adj
    return made


def _candidates(name: str, path: str) -> list[str]:
    """Where a command may be, in the order in which it is looked for."""
    if "/" in name:
        return [name]
    return [posixpath.join(folder, name) for folder in path.split(":") if folder.startswith("/")]


def held_command(args: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """(where its program may be, its arguments) of a command that is held back until it is released; None of others'."""
    if list(args[:2]) != [INIT, ""] or "" not in args[2:]:
        return None
    end = 2 + list(args[2:]).index("")
    return list(args[2:end]), list(args[end + 1 :])


def _user(user: User) -> dict[str, Any]:
    made: dict[str, Any] = {"uid": user.uid, "gid": user.gid}
    if user.groups:
        made["additionalGids"] = list(user.groups)
    return made


class TooLong(FormatError):
    """A command's arguments and variables are more than the kernel takes."""


def check_length(args: Sequence[str], env: Sequence[str], room: int = MOST_ARGUMENTS) -> None:
    """Raise TooLong for what execve(2) does not take; ``room``: bytes in all, a quarter of the stack's limit."""
    longest = total = 0
    for text in (*args, *env):
        size = len(os.fsencode(text)) + 1
        longest = max(longest, size)
        total += size + 8
    if longest > MOST_TEXT:
        raise TooLong(f"an argument or variable has {longest - 1} bytes, of {MOST_TEXT - 1} that the kernel takes", hint=_LONG)
    room = min(room, MOST_ARGUMENTS)
    if total > room:
        raise TooLong(f"arguments and variables have {total} bytes, of {room} that the kernel takes", hint=_LONG)


def added_process(
    base: Mapping[str, Any],
    args: tuple[str, ...],
    *,
    env: Mapping[str, str],
    cwd: str = "",
    user: User | None = None,
    terminal: bool = False,
) -> dict[str, Any]:
    """The ``process`` object of one more process, from that of the first (``base``). Raises FormatError."""
    if not args or not args[0] or any("\0" in arg for arg in args):
        raise FormatError("there is no command, or one with a zero byte in it")
    if cwd and (not cwd.startswith("/") or "\0" in cwd):
        raise FormatError(f"the working directory must be absolute, not {cwd[:200]!r}")
    _check_text(*args, cwd)
    check_variables(env)
    made = dict(base)
    variables = dict(item.partition("=")[::2] for item in base.get("env") or ())
    if user is not None:
        made["user"] = _user(user)
        made["capabilities"] = _capabilities(user)
        variables["HOME"] = user.home
    if terminal:
        variables.setdefault("TERM", "xterm")
    variables.update(env)
    made |= {"args": list(args), "env": [f"{name}={value}" for name, value in variables.items()], "terminal": terminal}
    if cwd:
        made["cwd"] = cwd
    return made


def resources(limits: Limits) -> dict[str, Any]:
    """The ``linux.resources`` object of limits."""
    made: dict[str, Any] = {}
    if limits.cpus:
        # The kernel takes at least a millisecond of quota and two shares; runtimes take no more shares than MOST_SHARES.
        made["cpu"] = {
            "quota": max(1000, round(limits.cpus * PERIOD)),
            "period": PERIOD,
            "shares": min(MOST_SHARES, max(2, round(limits.cpus * 1024))),
        }
    if limits.memory:
        made["memory"] = {"limit": limits.memory}
        if limits.swap:
            made["memory"]["swap"] = limits.memory
    if limits.pids:
        made["pids"] = {"limit": limits.pids}
    return made


def _mount(target: str, kind: str, source: str, *options: str) -> dict[str, Any]:
    return {"destination": target, "type": kind, "source": source, "options": list(options)}


def mounts(options: Options, *, unified: bool) -> list[dict[str, Any]]:
    """The ``mounts`` list. ``unified``: the machine has cgroup v2 only."""
    made = [
        _mount("/proc", "proc", "proc", "nosuid", "noexec", "nodev"),
        _mount("/dev", "tmpfs", "tmpfs", "nosuid", "strictatime", "mode=755", "size=65536k"),
        _mount("/dev/pts", "devpts", "devpts", "nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"),
        _mount("/dev/shm", "tmpfs", "shm", "nosuid", "noexec", "nodev", "mode=1777", f"size={options.shm}"),  # noqa: S108
        _mount("/dev/mqueue", "mqueue", "mqueue", "nosuid", "noexec", "nodev"),
        _mount("/sys", "sysfs", "sysfs", "nosuid", "noexec", "nodev", "ro"),
    ]
    if unified:
        made.append(_mount("/sys/fs/cgroup", "cgroup", "cgroup", "nosuid", "noexec", "nodev", "relatime", "ro"))
    if options.network == "host":
        made += [_mount(path, "bind", path, "rbind", "rprivate", "ro") for path in ("/etc/hosts", "/etc/resolv.conf")]
    if options.init:
        made.append(_mount(INIT, "bind", options.init, "bind", "rprivate", "ro"))
    for bind in options.binds:
        mode = "ro" if bind.read_only else "rw"
        made.append(_mount(bind.target, "bind", bind.source, "rbind", "rprivate", mode))
    return made


def build_spec(image: Mapping[str, Any], options: Options, user: User, *, cgroup: str, unified: bool) -> dict[str, Any]:
    """The whole specification. ``image`` is an image config (image-spec config.md), ``cgroup`` an absolute cgroup path.

    Raises FormatError, WeenvError.
    """
    config = image.get("config") or {}
    if options.network not in ("none", "host"):
        raise FormatError(f"network must be none or host, not {options.network[:40]!r}")
    namespaces = ["pid", "ipc", "uts", "mount"]
    if options.network == "none":
        namespaces.append("network")
    if unified:
        namespaces.append("cgroup")
    return {
        "ociVersion": VERSION,
        "process": process(config, options, user),
        "root": {"path": "rootfs", "readonly": options.read_only},
        "hostname": options.hostname or "weenv",
        "mounts": mounts(options, unified=unified),
        "linux": {
            "cgroupsPath": cgroup,
            # Nothing but the standard devices, which runtimes allow by themselves.
            "resources": {"devices": [{"allow": False, "access": "rwm"}], **resources(options.limits)},
            "namespaces": [{"type": name} for name in namespaces],
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
        },
    }


def restrict(oom_score_adj: int | None, *, own: int, privileged: bool) -> int | None:
    """What a process without CAP_SYS_RESOURCE may be given: never less than its parent's (``own``), proc(5)."""
    return oom_score_adj if oom_score_adj is None or privileged else max(oom_score_adj, own)
