"""registry/trusted.py: what the operator named is written down, what nobody may rely on is not read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from weenv.registry.config import RegistryConfig
from weenv.registry.trusted import MAX_HOSTS, NAME, TrustedHosts, add_hosts, read_hosts, trust


def test_added_hosts_are_read_by_who_looked_before(tmp_path: Path) -> None:
    hosts = TrustedHosts(str(tmp_path))
    assert "localhost:5000" not in hosts
    add_hosts(str(tmp_path), ["localhost:5000"])
    assert "localhost:5000" in hosts and "localhost:5001" not in hosts and "localhost" not in hosts
    add_hosts(str(tmp_path), ["[::1]:5001", "localhost:5000"])
    assert "localhost:5000" in hosts and "[::1]:5001" in hosts
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
    (tmp_path / NAME).unlink()
    assert "localhost:5000" not in hosts


def test_their_number_is_bounded_and_the_oldest_go(tmp_path: Path) -> None:
    add_hosts(str(tmp_path), [f"127.0.0.1:{port}" for port in range(1, MAX_HOSTS + 1)])
    add_hosts(str(tmp_path), ["localhost:1"])
    kept = read_hosts(str(tmp_path / NAME))
    assert len(kept) == MAX_HOSTS and kept[-1] == "localhost:1" and kept[0] == "127.0.0.1:2"


def test_what_others_may_have_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / NAME
    path.write_text("localhost:1\nhttps://x\n../../etc\n\nlocalhost:2\n")
    path.chmod(0o600)
    assert read_hosts(str(path)) == ("localhost:1", "localhost:2"), "lines that are no host are nothing"
    path.chmod(0o620)
    assert read_hosts(str(path)) == () and "localhost:1" not in TrustedHosts(str(tmp_path))
    path.chmod(0o600)
    path.write_text("localhost:1\n" * 10_000)
    assert read_hosts(str(path)) == (), "bounded before it is read"
    path.unlink()
    os.mkfifo(path)
    assert read_hosts(str(path)) == (), "nor waited for"


def test_two_that_add_at_once_lose_nothing(tmp_path: Path) -> None:
    wanted = [f"localhost:{port}" for port in range(1, 33)]
    threads = [threading.Thread(target=add_hosts, args=(str(tmp_path), [host])) for host in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(read_hosts(str(tmp_path / NAME))) == set(wanted)


async def test_only_hosts_that_need_it_are_written_down(tmp_path: Path) -> None:
    config = RegistryConfig(plain_http=frozenset({"localhost:1"}))
    await trust(str(tmp_path), ["localhost:1", "10.1.2.3:5000"], config)
    assert os.listdir(tmp_path) == []
    await trust(str(tmp_path), ["localhost:1", "127.0.0.1:2", "10.1.2.3:5000"], config)
    assert read_hosts(str(tmp_path / NAME)) == ("127.0.0.1:2",)
