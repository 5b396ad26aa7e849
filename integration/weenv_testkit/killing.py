"""Containers that verify what they read, over and over, while the daemons below them are killed at random.

Nobody helps the node but whoever would in real life: ``weenv serve`` starts its daemons again, the test stands for the
service manager that starts containerd and ``weenv serve``.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from weenv.plugin.snapshotter.blobfs import holder
from weenv_testkit.node import SNAPSHOTTER
from weenv_testkit.procs import Failed, open_fds, wait_until
from weenv_testkit.served import ServedNode
from weenv_testkit.store import Store

FIND = "cd /; find usr/bin usr/lib opt/weenv -xdev -type f | sort | head -{files} | xargs sha256sum"
_VERIFY = """cd /; until test -e sums; do sleep 0.05; done
while :; do
  if ! sha256sum --quiet --check sums > wrong 2>&1; then
    echo "a round failed" >> failed
    while read -r line; do echo "$line" >> failed; done < wrong
    exit 1
  fi
  echo x >> rounds
done"""
_WRONG = 77
"""Exit status of a container that read something else than the image holds."""
VICTIMS = (
    ("blobfs",), ("blobfs",), ("snapshotter",), ("snapshotter",), ("containerd",), ("holder",),
    ("blobfs", "holder"), ("blobfs", "snapshotter"), ("supervisor",), ("supervisor", "blobfs"),
    ("containerd", "supervisor", "blobfs", "snapshotter"),
)  # fmt: skip
"""Who dies together. Not holder, blobfs and supervisor: then nobody is left who has the mount."""
_KEEPERS = {"holder", "supervisor"}


@dataclass
class Outcome:
    """What came of it."""

    kills: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    """How often a container has verified its whole list."""
    files: int = 0
    """Files verified."""
    runs: int = 0
    """Images pulled, run and removed meanwhile."""
    asked_again: Counter[str] = field(default_factory=Counter)
    """Why client commands failed and were given again: containerd or a request of theirs died."""
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    """What a container found wrong, or could not read."""

    def __str__(self) -> str:
        kills = ", ".join(f"{name} {count}" for name, count in self.kills.most_common())
        return (
            f"{self.seconds:.0f} s, {sum(self.kills.values())} kills ({kills}); {self.files} files verified in {self.rounds} "
            f"rounds; {self.runs} images pulled, run and removed, {sum(self.asked_again.values())} commands given again; "
            f"{len(self.wrong)} wrong"
        )


class Killing:
    """One such run on ``node``, with ``containers`` of one image, each of which verifies ``files`` files."""

    def __init__(self, node: ServedNode, store: Store, *, containers: int, files: int, every: float = 2.0) -> None:
        self.node = node
        self.store = store
        self.containers = containers
        self.files = files
        self.every = every
        self.outcome = Outcome()
        self._dice = random.Random()
        self._done = threading.Event()

    def run(self, seconds: float) -> Outcome:
        """Do it for so long, then have every container finish a round; all that was made is gone afterwards."""
        node, outcome = self.node, self.outcome
        ref = self.store.lazy("debian")
        sums = self._expected()
        namespace = node.pull(ref)
        names = [
            node.containerd.run_detached(ref, "sh", "-c", _VERIFY, snapshotter=SNAPSHOTTER, namespace=namespace)
            for _ in range(self.containers)
        ]
        roots = [node.rootfs(name, namespace) for name in names]
        for root in roots:
            mine = self._dice.sample(sums, min(self.files, len(sums)))
            with open(f"{root}/sums.part", "w") as file:
                file.writelines(mine)
            os.rename(f"{root}/sums.part", f"{root}/sums")
        churn = threading.Thread(target=self._churn)
        churn.start()
        begin = time.monotonic()
        try:
            while (now := time.monotonic()) - begin < seconds and not self._wrong(roots):
                victims = self._dice.choice(VICTIMS)
                if not _KEEPERS & {*victims} or self._kept():
                    self._kill(victims)
                self._done.wait(max(0.0, now + self.every * self._dice.uniform(0.5, 1.5) - time.monotonic()))
            outcome.seconds = time.monotonic() - begin
        finally:
            self._done.set()
            churn.join(300)
        assert not churn.is_alive()
        for root in roots:
            before = _rounds(root)
            wait_until("one more round", lambda root=root, before=before: _rounds(root) > before + 1, 600)  # type: ignore[misc]
        outcome.rounds = sum(map(_rounds, roots))
        outcome.files = outcome.rounds * min(self.files, len(sums))
        outcome.wrong += self._wrong(roots)
        for name in names:
            node.containerd.remove_container(name, namespace)
        for lease in node.containerd.ctr("leases", "ls", "-q", namespace=namespace).split():
            node.containerd.ctr("leases", "rm", lease, namespace=namespace)  # of pulls that died: they keep what they pulled
        node.containerd.purge(namespace, SNAPSHOTTER)
        wait_until("the layers to go", lambda: not node.layers(), 60)
        return outcome

    def _expected(self) -> list[str]:
        """Lines of sha256sum, of an ordinary pull of the same image by containerd's own snapshotter."""
        containerd = self.node.containerd
        plain = self.store.plain("debian")
        containerd.pull(plain, snapshotter="overlayfs")
        script = FIND.format(files=6000)
        lines = containerd.run(plain, "sh", "-c", script, snapshotter="overlayfs").splitlines(keepends=True)
        containerd.remove_image(plain)  # the lazy one has the same configuration, which would keep its snapshots
        assert len(lines) > 1000
        return lines

    @staticmethod
    def _wrong(roots: list[str]) -> list[str]:
        found = []
        for root in roots:
            with contextlib.suppress(FileNotFoundError), open(f"{root}/failed") as file:
                found += file.read().splitlines()
        return found

    # -- killing ------------------------------------------------------------------------------------------------------

    def _kill(self, victims: tuple[str, ...]) -> None:
        node = self.node
        if self._dice.random() < 0.3:  # have the kernel ask again for what it has
            with open("/proc/sys/vm/drop_caches", "w") as file:
                file.write("3\n")
        if "blobfs" in victims and self._dice.random() < 0.2:
            self._forget()
        handles = {}
        for victim in victims:
            pid = self._pid(victim)
            with contextlib.suppress(ProcessLookupError):
                handles[victim] = os.pidfd_open(pid) if pid else -1
        for victim, handle in handles.items():
            with contextlib.suppress(ProcessLookupError, OSError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                self.outcome.kills[victim] += 1
        for handle in handles.values():
            if handle >= 0:
                os.close(handle)
        if "supervisor" in victims:
            assert node.supervisor is not None
            node.supervisor.kill()  # which also waits for it
            node.spawn()
        if "containerd" in victims:
            node.containerd.kill()
            node.containerd.start()

    def _kept(self) -> bool:
        """True once both have the mount: a keeper that was killed a moment ago may not have been replaced yet."""
        node = self.node
        assert node.supervisor is not None
        answer = holder.ask(f"{node.run}/h.sock", {"op": "status"})
        return answer is not None and answer["server"] is not None and "/dev/fuse" in open_fds(node.supervisor.pid).values()

    def _pid(self, victim: str) -> int | None:
        node = self.node
        if victim == "containerd":
            return node.containerd.pid
        if victim == "supervisor":
            assert node.supervisor is not None
            return node.supervisor.pid
        if victim == "holder":
            answer = holder.ask(f"{node.run}/h.sock", {"op": "status"})
            return int(answer["pid"]) if answer else None
        return node.daemon(victim)

    def _forget(self) -> None:
        """Take away what is local of every layer: the next server has to fetch it again."""
        for digest in self.node.layers():
            for name in ("data", "present"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(self.node.root, "layers", "sha256", digest.removeprefix("sha256:"), name))

    # -- and, meanwhile, pulling ----------------------------------------------------------------------------------------

    def _churn(self) -> None:
        """Pull, run and remove small images; a command that died with its server is given again."""
        while not self._done.is_set():
            try:
                self._turn(self._dice.choice(("solo", "pair")))
            except Failed as error:
                self.outcome.wrong.append(str(error))
                return
            self.outcome.runs += 1

    def _turn(self, name: str) -> None:
        ref = self.store.lazy(name)
        namespace = self._again(lambda: self.node.pull(ref))
        # The status is the verdict, not the output: ctr may lose that of a process which ends at once.
        check = f'test "$(cat /etc/weenv-release)" = {name} || exit {_WRONG}'
        self._again(lambda: self.node.shell(ref, check, namespace))
        self._again(lambda: self.node.remove_image(ref, namespace))

    def _again(self, command: Callable[[], str | None]) -> str:
        end = time.monotonic() + 120
        while True:
            try:
                return command() or ""
            except (Failed, OSError, RuntimeError, grpc.RpcError) as error:
                if f"ended with {_WRONG}" in str(error):
                    raise
                if time.monotonic() > end:
                    raise Failed(f"it failed for two minutes: {error}") from error
                self.outcome.asked_again[str(error).splitlines()[-1][-160:]] += 1
                time.sleep(0.2)


def _rounds(root: str) -> int:
    try:
        return os.path.getsize(f"{root}/rounds") // 2
    except FileNotFoundError:
        return 0
