"""core/regular.py, and every command that names a file: what is no file is refused and not waited for; what it holds open
already, such as a process substitution, is read."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weenv.cli.main import main
from weenv.core.errors import ConfigError
from weenv.core.regular import held, read_file
from weenv.environment import recall
from weenv.environment.gateway.config import GatewayConfig
from weenv.environment.gateway.daemon import tls_context
from weenv.plugin.nri import journal
from weenv.registry.config import RegistryConfig
from weenv.registry.groupref import keys
from weenv.registry.groupref.policy import parse_policy

Captured = pytest.CaptureFixture[str]

PLAN = b"apiVersion: weenv.dev/v1\nkind: EnvironmentPlan\nmetadata: {name: task}\ngroups: ['oci:./nowhere:1']\n"
REF = "oci:./nowhere:1"
COMMANDS = {
    "key": f"group sign --key {{}} {REF}",
    "password": "group keygen --password-file {} made",
    "public": f"group verify --key {{}} {REF}",
    "policy": f"group verify --policy {{}} {REF}",
    "config": "elastic replay @bursts --config {}",
    "check": "plan check {}",
    "lock": "plan lock {}",
    "show": "plan show {}",
    "compose": "plan compose {}",
    "push": "plan push {} oci:./out:1",
    "run": "run {}",
    "replay": "elastic replay {}",
    "trace": "elastic trace --log {} task",
}


def run(command: str, path: str, capsys: Captured) -> tuple[int, str]:
    """Exit code of the command, run in this process, and what it said."""
    with pytest.raises(SystemExit) as ended:
        main(command.format(path).split())
    found = capsys.readouterr()
    return int(ended.value.code or 0), found.out + found.err


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in a directory of their own, and no configuration is this machine's."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def given() -> Iterator[Callable[[bytes], str]]:
    """A name, as a shell makes one of ``<(command)``, of a pipe that brings some bytes and ends."""
    ends: list[int] = []
    threads: list[threading.Thread] = []

    def make(data: bytes) -> str:
        ours, theirs = os.pipe()
        ends.append(ours)

        def write() -> None:
            with os.fdopen(theirs, "wb") as file:
                file.write(data)

        threads.append(threading.Thread(target=write))
        threads[-1].start()
        return f"/dev/fd/{ours}"

    yield make
    for fd in ends:
        os.close(fd)
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_pipe_that_nobody_writes_into_is_no_file(name: str, capsys: Captured) -> None:
    os.mkfifo("pipe.yaml")
    code, text = run(COMMANDS[name], "pipe.yaml", capsys)
    assert code == 1 and "it is a pipe, not a file" in text and len(text.splitlines()) <= 2


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"run", "trace"}))
def test_a_device_is_no_file(name: str, capsys: Captured) -> None:
    code, text = run(COMMANDS[name], "/dev/zero", capsys)
    assert code == 1 and "it is a device, not a file" in text


@pytest.mark.parametrize("name", ["key", "password", "public", "policy", "config", "check", "lock", "push"])
def test_what_has_no_end_is_not_read(name: str, capsys: Captured) -> None:
    with open("huge", "wb") as file:
        file.truncate(1 << 40)
    code, text = run(COMMANDS[name], "huge", capsys)
    assert code == 1 and "huge" in text and ("larger than" in text or "no usable password" in text)


def test_what_a_shell_gives_is_read(given: Callable[[bytes], str], capsys: Captured) -> None:
    key = keys.generate()
    assert run("plan check {}", given(PLAN), capsys)[0] == 0
    assert run("plan push {} oci:./out:1", given(PLAN), capsys)[0] == 0
    for command in ("plan lock {}", "plan show {}"):  # read, and then its group is not there
        code, text = run(command, given(PLAN), capsys)
        assert code == 1 and "nowhere" in text, text
    assert run("group keygen --password-file {} made", given(b"secret\n"), capsys)[0] == 0
    assert b"ENCRYPTED" in Path("made.key").read_bytes()
    for command, data in (("sign", keys.private_pem(key)), ("verify", keys.public_pem(key))):
        code, text = run(f"group {command} --key {{}} {REF}", given(data), capsys)
        assert code == 1 and "nowhere" in text, text
    code, text = run("group verify --policy {} " + REF, given(b'default = "deny"\n'), capsys)
    assert code == 1 and "nowhere" in text, text


def test_what_configuration_names_is_a_file(given: Callable[[bytes], str]) -> None:
    os.mkfifo("pipe")
    for path in (os.path.abspath("pipe"), given(b"")):  # a daemon is given nothing
        with pytest.raises(ConfigError, match="it is a pipe, not a file"):
            parse_policy({"rules": [{"match": "**", "keys": [path]}]})
        with pytest.raises(ConfigError, match=f"cannot use the CA bundle {path}.*it is a pipe"):
            RegistryConfig(ca_file=path).ssl_context()
        with pytest.raises(ConfigError, match=f"cannot use the client certificate {path}.*it is a pipe"):
            RegistryConfig().ssl_context(client=[(path, "")])
        with pytest.raises(ConfigError, match="it is a pipe"):
            tls_context(GatewayConfig(tls_certificate=path, tls_key=path))
        with pytest.raises(OSError, match="it is a pipe"):
            recall.seal([path])
    with open("huge", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigError, match="huge is larger than"):
        RegistryConfig(ca_file="huge").ssl_context()


def test_an_authority_is_read_from_its_file() -> None:
    trusted = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    assert len(RegistryConfig(ca_file=trusted).ssl_context().get_ca_certs()) > 10
    Path("text").write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot use the CA bundle text"):
        RegistryConfig(ca_file="text").ssl_context()


def test_a_held_file_is_the_one_that_was_looked_at() -> None:
    Path("a").write_bytes(b"first")
    with held("a", 100) as name:
        os.replace("a", "b")
        Path("a").write_bytes(b"second")
        assert Path(name).read_bytes() == b"first"
    with pytest.raises(ConfigError, match="a is larger than 5 bytes"), held("a", 5):
        pass
    assert read_file("a", 6) == b"second"
    with pytest.raises(ConfigError, match="a is larger than 5 bytes"):
        read_file("a", 5)


def test_a_journal_that_is_a_pipe_is_not_waited_for() -> None:
    os.mkfifo("log")
    with pytest.raises(OSError, match="it is a pipe"):
        list(journal.read("log"))
    os.rename("log", "log.1")
    with pytest.raises(OSError, match="it is a pipe"):
        list(journal.read("log"))


def test_a_set_of_traces_replaces_no_device(capsys: Captured) -> None:
    os.mkfifo("pipe")
    code, text = run("elastic replay @bursts --write {}", "pipe", capsys)
    assert code == 1 and "is no regular file" in text
    assert os.listdir() == ["pipe"]
