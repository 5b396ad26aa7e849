"""Blobs to clients: a redirect to where a layer lives, or its bytes.

``auto`` redirects where the client gets the blob there as anybody would: from a registry that asks for no token, or from
the storage whose signed URL the registry gave for it. A client of the gateway has neither the node's credentials nor its
certificates, and they are never sent on; what needs them goes through the gateway.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from urllib.parse import urlsplit

from weenv.core.errors import SourceError
from weenv.environment.gateway.config import AUTO, PROXY, GatewayConfig
from weenv.plugin.snapshotter.layerdir import Origin
from weenv.registry.client import RegistryClient
from weenv.registry.config import is_loopback
from weenv.registry.source import BlobSource, RegistrySource, open_source

_SOURCES = 1024
"""Blobs whose redirect targets are remembered."""
_DEADLINE = 86_400.0
"""Seconds for a blob as a whole: the client's pace counts, and one that stands still is dropped sooner."""


class Blobs:
    """Finds and reads layers. Belongs to one event loop."""

    def __init__(self, config: GatewayConfig, client: RegistryClient) -> None:
        self._config = config
        self._client = client
        self._sources: OrderedDict[tuple[str, str, str], RegistrySource] = OrderedDict()

    def _source(self, origin: Origin, digest: str, size: int) -> BlobSource:
        if origin.kind != "registry":
            return open_source(self._client, origin, digest, size)
        key = origin.host, origin.repository, digest
        source = self._sources.get(key)
        if source is None or source.size != size:
            source = RegistrySource(self._client, origin.host, origin.repository, digest, size)
        self._sources[key] = source
        self._sources.move_to_end(key)
        while len(self._sources) > _SOURCES:
            self._sources.popitem(last=False)
        return source

    async def redirect(self, origin: Origin, digest: str, size: int) -> str:
        """The URL to send a client to, or empty: proxy it. Raises SourceError where the blob cannot be had at all."""
        if origin.kind != "registry" or self._config.blobs == PROXY:
            return ""
        source = self._source(origin, digest, size)
        assert isinstance(source, RegistrySource)
        try:
            url = await source.public_url()
        except SourceError:
            if self._config.blobs == AUTO:
                return ""  # reading it tries harder, and has the error to tell
            raise
        if not url or self._config.blobs != AUTO:
            return url
        parts = urlsplit(url)
        plain = parts.scheme == "http"
        if (plain and self._config.tls_certificate) or (not plain and self._client.config.ca_file):
            return ""
        if not self._config.loopback and is_loopback(parts.hostname or ""):
            return ""
        return url

    async def stream(self, origin: Origin, digest: str, size: int, start: int, end: int) -> AsyncGenerator[bytes, None]:
        """The bytes ``[start, end)``; unverified, as the client verifies the whole. Raises SourceError."""
        source = self._source(origin, digest, size)
        try:
            async with aclosing(source.stream(start, end - start, deadline=_DEADLINE)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            await source.close()
