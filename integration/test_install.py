"""``weenv install`` on a node whose first process is systemd: all starts, is killed, hung and upgraded, and goes away."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from weenv_testkit import kernels
from weenv_testkit.installguest import PACKAGES, SUITES, usable
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store

SOAK = (pytest.mark.soak, pytest.mark.timeout(900))  # its system may have to be made first


@pytest.mark.skipif(not kernels.supported(), reason="these kernels are for x86-64")
@pytest.mark.parametrize(
    ("suite", "more"), [(SUITES[0], ""), *(pytest.param(suite, "more", marks=SOAK) for suite in SUITES)]
)
def test_a_node_from_install_to_uninstall(suite: str, more: str, store: Store, registry: Registry) -> None:
    if not usable(suite):
        pytest.skip(f"this Python is not {suite}'s")
    image = store.lazy("pair")
    root = kernels.system(*PACKAGES, suite=suite)
    clone = str(Path(__file__).parents[1])
    script = f"exec {sys.executable} -m weenv_testkit.installguest {registry.root} {registry.host} {image} {more}"
    done = kernels.run(
        kernels.UML, script, root=root, systemd=True, timeout=800 if more else 270, memory=1536, disk=1024,
        shares=[registry.root], environment={"PYTHONPATH": f"{clone}/integration", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert "uninstalled: everything is as it was" in done.ok(), done
