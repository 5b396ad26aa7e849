"""What an installation consists of: units, sysusers.d, tmpfiles.d, a first configuration; made to fit the node's settings.

The texts are those of ``systemd/units``, which are right as they are for a package that puts the command at
``/usr/bin/weenv``. On a node, the paths and the address in them become those of its configuration.

====================================================  ==================================================================
where                                                 what
====================================================  ==================================================================
``/usr/local/lib/systemd/system/weenv*``              units; an operator's changes go to ``/etc``: ``systemctl edit``
``/usr/local/lib/sysusers.d/weenv.conf``              the user of the gateway
``/usr/local/lib/tmpfiles.d/weenv.conf``              the directories
``/etc/systemd/system/*.wants/weenv*``                what is enabled
``/etc/weenv/config.toml``                            comments only, if there is none
``/etc/weenv/installed.json``                         what was put where (:mod:`weenv.systemd.install.record`)
====================================================  ==================================================================
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from weenv.core.errors import ConfigError

UNITS: Final = "/usr/local/lib/systemd/system"
SYSUSERS: Final = "/usr/local/lib/sysusers.d/weenv.conf"
TMPFILES: Final = "/usr/local/lib/tmpfiles.d/weenv.conf"
CONFIG: Final = "/etc/weenv/config.toml"
_WANTS: Final = "/etc/systemd/system"

PLACES: Final = (UNITS, SYSUSERS, TMPFILES)
"""Where there is nothing of ours but what is wanted."""
ALWAYS: Final = ("blobfs", "snapshotter")
OPTIONAL: Final = ("elastic", "gateway", "nri")
SOCKETS: Final = ("blobfs", "snapshotter", "elastic", "gateway")
"""Those of the daemons that have one."""

FIRST_CONFIG: Final = """\
# WeEnv's configuration. Without a setting its default is used; docs/configuration.md lists them all.
# Restart the daemons after a change: systemctl restart weenv.target. Paths and addresses of sockets are also in the units
# and in containerd's configuration, so run "weenv install" again after changing one.

#[registry]
#plain_http = ["registry.internal:5000"]

#[snapshotter]
#metrics_address = "127.0.0.1:9440"

#[blobfs]
#metrics_address = "127.0.0.1:9441"
"""

_PLAIN = re.compile(r"/[A-Za-z0-9_.,+@:/-]+\Z")
"""Paths that mean themselves in unit files, TOML and tmpfiles.d."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the files depend on. ``program`` is the command's path; ``chosen`` are daemons of :data:`OPTIONAL`.

    ``plane`` is how layers are mounted, as the configuration says: containerd is told what works then. ``interpreter`` is the
    Python that the command names, empty where it names none.
    """

    program: str
    config: str = CONFIG
    root: str = "/var/lib/weenv"
    socket: str = "/run/weenv/snapshotter.sock"
    status_socket: str = "/run/weenv/blobfs.sock"
    elastic_socket: str = "/run/weenv/elastic.sock"
    elastic_root: str = "/var/lib/weenv/elastic"
    gateway: str = "127.0.0.1:5050"
    containerd: str = "/run/containerd/containerd.sock"
    plane: str = "auto"
    chosen: frozenset[str] = frozenset()
    interpreter: str = ""

    def __post_init__(self) -> None:
        for name in ("program", "config", "root", "socket", "status_socket", "elastic_socket", "elastic_root", "containerd"):
            _check(getattr(self, name))

    @property
    def elastic_place(self) -> str:
        """The directory in which the elastic daemon makes its own: systemd gives it no other to write to."""
        return self.elastic_root.rstrip("/").rpartition("/")[0] or self.elastic_root

    @property
    def in_tmp(self) -> bool:
        """Whether a service with a /tmp of its own would miss something."""
        needed = (self.program, self.interpreter, self.config, self.root, self.elastic_root, self.containerd)
        return any(path.startswith(("/tmp/", "/var/tmp/")) for path in needed)  # noqa: S108

    @property
    def daemons(self) -> tuple[str, ...]:
        """All that are to run."""
        return (*ALWAYS, *(name for name in OPTIONAL if name in self.chosen))


def _check(path: str) -> None:
    if not _PLAIN.match(path):
        raise ConfigError(f"a unit cannot name the path {path!r}", hint="use letters, digits and _.,+@:- in paths")


@dataclass(frozen=True, slots=True)
class Item:
    """A file; ``keep``: not if there is one already."""

    path: str
    data: bytes
    keep: bool = False


def unit_names(daemons: Iterable[str]) -> list[str]:
    """The units that belong to daemons, in the order in which to start them."""
    wanted = list(daemons)
    sockets = [f"weenv-{name}.socket" for name in wanted if name in SOCKETS]
    return [*sockets, *(f"weenv-{name}.service" for name in wanted), "weenv.target"]


def items(settings: Settings) -> list[Item]:
    """All files but the record and containerd's. Raises ConfigError for settings that no unit can express."""
    found = [_unit(name, settings) for name in ("weenv.slice", *unit_names(settings.daemons))]
    directories = _fit("weenv.tmpfiles", settings)
    if "elastic" in settings.chosen and settings.elastic_place != settings.root:
        directories += f"d {settings.elastic_place} 0711 root root -\n"
    found.append(Item(TMPFILES, directories.encode()))
    if "gateway" in settings.chosen:
        found.append(Item(SYSUSERS, _fit("weenv.sysusers", settings).encode()))
    found.append(Item(CONFIG, FIRST_CONFIG.encode(), keep=True))
    return found


def links(settings: Settings) -> dict[str, str]:
    """The symlinks that enable the units: path to target. They are what the units' [Install] sections say."""
    found = {}
    for name in unit_names(settings.daemons):
        wanted = re.findall(r"^WantedBy=(\S+)$", _text(name), re.MULTILINE)
        found.update({f"{_WANTS}/{by}.wants/{name}": f"{UNITS}/{name}" for by in wanted})
    return found


def _text(name: str) -> str:
    return (files("weenv.systemd") / "units" / name).read_text(encoding="utf-8")


def _unit(name: str, settings: Settings) -> Item:
    return Item(f"{UNITS}/{name}", _fit(name, settings).encode())


def _fit(name: str, settings: Settings) -> str:
    """The text with the node's paths. One pass, so that what is put in is not looked at again."""
    config = "" if settings.config == CONFIG else f" --config {settings.config}"
    places = {
        "/usr/bin/weenv": settings.program,
        "/run/weenv/snapshotter.sock": settings.socket,
        "/run/weenv/blobfs.sock": settings.status_socket,
        "/run/weenv/elastic.sock": settings.elastic_socket,
        "/run/containerd": settings.containerd.rpartition("/")[0] or "/",
        "/var/lib/weenv": settings.elastic_place if name == "weenv-elastic.service" else settings.root,
    }
    if name == "weenv-gateway.socket":
        places["127.0.0.1:5050"] = _listen(settings.gateway)
    pattern = "|".join(rf"{re.escape(place)}(?![\w.-])" for place in places)
    text = re.sub(pattern, lambda found: places[found[0]], _text(name))
    if settings.in_tmp:
        text = re.sub(r"^PrivateTmp=yes$", "PrivateTmp=no", text, flags=re.MULTILINE)
    return re.sub(r"^(ExecStart=.* serve)$", lambda found: found[1] + config, text, flags=re.MULTILINE)


def _listen(address: str) -> str:
    """``gateway.address`` as ``ListenStream=`` wants it: a path, or an IP address and port."""
    path = address.removeprefix("unix:")
    if path != address:
        _check(path)
        return path
    host, _, port = address.rpartition(":")
    host = {"localhost": "127.0.0.1"}.get(host, host)
    try:
        ip = ipaddress.ip_address(host.strip("[]"))
    except ValueError as error:
        raise ConfigError(f"gateway.address must have an IP address, not {host!r}", hint="systemd looks up no names") from error
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"
