"""Other kernels than the machine's own, to run tests under: User-mode Linux, and Debian's kernels in QEMU without KVM.

``run(UML, "uname -r")`` boots, runs the shell text as root and powers off. What the script sees:

- ``/`` is the machine's own (or ``root``, a directory with another system), through an overlay in the guest's memory: all can
  be written to, nothing of it stays. ``/tmp``, ``/var/tmp`` and ``/run`` are file systems in memory of its own, and empty.
- The clone, the virtual environment, the tool cache and what ``shares`` names are where the machine has them; only ``shares``
  are written through to.
- cgroup v2 alone, with all controllers on; a loopback interface and no other; its own ``/proc``, ``/sys``, ``/dev``.

============  ====================================  =====================================================================
kernel        from                                  good for
============  ====================================  =====================================================================
``UML``       Debian unstable, boots in a second    limits and reclaim of cgroup v2, at nearly full speed; one CPU, no PSI
``UML_6_1``   Debian 12, the same                   an old kernel, likewise: no EROFS from files, for one
``LINUX_6_12``  Debian 13, boots in some seconds    all else: PSI, two CPUs, dm, fanotify; programs run 10 to 30 times slower
``LINUX_6_1`` Debian 12, the same                   the same with the old kernel that Debian boots
============  ====================================  =====================================================================

:func:`prepare` (``make test`` calls it beforehand) downloads with apt, by the machine's own configuration, into the tool cache
of :mod:`weenv_testkit.fetch_tools`; nothing is installed. A guest lives in mount and pid namespaces of its own: however it
ends, the kernel takes all of it away.
"""

from __future__ import annotations

import contextlib
import fcntl
import lzma
import os
import platform
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weenv_testkit import fetch_tools, images, tools
from weenv_testkit.fetch_tools import TOOLS, PrivateApt, SetupError, Tool
from weenv_testkit.procs import Failed, children_of, end_processes
from weenv_testkit.procs import run as run_program

LAYOUT = "1"
"""Changes when what :func:`prepare` leaves changes."""


@dataclass(frozen=True)
class Kernel:
    """``name`` is its directory in the cache, ``suite`` the Debian that it is from, ``package`` what depends on it there."""

    name: str
    suite: str
    package: str

    @property
    def emulated(self) -> bool:
        """It runs in QEMU, so that everything is slow."""
        return self.package != _UML_PACKAGE

    @property
    def home(self) -> Path:
        """What :func:`prepare` has made of it."""
        return TOOLS / self.name


_UML_PACKAGE = "user-mode-linux"
UML = Kernel("uml", "sid", _UML_PACKAGE)
UML_6_1 = Kernel("uml-6.1", "bookworm", _UML_PACKAGE)
LINUX_6_12 = Kernel("linux-6.12", "trixie", "linux-image-amd64")
LINUX_6_1 = Kernel("linux-6.1", "bookworm", "linux-image-amd64")
KERNELS = (UML, UML_6_1, LINUX_6_12, LINUX_6_1)

_QEMU_SUITE = "trixie"
_QEMU = TOOLS / "qemu"
_PARTS = (
    "*/boot/vmlinuz-*", "*/boot/config-*", "*/modules.builtin", "*/modules.order", "*/kernel/fs/*", "*/kernel/lib/*",
    "*/kernel/crypto/*", "*/kernel/net/*", "*/kernel/drivers/virtio/*", "*/kernel/drivers/block/*",
    "*/kernel/drivers/char/*", "*/kernel/drivers/md/*", "*/kernel/drivers/net/virtio_net*", "*/kernel/drivers/net/veth*",
    "*/kernel/drivers/net/net_failover*", "*/kernel/drivers/net/dummy*",
)  # fmt: skip
"""Of a kernel's package: no drivers of hardware."""
_BOOT_MODULES = ("9pnet_virtio", "9p", "virtio_pci", "overlay")
"""In the initramfs: what it takes to see the machine's files."""
MODULES = ("overlay", "fuse", "crc32c_generic", "erofs", "virtio_blk", "ext4")
"""Loaded in every guest, where they are modules at all. EROFS finds its checksum by name, which no list of dependencies has."""

PREFIX = f"wk{os.getpid()}."
"""Of a guest's directory in /tmp; its processes have it in their command lines."""


def supported() -> bool:
    """Whether such guests run on this machine's processor at all."""
    return platform.machine() == "x86_64"


# -- the cache ------------------------------------------------------------------------------------------------------------


def prepare(*kernels: Kernel) -> None:
    """Have everything that ``kernels`` (all of them, if none is named) need. Raises SetupError."""
    if not supported() or all(_ready(kernel.home) for kernel in kernels or KERNELS):
        return
    with _alone():
        missing = [kernel for kernel in kernels or KERNELS if not _ready(kernel.home)]
        if any(kernel.emulated for kernel in missing) and not _ready(_QEMU):
            _fetch_qemu()
        for kernel in missing:
            if kernel.emulated:
                _fetch_kernel(kernel)
            else:
                _fetch_uml(kernel)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """One process at a time fills the cache."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    with open(TOOLS / ".kernels", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _ready(home: Path) -> bool:
    try:
        return (home / "READY").read_text() == LAYOUT
    except OSError:
        return False


def _done(home: Path) -> None:
    (home / "READY").write_text(LAYOUT)


@contextlib.contextmanager
def _filling(final: Path) -> Iterator[Path]:
    """A directory that takes its place in the cache once the block is through."""
    work = TOOLS / f".new-{final.name}"
    shutil.rmtree(work, ignore_errors=True)
    (work / "debs").mkdir(parents=True)
    try:
        yield work
        shutil.rmtree(work / "debs")
        _done(work)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(work, final)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch_uml(kernel: Kernel) -> None:
    """The kernel, which is a program, its C library and its modules."""
    tool = Tool(kernel.name, (kernel.suite,), (kernel.package, "libc6", "libgcc-s1"), ("linux.uml",))
    fetch_tools.unpack(tool, PrivateApt(fetch_tools.machine_sources(), tool.suites))
    _loadable(kernel.home, next((kernel.home / "root").glob("usr/lib/uml/modules/*")))
    _enterable(kernel.home / "root")
    _done(kernel.home)


def _fetch_qemu() -> None:
    """QEMU with all that it depends on, down to its C library: one directory, whatever Debian the machine is."""
    apt = PrivateApt(fetch_tools.machine_sources(), (_QEMU_SUITE,))
    with _filling(_QEMU) as work:
        for deb in apt.download(apt.closure("qemu-system-x86"), work / "debs"):
            fetch_tools.run("dpkg-deb", "--extract", str(deb), str(work / "root"))
        _enterable(work / "root")


def _fetch_kernel(kernel: Kernel) -> None:
    """``vmlinuz``, ``config``, ``lib/modules/VERSION`` and an initramfs that finds the machine's files."""
    apt = PrivateApt(fetch_tools.machine_sources(), (kernel.suite,))
    package = next((name for name in apt.closure(kernel.package) if re.match(r"linux-image-\d", name)), None)
    if package is None:
        raise SetupError(f"{kernel.package} of {kernel.suite} depends on no kernel; report this as a bug of the test kit")
    with _filling(kernel.home) as work:
        (deb,) = apt.download((package,), work / "debs")
        (work / "all").mkdir()
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE) as source:
            argv = ["tar", "--extract", "--wildcards", "--directory", str(work / "all"), *_PARTS]
            # tar's complaint about a pattern that matches nothing is none: kernels differ in what is built in.
            subprocess.run(argv, stdin=source.stdout, stderr=subprocess.DEVNULL, check=False)
        modules = next(iter((work / "all").glob("**/modules/*")), None)
        vmlinuz = next(iter((work / "all").glob("boot/vmlinuz-*")), None)
        if source.returncode or modules is None or vmlinuz is None:
            raise SetupError(f"package {package} has no kernel where one is expected; report this as a bug of the test kit")
        os.rename(vmlinuz, work / "vmlinuz")
        os.rename(next((work / "all").glob("boot/config-*")), work / "config")
        _loadable(work, modules)
        shutil.rmtree(work / "all")
        _initramfs(work)


def _loadable(home: Path, modules: Path) -> None:
    """Move a kernel's modules to ``lib/modules``, uncompressed, and find out what needs what."""
    target = home / "lib" / "modules" / modules.name
    target.parent.mkdir(parents=True)
    os.rename(modules, target)
    for packed in target.rglob("*.ko.xz"):
        packed.with_suffix("").write_bytes(lzma.decompress(packed.read_bytes()))
        packed.unlink()
    fetch_tools.run(tools.busybox(), "depmod", "-b", str(home), target.name)


def _enterable(root: Path) -> None:
    """Make unpacked packages a directory that a process can have as its root."""
    for name in ("bin", "sbin", "lib", "lib64"):
        if not os.path.lexists(root / name):
            (root / name).symlink_to(f"usr/{name}")
    for name in ("h", "proc", "dev", "tmp"):
        (root / name).mkdir(exist_ok=True)
    shutil.copy(tools.busybox(), root / "busybox")


def _initramfs(home: Path) -> None:
    tree = home / "initramfs"
    for name in ("bin", "dev", "proc", "host", "new", "m"):
        (tree / name).mkdir(parents=True)
    shutil.copy(tools.busybox(), tree / "bin" / "busybox")
    order = [shutil.copy(path, tree / "m") for path in _in_order(home, _BOOT_MODULES)]
    load = "".join(f"$B insmod /m/{os.path.basename(path)}\n" for path in order)
    (tree / "init").write_text(_INITRAMFS.replace("@LOAD@", load))
    (tree / "init").chmod(0o755)
    fetch_tools.run("bsdtar", "--format=newc", "--create", "--file", str(home / "initrd"), "--directory", str(tree), ".")
    shutil.rmtree(tree)


def _in_order(home: Path, names: Sequence[str]) -> list[str]:
    """Paths of modules and of all that they need, that which is needed first; what is built in is left out."""
    (folder,) = (home / "lib" / "modules").iterdir()
    needs: dict[str, list[str]] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
    by_name = {os.path.basename(path).removesuffix(".ko").replace("-", "_"): path for path in needs}
    order: list[str] = []

    def add(path: str) -> None:
        for needed in needs[path]:
            add(needed)
        if path not in order:
            order.append(path)

    for name in names:
        if name in by_name:
            add(by_name[name])
    return [str(folder / path) for path in order]


def system(*packages: str, suite: str = "") -> str:
    """A directory with a minimal Debian of the machine's suite, or ``suite``, and packages: a ``root`` of guests; cached."""
    with _alone():
        tar = images.debian_tar(packages, suite)
        final = Path(tar.removesuffix(".tar"))
        if not _ready(final):
            with _filling(final) as work:
                options = ["--xattrs", "--xattrs-include=*", "--directory", str(work)]
                run_program("tar", "--extract", "--file", tar, *options, timeout=300)
    return str(final)


# -- in the guest ---------------------------------------------------------------------------------------------------------

_INITRAMFS = """#!/bin/busybox sh
B=/bin/busybox
$B mount -t devtmpfs dev /dev
exec </dev/console >/dev/console 2>&1
$B mount -t proc proc /proc
@LOAD@$B mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=512000 root /host
kit=$($B sed -n 's/.*weenv[.]kit=\\([^ ]*\\).*/\\1/p' /proc/cmdline)
exec $B sh /host$kit/first
"""

_FIRST = """#!{busybox} sh
# The first process of the guest: the machine's files are below {host}/, and not to be written to.
B={host}{busybox}
$B mount -t proc proc /proc 2>/dev/null
{load}
$B mount -t tmpfs -o mode=755 new {new}
$B mkdir -p {new}/up {new}/work {new}/root
R={new}/root
$B mount -t overlay -o lowerdir={host}{root},upperdir={new}/up,workdir={new}/work overlay $R || $B poweroff -f
for own in tmp var/tmp run; do
    $B mkdir -p $R/$own
    $B mount -t tmpfs -o mode=1777 $own $R/$own
done
$B mount -t devtmpfs dev $R/dev
$B rm -f $R/.dockerenv
{disk}
{binds}
$B mkdir -p $R/lib/modules/{release}
$B mount -o bind {host}{modules} $R/lib/modules/{release}
$B cp -a {host}{kit}/etc $R/
cd $R
$B mount -o move . /
exec $B chroot . {start}
"""

_SECOND = """#!{busybox} sh
B={busybox}
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mkdir -p /dev/pts /dev/shm
$B mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
$B mount -t tmpfs -o mode=1777 shm /dev/shm
$B mount -t cgroup2 cgroup2 /sys/fs/cgroup
for controller in $($B cat /sys/fs/cgroup/cgroup.controllers); do
    echo +$controller > /sys/fs/cgroup/cgroup.subtree_control
done
$B ip link set lo up
exec {kit}/run
"""

_RUN = """#!{busybox} sh
B={busybox}
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root PYTHONDONTWRITEBYTECODE=1
{environment}
$B stty raw -echo -F {out}
exec </dev/null >{out} 2>&1
/bin/sh {kit}/script
printf '\\n{token} %d\\n' $?
exec >/dev/null 2>&1
$B sync
$B poweroff -f
"""

_UNITS = {
    "weenv-kit.target": "[Unit]\nRequires=basic.target weenv-kit.service\nAfter=basic.target\nAllowIsolate=yes\n",
    "weenv-kit.service": (
        "[Unit]\nAfter=basic.target\n[Service]\nType=oneshot\nExecStart={kit}/run\nTimeoutStartSec=infinity\nDelegate=yes\n"
    ),
}
"""With systemd as the first process: only what is basic is started, and the script."""


@dataclass(frozen=True)
class Done:
    """``output`` is what the script wrote to its standard output and error, ``console`` what the kernel did."""

    status: int
    output: str
    console: str
    seconds: float

    def ok(self) -> str:
        """The output. Raises Failed with its end where the script ended with anything but 0."""
        if self.status:
            raise Failed(f"the script ended with {self.status} in the guest:\n{self.output[-6000:]}")
        return self.output


def run(
    kernel: Kernel,
    script: str,
    *,
    timeout: float = 120,
    shares: Sequence[str] = (),
    memory: int = 1024,
    cpus: int = 2,
    disk: int = 0,
    root: str = "/",
    modules: Sequence[str] = (),
    systemd: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Done:
    """Boot ``kernel``, run a shell script as root, power off.

    ``timeout`` is in seconds and hard. ``memory`` is in MiB. ``cpus`` are one in UML, whatever is asked for. ``disk`` is the
    size in MiB of an ext4 file system at ``/var/tmp``, for what cannot be in memory. ``modules`` are loaded besides
    :data:`MODULES`. With ``systemd`` the script is a service of the system in ``root``, which is the first process.
    Raises Failed where the guest does not come to the script's end, with all that it wrote.
    """
    prepare(kernel)
    kit = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
    try:
        return _Guest(kernel, kit, root, tuple(shares), disk).run(
            script, timeout, memory, cpus, [*MODULES, *modules], systemd, environment or {}
        )
    finally:
        shutil.rmtree(kit, ignore_errors=True)


def run_tests(
    kernel: Kernel,
    files: Sequence[str],
    chosen: str,
    *,
    first: str = ":",
    timeout: float,
    memory: int = 1024,
    disk: int = 0,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run those of this directory's tests that ``chosen`` (pytest's -k) names in a guest, after the shell command ``first``;
    what both said. Raises Failed where a test fails, or is skipped."""
    argv = [sys.executable, "-m", "pytest", "-q", "--color=no", "-p", "no:cacheprovider", "-m", "not soak", "--tb=short"]
    argv += ["-k", chosen, *(f"integration/{name}" for name in files)]
    script = f"cd {shlex.quote(str(Path(__file__).parents[2]))} && {first} && {shlex.join(argv)}"
    text = run(kernel, script, timeout=timeout, memory=memory, disk=disk, environment=environment).ok()
    summary = text.strip().splitlines()[-1]
    if " passed" not in summary or "skipped" in summary:
        raise Failed(f"not all tests were run in the guest:\n{text[-3000:]}")
    return text


class _Guest:
    def __init__(self, kernel: Kernel, kit: str, root: str, shares: tuple[str, ...], disk: int) -> None:
        self.kernel = kernel
        self.kit = kit
        self.root = os.path.realpath(root)
        self.shares = tuple(os.path.realpath(path) for path in shares)
        own = [str(Path(__file__).parents[2]), sys.prefix, sys.base_prefix, str(TOOLS), kit]
        self.seen = tuple(dict.fromkeys(os.path.realpath(path) for path in own if path != "/usr"))
        self.disk = disk
        self.token = secrets.token_hex(12)
        # UML's first serial line, or QEMU's second: the first is the console there.
        self.out = "/dev/ttyS1" if kernel.emulated else "/dev/ttyS0"

    def run(
        self,
        script: str,
        timeout: float,
        memory: int,
        cpus: int,
        modules: Sequence[str],
        systemd: bool,
        environment: Mapping[str, str],
    ) -> Done:
        self._write(script, modules, systemd, environment)
        program = self._qemu(memory, cpus) if self.kernel.emulated else self._uml(memory)
        begin = time.monotonic()
        ended = self._enter(program, timeout)
        took = time.monotonic() - begin
        output, console = self._read("output"), self._read("console")
        text, mark, rest = output.rpartition(f"\n{self.token} ")
        if mark and rest.strip().isdigit():
            return Done(int(rest), text, console, took)
        what = f"ended with {ended}" if ended is not None else f"was ended after {timeout:.0f} s"
        raise Failed(f"{self.kernel.name} {what}, before the script did:\n{console[-3000:]}\n{output[-6000:]}")

    def _read(self, name: str) -> str:
        with open(os.path.join(self.kit, name), errors="replace") as file:
            return file.read().replace("\r\n", "\n")

    def _write(self, script: str, modules: Sequence[str], systemd: bool, environment: Mapping[str, str]) -> None:
        """All that the guest reads, into the kit's directory."""
        host = "/host" if self.kernel.emulated else ""
        (folder,) = (self.kernel.home / "lib" / "modules").iterdir()
        load = [f"$B insmod {host}{path} 2>/dev/null" for path in _in_order(self.kernel.home, modules)]
        device = "vda" if host else "ubda"
        exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
        values = {
            "busybox": tools.busybox(),
            "kit": self.kit,
            "host": host,
            "new": "/new" if self.kernel.emulated else f"{self.kit}/new",
            "root": self.root,
            "release": folder.name,
            "modules": str(folder),
            "load": "\n".join(load),
            "disk": f"$B mount -t ext4 $R/dev/{device} $R/var/tmp\n$B chmod 1777 $R/var/tmp" if self.disk else "",
            "binds": "\n".join(self._binds(host)),
            "start": "/lib/systemd/systemd --unit=weenv-kit.target" if systemd else f"{self.kit}/second",
            "environment": "\n".join(exports),
            "out": self.out,
            "token": self.token,
        }
        if self.disk:
            with open(os.path.join(self.kit, "disk"), "wb") as disk:
                disk.truncate(self.disk << 20)
            run_program("mkfs.ext4", "-q", "-E", "lazy_itable_init=1,lazy_journal_init=1", disk.name)
        units = os.path.join(self.kit, "etc", "systemd", "system")
        os.makedirs(units if systemd else os.path.join(self.kit, "etc"))
        os.mkdir(os.path.join(self.kit, "new"))
        texts = {"first": _FIRST, "second": _SECOND, "run": _RUN}
        if systemd:
            texts |= {os.path.join(units, name): text for name, text in _UNITS.items()} | {"etc/fstab": ""}
        with open(os.path.join(self.kit, "script"), "w") as file:
            file.write(script)
        for name, text in texts.items():
            path = os.path.join(self.kit, name)
            with open(path, "w") as file:
                file.write(text.format_map(values))
            os.chmod(path, 0o755 if "/" not in name else 0o644)

    def _binds(self, host: str) -> Iterator[str]:
        """The machine's directories that the new root does not have, or has hidden; then those to be written to."""
        hidden = ("/tmp/", "/var/tmp/", "/run/")
        for path in self.seen:
            if self.root != "/" or f"{path}/".startswith(hidden):
                yield f"$B mkdir -p $R{path}\n$B mount -o bind {host}{path} $R{path}"
        for number, path in enumerate(self.shares):
            how = f"-t hostfs -o /h{path} share{number}"
            if host:
                how = f"-t 9p -o trans=virtio,version=9p2000.L,cache=none,msize=512000 share{number}"
            yield f"$B mkdir -p $R{path}\n$B mount {how} $R{path}"

    def _uml(self, memory: int) -> list[str]:
        console = ["con=null", "con0=null,fd:1", "ssl=null", "ssl0=null,fd:3"]
        boot = ["rootfstype=hostfs", "rootflags=/h", "ro", f"init={self.kit}/first", "quiet", "panic=-1"]
        boot.append("seccomp=auto")  # system calls cost half as much as those that ptrace catches
        if self.disk:
            boot.append(f"ubd0=/h{self.kit}/disk")
        return ["/usr/bin/linux.uml", "uml_dir=/tmp/", f"mem={memory}M", *console, *boot]

    def _qemu(self, memory: int, cpus: int) -> list[str]:
        home = f"/h{self.kernel.home}"
        argv = ["/usr/bin/qemu-system-x86_64", "-accel", "tcg,thread=multi", "-machine", "q35", "-cpu", "max"]
        argv += ["-smp", str(cpus), "-m", str(memory), "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        argv += ["-nic", "none", "-kernel", f"{home}/vmlinuz", "-initrd", f"{home}/initrd", "-append"]
        argv.append(f"console=ttyS0 quiet loglevel=4 panic=-1 psi=1 mitigations=off weenv.kit={self.kit}")
        argv += ["-serial", f"file:/h{self.kit}/console", "-serial", f"file:/h{self.kit}/output"]
        if self.disk:
            argv += ["-drive", f"file=/h{self.kit}/disk,if=virtio,format=raw,cache=unsafe"]
        for name, path, more in [("root", "", ",readonly=on")] + [(f"share{n}", p, "") for n, p in enumerate(self.shares)]:
            argv += ["-fsdev", f"local,id={name},path=/h{path},security_model=none,multidevs=remap{more}"]
            argv += ["-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"]
        return argv

    def _enter(self, program: Sequence[str], timeout: float) -> int | None:
        """Run a program in a root of its own, where the machine's files are below ``/h``; None where its time was up."""
        root = (_QEMU if self.kernel.emulated else self.kernel.home) / "root"
        places = [path for path in (*self.seen, *self.shares, self.root) if path != "/"]
        binds = "".join(f"mount --bind {shlex.quote(path)} {shlex.quote(f'{root}/h{path}')}\n" for path in places)
        argv = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--"]
        argv += ["sh", "-ec", _ENTER.replace("@BINDS@", binds), "sh", str(root), f"/h{self.kit}/output", *program]
        with open(os.path.join(self.kit, "console"), "wb") as console:
            open(os.path.join(self.kit, "output"), "wb").close()
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                return child.wait(timeout)
            except subprocess.TimeoutExpired:
                return None
            finally:
                # The first process of a pid namespace takes all others with it, and they their mounts; it ends after them.
                if child.poll() is None:
                    end_processes([child.pid, *children_of([child.pid])], timeout=60)
                    child.wait()


_ENTER = """
root=$1
mount --make-rprivate /
mount --bind "$root" "$root"
mount --bind / "$root/h"
@BINDS@mount -t tmpfs tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/dev"
for node in null zero random urandom; do
    touch "$root/dev/$node"
    mount --bind "/dev/$node" "$root/dev/$node"
done
mount -t proc proc "$root/proc"
cd "$root"
exec ./busybox sh -ec '
# Only what is in this root from here on: the machine must not find its other mounts kept in use by our copies of them.
./busybox pivot_root . .
./busybox umount -l .
cd /
exec 3>>"$2"
export HOME=/tmp TMPDIR=/tmp
shift 2
"$@"
exit $?
' sh "$@"
"""
