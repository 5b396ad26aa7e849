"""``weenv uninstall``: a node as it was before ``weenv install``."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from dataclasses import dataclass

import click

from weenv.cli import render
from weenv.cli.nodesystem import (
    CONTAINERD,
    DRY_RUN,
    NO_RESTART,
    ROOT,
    alone,
    refuse_strangers,
    settings_of,
    show_write,
    tree_of,
)
from weenv.core.errors import ConfigError, MountError
from weenv.plugin.snapshotter.blobfs import config as blobfs_config
from weenv.plugin.snapshotter.blobfs.config import BlobfsConfig
from weenv.systemd.install import containerd, docker, files, record, steps
from weenv.systemd.install.manager import Manager, booted
from weenv.systemd.install.tree import Tree


@click.command(short_help="Take away what weenv install put on this node.")
@click.option("--purge", is_flag=True, help="Delete layers, snapshots and the configuration, too.")
@NO_RESTART
@ROOT
@DRY_RUN
def uninstall(purge: bool, no_restart: bool, directory: str, dry_run: bool) -> None:
    """Take away what weenv install put on this node: services, units, containerd's drop-in. Layers and snapshots stay.

    Refused while containers use layers of WeEnv, since they could read no more of them than is here. After another
    weenv install, everything goes on from where it was; --purge deletes it instead.

    \b
    Examples:
      weenv uninstall --dry-run
      weenv uninstall --purge
    """
    tree = tree_of(directory, look=dry_run)
    with alone(tree):
        known = record.load(tree)
        if known is None:
            click.echo("weenv is not installed here: nothing was changed")
            return
        settings = settings_of(tree, "/usr/bin/weenv", known.options.get("config", files.CONFIG), frozenset(files.OPTIONAL))
        lower = BlobfsConfig() if tree.read(settings.config) is None else blobfs_config.load(tree.host(settings.config))
        removal = steps.plan_removal(tree, known)
        left = _Left()
        if tree.live:
            _refuse_while_used(settings.root)
            if not booted():
                left = _left(settings, lower, known)
                if purge and left:
                    raise ConfigError(f"{settings.root} is still served", hint=f"first: {', '.join(left.todo)}")
        todo = left.todo
        if tree.live and not booted() and (told := _told(removal, known)):
            todo.append(f"restart {' and '.join(told)}")
        if dry_run:
            for write in removal.writes:
                show_write(write)
            for path in [*removal.links, *removal.files, record.PATH, *([settings.root] if purge else [])]:
                click.echo(f"would remove {path}")
            if todo:
                click.echo(f"would leave to you: {', '.join(todo)}")
            return
        if tree.live and booted():
            with Manager() as manager:
                refuse_strangers(manager, settings.root)
                _stop(manager, settings, lower)
                steps.remove(tree, known, removal)
                manager.reload()
                if line := _forget(manager, restart=not no_restart):
                    click.echo(line)
        else:
            steps.remove(tree, known, removal)
        for write in removal.writes:
            click.echo(f"restored {write.path}")
        for path in [*removal.links, *removal.files]:
            click.echo(f"removed {path}")
        for path, reason in removal.kept.items():
            click.echo(f"left {path}: {reason}", err=True)
        if tree.live and not left:
            _sweep(settings, lower)
        if todo:
            click.echo(f"systemd is not the first process here, so nothing was stopped: {', '.join(todo)}", err=True)
        if purge:
            _purge(tree, settings)
        elif os.path.isdir(tree.host(settings.root)):
            when = " after that" if todo else ""
            stay = f"layers and snapshots stay in {settings.root}"
            click.echo(f"{stay}; weenv install goes on with them, rm -r{when} deletes them")


def _forget(manager: Manager, *, restart: bool) -> str:
    """Have containerd read its configuration again; what was done about it."""
    if manager.state(CONTAINERD) != "active":
        return ""
    others = manager.depends_on(CONTAINERD)
    if others or not restart:
        also = f", which restarts {', '.join(others)}" if others else ""
        return f"restart containerd when it suits{also}: systemctl restart containerd"
    manager.restart(CONTAINERD)
    return "restarted containerd.service (containers go on)"


def _using(root: str) -> list[str]:
    """Where containers have layers below ``root`` mounted: overlays over them, and single layers a second time.

    A root that is a bind mount itself is seen twice with all that is in it, which is no use of it.
    """
    from weenv.plugin.snapshotter.mounts import mounts_below

    inside = f"{root}/"
    entries = mounts_below("/").values()
    own = {entry.device: entry.point[len(root) :] for entry in entries if entry.point.startswith(inside)}
    outside = [entry for entry in entries if not entry.point.startswith(inside)]
    overlays = [entry.point for entry in outside if entry.fstype == "overlay" and inside in entry.super_options]
    return overlays + [entry.point for entry in outside if entry.device in own and not entry.point.endswith(own[entry.device])]


def _refuse_while_used(root: str) -> None:
    if used := _using(root):
        raise ConfigError(
            f"{render.counted(len(used), 'container uses', 'containers use')} layers of WeEnv, such as {used[0]}",
            hint="remove them first: weenv rm --all --force, ctr, crictl or docker; their layers stay",
        )


@dataclass(frozen=True, slots=True)
class _Left:
    """What runs and is mounted, without services that could be stopped; false where nothing is. ``todo`` ends it, in order."""

    daemons: tuple[str, ...] = ()
    layers: str = ""
    """The directory below which layers are mounted."""
    blobfs: bool = False
    unseen: tuple[str, ...] = ()
    """Daemons that may run."""

    def __bool__(self) -> bool:
        return bool(self.daemons or self.layers or self.blobfs)

    @property
    def todo(self) -> list[str]:
        steps = [f"end {daemon}" for daemon in self.daemons] + [f"end {daemon} where it runs" for daemon in self.unseen]
        if self.layers:
            steps.append(f"unmount what is mounted below {self.layers}")
        if self.blobfs:
            steps.append("run weenv blobfs stop")
        return steps


def _left(settings: files.Settings, lower: BlobfsConfig, known: record.Record) -> _Left:
    """As the locks that daemons hold say, and the mounts."""
    from weenv.core.process import holder_of
    from weenv.plugin.snapshotter.mounts import mounts_below
    from weenv.systemd import supervisor

    daemons = [above] if (above := supervisor.running(lower.status_socket)) else []
    for name, root in (("weenv snapshotter", settings.root), ("weenv elastic", settings.elastic_root)):
        with contextlib.suppress(PermissionError):  # a dry run of somebody who is not root
            held, pid = holder_of(root)
            if held and not (above and root == settings.root):
                daemons.append(f"{name} (pid {pid})")
    mounted = lower.mountpoint in mounts_below(os.path.dirname(lower.mountpoint))
    unseen = tuple(f"weenv {name}" for name in ("nri", "gateway") if name in known.options.get("with", ()))
    return _Left(tuple(daemons), settings.root if mounts_below(settings.root) else "", mounted, unseen)


def _told(removal: steps.Removal, known: record.Record) -> list[str]:
    """Whose configuration says less of weenv afterwards."""
    folder = os.path.dirname(known.options.get("containerd", containerd.MAIN))
    paths = [*removal.files, *(write.path for write in removal.writes)]
    also = ["docker"] if docker.DAEMON in paths else []
    return ["containerd", *also] if any(path.startswith(f"{folder}/") for path in paths) else also


def _stop(manager: Manager, settings: files.Settings, lower: BlobfsConfig) -> None:
    """End the daemons and take their mounts away; where a container has come in between, start them again."""
    from weenv.plugin.snapshotter.blobfs import daemon
    from weenv.plugin.snapshotter.mounts import mounts_below, unmount

    units = files.unit_names(settings.daemons)
    running = [unit for unit in units if manager.state(unit) == "active"]
    for unit in [*(unit for unit in units if unit.endswith(".socket")), *units]:
        manager.stop(unit)
    try:
        _refuse_while_used(settings.root)
        for point in sorted(mounts_below(settings.root), key=len, reverse=True):
            unmount(point)
        daemon.stop(lower)
    except (MountError, ConfigError):
        for unit in running:
            manager.start(unit)
        raise
    for unit in units:
        manager.reset(unit)  # while it is known; a unit that keeps descriptors of a mount that is gone would stay loaded
    manager.stop("weenv.slice")
    manager.disable(units)
    click.echo(f"stopped {', '.join(running) or 'nothing: no unit was running'}")


_OURS = re.compile(
    r"(layers|s|m|i|lock|mutations|converted|environments|elastic|(metastore|mapping|gateway)\.db.*|trusted-hosts.*)\Z"
)
"""What is made in the snapshotter's root, which may be a disk that others use as well."""


def _purge(tree: Tree, settings: files.Settings) -> None:
    """Delete data and configuration. Raises ConfigError where that is not ours."""
    root = tree.host(settings.root)
    if os.path.isdir(root):
        names = os.listdir(root)
        if names and not {"metastore.db", "layers", "lock"} & set(names):
            raise ConfigError(f"{settings.root} does not look like WeEnv's", hint="delete it by hand")
        for entry in list(os.scandir(root)):
            if _OURS.match(entry.name) is None:
                click.echo(f"left {settings.root}/{entry.name}: it is not WeEnv's", err=True)
            elif entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        with contextlib.suppress(OSError):  # it may be a mount point
            os.rmdir(root)
        click.echo(f"deleted {settings.root}")
    if tree.remove(settings.config):
        click.echo(f"deleted {settings.config}")
    tree.remove_directory(os.path.dirname(settings.config))


def _sweep(settings: files.Settings, lower: BlobfsConfig) -> None:
    """What ended daemons leave in /run."""
    for path in (f"{lower.holder_socket}.lock", f"{settings.containerd}.weenv-elastic"):
        with contextlib.suppress(OSError):  # it may not be there, and is in /run
            os.unlink(path)
    for path in (lower.mountpoint, os.path.dirname(lower.mountpoint), settings.root):
        with contextlib.suppress(OSError):  # others may have put something there
            os.rmdir(path)  # those that are empty
