"""What ``weenv install`` and ``weenv uninstall`` have in common: the system they change, its configuration, their options."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import click

from weenv.cli import render
from weenv.core import settings as core_settings
from weenv.core.errors import ConfigError
from weenv.core.rights import AS_ROOT
from weenv.plugin.snapshotter.blobfs import config as blobfs_config
from weenv.systemd.install import files, steps
from weenv.systemd.install.manager import Manager
from weenv.systemd.install.tree import Tree

CONTAINERD = "containerd.service"

ROOT = click.option("--root", "directory", metavar="DIR", default="/", help="A mounted image, instead of this system.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Show what would be done, as a diff; change nothing.")
NO_RESTART = click.option("--no-restart", is_flag=True, help="Leave it to you to restart containerd.")


def tree_of(directory: str, *, look: bool) -> Tree:
    """``look``: nothing is going to be changed."""
    if os.geteuid() != 0 and not look:
        raise ConfigError("only root may change a system", hint=AS_ROOT)
    if not os.path.isdir(directory):
        raise ConfigError(f"--root: there is no directory {directory}")
    return Tree(directory)


@contextlib.contextmanager
def alone(tree: Tree) -> Iterator[None]:
    """One installation at a time."""
    import fcntl

    fd = os.open(tree.host("/etc"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError("another weenv install or uninstall is under way", hint="wait for it") from error
        yield
    finally:
        os.close(fd)


def interpreter_of(tree: Tree, program: str) -> str:
    """The Python that a command's first line names; the command itself where it is no script."""
    first = (tree.read(program) or b"").partition(b"\n")[0]
    return os.fsdecode(first[2:].split()[0]) if first.startswith(b"#!/") else program


def settings_of(tree: Tree, program: str, config: str, chosen: frozenset[str]) -> files.Settings:
    """From the system's configuration, which is checked by the way. Raises ConfigError."""
    from weenv.environment.gateway import config as gateway
    from weenv.plugin.nri import serveconfig
    from weenv.plugin.snapshotter import config as snapshotter

    tables: dict[str, Any] = {}
    if tree.read(config) is not None:
        tables = core_settings.read_tables(tree.host(config))
    elif config != files.CONFIG:
        raise ConfigError(f"--config: there is no file {config}", hint="write it first")
    lazy, bytes_ = snapshotter.from_tables(tables), blobfs_config.from_table(tables.get("blobfs", {}))
    if lazy.root != bytes_.root or lazy.blobs != bytes_.mountpoint:
        hint = "blobfs.root is snapshotter.root, blobfs.mountpoint is snapshotter.blobs"
        raise ConfigError(f"{config}: the two daemons do not fit together", hint=hint)
    elastic = serveconfig.from_tables(tables)
    return files.Settings(
        program, config, lazy.root, lazy.socket, bytes_.status_socket, elastic.socket, elastic.root,
        gateway.from_tables(tables).address, elastic.address, lazy.plane, chosen,
        interpreter_of(tree, program),
    )  # fmt: skip


def refuse_strangers(manager: Manager, root: str) -> None:
    """Daemons that somebody started by hand are not ours to replace or to take mounts from."""
    from weenv.plugin.snapshotter.status import collect

    if manager.state("weenv-snapshotter.service") in ("inactive", "failed") and (found := collect(root)).running:
        raise ConfigError(
            f"a snapshotter that is no service serves {root} (pid {found.pid})",
            hint="end weenv serve, or both daemons (containers go on), and run this again",
        )


def show_write(write: steps.Write) -> None:
    """A change of a file, as a diff."""
    for line in write.diff().splitlines():
        click.echo(render.plain(line))
