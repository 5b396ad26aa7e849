"""When a composed image was last used on this node: the time of an empty file, set at every start.

::

    <root>/environments/used/<namespace>/<SHA-256 of the image's name>

Nothing is asked of containerd for it, and a file that is lost makes an image look as old as its record.
"""

from __future__ import annotations

import contextlib
import hashlib
import os

HOST = "weenv.local"
"""Registry host in the names of composed images: no such registry exists, so nobody can be asked for one by mistake."""


def _place(directory: str, namespace: str) -> str:
    return os.path.join(directory, "used", namespace)


def _name(image: str) -> str:
    return hashlib.sha256(image.encode()).hexdigest()


def touch(directory: str, namespace: str, image: str) -> None:
    """It is used now (of images that were not composed nothing is noted). Blocking, some 10 us; never fails."""
    if not image.startswith(f"{HOST}/"):
        return
    path = os.path.join(_place(directory, namespace), _name(image))
    with contextlib.suppress(OSError):
        try:
            os.utime(path)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))


def last(directory: str, namespace: str, image: str) -> float:
    """When that was, in seconds since 1970; 0 where nobody knows."""
    try:
        return os.stat(os.path.join(_place(directory, namespace), _name(image))).st_mtime
    except OSError:
        return 0.0


def forget(directory: str, namespace: str, kept: set[str], before: float) -> None:
    """Remove what is noted of all images but ``kept``, if it was noted before a time (seconds since 1970)."""
    names = {_name(image) for image in kept}
    with contextlib.suppress(FileNotFoundError), os.scandir(_place(directory, namespace)) as entries:
        for entry in entries:
            if entry.name not in names:
                with contextlib.suppress(OSError):
                    if entry.stat().st_mtime < before:
                        os.unlink(entry.path)
