"""``weenv nri``: the NRI plugin by itself, for runtimes that launch it, and for nodes without the elastic daemon."""

from __future__ import annotations

import asyncio
import os
import signal

import click

from weenv.cli.daemons import CONFIG, log_options, start_logging


@click.group()
def nri() -> None:
    """The plugin that gives containers of CRI their starting quotas."""


@nri.command("serve")
@CONFIG
@click.option("--socket", default=None, help="The runtime's NRI socket.  [default: /var/run/nri/nri.sock]")
@log_options
@click.pass_context
def nri_serve(ctx: click.Context, config_path: str, socket: str | None, log_level: str, log_format: str) -> None:
    """Give containers of CRI the quota they are to start with, until SIGTERM or SIGINT.

    Live changes are made by "weenv elastic serve", which includes this: do not run both. A runtime may also launch this
    command, as an executable such as /opt/nri/plugins/10-weenv; it then ends with the runtime.

    \b
    Example:
      weenv nri serve --socket /var/run/nri/nri.sock
    """
    from weenv.core.settings import read_tables
    from weenv.plugin.nri import config, nriconfig
    from weenv.plugin.nri.nrihandler import StartingQuotas
    from weenv.plugin.nri.nriplugin import SOCKET_VARIABLE, NriPlugin, launched_descriptor
    from weenv.systemd import notify

    start_logging(ctx, log_level, log_format)
    tables = read_tables(config_path)
    settings = nriconfig.from_tables(tables, socket=socket)
    plugin = NriPlugin(StartingQuotas(), settings, config.from_tables(tables))
    launched = os.environ.pop(SOCKET_VARIABLE, None)
    descriptor = launched_descriptor(launched) if launched is not None else None

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        work = loop.create_task(plugin.run() if descriptor is None else plugin.run_launched(descriptor))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, work.cancel)
        signs = loop.create_task(notify.watchdog())
        notify.ready()  # a runtime that is not there yet is waited for
        await asyncio.wait({work})
        signs.cancel()
        notify.stopping()
        if not work.cancelled():
            work.result()

    asyncio.run(serve())
