"""Bounds on what a hostile or broken layer may ask for; every parser checks them before it allocates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one layer. Sizes are in bytes. The defaults are far above any image seen in practice."""

    max_entries: int = 4_000_000
    """Files, directories and links of one layer."""
    max_frames: int = 1 << 21
    """Frames of one blob: beyond max_stream at 640 KiB a frame, the default. blobfs keeps some 75 bytes of each in memory."""
    max_frame_content: int = 64 << 20
    """Uncompressed size of one frame: bounds the decompressor's output buffer."""
    max_toc_compressed: int = 512 << 20
    """Size of the tail as fetched from a registry."""
    max_toc_content: int = 2 << 30
    """Uncompressed size of the TOC."""
    max_toc_header: int = 1 << 20
    """The JSON header within the TOC."""
    max_stream: int = 1 << 40
    """Size of the tar stream (EROFS with 512-byte blocks and 32-bit addresses ends at 2 TiB)."""
    max_name: int = 255
    """One path component (NAME_MAX)."""
    max_path: int = 4096
    """A whole path (PATH_MAX)."""
    max_symlink: int = 4095
    """A symlink target (PATH_MAX less the terminator)."""
    max_depth: int = 1024
    """Directory depth."""
    max_xattr_value: int = 65_536
    """One extended attribute's value (XATTR_SIZE_MAX)."""
    max_xattrs_per_entry: int = 1024
    max_sparse_chunks: int = 4_000_000
    """Chunk indexes that sparse files of one layer may need together."""
    max_pax_header: int = 16 << 20
    """One PAX or GNU long-name header block's payload."""


DEFAULT_LIMITS = Limits()
