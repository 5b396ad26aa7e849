"""``weenv run --rm PLAN -- COMMAND`` where all is known already, without a library that takes long to import.

Does what weenv.environment.attended does, step by step the same, for the plainest case: a plan that is remembered
(recall.py), a user that is (accounts.py), no terminal, no input. Whatever else it meets, before anything has been made it
gives up and the ordinary way is taken; after that, the ordinary way does the removing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from weenv.core.regular import regular
from weenv.core.settings import DEFAULT_CONFIG
from weenv.environment import accounts, admission, owner, recall, used
from weenv.environment.outlet import AT_MOST, HURRY, LAST, Outlet
from weenv.environment.quickclient import ALREADY_EXISTS, BROKEN, NOT_FOUND, QuickClient, QuickError
from weenv.environment.record import LABEL_RM, check_id, completed, labels_of, new_id, spec_of, user_text
from weenv.environment.requested import GRACE, PATIENCE, TIMED_OUT, UNREAD, last_words, options_of, told, unread
from weenv.environment.runconfig import NodeConfig, load

FLAGS = {"rm": "remove", "read-only": "read_only", "no-new-privileges": "no_new_privileges"}
"""Options without a value that are taken here: name -> name in the command's parameters."""
VALUES = {
    "config": "config_path", "containerd": "address", "namespace": "namespace", "snapshotter": "snapshotter", "env": "env",
    "volume": "volume", "workdir": "workdir", "user": "user", "entrypoint": "entrypoint", "cpus": "cpus", "memory": "memory",
    "pids": "pids", "network": "network", "hostname": "hostname", "runtime": "runtime", "name": "name",
    "timeout": "timeout",
}  # fmt: skip
"""Options with a value, the same way."""
SHORT = {"e": "env", "v": "volume", "w": "workdir", "u": "user", "n": "namespace"}
_MANY = ("env", "volume")

_LEASES = "containerd.services.leases.v1.Leases"
_CONTAINERS = "containerd.services.containers.v1.Containers"
_SNAPSHOTS = "containerd.services.snapshots.v1.Snapshots"
_TASKS = "containerd.services.tasks.v1.Tasks"
_EMPTY = ".google.protobuf.Empty"
_SPEC = "types.containerd.io/opencontainers/runtime-spec/1/Spec"
_RUNC_OPTIONS = "containerd.runc.v1.Options"

_CHUNK = 1 << 16
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED = (signal.SIGUSR1, signal.SIGUSR2)
_RECONNECT = 60.0
_LONGEST = 3600.0
"""Seconds to wait at a time: select(2) does not take any number."""


def parse(argv: Sequence[str]) -> dict[str, Any] | None:
    """The parameters of ``weenv run`` with ``target`` and ``command``; None for what is not plain enough."""
    found: dict[str, Any] = {
        "config_path": DEFAULT_CONFIG, "address": None, "namespace": None, "snapshotter": None, "env": (), "volume": (),
        "workdir": "", "user": "", "entrypoint": None, "cpus": 0.0, "memory": None, "pids": 0, "network": None,
        "hostname": "", "runtime": None, "name": "", "remove": False, "read_only": False, "no_new_privileges": False,
        "tty": False, "timeout": None,
    }  # fmt: skip
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("-") or word == "-":
            found["target"], found["command"] = word, tuple(words)
            return found
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        elif len(word) == 2 and word[1] in SHORT:
            name, equals, value = SHORT[word[1]], "", ""
        else:
            return None
        if name in FLAGS and not equals:
            found[FLAGS[name]] = True
            continue
        if name not in VALUES or (not equals and not words):
            return None
        parameter = VALUES[name]
        text = value if equals else words.pop(0)
        if parameter in _MANY:
            found[parameter] += (text,)
            continue
        kind = float if parameter == "timeout" else type(found[parameter])
        try:
            found[parameter] = kind(text) if kind in (int, float) else text
        except ValueError:
            return None
        if parameter == "timeout" and not found[parameter] >= 0:
            return None
    return None


def run(argv: Sequence[str]) -> int | None:
    """Run it and give the exit status; None where this is not for us. Raises WeenvError."""
    asked = parse(argv)
    if asked is None or not asked["remove"] or asked["network"] not in (None, "none", "host"):
        return None
    if not asked["target"].endswith((".yaml", ".yml", ".json")):
        return None
    config = load(
        asked["config_path"],
        address=asked["address"],
        namespace=asked["namespace"],
        snapshotter=asked["snapshotter"],
        runtime=asked["runtime"],
    )
    try:
        with open(asked["target"], "rb", opener=regular) as file:
            text = file.read(recall.MAX_PLAN + 1)
    except OSError:
        return None
    name = recall.key(text, asked["target"], config.tables, config.run.namespace, config.run.snapshotter)
    ready = recall.recall(f"{config.directory}/plans", name) if name else None
    if ready is None or ready.runs:
        return None
    container = check_id(asked["name"]) or new_id(ready.plan)
    wanted = options_of(asked, asked["command"], config.run.network)
    user = accounts.remembered(config.directory, ready.chain, user_text(ready, wanted))
    if user is None:
        return None
    try:
        client = QuickClient(config.run.address, config.run.namespace)
    except QuickError:
        return None
    try:
        options = completed(config, ready, admission.admit(config, ready, wanted, container, say=_say), container)
    except BaseException:
        client.close()
        raise
    spec = spec_of(config, ready, options, user, container)
    message: dict[str, Any] = {
        "id": container,
        "labels": labels_of(ready, wanted),
        "image": ready.name,
        "runtime": {"name": config.run.shim, **_options(config)},
        "spec": {"type_url": _SPEC, "value": _json(spec)},
        "snapshotter": config.run.snapshotter,
        "snapshot_key": container,
    }
    used.touch(config.directory, config.run.namespace, ready.name)
    with _Signals() as signals:
        one = _One(config, client, container, signals, math.inf if asked["timeout"] is None else asked["timeout"], spec)
        try:
            client.call(_CONTAINERS, "Create", "CreateContainerRequest", {"container": message}, "CreateContainerResponse")
        except QuickError as error:
            client.close()
            admission.give_back(config, ready, wanted, container)
            if error.code in (ALREADY_EXISTS, BROKEN):
                return signals.status  # said, or tried again, by the ordinary way
            raise
        if ready.notice:
            _say(ready.notice)
        try:
            status = one.live(ready.chain)
        except BaseException:
            admission.give_back(config, ready, wanted, container)
            raise
        finally:
            one.remove()
            if one.leftovers:
                one.sweep()
        return signals.status if status is None else status


class _Signals:
    """Signals are only noted for the length of the block, so that none ends this process while something of it is in
    containerd; ``wake`` becomes readable."""

    def __init__(self) -> None:
        self.caught: list[int] = []
        """Those that are to end what runs."""
        self.passed: list[int] = []
        """Those only to be handed on, not yet."""
        self.wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before: dict[int, Any] = {}

    @property
    def status(self) -> int | None:
        """The exit status of who was told to end before anything ran; None where nobody was."""
        return 128 + self.caught[0] if self.caught else None

    def __enter__(self) -> _Signals:
        for number in (*_ENDING, *_PASSED):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as of nohup(1), or of a shell's background job
                self._before[number] = signal.signal(number, self._come)
        return self

    def __exit__(self, *_exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.wake)
        os.close(self._woken)

    def _come(self, number: int, _frame: object) -> None:
        (self.caught if number in _ENDING else self.passed).append(number)
        with contextlib.suppress(BlockingIOError):
            os.write(self._woken, b"!")


def _say(line: str) -> None:
    """What of the plan is not lazy."""
    from weenv.core.log import printable

    os.write(2, f"weenv: {printable(line)}\n".encode("utf-8", "replace"))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogateescape")


def _options(config: NodeConfig) -> dict[str, Any]:
    if not config.run.binary:
        return {}
    from weenv.core.wire import encode
    from weenv.plugin.containerd.fields import TABLES

    return {"options": {"type_url": _RUNC_OPTIONS, "value": encode(TABLES, "RuncOptions", {"binary_name": config.run.binary})}}


class _One:
    """One environment, from its record to its removal."""

    def __init__(
        self, config: NodeConfig, client: QuickClient, container: str, signals: _Signals, timeout: float,
        spec: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.config = config
        self.client = client
        self.container = container
        self.home = config.home(container)
        self.leftovers = False
        self.ended = False
        self.prepared = False
        self.removed = False
        self.signals = signals
        self.killed_at = self.told_at = math.inf
        """When it is killed, and when that is said, having been told to end (monotonic seconds)."""
        self.timeout = timeout
        self.spec = spec
        self.timed_out = False
        self.last = b""
        self.running = False
        self.exit_status = -1
        self.waiting = 0
        self.listing: list[int] = []
        self.outputs: dict[int, int] = {}

    def live(self, chain: str) -> int | None:
        """Start, copy, wait; the exit status, or None where the plan has to be composed anew or a signal came first."""
        if not self._start(chain):
            self.remove()
            return None
        status = self._attend()
        if unread(status, self.last):
            _say(UNREAD)
        return TIMED_OUT if self.timed_out else status

    def _start(self, chain: str) -> bool:
        call, key = self.client.call, {"snapshotter": self.config.run.snapshotter, "key": self.container}
        try:
            mounts = call(_SNAPSHOTS, "Prepare", "PrepareSnapshotRequest", {**key, "parent": chain}, "PrepareSnapshotResponse")
        except QuickError as error:
            if error.code == NOT_FOUND:
                return False
            raise
        self.prepared = True
        os.makedirs(self.home, mode=0o700, exist_ok=True)
        paths = [f"{self.home}/1", f"{self.home}/2"]
        for number, path in enumerate(paths, 1):
            os.mkfifo(path, 0o600)
            self.outputs[os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)] = number
        made = False
        try:
            request = {
                "container_id": self.container,
                "rootfs": mounts.get("mounts", []),
                "stdout": paths[0],
                "stderr": paths[1],
                **_options(self.config),
            }
            if self.signals.caught:
                return False
            self.running = True
            call(_TASKS, "Create", "CreateTaskRequest", request, "CreateTaskResponse")
            made = True
            if self.signals.caught:
                return False  # who has not begun needs no chance to end well
            call(_TASKS, "Start", "StartRequest", {"container_id": self.container}, "StartResponse")
        except QuickError as error:
            self.running = made or error.code == BROKEN  # else containerd has taken away what it could not make
            from weenv.environment.lifecycle import is_cleared_away, mount_moved, start_error
            from weenv.plugin.containerd.client import ContainerdError

            if mount_moved(error.message) or is_cleared_away(error.message, self.container):
                return False
            raise start_error(ContainerdError(error.message, "UNKNOWN"), self.spec) from error
        return True

    def _attend(self) -> int:
        """Copy what it writes until it has ended."""
        self.waiting = self._ask_wait()
        for service, what, label in (_CONTAINERS, "Containers", LABEL_RM), (_LEASES, "Leases", owner.LEASE_LABEL):
            ours = {"filters": [f'labels."{label}"']}
            self.listing.append(self.client.begin(service, "List", f"List{what}Request", ours, f"List{what}Response"))
        outlets = {fd: Outlet(number) for fd, number in self.outputs.items()}
        done: set[int] = set()
        deadline = 0.0
        sent = left = 0
        up = time.monotonic() + self.timeout
        while True:
            for number in self.signals.caught[sent:]:
                self._signal(number, again=sent > 0)
                sent += 1
            while self.signals.passed:
                self._kill(self.signals.passed.pop(0))
            # An answer may have come while another was waited for: the socket does not tell.
            before = self.exit_status
            self._take_answers()
            now = time.monotonic()
            if before < 0 <= self.exit_status:  # all others in there have, too (pid_namespaces(7)): its streams end
                deadline = now + AT_MOST
            blocked = [outlet.fd for outlet in outlets.values() if outlet.pending]
            if blocked and self.exit_status >= 0 and self.signals.caught:
                deadline = min(deadline, now + HURRY)
            timeout = None
            if self.exit_status >= 0:
                if not blocked and (len(done) == len(outlets) or left > LAST or now >= deadline):
                    return self.exit_status
                if blocked and self.signals.caught and now >= deadline:
                    return self.exit_status  # told to end, with a reader that takes nothing
                timeout = None if blocked and not self.signals.caught else deadline - now
            elif now >= min(up, self.killed_at):
                self.timed_out |= now >= up
                up = self.killed_at = self.told_at = math.inf
                self._kill(signal.SIGKILL, everyone=True)
                continue
            elif now >= self.told_at:
                self.told_at = math.inf
                _say(told(self.signals.caught[0]))
                continue
            elif (due := min(up, self.killed_at, self.told_at)) < math.inf:
                timeout = min(due - now, _LONGEST)
            sources = [fd for fd, outlet in outlets.items() if fd not in done and not outlet.pending]
            poll = [*sources, self.signals.wake, *([self.client.socket.fileno()] if self.waiting or self.listing else [])]
            readable, writable, _ = select.select(poll, blocked, [], timeout)
            if self.signals.wake in readable:
                os.read(self.signals.wake, 4096)
            if blocked and self.exit_status >= 0 and not self.signals.caught:
                deadline += time.monotonic() - now  # it is our reader who is slow, not what has been running here
            for fd, outlet in outlets.items():
                try:
                    if outlet.fd in writable:
                        outlet.flush()
                    if fd in readable and not outlet.pending:
                        data = _copy(fd, outlet)
                        if data == b"":
                            done.add(fd)
                        elif data is not None:
                            if outlet.fd == 2:
                                self.last = last_words(self.last, data)
                            left += len(data) if self.exit_status >= 0 else 0
                except BrokenPipeError:
                    return 128 + signal.SIGPIPE  # as who writes there himself; it is killed by being removed

    def _take_answers(self) -> None:
        """What has come of the answers that are outstanding."""
        try:
            for number in tuple(self.listing):
                if (answer := self.client.result(number, block=False)) is not None:
                    self.listing.remove(number)
                    self._look(answer)
            if self.waiting and (answer := self.client.result(self.waiting, block=False)) is not None:
                self.waiting = 0
                self.exit_status = int(answer.get("exit_status", 0))
                self.ended = True
        except QuickError as error:
            if error.code != BROKEN:
                raise
            self.listing.clear()
            if not self.ended:
                self.waiting = self._reconnect()

    def _ask_wait(self) -> int:
        return self.client.begin(_TASKS, "Wait", "WaitRequest", {"container_id": self.container}, "WaitResponse")

    def _reconnect(self) -> int:
        """containerd went away, as in a restart; the environment goes on meanwhile."""
        end = time.monotonic() + _RECONNECT
        self.client.close()
        while True:
            try:
                self.client = QuickClient(self.config.run.address, self.config.run.namespace)
                return self._ask_wait()
            except QuickError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def _look(self, answer: dict[str, Any]) -> None:
        """Whether there is something to sweep."""
        for item in answer.get("containers", []):
            mark = item.get("labels", {}).get(LABEL_RM, "")
            if item.get("id") != self.container and (mark == "-" or owner.is_gone(mark)):
                self.leftovers = True
        for lease in answer.get("leases", []):
            self.leftovers |= owner.is_orphan(lease.get("id", ""), lease.get("labels", {}))

    def _signal(self, number: int, *, again: bool) -> None:
        if again:
            self._kill(signal.SIGKILL, everyone=True)
        else:
            self._kill(number)
            self.killed_at, self.told_at = time.monotonic() + GRACE, time.monotonic() + PATIENCE

    def _kill(self, number: int, *, everyone: bool = False) -> None:
        if self.ended:
            return
        request = {"container_id": self.container, "signal": number, "all": everyone}
        try:
            self.client.call(_TASKS, "Kill", "KillRequest", request, _EMPTY)
        except QuickError as error:
            if error.code == BROKEN:
                self.listing.clear()
                self.waiting = self._reconnect()
                with contextlib.suppress(QuickError):
                    self.client.call(_TASKS, "Kill", "KillRequest", request, _EMPTY)

    def remove(self) -> None:
        """Take it away; in any difficulty as :func:`weenv.environment.lifecycle.remove` does."""
        if self.removed:
            return
        self.removed = True
        call = self.client.call
        try:
            if self.running and not self.ended:
                raise QuickError("it has not ended", BROKEN)
            if self.running:
                self._delete()
            if self.prepared:
                key = {"snapshotter": self.config.run.snapshotter, "key": self.container}
                call(_SNAPSHOTS, "Remove", "RemoveSnapshotRequest", key, _EMPTY)
            self._clear()
            call(_CONTAINERS, "Delete", "DeleteContainerRequest", {"id": self.container}, _EMPTY)
            while self.listing:  # of one that was over at once the answers may have come only now
                self._look(self.client.result(self.listing.pop()) or {})
        except QuickError:
            self._ordinarily("remove")
        finally:
            self.client.close()
            for fd in self.outputs:
                os.close(fd)

    def _delete(self) -> None:
        """Delete the ended task; what it wrote and nobody takes any more is dropped, for the shim waits for its end."""
        number = self.client.begin(_TASKS, "Delete", "DeleteTaskRequest", {"container_id": self.container}, "DeleteResponse")
        open_ends = set(self.outputs)
        while self.client.result(number, block=False) is None:
            readable, _, _ = select.select([self.client.socket.fileno(), *open_ends], [], [])
            for fd in open_ends.intersection(readable):
                with contextlib.suppress(BlockingIOError):
                    if not os.read(fd, _CHUNK):
                        open_ends.discard(fd)

    def _clear(self) -> None:
        """The directory, which has nothing but the FIFOs in it."""
        try:
            for number in self.outputs.values():
                os.unlink(f"{self.home}/{number}")
            if self.prepared:
                os.rmdir(self.home)
        except OSError:
            import shutil

            shutil.rmtree(self.home, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what others left behind."""
        self._ordinarily("sweep")

    def _ordinarily(self, what: str) -> None:
        import asyncio

        from weenv.environment import lifecycle
        from weenv.environment.node import Node

        async def go() -> None:
            async with Node(self.config) as node:
                if what == "remove":
                    await lifecycle.remove(node, self.container, ended=self.ended)
                else:
                    await lifecycle.tidy(node)

        asyncio.run(go())


def _copy(source: int, outlet: Outlet) -> bytes | None:
    """Copy what is there, which is nothing at its end; None where there is nothing yet."""
    try:
        data = os.read(source, _CHUNK)
    except BlockingIOError:
        return None
    outlet.write(data)
    return data
