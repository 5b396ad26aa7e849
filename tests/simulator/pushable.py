"""A registry that takes pushes, keeps repositories apart, lists, mounts and deletes: distribution-spec 1.1 in memory.

``referrers`` switches the referrers API, ``filters`` whether that lists only the type asked for, ``delete_tags`` whether a tag
can be deleted alone, ``page`` the length of listings; ``listed`` are rows that it lists as referrers of everything.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from aiohttp import web
from simulator.registry import SimulatedRegistry

OCI_INDEX = "application/vnd.oci.image.index.v1+json"


@dataclass
class Repository:
    """What one repository holds."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


@dataclass
class PushableRegistry(SimulatedRegistry):
    """``repositories`` is all that it holds."""

    referrers: bool = False
    filters: bool = True
    delete_tags: bool = False
    mounts: bool = True
    catalog: bool = True
    page: int = 1000
    listed: list[Any] = field(default_factory=list)
    repositories: dict[str, Repository] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v2/", self._hello),
            web.get("/v2/_catalog", self._catalog),
            web.get("/v2/{repository:.+}/tags/list", self._tags),
            web.get("/v2/{repository:.+}/referrers/{digest}", self._referrers),
            web.post("/v2/{repository:.+}/blobs/uploads/", self._start),
            web.patch("/v2/{repository:.+}/blobs/uploads/{session}", self._append),
            web.put("/v2/{repository:.+}/blobs/uploads/{session}", self._finish),
            web.delete("/v2/{repository:.+}/blobs/uploads/{session}", self._drop),
            web.put("/v2/{repository:.+}/manifests/{target}", self._put),
            web.delete("/v2/{repository:.+}/manifests/{target}", self._delete),
            web.get("/v2/{repository:.+}/blobs/{digest}", self._get_blob),
            web.get("/v2/{repository:.+}/manifests/{target}", self._get_manifest),
        ]

    def repository(self, request: web.Request) -> Repository:
        self._record("registry", request)
        return self.repositories.setdefault(request.match_info["repository"], Repository())

    def _list(self, request: web.Request, key: str, names: list[str], **more: Any) -> web.Response:
        last, count = request.query.get("last", ""), min(int(request.query.get("n", "1000")), self.page)
        rest = [name for name in sorted(names) if name > last]
        headers = {}
        if len(rest) > count:
            headers["Link"] = f'<{request.path}?last={rest[count - 1]}&n={count}>; rel="next"'
        return web.json_response({**more, key: rest[:count]}, headers=headers)

    async def _hello(self, request: web.Request) -> web.Response:
        self._record("registry", request)
        refused = self._refusal(request) if self.auth == "basic" else None  # tokens are for repositories
        return refused if refused is not None else web.json_response({})

    async def _catalog(self, request: web.Request) -> web.Response:
        self._record("registry", request)
        if not self.catalog:
            return web.Response(status=404)
        return self._list(request, "repositories", [name for name, held in self.repositories.items() if held.manifests])

    async def _tags(self, request: web.Request) -> web.Response:
        held = self.repository(request)
        if not held.manifests:
            return web.Response(status=404)
        return self._list(request, "tags", list(held.tags), name=request.match_info["repository"])

    async def _referrers(self, request: web.Request) -> web.Response:
        held = self.repository(request)
        if not self.referrers:
            return web.Response(status=404)
        wanted = request.query.get("artifactType", "") if self.filters else ""
        rows = list(self.listed)
        for digest, (media_type, data) in held.manifests.items():
            try:
                parsed = dict(json.loads(data))
            except ValueError:
                continue
            kind = parsed.get("artifactType") or (parsed.get("config") or {}).get("mediaType")
            if (parsed.get("subject") or {}).get("digest") == request.match_info["digest"] and wanted in ("", kind):
                rows.append({"mediaType": media_type, "digest": digest, "size": len(data), "artifactType": kind,
                             "annotations": parsed.get("annotations") or {}})  # fmt: skip
        start = int(request.query.get("mark", "0").partition("/")[2] or "0")
        page = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": rows[start : start + self.page]}
        headers = {"OCI-Filters-Applied": "artifactType"} if wanted else {}
        if len(rows) > start + self.page:  # its own way to say where to go on, which a client hands back as it is
            headers["Link"] = f'<{request.path}?artifactType={quote(wanted)}&mark=at/{start + self.page}>; rel="next"'
        return web.Response(body=json.dumps(page).encode(), content_type=OCI_INDEX, headers=headers)

    async def _start(self, request: web.Request) -> web.Response:
        held = self.repository(request)
        digest, other = request.query.get("mount", ""), self.repositories.get(request.query.get("from", ""))
        if self.mounts and other is not None and digest in other.blobs:
            held.blobs[digest] = other.blobs[digest]
            return web.Response(status=201)
        location = f"/v2/{request.match_info['repository']}/blobs/uploads/{secrets.token_hex(8)}"
        return web.Response(status=202, headers={"Location": location})

    async def _drop(self, request: web.Request) -> web.Response:
        self._record("registry", request)
        return web.Response(status=204)

    async def _append(self, request: web.Request) -> web.Response:
        self._record("registry", request)
        session = request.match_info["session"]
        data = self.uploads[session] = self.uploads.get(session, b"") + await request.read()
        return web.Response(status=202, headers={"Location": request.path, "Range": f"0-{len(data) - 1}"})

    async def _finish(self, request: web.Request) -> web.Response:
        held = self.repository(request)
        data = self.uploads.pop(request.match_info["session"], b"") + await request.read()
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        if digest != request.query["digest"]:
            return web.Response(status=400)
        held.blobs[digest] = data
        return web.Response(status=201)

    async def _put(self, request: web.Request) -> web.Response:
        held, data = self.repository(request), await request.read()
        parsed = json.loads(data)
        wanted = [parsed["config"], *parsed["layers"]] if "layers" in parsed else []
        if any(blob["digest"] not in held.blobs for blob in wanted):
            return web.json_response({"errors": [{"code": "MANIFEST_BLOB_UNKNOWN"}]}, status=400)
        if any(child["digest"] not in held.manifests for child in parsed.get("manifests", ())):
            return web.json_response({"errors": [{"code": "MANIFEST_BLOB_UNKNOWN"}]}, status=400)
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        held.manifests[digest] = (request.content_type, data)
        if not request.match_info["target"].startswith("sha256:"):
            held.tags[request.match_info["target"]] = digest
        headers = {"Docker-Content-Digest": digest}
        if self.referrers and parsed.get("subject"):
            headers["OCI-Subject"] = parsed["subject"]["digest"]
        return web.Response(status=201, headers=headers)

    async def _delete(self, request: web.Request) -> web.Response:
        held, target = self.repository(request), request.match_info["target"]
        if target in held.tags:
            if not self.delete_tags:
                return web.Response(status=405)
            del held.tags[target]
            return web.Response(status=202)
        if held.manifests.pop(target, None) is None:
            return web.Response(status=404)
        held.tags = {name: digest for name, digest in held.tags.items() if digest != target}
        return web.Response(status=202)

    async def _get_manifest(self, request: web.Request) -> web.Response:
        held, target = self.repository(request), request.match_info["target"]
        found = held.manifests.get(held.tags.get(target, target))
        if found is None:
            return web.Response(status=404)
        digest = "sha256:" + hashlib.sha256(found[1]).hexdigest()
        headers = {"Docker-Content-Digest": digest, "ETag": f'"{digest}"'}
        if request.headers.get("If-None-Match") == f'"{digest}"':
            return web.Response(status=304, headers=headers)
        return web.Response(body=found[1], content_type=found[0], headers=headers)

    async def _get_blob(self, request: web.Request) -> web.StreamResponse:
        held = self.repository(request)
        data = held.blobs.get(request.match_info["digest"])
        if data is None:
            return web.Response(status=404)
        return await self._serve_blob(request, data, self.script)
