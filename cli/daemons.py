"""``weenv serve``, ``weenv snapshotter`` and ``weenv blobfs``: the daemons of a node, and the options of all daemons."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time

import click

from weenv.core.log import configure

CONFIG = click.option(
    "--config",
    "config_path",
    default="/etc/weenv/config.toml",
    show_default=True,
    type=click.Path(dir_okay=False),
    help="Configuration file; the default one need not exist.",
)
_ENDING = 5.0
"""Seconds for a ``weenv serve`` that has just been told to end."""
_FORMAT = "Lines for people, or a JSON object each (docs/logs.md)."
_LEVELS = ["debug", "info", "warning", "error"]


def log_options(command: click.decorators.FC) -> click.decorators.FC:
    """``--log-level`` and ``--log-format``."""
    styles, least = click.Choice(["text", "json"]), "The least that is logged."
    command = click.option("--log-format", type=styles, default="text", show_default=True, help=_FORMAT)(command)
    return click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True, help=least)(command)


def start_logging(ctx: click.Context, level: str, style: str) -> None:
    """As these two say, or ``weenv --debug``."""
    configure("debug" if ctx.find_root().obj.get("debug") else level, style)
    if level != "debug":
        logging.getLogger("asyncio").setLevel(logging.WARNING)


@click.command()
@CONFIG
@log_options
@click.pass_context
def serve(ctx: click.Context, config_path: str, log_level: str, log_format: str) -> None:
    """Run snapshotter and blobfs, and start again whichever ends, until SIGTERM or SIGINT.

    Their sockets and the mount are held meanwhile, so that neither a crash nor an upgrade (send SIGHUP afterwards) of a daemon
    is an error for anybody: who connects or reads waits. Under systemd, units for the two daemons do the same.

    \b
    Examples:
      weenv serve
      weenv serve --config /etc/weenv/config.toml --log-format json
    """
    from weenv.core.settings import read_tables
    from weenv.plugin.snapshotter import config
    from weenv.plugin.snapshotter.blobfs import config as blobfs_config

    start_logging(ctx, log_level, log_format)
    tables = read_tables(config_path)
    node = config.from_tables(tables)
    held = {"blobfs": blobfs_config.from_table(tables.get("blobfs", {})).status_socket}
    if node.transport == "builtin":  # grpcio cannot take over a socket
        held["snapshotter"] = node.socket
    sockets = [f"{name}={path}" for name, path in held.items()]
    level = "debug" if ctx.find_root().obj.get("debug") else log_level
    # A process of its own kind, for it is to stay small: command line and configuration take twice the memory that it needs.
    argv = [sys.executable, "-P", "-m", "weenv.systemd.supervisor", os.path.abspath(config_path), level, log_format, *sockets]
    os.execv(sys.executable, argv)  # noqa: S606


@click.group()
def snapshotter() -> None:
    """The containerd proxy snapshotter daemon."""


@snapshotter.command("serve")
@CONFIG
@click.option("--root", default=None, help="Where layers and snapshots are kept.  [default: /var/lib/weenv]")
@click.option("--socket", default=None, help="Where containerd connects to.  [default: /run/weenv/snapshotter.sock]")
@log_options
@click.pass_context
def snapshotter_serve(
    ctx: click.Context, config_path: str, root: str | None, socket: str | None, log_level: str, log_format: str
) -> None:
    """Serve snapshots.v1 to containerd until SIGTERM or SIGINT.

    Stopping never unmounts what containers use and never deletes data; the next start carries on.

    \b
    Example:
      weenv snapshotter serve --config /etc/weenv/config.toml --log-format json
    """
    from weenv.systemd import lobby, notify

    start_logging(ctx, log_level, log_format)
    passed = notify.inherited()
    with lobby.attended(passed, "snapshotter") as hand_over:  # first, for what follows takes a while
        from weenv.core.process import settle
        from weenv.plugin.snapshotter import config, daemon

        def ready() -> None:
            hand_over()
            settle()

        asyncio.run(daemon.serve(config.load(config_path, root=root, socket=socket), ready=ready, passed=passed))


@click.group()
def blobfs() -> None:
    """The daemon that serves layer bytes on demand."""


@blobfs.command("serve", short_help="Serve the layers' bytes until SIGTERM or SIGINT.")
@CONFIG
@click.option("--root", default=None, help="The snapshotter's root.  [default: /var/lib/weenv]")
@click.option("--mountpoint", default=None, help="Where the layers' data appears.  [default: /run/weenv/blobs]")
@log_options
@click.pass_context
def blobfs_serve(
    ctx: click.Context, config_path: str, root: str | None, mountpoint: str | None, log_level: str, log_format: str
) -> None:
    """Serve the layers' bytes until SIGTERM or SIGINT; the mount stays for the next start.

    \b
    Example:
      weenv blobfs serve --config /etc/weenv/config.toml
    """
    from weenv.core.settings import read_tables
    from weenv.plugin.snapshotter.blobfs import config, daemon
    from weenv.plugin.snapshotter.config import registry_config

    start_logging(ctx, log_level, log_format)
    registry = registry_config(read_tables(config_path))
    asyncio.run(daemon.serve(config.load(config_path, root=root, mountpoint=mountpoint), registry))


@blobfs.command("stop", short_help="End the server and take its mount away.")
@CONFIG
@click.option("--force", is_flag=True, help="Detach the mount even though containers may still read from it.")
@click.pass_context
def blobfs_stop(ctx: click.Context, config_path: str, force: bool) -> None:
    """End the server and take its mount away, where no container depends on it.

    Refused while weenv serve or a service of systemd runs it, which would start it again at once. With --force, that does
    so, with another mount.

    \b
    Example:
      weenv blobfs stop
    """
    from weenv.core.errors import ConfigError
    from weenv.plugin.snapshotter.blobfs import config, daemon, holder
    from weenv.systemd import supervisor
    from weenv.systemd.unit import service_of

    found = config.load(config_path)
    end = time.monotonic() + (0 if force else _ENDING)
    while (above := supervisor.running(found.status_socket)) and time.monotonic() < end:
        time.sleep(0.05)
    hint = "end that first: its SIGTERM stops no container"
    _, pid = supervisor.running_pid(found.status_socket)
    if not above:
        pid = int((holder.ask(found.holder_socket, {"op": "status"}) or {}).get("server") or 0)
    if pid and (service := service_of(pid)) is not None:
        above, hint = above or service.name, f"end that first, which stops no container: {service.stop}"
    if above and not force:
        raise ConfigError(f"{above} starts blobfs again at once", hint=hint)
    stopped = daemon.stop(found, force=force)
    if stopped and above:
        click.echo(f"blobfs has ended; {above} starts it again, with another mount")
    else:
        click.echo("blobfs has ended and its mount is gone" if stopped else "no blobfs is running")
