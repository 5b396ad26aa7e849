"""The gateway as a process: ``await serve(config, tables)``.

Start: settings, store, mapping cache, then the address. Stop (SIGTERM, SIGINT): no new connections, answers under way get a
moment. ``kill -9`` is a normal stop: what is on disk is only remembered, and written whole or not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aiohttp import web

from weenv.core.aio import expect_many
from weenv.core.endpoint import MetricsEndpoint
from weenv.core.errors import ConfigError
from weenv.core.process import stop_signals
from weenv.core.unixsocket import bind_private
from weenv.environment.composeconfig import compose_config
from weenv.environment.gateway.blobs import Blobs
from weenv.environment.gateway.config import GatewayConfig, parse_address
from weenv.environment.gateway.http import Server
from weenv.environment.gateway.idle import Idle, most_connections
from weenv.environment.gateway.metrics import Metrics
from weenv.environment.gateway.service import Gateway
from weenv.environment.gateway.store import Store
from weenv.environment.mutate.mutator import Mutator
from weenv.environment.nodelayers import NodeLayers
from weenv.plugin.snapshotter.config import from_tables
from weenv.registry.client import RegistryClient
from weenv.registry.config import load_pair
from weenv.registry.groupref.cache import MappingCache
from weenv.registry.groupref.resolve import Resolver, node_policy
from weenv.systemd import notify

log = logging.getLogger(__name__)

_STOP_GRACE = 5.0
"""Seconds for answers under way when the gateway is stopped."""
_IDLE = 60.0
"""Seconds for which a connection is kept without a request."""


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """What TLS is spoken with; None where it is plain HTTP. Raises ConfigError."""
    if not config.tls_certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        load_pair(context, config.tls_certificate, config.tls_key)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(f"cannot use {config.tls_certificate} and {config.tls_key}: {error}") from error
    return context


async def _listen(runner: web.AppRunner, config: GatewayConfig, inherited: socket.socket | None) -> str:
    """Start listening, or serve the socket that a service manager passed; the address with the port that it is.

    Raises ConfigError.
    """
    path, host, port = parse_address(config.address)
    context = tls_context(config)
    try:
        if inherited is not None:
            await web.SockSite(runner, inherited, ssl_context=context).start()
            name = inherited.getsockname()
            return f"unix:{name}" if inherited.family == socket.AF_UNIX else _spelt(*name[:2])
        if path:
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    raise ConfigError(f"{path} is in the way of the gateway's socket", hint="remove it")
                os.unlink(path)
            await web.SockSite(runner, bind_private(path), ssl_context=context).start()
            return config.address
        await web.TCPSite(runner, host, port, ssl_context=context).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.address}: {error.strerror or error}", hint="set gateway.address"
        ) from error
    return _spelt(host, runner.addresses[0][1])


def _spelt(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def serve(config: GatewayConfig, tables: dict[str, Any], *, ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM, SIGINT or cancellation. ``ready`` is called with the address once requests are answered.

    ``tables`` are those of the configuration file: registries, the node's root and its policy. A listening socket
    ``gateway`` that a service manager passed (:mod:`weenv.systemd.notify`) is served instead of the address in the
    configuration. Raises ConfigError, StorageError.
    """
    expect_many()  # one descriptor a client, one a registry's connection
    inherited = notify.take_socket("gateway", notify.NETWORK)
    node = from_tables(tables)
    async with contextlib.AsyncExitStack() as exits:
        stop = exits.enter_context(stop_signals())
        policy = node_policy(tables)
        store = Store(os.path.join(node.root, "gateway.db"), keep_images=config.keep_images, keep_bytes=config.keep_bytes)
        exits.callback(store.close)
        cache = MappingCache(os.path.join(node.root, "mapping.db"))
        exits.callback(cache.close)
        client = await exits.enter_async_context(RegistryClient(node.registry))
        resolver = Resolver(client, cache, config.platform, config.max_age, policy=policy)
        metrics = Metrics()
        metrics.registries.read = client.counters.rows
        mutator = Mutator(client, node.root, local=NodeLayers(client, node.root, compose_config(tables)))
        gateway = Gateway(config, resolver, store, mutator, node.root)
        server = Server(gateway, Blobs(config, client), metrics)
        # Where a client leaves, its request ends, and what nobody else waits for with it.
        runner = web.AppRunner(
            server.app, access_log=None, shutdown_timeout=_STOP_GRACE, handler_cancellation=True, auto_decompress=False,
            keepalive_timeout=_IDLE,
        )  # fmt: skip
        await runner.setup()
        exits.push_async_callback(runner.cleanup)
        assert runner.server is not None
        watch = asyncio.ensure_future(Idle(runner.server, server.busy, most_connections()).watch())
        exits.callback(watch.cancel)
        if config.metrics_address:
            exits.callback(MetricsEndpoint(metrics, config.metrics_address).close)
        address = await _listen(runner, config, inherited)
        if not replace(config, address=address).loopback and not config.users_file:
            log.warning("anybody who reaches it may ask: set gateway.users_file", extra={"address": address})
        log.info("serving", extra={"address": address, "plans": ", ".join(config.plans), "groups": ", ".join(config.groups)})
        if ready is not None:
            ready(address)
        notify.ready()
        signs = asyncio.ensure_future(notify.watchdog())
        exits.callback(signs.cancel)
        await stop.wait()
        notify.stopping()
        log.info("stopping")
