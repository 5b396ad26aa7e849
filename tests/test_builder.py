"""The processes that build metadata images, and a daemon that is killed meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys


def test_a_daemon_that_is_gone_is_no_error_of_the_nursery() -> None:
    code = [sys.executable, "-c", "from weenv.plugin.snapshotter.builder import nursery; nursery()"]
    with subprocess.Popen(code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        request = json.dumps({"id": 1, "memory": 64 << 20, "directory": "/nowhere", "variant": "", "attributes": "[]"})
        process.stdin.write(request.encode() + b"\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["error"] == "StorageError"
        process.stdout.close()
        process.stdin.write(request.encode() + b"\n")
        process.stdin.close()
        assert process.stderr.read() == b""  # at the end of which its child has ended, too
        assert process.wait(60) == 0
