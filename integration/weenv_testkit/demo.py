"""``make demo``: a real image is converted, pushed to a real registry and started lazily by a real containerd; then a task
is put together of layer groups, a plan and a mutation, and graded.

Everything runs beside what the machine runs: own registry, own containerd 2.x, own daemons, in one temporary directory
that is gone afterwards. What each step cost is shown against plain overlayfs on the same containerd, from the same
registry, in the same run. Registry and node share a machine here, so the network costs nothing; ``make bench`` puts a
real link between them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from weenv_testkit import images, tasks, tools
from weenv_testkit.demo_tasks import REPOSITORY, TaskDemo
from weenv_testkit.fetch_tools import TOOLS
from weenv_testkit.images import Layout
from weenv_testkit.node import SNAPSHOTTER, Node
from weenv_testkit.procs import Failed, run
from weenv_testkit.registry import Registry
from weenv_testkit.store import PACKAGES

LINE = "2.1"
NUMPY = "import numpy; print(int(numpy.arange(10).sum()))"
STEPS = (
    ("first output of echo", ("echo", "started"), "started"),
    ("python3 -c 'import numpy'", ("python3", "-c", NUMPY), "45"),
    ("find / -xdev", ("sh", "-c", "find / -xdev | wc -l"), None),
    ("the same echo once more", ("echo", "again"), "again"),
)


@dataclass
class Cost:
    """What one way of starting the image cost: seconds by step, bytes that came from the registry, bytes on disk."""

    seconds: dict[str, float] = field(default_factory=dict)
    fetched: dict[str, int] = field(default_factory=dict)
    disk: int = 0


def numpy_tar(debian: str) -> str:
    """Path of a layer tar with numpy for the Python of a Debian tar, from PyPI; cached beside the tools."""
    listing = run("tar", "--list", "--file", debian, "--wildcards", "./usr/bin/python3.*")
    version = next(name for name in listing.split() if name.count(".") == 2 and name[-1].isdigit()).rpartition("python")[2]
    final = TOOLS / "images" / f"numpy-{version}.tar"
    if final.exists():
        return str(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent) as work:
        machine = os.uname().machine
        platforms = [f"--platform=manylinux{tag}_{machine}" for tag in ("_2_28", "_2_27", "2014")]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download", "--no-deps"]
        run(
            *pip,
            "--only-binary=:all:",
            f"--python-version={version}",
            *platforms,
            "--dest",
            work,
            "numpy",
            env=dict(os.environ),
        )
        packages = Path(work, "root", "usr/lib/python3/dist-packages")
        packages.mkdir(parents=True)
        with zipfile.ZipFile(next(Path(work).glob("numpy-*.whl"))) as wheel:
            wheel.extractall(packages)
        os.rename(images.tar_to(os.path.join(work, "numpy.tar"), os.path.join(work, "root")), final)
    return str(final)


def disk_usage(path: str) -> int:
    """Bytes that a directory takes on disk, without what is mounted in it."""
    return int(run("du", "--summarize", "--one-file-system", "--block-size=1", path).split()[0])


class Demo:
    """The steps, each announced with what it took."""

    def __init__(self, console: Console, work: str) -> None:
        self.console = console
        self.work = work

    @contextlib.contextmanager
    def step(self, text: str) -> Iterator[None]:
        """Say what is done and how long it took."""
        begin = time.monotonic()
        with self.console.status(text):
            yield
        self.console.print(f"  {text} [dim]{time.monotonic() - begin:.1f} s[/dim]")

    def try_it(self, node: Node, registry: Registry, ref: str, snapshotter: str, store: str) -> Cost:
        """Pull and run; what it cost. Raises Failed where a command does not print what it should."""
        cost = Cost()
        namespace = f"demo-{snapshotter}"
        mark = registry.mark()
        begin = time.monotonic()
        cost.seconds["pull"] = node.containerd.pull(ref, snapshotter=snapshotter, namespace=namespace)
        cost.fetched["pull"] = sum(registry.blob_bytes(mark).values())
        for name, command, wanted in STEPS:
            since = time.monotonic()
            out = node.containerd.run(ref, *command, snapshotter=snapshotter, namespace=namespace).strip()
            if wanted is not None and out != wanted:
                raise Failed(f"{' '.join(command)} printed {out!r}")
            cost.seconds[name] = time.monotonic() - since
            cost.fetched[name] = sum(registry.blob_bytes(mark).values())
        cost.seconds["total"] = time.monotonic() - begin
        # containerd keeps the compressed layers of an unpacked image too, beside their files.
        cost.disk = disk_usage(store) + sum(node_content(node, namespace).values())
        node.containerd.purge(namespace, snapshotter)
        return cost

    def main(self) -> None:
        """The whole demonstration. Raises Failed."""
        say = self.console.print
        with contextlib.ExitStack() as stack:
            say("[bold]1. An image[/bold]")
            with self.step("Debian with Python (debootstrap; cached after the first time), numpy from PyPI"):
                debian = images.debian_tar(PACKAGES)
                tars = [debian, numpy_tar(debian)]
            layout = Layout(os.path.join(self.work, "layout"))
            with self.step("packed as an OCI image with gzip layers"):
                layout.image([layout.layer(tar, "gzip", level=6) for tar in tars], "demo")
            home = os.path.join(self.work, "registry")
            os.mkdir(home)
            registry = stack.enter_context(Registry(home))
            with self.step(f"pushed to docker-registry {tools.version('registry')} at {registry.host}"):
                plain = layout.push("demo", registry, "demo/python", "gzip")

            say("[bold]2. Converted, registry to registry[/bold]")
            lazy = f"{registry.host}/demo/python:lazy"
            argv = [*tools.weenv(), "convert", plain, lazy]
            say(f"  [green]$ weenv convert {plain} {lazy}[/green]", soft_wrap=True)
            if subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode:
                raise Failed("the conversion failed, see above")
            sizes = {ref: sum(layer["size"] for layer in manifest_layers(registry, ref)) for ref in ("gzip", "lazy")}
            unpacked = sum(os.path.getsize(tar) for tar in tars)

            say(f"[bold]3. Started, by containerd {tools.version('containerd-2')} and runc {tools.version('runc')}[/bold]")
            node = Node(LINE, os.path.join(self.work, "n"), registry=registry.host, settings={"blobfs.fill": "enabled = false"})
            with self.step("containerd, weenv snapshotter and weenv blobfs start"):
                stack.enter_context(node)
            overlay_root = os.path.join(node.containerd.root, "io.containerd.snapshotter.v1.overlayfs")
            with self.step("plain overlayfs: pull, then four containers"):
                overlay = self.try_it(node, registry, plain, "overlayfs", overlay_root)
            with self.step("weenv: pull, then the same four containers"):
                ours = self.try_it(node, registry, lazy, SNAPSHOTTER, node.root)

            say("[bold]4. A task: components published apart, met when it starts[/bold]")
            with self.step(f"tasks made of {tasks.REPOSITORIES[REPOSITORY][0]} by swesmith (cached after the first time)"):
                made = tasks.load({REPOSITORY: 1})
            task = TaskDemo(self.console, self.work, registry, node)
            task.main(made)
            complaints = node.complaints()
            if complaints:
                raise Failed("the daemons complained:\n" + "\n".join(complaints))
            with self.step("everything stopped, unmounted and removed"):
                stack.close()
        self.show(overlay, ours, sizes, unpacked)
        task.show()

    def show(self, overlay: Cost, ours: Cost, sizes: dict[str, int], unpacked: int) -> None:
        """The table."""
        table = Table(
            title=f"An image of {unpacked / 1e6:.0f} MB, its layers {sizes['gzip'] / 1e6:.0f} MB in gzip", title_justify="left"
        )
        table.add_column("step")
        for name in ("overlayfs", "weenv", "ratio"):
            table.add_column(name, justify="right")
        for name in ("pull", *(name for name, _, _ in STEPS), "total"):
            if name == "total":
                table.add_section()
            left, right = overlay.seconds[name], ours.seconds[name]
            table.add_row(name, f"{left:.2f} s", f"{right:.2f} s", f"{right / left:.2f}")
        table.add_section()
        first = STEPS[0][0]
        left, right = (cost.seconds["pull"] + cost.seconds[first] for cost in (overlay, ours))
        table.add_row(
            "[bold]pull to first output[/bold]", f"{left:.2f} s", f"[bold]{right:.2f} s[/bold]", f"{right / left:.2f}"
        )
        table.add_section()
        for name, label in ((first, "fetched by the first output"), (STEPS[-1][0], "fetched by the end")):
            left_bytes, right_bytes = overlay.fetched[name], ours.fetched[name]
            table.add_row(label, megabytes(left_bytes), megabytes(right_bytes), f"{right_bytes / left_bytes:.2f}")
        table.add_row("on the node's disk", megabytes(overlay.disk), megabytes(ours.disk), f"{ours.disk / overlay.disk:.2f}")
        self.console.print()
        self.console.print(table)
        self.console.print(
            "Registry and node share this machine, so bytes are nearly free here; make bench puts a link between them.\n"
            "Converted, the layers take "
            f"{sizes['lazy'] / 1e6:.0f} MB, and docker, podman and plain containerd unpack them like any other image."
        )


def manifest_layers(registry: Registry, tag: str) -> list[dict[str, int]]:
    """Layer descriptors of the demo image."""
    layers = registry.manifest("demo/python", tag)[0]["layers"]
    assert isinstance(layers, list)
    return layers


def node_content(node: Node, namespace: str) -> dict[str, int]:
    """Digest -> size of what the content store holds for a namespace."""
    folder = os.path.join(node.containerd.root, "io.containerd.content.v1.content", "blobs", "sha256")
    paths = {digest: os.path.join(folder, digest.removeprefix("sha256:")) for digest in node.containerd.content(namespace)}
    return {digest: os.path.getsize(path) for digest, path in paths.items() if os.path.exists(path)}


def save_logs(work: str) -> str:
    """Move the logs that the parts have left below ``work`` to a directory of their own; its path."""
    saved = tempfile.mkdtemp(prefix="weenv-demo-logs.", dir="/var/tmp")
    for depth in ("*.log", "*/*.log", "*/*/*.log"):
        for path in Path(work).glob(depth):
            shutil.move(path, os.path.join(saved, "-".join(path.relative_to(work).parts)))
    return saved


def megabytes(size: int) -> str:
    """``12.3 MB``."""
    return f"{size / 1e6:.1f} MB"


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 0, or 1 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="keep the temporary directory, with all logs")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        print("demo: needs root, because it mounts and runs containers; run: sudo make demo", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that everything is taken away again
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    work = tempfile.mkdtemp(prefix="wd.", dir="/var/tmp")
    # Whether the logs are wanted is known at the end; the parts remove their own directories before that.
    os.environ["WEENV_TEST_KEEP"] = "1"
    begin = time.monotonic()
    failed = False
    try:
        Demo(console, work).main()
    except (Failed, FileNotFoundError) as error:
        failed = True
        for text in (f"demo: {error}", *getattr(error, "__notes__", ())):
            print(text, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; everything has been taken away again", file=sys.stderr)
        return 130
    finally:
        if options.keep:
            console.print(f"kept: {work}")
        else:
            if failed:
                print(f"demo: the logs of its parts are in {save_logs(work)}", file=sys.stderr)
            shutil.rmtree(work, ignore_errors=True)
    console.print(f"[dim]All of it took {time.monotonic() - begin:.0f} s; nothing is left mounted or running.[/dim]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
