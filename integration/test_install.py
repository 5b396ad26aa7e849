"""``weenv install`` on a node whose first process is systemd: all starts, is killed, hung and upgraded, and goes away."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weenv_testkit import kernels
from weenv_testkit.installguest import PACKAGES, SUITES, suite_to_boot, usable
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

pytestmark = pytest.mark.skipif(not kernels.supported(), reason="these kernels are for x86-64")


def node(suite: str, store: Store, registry: Registry, *more: str, timeout: float) -> None:
    """Boot a system and have :mod:`weenv_testkit.installguest` try it."""
    image = store.lazy("pair")
    clone = str(Path(__file__).parents[1])
    script = " ".join(["exec", sys.executable, "-m weenv_testkit.installguest", registry.root, registry.host, image, *more])
    done = kernels.run(
        kernels.UML, script, root=kernels.system(*PACKAGES, suite=suite), systemd=True, timeout=timeout, memory=1536, disk=1024,
        shares=[registry.root], environment={"PYTHONPATH": f"{clone}/integration", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert "uninstalled: everything is as it was" in done.ok(), done


@pytest.mark.timeout(600)
def test_a_node_from_install_to_uninstall(store: Store, registry: Registry) -> None:
    node(suite_to_boot(), store, registry, timeout=550)


@pytest.mark.soak
@pytest.mark.timeout(900)  # its system may have to be made first
@pytest.mark.parametrize("suite", SUITES)
def test_a_node_of_each_debian(suite: str, store: Store, registry: Registry) -> None:
    if not usable(suite):
        pytest.skip(f"this Python is not {suite}'s")
    node(suite, store, registry, "more", timeout=800)
