"""dockerd's configuration, for nodes whose containers docker starts: images in containerd's store, layers from WeEnv."""

from __future__ import annotations

from weenv.systemd.install.edits import Change, Put

DAEMON = "/etc/docker/daemon.json"


def changes(name: str = "weenv") -> list[Change]:
    """What ``daemon.json`` has to say: with containerd's image store, the "storage driver" is a snapshotter of containerd's."""
    return [Put(("features", "containerd-snapshotter"), True), Put(("storage-driver",), name)]
