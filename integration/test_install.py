"""``weenv install`` on a node whose first process is systemd, of two Debians, and what systemd itself says of the units."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from weenv_testkit import kernels, tools
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

PACKAGES = ("systemd", "dbus", "kmod", "python3")
SUITES = ("trixie", "bookworm")


def usable(suite: str) -> bool:
    """Whether this interpreter runs in a system of that suite: it is not the system's own of another one."""
    return not os.path.realpath(sys.executable).startswith("/usr/bin/") or tools.sources()["codename"] == suite


@pytest.mark.skipif(not kernels.supported(), reason="these kernels are for x86-64")
@pytest.mark.parametrize("suite", ["trixie", pytest.param("bookworm", marks=pytest.mark.soak)])
def test_a_node_from_install_to_uninstall(suite: str, store: Store, registry: Registry) -> None:
    if not usable(suite):
        pytest.skip(f"this Python is not {suite}'s")
    image = store.lazy("pair")
    root = kernels.system(*PACKAGES, suite=suite)
    clone = str(Path(__file__).parents[1])
    script = f"exec {sys.executable} -m weenv_testkit.installguest {registry.root} {registry.host} {image}"
    done = kernels.run(
        kernels.UML, script, root=root, systemd=True, timeout=240, memory=1536, disk=1024, shares=[registry.root],
        environment={"PYTHONPATH": f"{clone}/integration", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert "uninstalled: everything is as it was" in done.ok(), done
