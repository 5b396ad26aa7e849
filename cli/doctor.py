"""``weenv doctor``: everything that keeps an image from being lazy, each finding with its remedy."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from collections.abc import Sequence
from typing import Any

import click

from weenv.cli import checks, nodechecks, render
from weenv.core import rights
from weenv.core.errors import UnavailableError, WeenvError

START = "weenv install sets the node up; without systemd: weenv serve"
"""What to do where our daemons do not run."""


def _plane(setting: str, root: str) -> checks.Finding:
    """Which plane mounts the layers that are kept at ``root``, and why."""
    from weenv.plugin.snapshotter.planes.choose import choose

    if os.geteuid() != 0:
        return checks.Finding("plane", "skip", "not root, so not tried", "run weenv doctor as root")
    choice = choose(setting, checks.nearest(root))
    if choice.error is not None:
        return checks.Finding(
            "plane", "fail", f"{choice.name}: {choice.error.message}", choice.error.hint or "see docs/planes.md"
        )
    return checks.Finding("plane", "warn" if choice.better else "ok", f"{choice.name}: {choice.why}", choice.better)


async def _running(address: str, name: str, socket: str, plane: str) -> tuple[list[checks.Finding], str]:
    """Whether the containerd that ``weenv run`` uses answers, and has our plugin as it runs now; and its version."""
    from weenv.plugin.containerd.client import Client

    try:
        async with asyncio.timeout(5), Client(address) as client:
            version, _ = await client.version(deadline=4)
            loaded = await client.plugins(f"type==io.containerd.snapshotter.v1,id=={name}")
    except (WeenvError, OSError, TimeoutError) as error:
        hint = getattr(error, "hint", "") or "is it busy? see its log"
        return [checks.Finding("containerd", "fail", str(error) or f"no answer at {address} in 5 s", hint)], ""
    answers = checks.Finding("containerd", "ok", f"{render.plain(version)} answers at {address}")
    if loaded:
        mapping = checks.id_mapping(loaded[0].capabilities, plane)
        return [answers, checks.Finding("plugin", "ok", f"{name} is loaded"), mapping], version
    remedy = f'declare [proxy_plugins.{name}] with type = "snapshot" and address = "{socket}", and start containerd again'
    return [answers, checks.Finding("plugin", "fail", f"the running containerd has no snapshotter {name!r}", remedy)], version


def _containerd(path: str, address: str, name: str, version: str) -> tuple[list[checks.Finding], dict[str, Any] | None]:
    """Findings about containerd's configuration, imports and all, and what a containerd of ``version`` makes of it."""
    from weenv.plugin.nri.wire.versions import parse
    from weenv.systemd.install import containerd
    from weenv.systemd.install.tree import Tree

    tree, main = Tree(), os.path.abspath(path)

    def read(path: str) -> str | None:
        data = tree.read(path)
        return None if data is None else data.decode("utf-8", "strict")

    try:
        if tree.read(main) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        files = containerd.chain(containerd.Reader(read, tree.matches), main)
        own, written = parse(version), files[main].get("version", 1)
        merges = own >= (2, 0, 0) if own is not None else type(written) is int and written >= 3  # which 1.7 does not read
        config = containerd.effective(files, tables=merges)
    except (OSError, ValueError, WeenvError) as error:
        remedy = getattr(error, "hint", "") or "name it with --containerd-config; weenv install writes what it needs of ours"
        seen = f"{error.filename or path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        return [checks.Finding("containerd config", "fail", seen, rights.remedy(error, remedy))], None
    findings = list(checks.containerd_tables(config, address, name))
    if uneven := containerd.newer(files):
        seen = f"{uneven} has version {files[uneven].get('version', 1)}, the main file {written}"
        remedy = "make them the same: containerd 2.3 does not start like this, older ones pass by parts of the main file"
        findings.append(checks.Finding("containerd config", "warn", seen, remedy))
    return findings, config


def _to_restart(running: list[checks.Finding], written: list[checks.Finding]) -> list[checks.Finding]:
    """``running``; where containerd lacks only what its file has, the remedy is a restart."""
    if not any((found.name, found.state) == ("proxy plugin", "ok") for found in written):
        return running
    remedy = "its configuration has it: restart containerd (systemctl restart containerd), which stops no container"
    return [
        dataclasses.replace(found, remedy=remedy) if (found.name, found.state) == ("plugin", "fail") else found
        for found in running
    ]


def _blobs(path: str, status_socket: str) -> list[checks.Finding]:
    """Whether blobfs is mounted and answers. Never looks at the mount itself: without a server that waits for one."""
    from weenv.cli.status import blobfs_problems, blobfs_status
    from weenv.plugin.snapshotter.mounts import mounts_below

    remedy = START
    if path not in mounts_below(os.path.dirname(path)):
        return [checks.Finding("blobfs", "fail", f"nothing is mounted at {path}", remedy)]
    try:
        answer = blobfs_status(status_socket)
    except UnavailableError:
        answer = None
    if answer is None:
        found = checks.unix_socket("blobfs", status_socket, remedy)
        if found.state == "skip":
            return [found]
        why = f" ({found.seen})" if found.state == "fail" else ""
        return [checks.Finding("blobfs", "fail", f"mounted at {path}, but no server answers: readers wait for it{why}", remedy)]
    cache = list(nodechecks.cache(answer))
    if bad := answer.get("bad_layers"):
        seen = f"{len(bad)} layers are not served: {bad[0]['digest']}: {bad[0]['reason']}"
        remedy = "remove the images that use them; whoever published them must mend them"
        return [checks.Finding("blobfs", "fail", seen, remedy), *cache]
    if problems := blobfs_problems(answer):
        seen = f"mounted at {path}; {problems[0]}"
        return [checks.Finding("blobfs", "warn", seen, "see weenv status and the daemon's log"), *cache]
    found = checks.unix_socket("blobfs", status_socket, remedy)
    return [found if found.state == "warn" else checks.Finding("blobfs", "ok", f"mounted at {path}"), *cache]


async def _snapshotter(address: str) -> checks.Finding:
    from weenv.plugin.containerd.client import Client

    try:
        async with asyncio.timeout(5), Client(address) as client:
            count = len(await client.namespace("default").snapshots("weenv").list())
    except (WeenvError, OSError, TimeoutError) as error:
        return checks.Finding("snapshotter", "fail", f"{address}: {error}", START)
    return checks.Finding("snapshotter", "ok", f"answers at {address}; {render.counted(count, 'snapshot')}")


async def _registries(named: Sequence[str], config_path: str) -> list[checks.Finding]:
    """Those that were named and those of the configuration, side by side; and the files about mirrors that are no use."""
    from weenv.plugin.snapshotter.config import load
    from weenv.registry.hosts import unusable

    config = load(config_path).registry
    remedy = "mend it: until then its mirrors are not used, nor by containerd (docs/registries.md)"
    wrong = [checks.Finding("hosts.toml", "warn", f"{path}: {why}", remedy) for path, why in unusable(config)]
    others = sorted((config.plain_http | config.tls) - set(named))
    found = await asyncio.gather(*(_registry(host, config_path) for host in (*named, *others)))
    for number, each in enumerate(found):
        if number >= len(named) and each.state == "fail":  # perhaps nobody needs it now
            found[number] = dataclasses.replace(each, state="warn")
    return [*wrong, *found]


async def _registry(host: str, config_path: str) -> checks.Finding:
    from weenv.plugin.snapshotter.config import load
    from weenv.registry.client import RegistryClient
    from weenv.registry.credentials import CredentialStore

    config = load(config_path).registry
    name = f"registry {host}"
    try:
        async with asyncio.timeout(15), RegistryClient(config) as client:
            # 401 is an answer too: it asks for a token that belongs to a repository
            status, _, _ = await client.request(
                "GET", host, "/v2/", what="the registry API", scope="", accept=frozenset({200, 401})
            )
            login = status != 401 or bool(await asyncio.to_thread(CredentialStore(config.docker_config).lookup, host))
    except (WeenvError, OSError, TimeoutError) as error:
        hint = getattr(error, "hint", "") or "check the name, the network, and [registry] plain_http in the configuration"
        return checks.Finding(name, "fail", str(error) or "no answer in 15 s", hint)
    private = "" if login else "; no login for it here: what is private is refused"
    return checks.Finding(name, "ok", f"answers at {config.base_url(host)}{private}")


@click.command()
@click.option("--config", "config_path", default="/etc/weenv/config.toml", show_default=True, help="WeEnv's configuration.")
@click.option("--containerd-config", default="/etc/containerd/config.toml", show_default=True, help="containerd's.")
@click.option("--docker-config", default="/etc/docker/daemon.json", show_default=True, help="dockerd's, where there is one.")
@click.option("--registry", "registries", multiple=True, metavar="HOST", help="Also see whether this registry answers.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def doctor(config_path: str, containerd_config: str, docker_config: str, registries: tuple[str, ...], as_json: bool) -> None:
    """Check kernel, containerd, docker, sockets, disk, registries, policy and NRI; say what to mend.

    Changes nothing. Exit code 1 where something would keep images from being lazy; what is only slower, or only keeps
    elastic provisioning from working well, is a warning.

    \b
    Examples:
      weenv doctor
      weenv doctor --registry registry.example --json
    """
    from weenv.environment import runconfig
    from weenv.plugin.nri import nriconfig
    from weenv.plugin.snapshotter.blobfs import config as blobfs_config
    from weenv.plugin.snapshotter.config import load

    config, node, blobfs = load(config_path), runconfig.load(config_path), blobfs_config.load(config_path)
    run = node.run
    findings = [*checks.kernel()]
    plane = _plane(config.plane, config.root)
    chosen = plane.seen.partition(":")[0]
    if chosen != "fuse" and (resend := nodechecks.resend(os.uname().release)) is not None:
        findings.append(resend)
    findings.append(plane)
    findings += nodechecks.settings(config.root, config.blobs, blobfs.root, blobfs.mountpoint)
    findings += _blobs(config.blobs, blobfs.status_socket)
    found = checks.unix_socket("snapshotter", config.socket, START)
    findings.append(asyncio.run(_snapshotter(config.socket)) if found.state == "ok" else found)
    running, version = asyncio.run(_running(run.address, run.snapshotter, config.socket, chosen))
    written, tables = _containerd(containerd_config, config.socket, run.snapshotter, version)
    findings += [*_to_restart(running, written), *written, *nodechecks.docker(docker_config, run.address, run.snapshotter)]
    findings += [checks.disk(config.root), *nodechecks.disk_abilities(config.root)]
    findings += asyncio.run(_registries(registries, config_path))
    findings.append(nodechecks.policy(node.tables))
    findings += nodechecks.control_groups()
    if version and tables is not None:
        findings += nodechecks.nri(tables, version, nriconfig.from_tables(node.tables).socket)
    if as_json:
        render.print_json([{"name": f.name, "state": f.state, "seen": f.seen, "remedy": f.remedy} for f in findings])
    else:
        render.findings((f.state, f.name, f.seen, f.remedy) for f in findings)
    if any(f.state == "fail" for f in findings):
        raise click.exceptions.Exit(1)
