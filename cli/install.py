"""``weenv install``: the daemons as services of a node, and containerd told of them (the way back: uninstall.py)."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from typing import Any

import click

from weenv import __version__
from weenv.cli.nodesystem import (
    CONTAINERD,
    DRY_RUN,
    NO_RESTART,
    ROOT,
    alone,
    interpreter_of,
    refuse_strangers,
    settings_of,
    show_write,
    tree_of,
)
from weenv.cli.render import print_json
from weenv.core.errors import ConfigError
from weenv.systemd import supervisor
from weenv.systemd.install import containerd, docker, files, record, steps
from weenv.systemd.install.manager import Manager, booted
from weenv.systemd.install.tree import Tree

_PLACES = ("/usr/bin", "/usr/local/bin", "/usr/sbin", "/usr/local/sbin", "/opt/containerd/bin")
"""Where containerd is looked for."""
_REMAPS = (6, 12)
"""Linux that mounts EROFS from files: layers can then be id-mapped."""


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


def _check_reach(tree: Tree, program: str) -> None:
    """The gateway is not root, so it has to be able to get at the command and at the Python that it names."""
    interpreter = interpreter_of(tree, program)
    for path in (program, interpreter, tree.resolve(interpreter)):
        while path != "/":
            path = os.path.dirname(path)
            place = tree.host(path)
            if os.path.isdir(place) and not os.stat(place).st_mode & 0o001:
                raise ConfigError(
                    f"the gateway does not run as root, and {path} lets nobody else pass to {program}",
                    hint="install weenv elsewhere, such as in /opt/weenv, or leave --with gateway out",
                )


def _containerd_line(tree: Tree, given: str | None, main: str) -> int:
    """containerd's major version; 0 where the system has none. Raises ConfigError where it cannot be told."""
    if given:
        if not (named := re.match(r"v?([12])(?:\.(\d+)|$)", given)):
            raise ConfigError(f"--containerd-version: {given!r} is none that weenv knows", hint="such as 1.7 or 2.1")
        return _usable_line(named)
    program = next((found for place in _PLACES if os.access(found := tree.host(f"{place}/containerd"), os.X_OK)), "")
    if program:
        with contextlib.suppress(OSError, subprocess.SubprocessError):  # then the default is taken
            said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
            if version := re.search(r"\sv?([12])\.(\d+)", said):
                return _usable_line(version)
    if not program and tree.read(main) is None:
        return 0
    raise ConfigError("cannot tell which containerd this is", hint="name it: --containerd-version 1.7, or 2.1")


def _usable_line(version: re.Match[str]) -> int:
    major, minor = int(version[1]), int(version[2] or 7)
    if (major, minor) < (1, 7):
        raise ConfigError(
            f"containerd {major}.{minor} is too old: its snapshotters cannot tell lazy layers",
            hint="install 1.7 or newer: Debian 13's containerd, the project's release, or docker's containerd.io",
        )
    return major


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
@click.option("--json", "as_json", is_flag=True, help="With --dry-run, for machines.")
def install(
    chosen: tuple[str, ...], cri: bool, with_docker: bool, containerd_config: str | None, containerd_version: str | None,
    no_containerd: bool, config_path: str | None, program: str | None, no_start: bool, no_restart: bool, force: bool,
    directory: str, dry_run: bool, as_json: bool,
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
    if as_json and not dry_run:
        raise click.UsageError("--json goes with --dry-run")
    tree = tree_of(directory, look=dry_run)
    with alone(tree):
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
        settings = settings_of(tree, command, options["config"], frozenset(options["with"]))
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
                refuse_strangers(manager, settings.root)
        run = _Install(tree, known, settings, plan, upgrade=bool(known.version) and known.version != __version__)
        if as_json:
            print_json(
                {
                    "write": [{"path": write.path, "diff": write.diff()} for write in plan.writes],
                    "link": plan.links,
                    "remove": list(plan.stale),
                }
            )
            return
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

    def __init__(self, tree: Tree, known: record.Record, settings: files.Settings, plan: steps.Plan, *, upgrade: bool) -> None:
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
            show_write(write)
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
            if todo := self._todo(main):
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

    def _todo(self, main: str) -> str:
        """What somebody has to do where there is no systemd, as far as it is not done."""
        written = [write.path for write in self.plan.writes]
        todo = [] if supervisor.running(self.settings.status_socket) else ["run weenv serve"]
        if not todo and self.upgrade:
            todo = ["send SIGHUP to weenv serve"]
        if any(path.startswith(f"{os.path.dirname(main)}/") for path in written):
            todo.append("restart containerd")
        if docker.DAEMON in written:
            todo.append("restart docker (without live-restore its containers stop)")
        return ", and ".join(todo)

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
        if manager.state(CONTAINERD) != "active":
            return
        ours = [path for path in self.known.files if path.startswith(f"{folder}/")]
        ours += [path for path, edit in self.known.edits.items() if steps.untouched(self.tree, path, edit)]
        written = [os.stat(self.tree.host(path)).st_mtime for path in ours if path.startswith(f"{folder}/")]
        if not written or manager.active_since(CONTAINERD) > max(written):
            return
        if not restart:
            self.say("containerd knows of it once it is restarted: systemctl restart containerd")
            return
        if others := manager.depends_on(CONTAINERD):
            self.say(f"containerd has to be restarted, which restarts {', '.join(others)}: systemctl restart containerd")
            return
        manager.restart(CONTAINERD)
        self.say("restarted containerd.service (containers go on)")


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
