"""A gateway that runs in this process, before groups in a simulated registry."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from simulator.registry import SimulatedRegistry

from weenv.environment.gateway import daemon
from weenv.environment.gateway.config import GatewayConfig
from weenv.layer.verify import MEDIA_TYPE
from weenv.registry.manifest import OCI_CONFIG, OCI_MANIFEST
from weenv_testkit.layers import encode, make_tar


@dataclass
class Groups:
    """Lazy one-layer images in a simulated registry; ``layers``: repository -> (digest, blob)."""

    sim: SimulatedRegistry
    layers: dict[str, tuple[str, bytes]] = field(default_factory=dict)

    def add(self, repository: str, files: dict[str, bytes], tag: str = "1", **config: Any) -> str:
        blob, layer = encode(make_tar([{"name": name, "data": data} for name, data in files.items()]))
        body = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": config,
                "rootfs": {"type": "layers", "diff_ids": [layer.diff_id]},
            }
        ).encode()
        descriptor = {
            "mediaType": MEDIA_TYPE, "digest": self.sim.add_blob(blob), "size": len(blob), "annotations": layer.annotations(),
        }  # fmt: skip
        manifest = {
            "schemaVersion": 2, "mediaType": OCI_MANIFEST,
            "config": {"mediaType": OCI_CONFIG, "digest": self.sim.add_blob(body), "size": len(body)}, "layers": [descriptor],
        }  # fmt: skip
        # The simulator has one list of tags for all repositories.
        self.sim.add_manifest(json.dumps(manifest).encode(), OCI_MANIFEST, tag)
        self.layers[repository] = layer.blob_digest, blob
        return f"{self.sim.host}/{repository}:{tag}"


@dataclass
class Served:
    """A gateway that runs in this process."""

    address: str
    session: aiohttp.ClientSession

    async def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
        url = f"http://{self.address}/v2/{path}"
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.session.request(method, url, headers=sent, allow_redirects=False) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, await answer.read()

    async def code(self, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
        status, _, body = await self.ask(path, method, **headers)
        return status, json.loads(body)["errors"][0]["code"] if status >= 400 and body else ""


@contextlib.asynccontextmanager
async def serving(root: Path, tables: dict[str, Any] | None = None, **changed: Any) -> AsyncIterator[Served]:
    """A gateway with the node's root at ``root``, until the block ends."""
    tables = {"snapshotter": {"root": str(root)}, "registry": {"attempts": 1, "deadline": 3.0}, **(tables or {})}
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    config = replace(GatewayConfig(address="127.0.0.1:0"), **changed)
    running = asyncio.ensure_future(daemon.serve(config, tables, ready=started.set_result))
    await asyncio.wait([started, running], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    try:
        async with aiohttp.ClientSession() as session:
            yield Served(await started, session)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def plan_of(*refs: str, more: str = "") -> str:
    groups = "".join(f"  - {ref}\n" for ref in refs)
    return f"apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\ngroups:\n{groups}{more}"


def directory(tmp_path: Path) -> Path:
    path = tmp_path / "plans"
    path.mkdir(exist_ok=True)
    return path
