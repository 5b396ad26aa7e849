"""skopeo, an independent reader and writer of images (containers/image and containers/storage)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from weenv_testkit.procs import run


def skopeo(policy: str, *arguments: str, storage: str = "") -> str:
    """Its output. ``policy`` is a signature policy file; ``storage`` a directory for a containers-storage of its own."""
    environment = dict(os.environ)
    if storage:
        configuration = storage + ".conf"
        Path(configuration).write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = {json.dumps(storage)}\nrunroot = {json.dumps(storage + ".run")}\n'
        )
        environment["CONTAINERS_STORAGE_CONF"] = configuration
    return run("skopeo", "--policy", policy, *arguments, env=environment)
