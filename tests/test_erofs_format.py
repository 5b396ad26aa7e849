"""Record shapes and the checksum against published numbers."""

from __future__ import annotations

from weenv.layer.erofs import format as fmt


def test_records_have_the_sizes_of_the_kernel() -> None:
    assert fmt.SUPER.itemsize == 128
    assert fmt.DEVICE_SLOT.itemsize == fmt.DEVICE_SLOT_SIZE == 128
    assert fmt.INODE.itemsize == fmt.INODE_SIZE == 64
    assert fmt.DEVICE_SLOT_OFFSET % fmt.DEVICE_SLOT_SIZE == 0
    assert fmt.META_START % fmt.BLOCK == 0
    assert fmt.META_START >= fmt.DEVICE_SLOT_OFFSET + fmt.DEVICE_SLOT_SIZE


def test_crc32c_of_rfc_3720() -> None:
    # Appendix B.4 gives these after the final inversion, which the kernel's crc32c() leaves to its caller.
    assert fmt.crc32c(bytes(32)) ^ 0xFFFFFFFF == 0x8A9136AA
    assert fmt.crc32c(b"\xff" * 32) ^ 0xFFFFFFFF == 0x62A8AB43
    assert fmt.crc32c(bytes(range(32))) ^ 0xFFFFFFFF == 0x46DD794E


def test_crc32c_goes_on_where_it_stopped() -> None:
    assert fmt.crc32c(b"6789", fmt.crc32c(b"12345")) == fmt.crc32c(b"123456789")
    # The kernel (fs/erofs/super.c) seeds with this value: the magic and a checksum of zero are behind it.
    assert fmt.crc32c(fmt.SUPER_MAGIC.to_bytes(4, "little") + bytes(4)) == 0x5045B54A
