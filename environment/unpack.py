"""A layer that is neither lazy nor convertible: fetched, checked, and unpacked by containerd into an ordinary snapshot.

As containerd's own unpacker does it (core/unpack/unpacker.go, v2.1.9): Prepare, content, Diff.Apply, Commit, all under the
caller's lease. But the stream's diffID and size are looked at before anything is written to the snapshot, for containerd
unpacks whatever comes and compares afterwards, and a process that unpacks the same layer for another environment is waited
for.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
import threading

from weenv.converter.decompress import TarStream
from weenv.core.errors import FormatError, LimitError
from weenv.environment.compose import StackedLayer, temporary_key
from weenv.environment.nodelayers import Meter, NodeLayers, key_of, wrong_content
from weenv.plugin.containerd.client import ContainerdError, Namespaced, Snapshots
from weenv.plugin.containerd.types import LABEL_SNAPSHOT_REF, Descriptor
from weenv.registry.threads import Cancelled, in_thread

_BLOCK = 1 << 20
LABEL_UNCOMPRESSED = "containerd.io/uncompressed"
"""containerd's label of a layer blob: its diffID (pkg/labels/labels.go)."""


async def unpack(
    layer: StackedLayer, chain: str, parent: str, leased: Namespaced, snapshots: Snapshots, local: NodeLayers
) -> bool:
    """Make the committed snapshot ``chain`` on ``parent``; False where it was there.

    Raises SourceError, FormatError (VerificationError, LimitError), StorageError, ContainerdError; the snapshot that was
    begun is removed then.
    """
    async with local.locked(key_of(layer)) as place:
        key = temporary_key(chain)
        try:
            mounts = await snapshots.prepare(key, parent, layer.labels(chain))
        except ContainerdError as error:
            if error.code != "ALREADY_EXISTS":
                raise
            return False
        try:
            await _store(layer, place, leased, local)
            blob = Descriptor(layer.ref.media_type, layer.ref.digest, layer.ref.size)
            try:
                applied = await leased.apply(blob, mounts)
            except ContainerdError as error:
                what = f"layer {layer.ref.digest} of {layer.group} cannot be unpacked: {error.message}"
                raise ContainerdError(what, error.code, hint=error.hint) from error
            if applied != layer.ref.diff_id:
                raise wrong_content(layer, applied)
            await snapshots.commit(chain, key, {LABEL_SNAPSHOT_REF: chain})
        except BaseException:
            await asyncio.shield(_remove(snapshots, key))
            raise
    return True


async def _remove(snapshots: Snapshots, key: str) -> None:
    with contextlib.suppress(ContainerdError):  # gone, or collected once the lease has ended
        await snapshots.remove(key)


async def _store(layer: StackedLayer, place: str, leased: Namespaced, local: NodeLayers) -> None:
    """Have the blob, checked, in containerd's content store."""
    labels = {LABEL_UNCOMPRESSED: layer.ref.diff_id}
    try:
        info = await leased.content_info(layer.ref.digest)
    except ContainerdError as error:
        if error.code != "NOT_FOUND":
            raise
    else:
        if info.labels.get(LABEL_UNCOMPRESSED) == layer.ref.diff_id:  # unpacked or checked before
            await leased.add_lease_resource(leased.lease, layer.ref.digest, "content")
            return
    with local.show(f"fetching {layer.group}") as report:
        path = await local.fetch(layer, f"{place}.in", Meter(report, layer.ref.size).step)
    await in_thread(None, lambda cancel: _check(path, layer, local, cancel))
    ref = f"weenv-layer-{layer.ref.digest}-{secrets.token_hex(4)}"
    await leased.write_content_file(ref, path, layer.ref.size, layer.ref.digest, labels=labels)
    await leased.add_lease_resource(leased.lease, layer.ref.digest, "content")


def _check(path: str, layer: StackedLayer, local: NodeLayers, cancel: threading.Event) -> None:
    """Read it through once. Raises FormatError, LimitError, VerificationError."""
    hasher, total, most = hashlib.sha256(), 0, local.limits.max_stream
    try:
        with open(path, "rb") as file:
            stream = TarStream(file)
            while block := stream.read(_BLOCK):
                if cancel.is_set():
                    raise Cancelled
                total += len(block)
                if total > most:
                    raise local.too_much(layer, LimitError(f"its tar stream has more than {most} bytes"))
                hasher.update(block)
    except LimitError:
        raise
    except FormatError as error:
        raise FormatError(f"layer {layer.ref.digest} of {layer.group} cannot be unpacked: {error}") from error
    diff_id = "sha256:" + hasher.hexdigest()
    if diff_id != layer.ref.diff_id:
        raise wrong_content(layer, diff_id)
