"""Layers for tests: tar streams made by the standard library's tarfile, and blobs of them."""

from __future__ import annotations

import io
import random
import tarfile
from typing import Any

from hypothesis import strategies as st

from weenv.layer.encode import EncodedLayer, encode_layer


def make_tar(members: list[dict[str, Any]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of members: ``name``, ``type`` (tarfile's, default a file), ``data``, and any attribute of TarInfo."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for member in members:
            info = tarfile.TarInfo(member["name"])
            data = member.get("data", b"")
            info.size = len(data)
            for key, value in member.items():
                if key not in ("name", "data"):
                    setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def sample_tar(seed: int = 1, large: int = 300_000) -> bytes:
    """A fixed tar with one of everything that a layer may hold, about ``large`` bytes and a half."""
    random_bytes = random.Random(seed).randbytes
    return make_tar(
        [
            {"name": "bin", "type": tarfile.DIRTYPE, "mode": 0o755, "mtime": 1_700_000_000},
            {"name": "bin/large", "data": random_bytes(large // 2) + bytes(large // 2), "mode": 0o755, "mtime": 5},
            {"name": "bin/su", "data": b"#!" * 300, "mode": 0o4755, "uid": 3_000_000, "mtime": 1_600_000_000},
            {"name": "bin/link", "type": tarfile.LNKTYPE, "linkname": "bin/su"},
            {"name": "etc/x/y/empty", "mtime": 7},
            {"name": "etc/passwd", "data": b"root:x:0:0::/:/bin/sh\n", "gid": 42},
            {"name": "etc/mtab", "type": tarfile.SYMTYPE, "linkname": "../proc/mounts"},
            {"name": "etc/.wh.shadow", "mode": 0o600},
            {"name": "opt", "type": tarfile.DIRTYPE, "mode": 0o700},
            {"name": "opt/.wh..wh..opq"},
            {"name": "dev/null", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3, "mode": 0o666},
            {"name": "dev/sda", "type": tarfile.BLKTYPE, "devmajor": 8, "devminor": 1_000, "mode": 0o660},
            {"name": "run/fifo", "type": tarfile.FIFOTYPE, "mode": 0o640},
            {
                "name": "bin/ping",
                "data": b"ping",
                "pax_headers": {"SCHILY.xattr.security.capability": "\0\0\0\x02" + "\0" * 16, "SCHILY.xattr.user.a": "1"},
            },
            {"name": "bin/\u00fcber " + "n" * 200, "data": b"long name", "mtime": 1.25},
            *({"name": f"usr/share/doc/{i:03d}/copyright", "data": b"text %d " % i * (i * 7)} for i in range(60)),
        ]
    )


def encode(tar: bytes, **options: Any) -> tuple[bytes, EncodedLayer]:
    """The blob of a tar stream and what the encoder says of it; frames of 16 KiB unless ``options`` say otherwise."""
    out = io.BytesIO()
    options.setdefault("target", 16 << 10)
    layer = encode_layer(io.BytesIO(tar), out, **options)
    return out.getvalue(), layer


_NAMES = st.text(alphabet="ab.\u00e9-_Z", min_size=1, max_size=12).filter(
    lambda n: n not in (".", "..") and not n.startswith(".wh.")
)


@st.composite
def tars(draw: st.DrawFn) -> bytes:
    """Any small tar that unpacks: files of all sizes around a few blocks, directories, links, devices, some replaced."""
    members: list[dict[str, Any]] = []
    directories, files = [""], []
    taken: set[str] = set()
    for _ in range(draw(st.integers(0, 14))):
        parent = draw(st.sampled_from(directories))
        name = parent + draw(_NAMES)
        kind = draw(st.sampled_from("fffdslcw"))
        if name in taken:
            continue
        taken.add(name)
        common = {
            "mode": draw(st.integers(0, 0o7777)),
            "uid": draw(st.sampled_from([0, 1000, 2_097_152])),
            "mtime": draw(st.sampled_from([0, 1, 1_700_000_000.5])),
        }
        if kind == "f":
            data = draw(st.binary(max_size=20)) * draw(st.sampled_from([0, 1, 30, 200, 2000]))
            members.append({"name": name, "data": data, **common})
            files.append(name)
        elif kind == "d":
            members.append({"name": name, "type": tarfile.DIRTYPE, **common})
            directories.append(name + "/")
        elif kind == "s":
            members.append({"name": name, "type": tarfile.SYMTYPE, "linkname": draw(_NAMES), **common})
        elif kind == "l" and files:
            members.append({"name": name, "type": tarfile.LNKTYPE, "linkname": draw(st.sampled_from(files)), **common})
        elif kind == "c":
            members.append({"name": name, "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5, **common})
        elif kind == "w":
            base = name.rpartition("/")[2]
            members.append({"name": f"{parent}.wh.{base}", **common})
    return make_tar(members, draw(st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])))
