"""WeEnv's two daemons alone: how long Prepare takes with many callers, how much memory a hundred large layers cost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from typing import Any

from weenv_bench.image import MEDIA_CONFIG, MEDIA_INDEX, MEDIA_LAYER, MEDIA_MANIFEST, BenchError, cache_root, put_blob, say
from weenv_bench.node import FarRegistry, Node
from weenv_bench.parts import proportional_memory
from weenv_testkit import tools


def prepare_latency(node: Node, callers: int = 50, rounds: int = 20) -> dict[str, dict[str, float]]:
    """Prepare on an existing lazy parent: ``weenv`` straight at the snapshotter's socket, and both snapshotters through
    containerd. The client is a process of its own, see :mod:`weenv_bench.prepare`."""
    result = {}
    containerd = f"{node.directory}/c.sock"
    pid = node.daemons()["snapshotter"]
    for name, address, snapshotter, server in (
        ("weenv", f"{node.directory}/w/snapshotter.sock", "weenv", pid),
        ("weenv through containerd", containerd, "weenv", pid),
        ("overlayfs through containerd", containerd, "overlayfs", 0),
    ):
        done = subprocess.run(
            [sys.executable, os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "prepare-client",
             address, snapshotter, str(callers), str(rounds), str(server), *(["keep"] if address == containerd else [])],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise BenchError(f"prepare client: {done.stderr[-1500:]}\n{node.logs()}")
        result[name] = json.loads(done.stdout)
    return result


# --- memory ----------------------------------------------------------------------------------------------------------


def _header(name: str, size: int, kind: bytes, mode: int = 0o644) -> bytes:
    """One ustar header (POSIX.1-1988), owned by root."""
    head = bytearray(512)
    head[0 : len(name)] = name.encode()
    head[100:108] = b"%07o\0" % mode
    head[108:124] = b"0000000\0" * 2
    head[124:136] = b"%011o\0" % size
    head[136:148] = b"%011o\0" % 1700000000
    head[148:156] = b" " * 8
    head[156:157] = kind
    head[257:265] = b"ustar\x0000"
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head)


def many_layers(layers: int = 100, files: int = 50_000) -> str:
    """An OCI layout with one image ``many`` of ``layers`` converted layers of ``files`` files each. Cached."""
    base = os.path.join(cache_root(), f"many-{layers}-{files}")
    converted = os.path.join(base, "converted")
    if os.path.exists(os.path.join(base, "done")):
        return converted
    shutil.rmtree(base, ignore_errors=True)
    plain = os.path.join(base, "plain")
    blobs = os.path.join(plain, "blobs", "sha256")
    os.makedirs(blobs)
    say(f"{layers} layers of {files} files")
    digests = []
    for number in range(layers):
        parts = [_header(f"l{number:03}/", 0, b"5", 0o755)]
        for index in range(files):
            if index % 250 == 0:
                folder = f"l{number:03}/dir{index // 250:04}"
                parts.append(_header(folder + "/", 0, b"5", 0o755))
            size = 300 if index % 10 == 0 else 0
            parts.append(_header(f"{folder}/module_{index:06}_of_layer.py", size, b"0"))
            if size:
                text = hashlib.sha256(b"%d %d" % (number, index)).hexdigest().encode()
                parts.append((text * 5)[:size].ljust(512, b"\0"))
        parts.append(bytes(1024))
        data = b"".join(parts)
        digests.append({**put_blob(blobs, data), "mediaType": MEDIA_LAYER})
    config = put_blob(blobs, json.dumps({
        "architecture": "amd64", "os": "linux", "config": {"Cmd": ["/true"]},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in digests]},
    }).encode())  # fmt: skip
    manifest = put_blob(blobs, json.dumps({
        "schemaVersion": 2, "mediaType": MEDIA_MANIFEST, "config": {"mediaType": MEDIA_CONFIG, **config}, "layers": digests,
    }).encode())  # fmt: skip
    with open(os.path.join(plain, "index.json"), "w") as file:
        entry = {"mediaType": MEDIA_MANIFEST, **manifest, "annotations": {"org.opencontainers.image.ref.name": "many"}}
        json.dump({"schemaVersion": 2, "mediaType": MEDIA_INDEX, "manifests": [entry]}, file)
    with open(os.path.join(plain, "oci-layout"), "w") as file:
        file.write('{"imageLayoutVersion": "1.0.0"}')
    subprocess.run([*tools.weenv(), "convert", f"oci:{plain}:many", f"oci:{converted}:many"], check=True, stdout=sys.stderr)
    shutil.rmtree(plain)
    with open(os.path.join(base, "done"), "w"):
        pass
    return converted


def memory(node: Node, registry: FarRegistry) -> dict[str, Any]:
    """Pull an image of 100 layers of 50 000 files, walk it through a view of it, read a file of each; the daemons' memory."""
    registry.push(many_layers(), "many")
    before = proportional_memory(node.weenv_pids())
    begin = time.perf_counter()
    node.pull("many:many", "weenv")
    pulled = time.perf_counter() - begin
    top = node.ctr("snapshots", "--snapshotter", "weenv", "ls")
    key = node.name("many")
    parents = {line.split()[1] for line in top.splitlines()[1:] if len(line.split()) == 3}
    (name,) = [
        line.split()[0] for line in top.splitlines()[1:] if line.split()[0] not in parents and line.split()[-1] == "Committed"
    ]
    mount_point = os.path.join(node.directory, "view")
    os.mkdir(mount_point)
    script = node.ctr("snapshots", "--snapshotter", "weenv", "prepare", "--target", mount_point, key, name)
    subprocess.run(["sh", "-c", script], check=True)
    files = 0
    try:
        for _, _, names in os.walk(mount_point):
            files += len(names)
        for layer in sorted(os.listdir(mount_point)):
            with open(os.path.join(mount_point, layer, "dir0000", "module_000000_of_layer.py"), "rb") as file:
                if len(file.read()) != 300:
                    raise BenchError(f"a file of layer {layer} is not what was put there")
    finally:
        subprocess.run(["umount", mount_point], check=False)
    pids = node.weenv_pids()
    return {
        "pull_s": pulled, "files_seen": files, "idle_bytes": before, "total_bytes": proportional_memory(pids),
        "processes": len(pids), "peak_bytes": sum(_peak(pid) for pid in pids),
    }  # fmt: skip


def _peak(pid: int) -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
