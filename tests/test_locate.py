"""What a user types in place of a layer, and files that are none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from weenv.cli.main import cli
from weenv.core.regular import regular


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        from weenv.cli.main import explain

        return 1, explain(result.exception)
    return result.exit_code, result.output


@pytest.mark.parametrize("name", ["missing.zst", "./missing", "../missing", "/nowhere/missing", "sub/missing.tar.gz", "x.tar"])
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_file_that_is_missing_is_not_looked_for_in_a_registry(
    name: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = run("layer", command, name)
    assert code == 1 and f"no such file: {name}" in text


@pytest.mark.parametrize("name", ["d", "./d", "d/"])
def test_a_directory_needs_its_kind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("d")
    code, text = run("layer", "inspect", name)
    assert code == 1 and f"{name} is a directory" in text and "oci:" in text


@pytest.mark.parametrize("command", [["layer", "inspect"], ["layer", "verify"]])
def test_only_regular_files_are_opened(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        for name, kind in (("pipe", "it is a pipe"), ("/dev/null", "it is a device"), ("socket", "")):
            code, text = run(*command, name)
            assert code == 1 and f"cannot open {os.path.abspath(name)}" in text and kind in text


def test_a_layout_of_pipes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("layout")
    os.mkfifo("layout/oci-layout")
    for arguments in (["layer", "inspect", "oci:layout"], ["convert", "oci:layout", "oci:out"]):
        code, text = run(*arguments)
        assert code == 1 and "it is a pipe, not a file" in text
    os.unlink("layout/oci-layout")
    Path("layout/oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    os.mkfifo("layout/index.json")
    code, text = run("layer", "inspect", "oci:layout")
    assert code == 1 and "it is a pipe, not a file" in text


def test_what_is_regular_is_read_as_ever(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"text")
    os.symlink("f", tmp_path / "link")
    with open(tmp_path / "link", "rb", opener=regular) as file:
        assert file.read() == b"text" and os.get_blocking(file.fileno()) and not os.get_inheritable(file.fileno())
    for name in ("missing", "."):
        with pytest.raises(OSError, match=r"No such file|it is a directory"), open(tmp_path / name, "rb", opener=regular):
            pass
