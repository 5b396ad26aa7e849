"""Which of systemd's services a process is, for those who are about to end it.

systemd.exec(5): a process that systemd itself starts has its own id in ``$SYSTEMD_EXEC_PID``, which its children inherit, and
are not; its control group is named after the unit (``/proc/PID/cgroup``, cgroups(7)).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Service:
    """A service. ``by_socket``: it was passed sockets, so a socket unit of its name may start it, too."""

    name: str
    by_socket: bool = False

    @property
    def stop(self) -> str:
        """The command that ends it for good."""
        sockets = [f"{self.name.removesuffix('.service')}.socket"] if self.by_socket else []
        return " ".join(["systemctl stop", *sockets, self.name])


def service_of(pid: int) -> Service | None:
    """The service whose process this is; None where it is none's own, is gone, or only root may look."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environ = file.read()
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            cgroup = file.read()
    except OSError:
        return None
    return parse(pid, environ, cgroup)


def parse(pid: int, environ: bytes, cgroup: str) -> Service | None:
    """:func:`service_of` from what the kernel says."""
    variables = dict(item.partition(b"=")[::2] for item in environ.split(b"\0"))
    if variables.get(b"SYSTEMD_EXEC_PID") != str(pid).encode():
        return None
    groups = {names: path for _, names, path in (line.split(":", 2) for line in cgroup.splitlines() if line.count(":") >= 2)}
    path = groups.get("name=systemd", groups.get("", ""))  # v1 and hybrid have a hierarchy of systemd's own
    names = [name for name in path.split("/") if name.endswith(".service")]
    return Service(names[-1], variables.get(b"LISTEN_PID") == str(pid).encode()) if names else None
