"""plugin/containerd/client.py: what containerd answers, told as what to do, over a real connection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from weenv.plugin.containerd.client import Client, ContainerdError

DIALING = 'connection error: desc = "transport: Error while dialing: '
DIALS = (  # as containerd 2.1.9 and 1.7.28 said it
    DIALING + 'dial unix:///run/weenv/snapshotter.sock: timeout"',
    DIALING + 'dial unix /run/weenv/snapshotter.sock: connect: connection refused"',
)


@pytest.mark.parametrize("details", DIALS)
async def test_a_plugin_that_containerd_does_not_reach_is_named(details: str, tmp_path: Path) -> None:
    async def answer(_request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await context.abort(grpc.StatusCode.UNAVAILABLE, details)

    class Anything(grpc.GenericRpcHandler):
        def service(self, _details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Anything(),))
    server.add_insecure_port(f"unix:{tmp_path}/s")
    await server.start()
    try:
        async with Client(f"{tmp_path}/s") as client:
            with pytest.raises(ContainerdError) as caught:
                await client.namespace("default").snapshots("weenv").stat("x")
    finally:
        await server.stop(None)
    assert caught.value.message == "containerd does not reach its plugin at /run/weenv/snapshotter.sock"
    assert "systemctl start weenv.target" in caught.value.hint and "weenv serve" in caught.value.hint
