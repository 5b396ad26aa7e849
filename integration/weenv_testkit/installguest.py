"""A node from ``weenv install`` to ``weenv uninstall``, under a real systemd: run in a guest of :mod:`weenv_testkit.kernels`.

``python -m weenv_testkit.installguest STORAGE ADDRESS IMAGE [more]`` with the storage of a docker-registry, the address that
it had, and the reference of ``Store.lazy("pair")`` in it. Each check is one line of the output; the first that fails ends it
with a traceback.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from weenv.plugin.snapshotter.mounts import mounts_below
from weenv.systemd.lobby import SETTINGS
from weenv_testkit import corpus, tools
from weenv_testkit.procs import processes_of, run, wait_until
from weenv_testkit.registry import Registry
from weenv_testkit.trees import contents

LINE = "2.1"
PACKAGES = ("systemd", "dbus", "kmod", "python3")
"""What the system of the guest consists of."""
SUITES = ("trixie", "bookworm", "sid")
"""With a systemd that keeps descriptors over a stop, one that does not yet, and the newest."""
UNITS = "/usr/local/lib/systemd/system"
DAEMONS = ("blobfs", "snapshotter", "elastic", "gateway")
_BEGIN = time.monotonic()


def usable(suite: str) -> bool:
    """Whether this interpreter runs in a system of that suite: it is not the system's own of another one."""
    return not os.path.realpath(sys.executable).startswith("/usr/bin/") or tools.sources()["codename"] == suite


def suite_to_boot() -> str:
    """The first of them that can be used here, at worst the machine's own."""
    return next(filter(usable, SUITES), tools.sources()["codename"])


def say(text: str) -> None:
    """One line of the report."""
    print(f"{time.monotonic() - _BEGIN:6.1f} {text}", flush=True)


def weenv(*arguments: str, status: int = 0) -> str:
    """Run the command; its output, errors included."""
    argv = [*tools.weenv(), *arguments]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    assert done.returncode == status, f"weenv {arguments} ended with {done.returncode}:\n{done.stdout}\n{journal()}"
    return done.stdout


def journal() -> str:
    """What systemd and the daemons have said."""
    argv = ("journalctl", "--no-pager", "--output=cat", "--unit=weenv*", "--unit=containerd", "--lines=250")
    return "\n".join(line for line in run(*argv, check=False).splitlines() if "level=info" not in line)


def show(unit: str, name: str) -> str:
    """A property of a unit."""
    return run("systemctl", "show", "--value", f"--property={name}", unit).strip()


def pid(daemon: str) -> int:
    """The main process of a daemon's unit; 0 where none runs."""
    return int(show(f"weenv-{daemon}.service", "MainPID"))


def active(daemon: str) -> bool:
    """Whether systemd has been told that it is ready."""
    return show(f"weenv-{daemon}.service", "ActiveState") == "active"


def prepare() -> None:
    """What Debian's packages of containerd and runc would put there, and a disk for what cannot be in memory."""
    os.chmod("/root", 0o711)  # where this machine may have its Python
    for name in ("weenv", "containerd"):
        os.makedirs(f"/var/tmp/{name}")
        os.makedirs(f"/var/lib/{name}", exist_ok=True)
        run("mount", "--bind", f"/var/tmp/{name}", f"/var/lib/{name}")
    programs = [os.path.join(tools.containerd_bin(LINE), name) for name in ("containerd", "ctr", "containerd-shim-runc-v2")]
    for program in (*programs, tools.runc()):
        os.symlink(program, f"/usr/local/bin/{os.path.basename(program)}")
    package = os.path.join(os.path.dirname(tools.containerd_bin(LINE)), "root")
    with open(f"{package}/usr/lib/systemd/system/containerd.service") as file:
        unit = file.read().replace("/usr/bin/containerd", "/usr/local/bin/containerd")
    with open("/etc/systemd/system/containerd.service", "w") as file:
        file.write(unit)
    shutil.copytree(f"{package}/etc/containerd", "/etc/containerd", dirs_exist_ok=True)
    run("systemctl", "daemon-reload")
    run("systemctl", "start", "containerd")


def ctr(*arguments: str) -> str:
    """Run ctr."""
    return run("/usr/local/bin/ctr", *arguments)


def installed() -> None:
    """``weenv install`` brings everything up, and a second run changes nothing."""
    assert "would" in weenv("install", "--dry-run") and not os.path.exists(UNITS)
    text = weenv("install", "--with", "elastic", "--with", "gateway")
    assert "restarted containerd.service" in text, text
    for daemon in DAEMONS:
        assert active(daemon), (daemon, journal())
        assert int(show(f"weenv-{daemon}.service", "WatchdogTimestampMonotonic")) > 0
        assert show(f"weenv-{daemon}.service", "ControlGroup").startswith("/weenv.slice/")
        with open(f"/proc/{pid(daemon)}/oom_score_adj") as file:
            assert int(file.read()) <= -500
    for daemon in ("blobfs", "snapshotter"):
        assert os.readlink(f"/proc/{pid(daemon)}/ns/mnt") == os.readlink("/proc/1/ns/mnt"), "mounts must propagate"
    with open(f"/proc/{pid('gateway')}/status") as file:
        assert "Uid:\t0" not in file.read(), "the gateway is not root"
    with open("/sys/fs/cgroup/weenv.slice/memory.min") as file:
        assert int(file.read()) == 256 << 20
    assert "weenv" in ctr("plugins", "ls")
    with urllib.request.urlopen("http://127.0.0.1:5050/v2/", timeout=60) as answer:
        assert answer.status == 200
    say("installed: all daemons told that they are ready")
    assert weenv("install") == "weenv is installed as it should be: nothing was changed\n"
    say("a second run changes nothing")


@contextlib.contextmanager
def container(image: str) -> Iterator[str]:
    """A container of a lazily pulled image, by containerd as it is configured now."""
    ctr("images", "pull", "--plain-http", "--snapshotter", "weenv", image)
    assert "lazy" in weenv("status")
    name = "c1"
    ctr("run", "--detach", "--null-io", "--snapshotter", "weenv", image, name, "sleep", "1000")
    try:
        yield name
    finally:
        for words in (("tasks", "kill", "--signal", "KILL", name), ("tasks", "delete", "--force", name)):
            subprocess.run(["/usr/local/bin/ctr", *words], capture_output=True, check=False)
        ctr("containers", "delete", name)


class Reader:
    """``sha256sum`` in the container of one of the image's files that nobody has read yet."""

    def __init__(self, name: str, number: int) -> None:
        self.number = number
        argv = ["/usr/local/bin/ctr", "tasks", "exec", "--exec-id", f"e{number}", name, "sha256sum", f"/data/{number}"]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ends_well(self) -> None:
        """The right content came, and no error."""
        said, _ = self.process.communicate(timeout=60)
        expected = hashlib.sha256(corpus.noise(50_000, 500 + self.number)).hexdigest()
        assert self.process.returncode == 0 and said.split()[0] == expected, (said, journal())


def waiting() -> bool:
    """Whether blobfs has a reader that it cannot answer yet."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect("/run/weenv/blobfs.sock")
        text = b"".join(iter(lambda: asked.recv(65536), b""))
    return bool(json.loads(text)["waiting"])


def survives(name: str, registry: Registry) -> None:
    """Kills, hangs and restarts: systemd starts anew what ended, and the container reads on."""
    kept = int(show("weenv-blobfs.service", "NFileDescriptorStore"))
    say(f"systemd {run('systemctl', '--version').split()[1]} keeps {kept} descriptors")
    os.kill(registry.pid, signal.SIGSTOP)
    reader = Reader(name, 0)
    wait_until("a reader to wait", waiting)
    old = pid("blobfs")
    victims = [old, *processes_of("blobfs.holder")] if kept else [old]
    for victim in victims:
        os.kill(victim, signal.SIGKILL)
    wait_until("another blobfs", lambda: pid("blobfs") not in (0, old) and active("blobfs"), 60)
    os.kill(registry.pid, signal.SIGCONT)
    reader.ends_well()
    say(f"killed: {len(victims)} processes of blobfs while a reader waited; it got its data")

    old = pid("snapshotter")
    lock = os.open("/var/lib/weenv/lock", os.O_RDWR)
    os.kill(old, signal.SIGKILL)
    fcntl.flock(lock, fcntl.LOCK_EX)  # the next one waits for it, as if its predecessor were still ending
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(60)
        client.connect("/run/weenv/snapshotter.sock")
        assert client.recv(100) == SETTINGS and not active("snapshotter")
    os.close(lock)
    wait_until("another snapshotter", lambda: pid("snapshotter") not in (0, old) and active("snapshotter"), 60)
    listed = ("snapshots", "--snapshotter", "weenv", "ls")  # before it was greeted it may have given up, and tries again
    wait_until("containerd to have it again", lambda: run("/usr/local/bin/ctr", *listed, check=False).count("\n") > 2)
    Reader(name, 1).ends_well()
    say("killed: the snapshotter; the next one greets who comes while it starts, and containerd has it again")

    before = {daemon: pid(daemon) for daemon in DAEMONS}
    reader = Reader(name, 2)
    run("systemctl", "restart", "weenv.target")
    wait_until("all to be back", lambda: all(active(one) and pid(one) != before[one] for one in DAEMONS), 60)
    reader.ends_well()
    Reader(name, 3).ends_well()
    say("restarted: everything, as an upgrade does")


def hangs(name: str) -> None:
    """Daemons that do not say anything any more are replaced. An operator's drop-in: a minute is too long here."""
    folders = [f"/etc/systemd/system/weenv-{daemon}.service.d" for daemon in DAEMONS]
    for folder in folders:
        os.makedirs(folder)
        with open(f"{folder}/quick.conf", "w") as file:
            file.write("[Service]\nWatchdogSec=5\nTimeoutAbortSec=1\n")
    run("systemctl", "daemon-reload")
    run("systemctl", "restart", "weenv.target")
    wait_until("all to be back", lambda: all(map(active, DAEMONS)), 60)
    before = {daemon: pid(daemon) for daemon in DAEMONS}
    for one in before.values():
        os.kill(one, signal.SIGSTOP)
    wait_until("the watchdog to bite", lambda: all(active(one) and pid(one) != before[one] for one in DAEMONS), 60)
    Reader(name, 4).ends_well()
    say("hung: everything, until the watchdog noticed")
    for folder in folders:
        shutil.rmtree(folder)
    run("systemctl", "daemon-reload")


def stopped() -> None:
    """blobfs is ended by what runs it; then its mount can be taken away, and the next one makes another."""
    units = [f"weenv-{daemon}.{kind}" for daemon in ("snapshotter", "blobfs") for kind in ("socket", "service")]
    run("systemctl", "stop", *units)
    assert "/run/weenv/blobs" in mounts_below("/run/weenv"), "the holder has it"
    for point in sorted(mounts_below("/var/lib/weenv"), key=len, reverse=True):
        run("umount", point)
    assert "is gone" in weenv("blobfs", "stop")
    assert "/run/weenv/blobs" not in mounts_below("/run/weenv") and not pid("blobfs")
    run("systemctl", "start", *units)
    assert "/run/weenv/blobs" in mounts_below("/run/weenv") and "lazy" in weenv("status")
    say("stopped: blobfs, and its mount taken away; another one has its own")


def again(image: str) -> None:
    """Installed anew, everything goes on from where it was; purged, nothing is left."""
    run("systemctl", "stop", "containerd", "dbus.socket", "dbus.service")  # systemd can be asked without a bus, too
    weenv("install", "--no-start", "--with", "nri")
    assert not active("snapshotter")
    run("systemctl", "start", "multi-user.target", "containerd")
    wait_until("all that is wanted at boot", lambda: all(map(active, ("blobfs", "snapshotter", "nri"))), 60)
    started = [int(show(unit, "ActiveEnterTimestampMonotonic")) for unit in ("weenv-snapshotter.service", "containerd.service")]
    assert started == sorted(started), "containerd finds its snapshotter"
    with container(image) as name:
        Reader(name, 0).ends_well()
        mapped = ("--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536", "--remap-labels")
        owner = ctr("run", "--rm", "--snapshotter", "weenv", *mapped, image, "c2", "stat", "-c", "%u %g", "/data/0")
        assert owner.split() == ["0", "0"], owner
        say("a container in a user namespace has its files")
    ctr("images", "rm", "--sync", image)
    weenv("uninstall", "--purge")
    assert not os.listdir("/var/lib/weenv") and not os.path.exists("/run/weenv")
    say("installed again at boot, and purged")


def main(storage: str, address: str, image: str, *more: str) -> None:
    """All of it."""
    prepare()
    before = contents("/etc", "/usr/local")
    with Registry("/var/tmp/registry", root=storage, address=address) as registry:
        say("the node is up")
        installed()
        with container(image) as name:
            survives(name, registry)
            if more:
                hangs(name)
            refused = weenv("blobfs", "stop", status=1)
            assert "weenv-blobfs.service starts blobfs again" in refused and pid("blobfs"), refused
            assert "systemctl stop weenv-blobfs.socket weenv-blobfs.service" in refused, refused
            refused = weenv("uninstall", status=1)
            assert "1 container" in refused and active("snapshotter"), refused
            Reader(name, 5).ends_well()
            say("uninstall is refused while a container runs")
        if more:
            stopped()
        weenv("uninstall")
        after = contents("/etc", "/usr/local")
        changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
        users = {"/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow", "/etc/.pwd.lock"}
        assert changed <= users | {f"{path}-" for path in users}, changed
        assert not os.path.exists("/run/weenv") and not mounts_below("/var/lib/weenv") and not mounts_below("/run/weenv")
        units = run("systemctl", "list-units", "--all", "--plain", "--no-legend", "weenv-[!k]*")
        assert "weenv-" not in units, (units, show("weenv-blobfs.service", "NFileDescriptorStore"))
        left = {line for word in (" serve", "holder", "nursery") for line in processes_of(word).values()}
        assert all("registry" in line for line in left), left
        assert os.path.exists("/var/lib/weenv/metastore.db"), "layers and snapshots stay"
        assert "overlayfs" in ctr("plugins", "ls") and " weenv " not in ctr("plugins", "ls")
        say("uninstalled: everything is as it was before, but for the user and the layers")
        if more:
            again(image)


if __name__ == "__main__":
    main(*sys.argv[1:])
