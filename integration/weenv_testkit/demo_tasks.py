"""The second half of ``make demo``: one task of SWE-smith's shape, its components published apart, met when it starts.

A bug in a real repository is a plan's mutation. In the rollout's environment (with a harness) the agent would look for it;
grading runs the task's test in another, clean environment (with the evaluator) before and after the mending patch.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weenv_testkit import tasks, tools
from weenv_testkit.node import Node
from weenv_testkit.procs import Failed
from weenv_testkit.registry import Registry

REPOSITORY = "tinydb"
GROUPS = ("base", f"repo-{REPOSITORY}", "harness-pip", "evaluator")


@dataclass(frozen=True)
class Cost:
    """One step: seconds, and bytes that crossed to the registry (pushed) or from it (fetched)."""

    what: str
    seconds: float
    size: int


class TaskDemo:
    """The steps on a running node and registry; ``work`` is a directory for the plans."""

    def __init__(self, console: Console, work: str, registry: Registry, node: Node) -> None:
        self.say = console.print
        self.console = console
        self.work = work
        self.registry = registry
        self.config = node.run_config()
        self.costs: list[Cost] = []

    def command(self, argv: list[str], shown: str, *, code: int = 0) -> str:
        """Run a ``weenv`` command, shown as a user would write it; its output. Raises Failed where it exits otherwise."""
        self.say(f"  [green]$ {escape(shown)}[/green]", soft_wrap=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WEENV_")}
        done = subprocess.run([*tools.weenv(), *argv], capture_output=True, text=True, env=environment, check=False)
        if done.returncode != code:
            raise Failed(f"{shown} ended with {done.returncode}, not {code}: {(done.stderr or done.stdout)[-1500:]}")
        return done.stdout

    def timed(self, what: str, argv: list[str], shown: str, *, code: int = 0) -> str:
        """The same, its cost noted."""
        mark = self.registry.mark()
        begin = time.monotonic()
        output = self.command(argv, shown, code=code)
        seconds = time.monotonic() - begin
        self.costs.append(Cost(what, seconds, sum(self.registry.blob_bytes(mark).values())))
        return output

    def publish(self, made: tasks.Tasks) -> dict[str, str]:
        """Build the four groups in the registry; name -> reference."""
        found = {}
        for name in GROUPS:
            tar = tasks.base() if name == "base" else made.groups[name]
            target = f"{self.registry.host}/tasks/{name}:1"
            argv = tasks.build_argv(target, name, tar)[len(tools.weenv()) :]
            begin = time.monotonic()
            kind = argv[argv.index("--kind") + 1]
            self.command(argv, f"weenv group build {target} --from {os.path.basename(tar)} --kind {kind} …")
            manifest, _ = self.registry.manifest(f"tasks/{name}", "1")
            layers = manifest["layers"]
            assert isinstance(layers, list)
            self.costs.append(Cost(f"publish {name}", time.monotonic() - begin, sum(layer["size"] for layer in layers)))
            found[name] = target
        return found

    def plan(self, name: str, groups: list[str], *patches: str) -> str:
        """Write a plan's file; its path."""
        path = os.path.join(self.work, f"{name}.yaml")
        with open(path, "w") as file:
            file.write(tasks.plan_text(name, groups, *patches))
        return path

    def run(self, what: str, plan: str, command: list[str], *, code: int = 0) -> str:
        """``weenv run --rm``."""
        shown = f"weenv run --rm {os.path.basename(plan)} -- {shlex.join(command)}"
        return self.timed(what, ["run", "--config", self.config, "--rm", plan, "--", *command], shown, code=code)

    def main(self, made: tasks.Tasks) -> None:
        """All of it. Raises Failed where something does not go as it should."""
        task = made.tasks[0]
        groups = self.publish(made)
        below = [groups["base"], groups[f"repo-{task.repo}"]]
        self.say(f"  A task is a patch ({task.strategy}) after which {task.fail[0]} fails:")
        for line in task.patch.splitlines():
            colour = {"-": "red", "+": "green"}.get(line[:1], "dim") if line[:3] not in ("---", "+++") else "dim"
            self.say(f"    [{colour}]{escape(line)}[/{colour}]", soft_wrap=True)

        rollout = self.plan("rollout", [*below, groups["harness-pip"]], task.patch)
        argv = ["plan", "compose", "--config", self.config, rollout]
        self.timed("compose the rollout: base, repository, harness, bug", argv, "weenv plan compose rollout.yaml")
        agent = "from importlib.metadata import version; print('mini-swe-agent', version('mini-swe-agent'))"
        script = f'PYTHONPATH=/opt/harness/lib python3 -c "{agent}"'
        self.say(f"    {self.run('run it: its harness is there', rollout, ['sh', '-c', script]).strip()}")

        pytest = ["python3", "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", *task.fail]
        broken = self.plan("grade-before", [*below, groups["evaluator"]], task.patch)
        mended = self.plan("grade-after", [*below, groups["evaluator"]], task.patch, task.inverse())
        for what, plan, code in (
            ("a clean environment with the evaluator: the test fails", broken, 1),
            ("another one, the inverse patch on top: it passes", mended, 0),
            ("the same once more", mended, 0),
        ):
            output = self.run(what, plan, pytest, code=code)
            self.say(f"    [{'red' if code else 'green'}]{escape(output.strip().splitlines()[-1])}[/]")

    def show(self) -> None:
        """The table of costs."""
        table = Table(title="One task: what each step cost", title_justify="left")
        for name in ("step", "time", "pushed or fetched"):
            table.add_column(name, justify="left" if name == "step" else "right")
        for cost in self.costs:
            table.add_row(cost.what, f"{cost.seconds * 1000:.0f} ms", f"{cost.size / 1e6:.3f} MB")
            if cost.what == f"publish {GROUPS[-1]}":
                table.add_section()
        self.console.print()
        self.console.print(table)
        self.console.print(
            "Groups are published once; every further task over this repository is another plan of a few hundred bytes.\n"
            "make bench counts artifacts and bytes for 210 tasks and two harnesses."
        )
