"""The kit itself: what failed first is what is told, whatever goes wrong while the node is taken away."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from weenv_testkit import demo
from weenv_testkit.node import Node
from weenv_testkit.procs import Failed
from weenv_testkit.registry import Registry, free_port


def test_the_first_error_stays_the_error(home: str, registry: Registry) -> None:
    node = Node("2.1", os.path.join(home, "broken"), registry=registry.host, settings={"blobfs": "nonsense = 1"})

    def fails() -> None:
        raise Failed("something was left behind")

    node.containerd.close = fails  # type: ignore[method-assign]  # the one end that cannot be made to fail from outside
    with pytest.raises(Failed, match="nonsense") as caught, node:
        pass
    assert caught.value.__notes__ == ["and while it was taken away: something was left behind"]


def test_a_free_port_is_none_that_an_outgoing_connection_gets() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found = [free_port() for _ in range(100)]
    assert len(set(found)) == len(found)
    assert max(found) < low or low < 20_000


def test_logs_outlive_a_failed_demo(tmp_path: Path) -> None:
    names = ("registry/registry.log", "n/blobfs.log", "n/c/containerd.log")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    saved = Path(demo.save_logs(str(tmp_path)))
    try:
        found = {path.name: path.read_text() for path in saved.iterdir()}
        assert found == {name.replace("/", "-"): name for name in names}
    finally:
        subprocess.run(["rm", "-r", "--", saved], check=True)
