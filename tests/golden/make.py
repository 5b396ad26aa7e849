"""Writes the golden files anew; only a new format version is a reason to. Run with the project's Python."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import zstandard

from weenv.layer import codec
from weenv_testkit.layers import encode, sample_tar

HERE = Path(__file__).parent


def main() -> None:
    spec = importlib.util.spec_from_file_location("test_codec", HERE.parent / "test_codec.py")
    assert spec is not None and spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    tar = sample_tar(large=30_000)
    head, tree = codec.encode_content(tests.with_fixed_frames(tar))
    (HERE / "toc-v1.content.zst").write_bytes(zstandard.ZstdCompressor(level=19).compress(head + tree))
    blob, layer = encode(tar)
    (HERE / "layer-v1.blob").write_bytes(blob)
    print(layer.blob_digest)


if __name__ == "__main__":
    main()
