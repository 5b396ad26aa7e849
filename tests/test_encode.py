"""The encoder, against tools that know nothing of it."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from weenv.core.errors import FormatError, LimitError
from weenv.layer.encode import encode_layer
from weenv.layer.limits import Limits
from weenv.layer.verify import parse_annotations
from weenv_testkit.layers import encode, make_tar, sample_tar, tars

TAR = sample_tar()


def test_what_it_says_of_the_blob_is_so() -> None:
    blob, layer = encode(TAR)
    assert layer.blob_digest == "sha256:" + hashlib.sha256(blob).hexdigest()
    assert layer.blob_size == len(blob) == layer.toc_offset + layer.toc_length
    assert layer.diff_id == "sha256:" + hashlib.sha256(TAR).hexdigest()
    assert layer.stream_size == len(TAR)
    assert layer.toc_digest == "sha256:" + hashlib.sha256(blob[layer.toc_offset :]).hexdigest()
    assert parse_annotations(layer.annotations()) == layer.descriptor()
    assert (layer.toc.frame_target, layer.toc.level) == (16 << 10, 3)


def test_zstd_gives_the_tar_back_byte_for_byte() -> None:
    blob, _ = encode(TAR)
    assert subprocess.run(["zstd", "-dcq"], input=blob, capture_output=True, check=True).stdout == TAR
    assert subprocess.run(["zstd", "-tq"], input=blob, capture_output=True, check=True).returncode == 0
    assert subprocess.run(["zstd", "-dcq"], input=encode(b"")[0], capture_output=True, check=True).stdout == b""


def test_gnu_tar_reads_it(tmp_path: Path) -> None:
    blob, _ = encode(TAR)
    (tmp_path / "layer.tar.zst").write_bytes(blob)
    listed = subprocess.run(["tar", "--zstd", "-tf", tmp_path / "layer.tar.zst"], capture_output=True, check=True, text=True)
    with tarfile.open(fileobj=io.BytesIO(TAR)) as tar:
        assert len(listed.stdout.splitlines()) == len(tar.getnames())
    subprocess.run(["tar", "--zstd", "-xf", tmp_path / "layer.tar.zst", "-C", tmp_path, "usr", "etc/passwd"], check=True)
    assert (tmp_path / "usr/share/doc/059/copyright").read_bytes() == b"text 59 " * (59 * 7)


@given(tars(), st.integers(1, 3), st.integers(0, 1 << 32))
@settings(deadline=None, max_examples=40)
def test_the_blob_depends_on_the_stream_only(tar: bytes, threads: int, seed: int) -> None:
    expected, layer = encode(tar, target=4096)
    source = io.BytesIO(tar)
    state = seed

    def short_reads(size: int) -> bytes:
        nonlocal state
        state = (state * 6364136223846793005 + 1) % (1 << 64)
        return source.read(1 + (state >> 33) % 5000)

    out = io.BytesIO()
    again = encode_layer(short_reads, out, target=4096, threads=threads)
    assert out.getvalue() == expected
    assert again.annotations() == layer.annotations()
    assert zstandard.ZstdDecompressor().stream_reader(expected, read_across_frames=True).read() == tar


def test_old_gnu_sparse_headers_do_not_make_cuts_depend_on_reads(tmp_path: Path) -> None:
    for n in range(3):
        with (tmp_path / f"sparse{n}").open("wb") as file:
            for piece in range(40):  # more than four pieces need extension headers
                file.seek(piece * 65_536)
                file.write(b"%d" % piece * 4096)
    tar = subprocess.run(["tar", "-C", tmp_path, "-S", "--format=gnu", "-cf", "-", "."], capture_output=True, check=True).stdout
    expected, layer = encode(tar, target=8192)
    assert len(layer.toc.sparse) >= 3 * 40
    for size in (512, 1000, 4096):
        source, out = io.BytesIO(tar), io.BytesIO()
        encode_layer(lambda _, source=source, size=size: source.read(size), out, target=8192)
        assert out.getvalue() == expected


def test_large_files_begin_frames_and_small_ones_are_not_split() -> None:
    _, layer = encode(TAR)
    begins = set(layer.toc.frames.content_offsets.tolist())
    entries = layer.toc.entries
    for entry in range(len(entries)):
        if entries.kind[entry] == 0 and entries.size[entry]:
            first, size = int(entries.aux[entry]), int(entries.size[entry])
            covering = layer.toc.frames.covering(first, size)
            if size >= 16 << 10:
                assert first in begins
            else:
                assert len(covering) == 1


def test_defaults() -> None:
    """What docs/adr/0001-frame-size.md decided, in a blob that the zstd tool takes."""
    text = b"".join(b"line %d of a text that compresses well\n" % i for i in range(150_000))[: 5 << 20]
    tar = make_tar(
        [{"name": "small", "data": text[:1000]}, {"name": "huge", "data": text}, {"name": "large", "data": text[: 3 << 19]}]
    )
    out = io.BytesIO()
    layer = encode_layer(io.BytesIO(tar), out)
    assert (layer.toc.frame_target, layer.toc.level) == (640 << 10, 3)
    assert layer.toc.frames.content_sizes.tolist()[1:-1] == [*[1280 << 10] * 3, (1280 << 10) + 512, 640 << 10]
    assert subprocess.run(["zstd", "-dcq"], input=out.getvalue(), capture_output=True, check=True).stdout == tar
    sizes = [len(encode_layer_of(tar, level)) for level in (1, 3, 5)]
    assert sizes[0] > max(sizes[1:])  # what the next ones make of this text is a matter of libzstd's version
    assert len(set(sizes)) == 3


def encode_layer_of(tar: bytes, level: int) -> bytes:
    out = io.BytesIO()
    encode_layer(io.BytesIO(tar), out, level=level)
    return out.getvalue()


def test_progress() -> None:
    calls: list[tuple[int, int | None]] = []
    encode_layer(io.BytesIO(TAR), io.BytesIO(), total=len(TAR), progress=lambda *c: calls.append(c))
    assert calls[-1] == (len(TAR), len(TAR))
    assert calls == sorted(calls)


def test_a_reused_read_buffer_does_no_harm() -> None:
    buffer = bytearray(4096)
    source = io.BytesIO(TAR)

    def read(_: int) -> memoryview:
        return memoryview(buffer)[: source.readinto(buffer)]

    out = io.BytesIO()
    encode_layer(read, out, target=16 << 10)  # type: ignore[arg-type]
    assert out.getvalue() == encode(TAR)[0]


@pytest.mark.parametrize(
    ("tar", "message"),
    [
        (TAR[:1000], "bin"),
        (TAR[:200_000], "bin/large: the tar stream ends"),
        (b"junk" * 1000, "checksum"),
        (make_tar([{"name": "x", "type": tarfile.LNKTYPE, "linkname": "nowhere"}]), "x: a hard link to nowhere"),
    ],
)
def test_broken_streams_name_the_member(tar: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        encode(tar)


def test_limits() -> None:
    with pytest.raises(LimitError):
        encode(TAR, limits=Limits(max_entries=10))
    with pytest.raises(LimitError):
        encode(TAR, limits=Limits(max_stream=10_000))
    with pytest.raises(LimitError):
        encode(TAR, limits=Limits(max_frames=3))
    with pytest.raises(ValueError, match="target"):
        encode(TAR, target=64 << 20)


class Reluctant(io.BytesIO):
    """Takes little at once, as a pipe or an unbuffered file may."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        return super().write(data[:1000])


def test_short_writes_are_continued() -> None:
    out = Reluctant()
    encode_layer(io.BytesIO(TAR), out, target=16 << 10)
    assert out.getvalue() == encode(TAR)[0]


class Failing(io.BytesIO):
    """A disk that is full after some bytes."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self.tell() > 5000:
            raise OSError(28, "No space left on device")
        return super().write(data)


def test_errors_of_source_and_destination_pass_through_and_no_thread_stays() -> None:
    with pytest.raises(OSError, match="No space left"):
        encode_layer(io.BytesIO(TAR), Failing(), target=4096)

    def broken(_: int) -> bytes:
        raise ConnectionResetError("gone")

    with pytest.raises(ConnectionResetError):
        encode_layer(broken, io.BytesIO())

    class Interrupt(KeyboardInterrupt):
        pass

    def interrupt(_: int, __: int | None) -> None:
        raise Interrupt

    with pytest.raises(Interrupt):
        encode_layer(io.BytesIO(TAR), io.BytesIO(), progress=interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("weenv-encode")]


def test_memory_does_not_grow_with_the_layer() -> None:
    # A process of its own: its peak is this encoder's. 600 MB of stream that compresses at no cost, in two files.
    script = (
        "import io, sys, tarfile\n"
        "from weenv.layer.encode import encode_layer\n"
        "size = int(sys.argv[1]) << 20\n"
        "def parts():\n"
        "    for name in 'ab':\n"
        "        info = tarfile.TarInfo(name); info.size = size\n"
        "        yield info.tobuf()\n"
        "        for _ in range(size >> 20): yield bytes(1 << 20)\n"
        "    yield bytes(1024)\n"
        "stream = parts()\n"
        "class Null(io.RawIOBase):\n"
        "    def write(self, data): return len(data)\n"
        "encode_layer(lambda n: next(stream, b''), Null())\n"
        # ru_maxrss would count the parent, too
        "print(next(int(l.split()[1]) // 1024 for l in open('/proc/self/status') if l.startswith('VmHWM')))\n"
    )

    def peak(size: int) -> int:
        result = subprocess.run(
            [sys.executable, "-c", script, str(size)], capture_output=True, check=True, text=True, env=os.environ
        )
        return int(result.stdout)

    small, large = peak(16), peak(300)
    assert large < small + 60
    assert large < 200
