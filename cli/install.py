"""``weenv install`` and ``weenv uninstall``: the daemons as services of a node, containerd told of them, and the way back."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import click

from weenv import __version__
from weenv.cli import render
from weenv.core import settings as core_settings
from weenv.core.errors import ConfigError, MountError
from weenv.core.rights import AS_ROOT
from weenv.plugin.snapshotter.blobfs import config as blobfs_config
from weenv.plugin.snapshotter.blobfs.config import BlobfsConfig
from weenv.systemd.install import containerd, docker, files, record, steps
from weenv.systemd.install.manager import Manager, booted
from weenv.systemd.install.tree import Tree

_PLACES = ("/usr/bin", "/usr/local/bin", "/usr/sbin", "/usr/local/sbin", "/opt/containerd/bin")
"""Where containerd is looked for."""
_CONTAINERD = "containerd.service"
_REMAPS = (6, 12)
"""Linux that mounts EROFS from files: layers can then be id-mapped."""

ROOT = click.option("--root", "directory", metavar="DIR", default="/", help="A mounted image, instead of this system.")
DRY_RUN = click.option("--dry-run", is_flag=True, help="Show what would be done, as a diff; change nothing.")
NO_RESTART = click.option("--no-restart", is_flag=True, help="Leave it to you to restart containerd.")


def _tree(directory: str, *, look: bool) -> Tree:
    """``look``: nothing is going to be changed."""
    if os.geteuid() != 0 and not look:
        raise ConfigError("only root may change a system", hint=AS_ROOT)
    if not os.path.isdir(directory):
        raise ConfigError(f"--root: there is no directory {directory}")
    return Tree(directory)


@contextlib.contextmanager
def _alone(tree: Tree) -> Iterator[None]:
    """One installation at a time."""
    import fcntl

    fd = os.open(tree.host("/etc"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError("another weenv install or uninstall is under way", hint="wait for it") from error
        yield
    finally:
        os.close(fd)


def _program(tree: Tree, given: str | None) -> str:
    """The command as the units are to call it."""
    path = given or os.path.join(sysconfig.get_path("scripts"), "weenv")
    if not given and not os.path.exists(path):
        path = shutil.which("weenv") or os.path.abspath(sys.argv[0])
    if not path.startswith("/"):
        raise ConfigError(f"--program must be an absolute path, not {path!r}")
    if not os.access(tree.host(path), os.X_OK):
        where = "" if tree.live else f" in {tree.root}"
        raise ConfigError(f"there is no program {path}{where}", hint="install weenv there first, or name it with --program")
    return path


def _interpreter(tree: Tree, program: str) -> str:
    """The Python that a command's first line names; the command itself where it is no script."""
    first = (tree.read(program) or b"").partition(b"\n")[0]
    return os.fsdecode(first[2:].split()[0]) if first.startswith(b"#!/") else program


def _check_reach(tree: Tree, program: str) -> None:
    """The gateway is not root, so it has to be able to get at the command and at the Python that it names."""
    interpreter = _interpreter(tree, program)
    for path in (program, interpreter, tree.resolve(interpreter)):
        while path != "/":
            path = os.path.dirname(path)
            place = tree.host(path)
            if os.path.isdir(place) and not os.stat(place).st_mode & 0o001:
                raise ConfigError(
                    f"the gateway does not run as root, and {path} lets nobody else pass to {program}",
                    hint="install weenv elsewhere, such as in /opt/weenv, or leave --with gateway out",
                )


def _settings(tree: Tree, program: str, config: str, chosen: frozenset[str]) -> files.Settings:
    """From the system's configuration, which is checked by the way. Raises ConfigError."""
    from weenv.environment.gateway import config as gateway
    from weenv.plugin.nri import serveconfig
    from weenv.plugin.snapshotter import config as snapshotter

    tables: dict[str, Any] = {}
    if tree.read(config) is not None:
        tables = core_settings.read_tables(tree.host(config))
    elif config != files.CONFIG:
        raise ConfigError(f"--config: there is no file {config}", hint="write it first")
    lazy, bytes_ = snapshotter.from_tables(tables), blobfs_config.from_table(tables.get("blobfs", {}))
    if lazy.root != bytes_.root or lazy.blobs != bytes_.mountpoint:
        hint = "blobfs.root is snapshotter.root, blobfs.mountpoint is snapshotter.blobs"
        raise ConfigError(f"{config}: the two daemons do not fit together", hint=hint)
    elastic = serveconfig.from_tables(tables)
    return files.Settings(
        program, config, lazy.root, lazy.socket, bytes_.status_socket, elastic.socket, elastic.root,
        gateway.from_tables(tables).address, elastic.address, lazy.plane, chosen,
        _interpreter(tree, program),
    )  # fmt: skip


def _containerd_line(tree: Tree, given: str | None, main: str) -> int:
    """containerd's major version; 0 where the system has none. Raises ConfigError where it cannot be told."""
    if given:
        if not (named := re.match(r"v?([12])(\.|$)", given)):
            raise ConfigError(f"--containerd-version: {given!r} is none that weenv knows", hint="such as 1.7 or 2.1")
        return int(named[1])
    program = next((found for place in _PLACES if os.access(found := tree.host(f"{place}/containerd"), os.X_OK)), "")
    if program:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
            if version := re.search(r"\sv?([12])\.\d+", said):
                return int(version[1])
    if not program and tree.read(main) is None:
        return 0
    raise ConfigError("cannot tell which containerd this is", hint="name it: --containerd-version 1.7, or 2.1")


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


def _amends(
    tree: Tree, settings: files.Settings, options: dict[str, Any], line: int
) -> tuple[list[files.Item], list[steps.Amend]]:
    """What containerd and docker are to be told."""

    def read(path: str) -> str | None:
        data = tree.read(path)
        return None if data is None else data.decode("utf-8", "replace")

    items, amends = [], []
    if line:
        remap = settings.plane != "fuse" and (not tree.live or _kernel() >= _REMAPS)
        wanted = containerd.Wanted(settings.socket, settings.root, line, cri=options["cri"], remap=remap)
        found = containerd.configure(containerd.Reader(read, tree.matches), options["containerd"], wanted)
        items.append(files.Item(found.path, found.text.encode()))
        for path in dict.fromkeys([*([options["containerd"]] if found.main else []), *found.edits]):
            first = found.main if path == options["containerd"] else None
            amends.append(steps.Amend(path, "toml", found.edits.get(path, []), first))
    if options["docker"]:
        amends.append(steps.Amend(docker.DAEMON, "json", docker.changes(), ""))
    return items, amends


@click.command(short_help="Make the daemons services of this node, and tell containerd of them.")
@click.option(
    "--with", "chosen", multiple=True, type=click.Choice(files.OPTIONAL), help="Also run this daemon; may be repeated."
)
@click.option("--cri", is_flag=True, help="Have CRI (Kubernetes) use the weenv snapshotter.")
@click.option("--docker", "with_docker", is_flag=True, help="Have dockerd keep images in containerd, with weenv.")
@click.option("--containerd-config", metavar="FILE", help="containerd's main file.  [default: /etc/containerd/config.toml]")
@click.option("--containerd-version", metavar="VERSION", help="Such as 1.7 or 2.1, where it cannot be found out.")
@click.option("--no-containerd", is_flag=True, help="Leave containerd's configuration alone.")
@click.option("--config", "config_path", metavar="FILE", help="WeEnv's configuration.  [default: /etc/weenv/config.toml]")
@click.option("--program", metavar="FILE", help="The weenv command that the units are to call.  [default: this one]")
@click.option("--no-start", is_flag=True, help="Put everything in place, start nothing.")
@NO_RESTART
@click.option("--force", is_flag=True, help="Replace files of these names that were changed, or are of others.")
@ROOT
@DRY_RUN
def install(
    chosen: tuple[str, ...], cri: bool, with_docker: bool, containerd_config: str | None, containerd_version: str | None,
    no_containerd: bool, config_path: str | None, program: str | None, no_start: bool, no_restart: bool, force: bool,
    directory: str, dry_run: bool,
) -> None:  # fmt: skip
    """Make the daemons services of this node, and tell containerd of them (docs/install.md).

    Puts units, a user, directories and a first configuration in place, adds a drop-in to containerd's configuration, starts the
    daemons and restarts containerd; containers go on. A second run changes only what is not as it should be, so it is also what
    to do after an upgrade. What was chosen once (--with, --cri, --docker) stays until weenv uninstall.

    \b
    Examples:
      weenv install --dry-run
      weenv install --with elastic --with gateway
      weenv install --root /mnt/image --program /opt/weenv/bin/weenv --containerd-version 2.1
    """
    tree = _tree(directory, look=dry_run)
    with _alone(tree):
        known = record.Record()
        with contextlib.suppress(*([ConfigError] if force else [])):  # a damaged record
            known = record.load(tree) or known
        earlier = known.options
        options: dict[str, Any] = {
            "with": sorted({*earlier.get("with", ()), *chosen}),
            "cri": bool(cri or earlier.get("cri")),
            "docker": bool(with_docker or earlier.get("docker")),
            "containerd": containerd_config or earlier.get("containerd") or containerd.MAIN,
            "config": config_path or earlier.get("config") or files.CONFIG,
        }
        if {"elastic", "nri"} <= set(options["with"]):
            raise ConfigError("elastic includes nri: they do not run side by side", hint="leave --with nri out")
        command = _program(tree, program)
        if "gateway" in options["with"]:
            _check_reach(tree, command)
        settings = _settings(tree, command, options["config"], frozenset(options["with"]))
        line = 0 if no_containerd else _containerd_line(tree, containerd_version, options["containerd"])
        items, amends = _amends(tree, settings, options, line)
        links = files.links(settings)
        plan = steps.plan(tree, known, [*files.items(settings), *items], links, amends, within=files.PLACES)
        if plan.conflicts and not force:
            raise ConfigError(
                f"not from an installation, or changed since: {', '.join(plan.conflicts)}",
                hint='move them away; an operator\'s changes to units belong into "systemctl edit"; --force replaces them',
            )
        if not no_containerd and not line:
            click.echo("there is no containerd here: run weenv install again when there is", err=True)
        if tree.live and booted() and not no_start and not dry_run:
            with Manager() as manager:
                _refuse_strangers(manager, settings.root)
        run = _Install(tree, known, settings, plan, upgrade=bool(known.version) and known.version != __version__)
        if dry_run:
            run.show()
            return
        known.options, known.version = options, __version__
        run.put(links)
        run.start(start=not no_start, restart=not no_restart, main=options["containerd"])
        if not run.did:
            click.echo("weenv is installed as it should be: nothing was changed")


class _Install:
    """The steps of one installation, each said as it is done. ``did`` is whether there was anything to do."""

    def __init__(
        self, tree: Tree, known: record.Record, settings: files.Settings, plan: steps.Plan, *, upgrade: bool
    ) -> None:
        self.tree = tree
        self.known = known
        self.settings = settings
        self.plan = plan
        self.upgrade = upgrade
        self.did = False

    def say(self, text: str) -> None:
        """One line of what was done."""
        self.did = True
        click.echo(text)

    def show(self) -> None:
        """What would be done."""
        for write in self.plan.writes:
            _show(write)
        for path, target in self.plan.links.items():
            click.echo(f"would link {path} -> {target}")
        for path in self.plan.stale:
            click.echo(f"would remove {path}")
        if self.plan.empty:
            click.echo("no file would be changed")
        elif self.tree.live and booted():
            click.echo(f"would start or restart {', '.join(files.unit_names(self.settings.daemons))}, and restart containerd")

    def put(self, links: dict[str, str]) -> None:
        """Files and links. With systemd, the links are made by it."""
        if not self.plan.empty:
            steps.begin(self.tree, self.known, self.plan)
            steps.carry_out(self.tree, self.known, self.plan)
        for path in self.plan.stale:
            self.say(f"removed {path}")
        for write in self.plan.writes:
            copy = f" (as it was: {write.edit.backup})" if write.edit is not None and write.edit.backup else ""
            self.say(f"{'wrote' if write.old is None else 'changed'} {write.path}{copy}")
        if not (self.tree.live and booted()):
            steps.enable(self.tree, self.plan.links)
            for path in self.plan.links:
                self.say(f"enabled {path.rpartition('/')[2]}")
        self.known.links.update(links)
        if self.known.files:
            steps.finish(self.tree, self.known)

    def start(self, *, start: bool, restart: bool, main: str) -> None:
        """Users, directories, units, containerd."""
        if not self.tree.live:
            self._users()
            self.say_if(self.plan, f"{self.tree.root} is ready; its daemons start when it is booted")
            return
        if not booted():
            self._users()
            todo = "run weenv serve, and restart containerd"
            click.echo(f"systemd is not the first process here, so nothing was started: {todo}", err=True)
            return
        self._users()
        if any(write.path == files.TMPFILES for write in self.plan.writes):
            _tool(self.tree, "systemd-tmpfiles", "--create", files.TMPFILES)
        with Manager() as manager:
            try:
                self._units(manager, start)
            finally:
                self._containerd(manager, os.path.dirname(main), restart)
        if any(write.path == docker.DAEMON for write in self.plan.writes):
            self.say("restart docker when it suits (without live-restore its containers stop): systemctl restart docker")

    def say_if(self, plan: steps.Plan, text: str) -> None:
        """Only where something was done."""
        if not plan.empty:
            self.say(text)

    def _users(self) -> None:
        if any(write.path == files.SYSUSERS for write in self.plan.writes):
            _tool(self.tree, "systemd-sysusers", files.SYSUSERS)

    def _units(self, manager: Manager, start: bool) -> None:
        changed = {name for write in self.plan.writes if (name := os.path.basename(write.path)).startswith("weenv")}
        units = files.unit_names(self.settings.daemons)
        if any(write.path.startswith(files.UNITS) for write in self.plan.writes) or self.plan.stale:
            manager.reload()
        if self.plan.links:
            manager.enable(units)
            manager.reload()
            self.say(f"enabled {', '.join(units)}")
        if not start:
            return
        for unit in units:
            running = manager.state(unit) == "active"
            if running and unit.endswith(".socket") and unit in changed:
                manager.stop(unit.replace(".socket", ".service"))
                manager.restart(unit)
                self.say(f"restarted {unit}")
            elif running and unit.endswith(".service") and (unit in changed or self.upgrade):
                manager.restart(unit)
                self.say(f"restarted {unit}")
            elif not running:
                manager.start(unit)
                self.say(f"started {unit}")

    def _containerd(self, manager: Manager, folder: str, restart: bool) -> None:
        """Restart it, if it started before what it has to know was written: in this run, or in one that was interrupted."""
        if manager.state(_CONTAINERD) != "active":
            return
        ours = [path for path in self.known.files if path.startswith(f"{folder}/")]
        ours += [path for path, edit in self.known.edits.items() if steps.untouched(self.tree, path, edit)]
        written = [os.stat(self.tree.host(path)).st_mtime for path in ours if path.startswith(f"{folder}/")]
        if not written or manager.active_since(_CONTAINERD) > max(written):
            return
        if not restart:
            self.say("containerd knows of it once it is restarted: systemctl restart containerd")
            return
        if others := manager.depends_on(_CONTAINERD):
            self.say(f"containerd has to be restarted, which restarts {', '.join(others)}: systemctl restart containerd")
            return
        manager.restart(_CONTAINERD)
        self.say("restarted containerd.service (containers go on)")


def _refuse_strangers(manager: Manager, root: str) -> None:
    """Daemons that somebody started by hand are not ours to replace or to take mounts from."""
    from weenv.plugin.snapshotter.status import collect

    if manager.state("weenv-snapshotter.service") in ("inactive", "failed") and (found := collect(root)).running:
        raise ConfigError(
            f"a snapshotter that is no service serves {root} (pid {found.pid})",
            hint="end weenv serve, or both daemons (containers go on), and run this again",
        )


def _show(write: steps.Write) -> None:
    for line in write.diff().splitlines():
        click.echo(render.plain(line))


def _tool(tree: Tree, program: str, *arguments: str) -> None:
    """Run one of systemd's programs on a system. Its absence is no error: the system does the same when it boots."""
    found = shutil.which(program)
    if found is None:
        click.echo(f"there is no {program} here: the system itself runs it when it boots", err=True)
        return
    where = [] if tree.live else [f"--root={tree.root}"]
    *options, path = arguments  # of the path its name, since it is looked for where such files belong, below --root as well
    done = subprocess.run([found, *where, *options, os.path.basename(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{program} failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")


@click.command(short_help="Take away what weenv install put on this node.")
@click.option("--purge", is_flag=True, help="Delete layers, snapshots and the configuration, too.")
@NO_RESTART
@ROOT
@DRY_RUN
def uninstall(purge: bool, no_restart: bool, directory: str, dry_run: bool) -> None:
    """Take away what weenv install put on this node: services, units, containerd's drop-in. Layers and snapshots stay.

    Refused while containers use layers of WeEnv, since they could read no more of them than is here. After another
    weenv install, everything goes on from where it was; --purge deletes it instead.

    \b
    Examples:
      weenv uninstall --dry-run
      weenv uninstall --purge
    """
    tree = _tree(directory, look=dry_run)
    with _alone(tree):
        known = record.load(tree)
        if known is None:
            click.echo("weenv is not installed here: nothing was changed")
            return
        settings = _settings(tree, "/usr/bin/weenv", known.options.get("config", files.CONFIG), frozenset(files.OPTIONAL))
        lower = BlobfsConfig() if tree.read(settings.config) is None else blobfs_config.load(tree.host(settings.config))
        removal = steps.plan_removal(tree, known)
        left = _Left()
        if tree.live:
            _refuse_while_used(settings.root)
            if not booted():
                left = _left(settings, lower, known)
                if purge and left:
                    raise ConfigError(f"{settings.root} is still served", hint=f"first: {', '.join(left.todo)}")
        todo = left.todo
        if tree.live and not booted() and (told := _told(removal, known)):
            todo.append(f"restart {' and '.join(told)}")
        if dry_run:
            for write in removal.writes:
                _show(write)
            for path in [*removal.links, *removal.files, record.PATH, *([settings.root] if purge else [])]:
                click.echo(f"would remove {path}")
            if todo:
                click.echo(f"would leave to you: {', '.join(todo)}")
            return
        if tree.live and booted():
            with Manager() as manager:
                _refuse_strangers(manager, settings.root)
                _stop(manager, settings, lower)
                steps.remove(tree, known, removal)
                manager.reload()
                if line := _forget(manager, restart=not no_restart):
                    click.echo(line)
        else:
            steps.remove(tree, known, removal)
        for write in removal.writes:
            click.echo(f"restored {write.path}")
        for path in [*removal.links, *removal.files]:
            click.echo(f"removed {path}")
        for path, reason in removal.kept.items():
            click.echo(f"left {path}: {reason}", err=True)
        if tree.live and not left:
            _sweep(settings, lower)
        if todo:
            click.echo(f"systemd is not the first process here, so nothing was stopped: {', '.join(todo)}", err=True)
        if purge:
            _purge(tree, settings)
        elif os.path.isdir(tree.host(settings.root)):
            when = " after that" if todo else ""
            stay = f"layers and snapshots stay in {settings.root}"
            click.echo(f"{stay}; weenv install goes on with them, rm -r{when} deletes them")


def _forget(manager: Manager, *, restart: bool) -> str:
    """Have containerd read its configuration again; what was done about it."""
    if manager.state(_CONTAINERD) != "active":
        return ""
    others = manager.depends_on(_CONTAINERD)
    if others or not restart:
        also = f", which restarts {', '.join(others)}" if others else ""
        return f"restart containerd when it suits{also}: systemctl restart containerd"
    manager.restart(_CONTAINERD)
    return "restarted containerd.service (containers go on)"


def _using(root: str) -> list[str]:
    """Where containers have layers below ``root`` mounted: overlays over them, and single layers a second time.

    A root that is a bind mount itself is seen twice with all that is in it, which is no use of it.
    """
    from weenv.plugin.snapshotter.mounts import mounts_below

    inside = f"{root}/"
    entries = mounts_below("/").values()
    own = {entry.device: entry.point[len(root) :] for entry in entries if entry.point.startswith(inside)}
    outside = [entry for entry in entries if not entry.point.startswith(inside)]
    overlays = [entry.point for entry in outside if entry.fstype == "overlay" and inside in entry.super_options]
    return overlays + [entry.point for entry in outside if entry.device in own and not entry.point.endswith(own[entry.device])]


def _refuse_while_used(root: str) -> None:
    if used := _using(root):
        raise ConfigError(
            f"{render.counted(len(used), 'container uses', 'containers use')} layers of WeEnv, such as {used[0]}",
            hint="remove them first: weenv rm --all --force, ctr, crictl or docker; their layers stay",
        )


@dataclass(frozen=True, slots=True)
class _Left:
    """What runs and is mounted, without services that could be stopped; false where nothing is. ``todo`` ends it, in order."""

    daemons: tuple[str, ...] = ()
    layers: str = ""
    """The directory below which layers are mounted."""
    blobfs: bool = False
    unseen: tuple[str, ...] = ()
    """Daemons that may run."""

    def __bool__(self) -> bool:
        return bool(self.daemons or self.layers or self.blobfs)

    @property
    def todo(self) -> list[str]:
        steps = [f"end {daemon}" for daemon in self.daemons] + [f"end {daemon} where it runs" for daemon in self.unseen]
        if self.layers:
            steps.append(f"unmount what is mounted below {self.layers}")
        if self.blobfs:
            steps.append("run weenv blobfs stop")
        return steps


def _left(settings: files.Settings, lower: BlobfsConfig, known: record.Record) -> _Left:
    """As the locks that daemons hold say, and the mounts."""
    from weenv.core.process import holder_of
    from weenv.plugin.snapshotter.mounts import mounts_below
    from weenv.systemd import supervisor

    daemons = [above] if (above := supervisor.running(lower.status_socket)) else []
    for name, root in (("weenv snapshotter", settings.root), ("weenv elastic", settings.elastic_root)):
        with contextlib.suppress(PermissionError):  # a dry run of somebody who is not root
            held, pid = holder_of(root)
            if held and not (above and root == settings.root):
                daemons.append(f"{name} (pid {pid})")
    mounted = lower.mountpoint in mounts_below(os.path.dirname(lower.mountpoint))
    unseen = tuple(f"weenv {name}" for name in ("nri", "gateway") if name in known.options.get("with", ()))
    return _Left(tuple(daemons), settings.root if mounts_below(settings.root) else "", mounted, unseen)


def _told(removal: steps.Removal, known: record.Record) -> list[str]:
    """Whose configuration says less of weenv afterwards."""
    folder = os.path.dirname(known.options.get("containerd", containerd.MAIN))
    paths = [*removal.files, *(write.path for write in removal.writes)]
    also = ["docker"] if docker.DAEMON in paths else []
    return ["containerd", *also] if any(path.startswith(f"{folder}/") for path in paths) else also


def _stop(manager: Manager, settings: files.Settings, lower: BlobfsConfig) -> None:
    """End the daemons and take their mounts away; where a container has come in between, start them again."""
    from weenv.plugin.snapshotter.blobfs import daemon
    from weenv.plugin.snapshotter.mounts import mounts_below, unmount

    units = files.unit_names(settings.daemons)
    running = [unit for unit in units if manager.state(unit) == "active"]
    for unit in [*(unit for unit in units if unit.endswith(".socket")), *units]:
        manager.stop(unit)
    try:
        _refuse_while_used(settings.root)
        for point in sorted(mounts_below(settings.root), key=len, reverse=True):
            unmount(point)
        daemon.stop(lower)
    except (MountError, ConfigError):
        for unit in running:
            manager.start(unit)
        raise
    for unit in units:
        manager.reset(unit)  # while it is known; a unit that keeps descriptors of a mount that is gone would stay loaded
    manager.stop("weenv.slice")
    manager.disable(units)
    click.echo(f"stopped {', '.join(running) or 'nothing: no unit was running'}")


_OURS = re.compile(
    r"(layers|s|m|i|lock|mutations|converted|environments|elastic|(metastore|mapping|gateway)\.db.*|trusted-hosts.*)\Z"
)
"""What is made in the snapshotter's root, which may be a disk that others use as well."""


def _purge(tree: Tree, settings: files.Settings) -> None:
    """Delete data and configuration. Raises ConfigError where that is not ours."""
    root = tree.host(settings.root)
    if os.path.isdir(root):
        names = os.listdir(root)
        if names and not {"metastore.db", "layers", "lock"} & set(names):
            raise ConfigError(f"{settings.root} does not look like WeEnv's", hint="delete it by hand")
        for entry in list(os.scandir(root)):
            if _OURS.match(entry.name) is None:
                click.echo(f"left {settings.root}/{entry.name}: it is not WeEnv's", err=True)
            elif entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        with contextlib.suppress(OSError):  # it may be a mount point
            os.rmdir(root)
        click.echo(f"deleted {settings.root}")
    if tree.remove(settings.config):
        click.echo(f"deleted {settings.config}")
    tree.remove_directory(os.path.dirname(settings.config))


def _sweep(settings: files.Settings, lower: BlobfsConfig) -> None:
    """What ended daemons leave in /run."""
    for path in (f"{lower.holder_socket}.lock", f"{settings.containerd}.weenv-elastic"):
        with contextlib.suppress(OSError):
            os.unlink(path)
    for path in (lower.mountpoint, os.path.dirname(lower.mountpoint), settings.root):
        with contextlib.suppress(OSError):
            os.rmdir(path)  # those that are empty
