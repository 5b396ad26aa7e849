"""What was converted before: a directory of small files, so that a run that was interrupted goes on where it was.

A file's name is the digest of everything that the result depends on: source layer, encoder parameters, format version and
library versions. Its content says what came out. It is only a hint for finding a blob at the destination by its digest;
a wrong one costs a conversion, never a wrong image: the diffID that it states is compared with the image config's.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from dataclasses import asdict, dataclass, replace

import zstandard

from weenv.core import digest as digests
from weenv.core.atomic import write_atomic
from weenv.core.errors import WeenvError
from weenv.layer.verify import LayerDescriptor

_PLACES = 8
FORMAT = 1
"""To be raised when the encoder writes other bytes for the same stream and parameters within one release."""


@dataclass(frozen=True, slots=True)
class Remembered:
    """A converted layer: its blob, its diffID and the length of its tar stream (bytes).

    ``places`` are repositories, ``HOST/NAME``, that were given it: others on the same host may have it from there.
    """

    layer: LayerDescriptor
    diff_id: str
    stream_size: int
    places: tuple[str, ...] = ()

    def also(self, place: str) -> Remembered:
        """The same with one more place, the latest last."""
        kept = [one for one in self.places if one != place]
        return replace(self, places=(*kept, place)[-_PLACES:] if place else self.places)


class Memory:
    """The directory; None remembers nothing. Never raises for a cache that cannot be read or written."""

    def __init__(self, directory: str | None, target: int, level: int) -> None:
        if directory == "":
            base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
            directory = os.path.join(base, "weenv", "converted")
        self._directory = directory
        version = ".".join(str(part) for part in zstandard.ZSTD_VERSION)
        self._salt = f"{FORMAT} {_release()} {target} {level} zstd-{version}"

    def _path(self, digest: str) -> str:
        key = digests.hex_of(digests.sha256(f"{self._salt} {digests.check_digest(digest)}".encode()))
        return os.path.join(self._directory or "", key)

    def find(self, digest: str) -> Remembered | None:
        """What a source layer became, or None."""
        if self._directory is None:
            return None
        try:
            with open(self._path(digest), "rb") as file:
                raw = json.loads(file.read(65_536))
            layer = LayerDescriptor(**raw["layer"])
            digests.check_digest(layer.digest)
            digests.check_digest(layer.toc_digest)
            sizes = (layer.size, layer.toc_offset, layer.toc_length, raw["stream_size"])
            if raw["source"] != digest or not all(type(size) is int and size >= 0 for size in sizes):
                return None
            places = raw.get("places", [])
            if not isinstance(places, list) or not all(isinstance(one, str) for one in places):
                return None
            return Remembered(layer, digests.check_digest(raw["diff_id"]), raw["stream_size"], tuple(places[-_PLACES:]))
        except (OSError, ValueError, TypeError, KeyError, WeenvError):
            return None

    def store(self, digest: str, result: Remembered) -> None:
        """Remember what a source layer became."""
        if self._directory is None:
            return
        raw = {
            "source": digest, "layer": asdict(result.layer), "diff_id": result.diff_id, "stream_size": result.stream_size,
            "places": result.places,
        }  # fmt: skip
        with contextlib.suppress(OSError):  # the layer is converted again next time, that is all
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            write_atomic(self._path(digest), json.dumps(raw).encode(), durable=False)


def _release() -> str:
    try:
        return importlib.metadata.version("weenv")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return ""
