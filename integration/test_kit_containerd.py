"""The kit itself: both containerd lines run plain images with runc through ctr and CRI, with nothing of ours involved.

What the proof of lazy loading compares with, and relies on, is shown to work here first.
"""

from __future__ import annotations

import pytest

from weenv_testkit.containerd import Containerd
from weenv_testkit.cri import Cri
from weenv_testkit.procs import Failed
from weenv_testkit.registry import Registry
from weenv_testkit.store import Store


def test_ctr_pulls_every_byte_and_runs(plain: Containerd, registry: Registry, store: Store) -> None:
    ref = store.plain("small")
    image = store.image("small")
    mark = registry.mark()
    plain.pull(ref, snapshotter="overlayfs")
    assert registry.blob_bytes(mark)[image.layers[0].digest] == image.layers[0].size
    assert plain.content() == {image.digest, image.config, image.layers[0].digest}
    assert plain.run(ref, "echo", "hello", snapshotter="overlayfs") == "hello\n"
    script = "seq 100000; echo why >&2; exit 3"
    everything = "".join(f"{number}\n" for number in range(1, 100_001))
    assert plain.run(ref, "sh", "-c", script, snapshotter="overlayfs", check=False) == everything
    with pytest.raises(Failed, match=r"ended with 3: why$"):
        plain.run(ref, "sh", "-c", script, snapshotter="overlayfs")
    with pytest.raises(Failed, match="no-such-program"):
        plain.run(ref, "no-such-program", snapshotter="overlayfs")


def test_containers_survive_a_restart_of_the_daemon(plain: Containerd, store: Store) -> None:
    ref = store.plain("small")
    container = plain.run_detached(ref, "sleep", "1000", snapshotter="overlayfs")
    plain.restart()
    assert plain.exec(container, "id", "-u") == "0\n"
    with pytest.raises(Failed, match=r"ended with 4: why$"):
        plain.exec(container, "sh", "-c", "echo why >&2; exit 4")
    plain.remove_container(container)
    assert container not in plain.snapshots("overlayfs")


def test_cri_runs_a_pod(plain: Containerd, store: Store) -> None:
    ref = store.plain("small")
    with Cri(plain) as cri:
        identity = cri.pull(ref)
        assert cri.image(ref).id == identity == store.image("small").config
        pod = cri.run_pod("kit")
        try:
            container = cri.start_container(pod, ref, "sleep", "1000")
            assert cri.exec(container, ["cat", "/etc/passwd"]).startswith("root:")
        finally:
            cri.remove_pod(pod)
        cri.remove_image(ref)
        assert cri.image(ref) is None
