"""A system below a directory: its symlinks lead nowhere else, whatever they say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weenv.cli.uninstall import _purge
from weenv.core.errors import ConfigError
from weenv.systemd.install.files import Settings
from weenv.systemd.install.tree import Tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "usr/etc").mkdir(parents=True)
    (made / "etc").symlink_to("/usr/etc")
    (made / "up").symlink_to("../../../..")
    (made / "usr/circle").symlink_to("circle")
    return made


def test_symlinks_are_those_of_the_system(root: Path) -> None:
    tree = Tree(str(root))
    assert not tree.live and Tree("/").live
    assert tree.resolve("/etc/x/../y") == "/usr/etc/y"
    assert tree.resolve("/up/up/etc") == "/usr/etc"
    assert tree.host("/../../etc/passwd") == f"{root}/usr/etc/passwd"
    assert tree.host("/etc", last=False) == f"{root}/etc"
    with pytest.raises(ConfigError, match="circles"):
        tree.resolve("/usr/circle/x")


def test_files_are_written_where_they_belong(root: Path) -> None:
    tree = Tree(str(root))
    assert tree.missing("/etc/a/b/c") == ["/etc/a", "/etc/a/b"]
    tree.write("/etc/a/b/c", b"1")
    assert tree.missing("/etc/a/b/c") == []
    assert (root / "usr/etc/a/b/c").read_bytes() == b"1" == tree.read("/etc/a/b/c")
    os.chmod(root / "usr/etc/a/b/c", 0o640)
    tree.write("/etc/a/b/c", b"3")
    assert (root / "usr/etc/a/b/c").stat().st_mode & 0o777 == 0o640
    (root / "usr/etc/link").symlink_to("/etc/a/b/c")
    tree.write("/etc/link", b"4")
    assert (root / "usr/etc/link").is_symlink() and tree.read("/etc/a/b/c") == b"4"
    assert tree.read("/etc/none") is None and tree.read("/etc/a/b/c/d") is None
    assert tree.matches("/etc/a/b/*") == ["/etc/a/b/c"]
    with pytest.raises(ConfigError, match="wildcards"):
        tree.matches("/etc/*/b/*")
    with pytest.raises(ConfigError, match="larger than 0 bytes"):
        tree.read("/etc/link", 0)
    os.mkfifo(root / "usr/etc/pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        tree.read("/etc/pipe")


def test_what_is_no_file_is_named_by_its_path(root: Path) -> None:
    tree = Tree(str(root))
    (root / "usr/etc/config.toml").mkdir()
    with pytest.raises(ConfigError, match=r"^/etc/config\.toml is no regular file$"):
        tree.read("/etc/config.toml")
    with pytest.raises(OSError) as caught:
        tree.write("/etc/config.toml", b"1")
    assert caught.value.filename == "/etc/config.toml"
    assert os.listdir(root / "usr/etc") == ["config.toml"]


def test_what_is_removed_is_what_is_there(root: Path) -> None:
    tree = Tree(str(root))
    tree.write("/etc/a/f", b"")
    for target in ("/nowhere", "/else"):
        tree.make_link("/etc/w/l", target)
        assert tree.link("/etc/w/l") == target
    assert not tree.remove_directory("/etc/a") and tree.remove("/etc/a/f") and not tree.remove("/etc/a/f")
    assert tree.remove_directory("/etc/a") and not tree.remove_directory("/etc/a")
    assert tree.remove("/etc/w/l") and tree.link("/etc/w/l") is None


def test_a_purge_deletes_what_weenv_makes_and_leaves_what_others_have_on_the_same_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "data"
    for name in ("layers/sha256/x", "s/1/fs", "m/1", "environments", "mine/layers", "lost+found"):
        (root / name).mkdir(parents=True)
    for name in ("metastore.db", "metastore.db-wal", "mapping.db", "trusted-hosts", "lock", "lock2", "mine/metastore.db"):
        (root / name).touch()
    (root / "elastic").symlink_to("mine")
    _purge(Tree(str(tmp_path)), Settings("/usr/bin/weenv", root="/data"))
    assert sorted(os.listdir(root)) == ["lock2", "lost+found", "mine"]
    assert sorted(os.listdir(root / "mine")) == ["layers", "metastore.db"]
    assert "left /data/mine: it is not WeEnv's" in capsys.readouterr().err
