"""Tables and findings on narrow terminals, and plural forms."""

from __future__ import annotations

import pytest

from weenv.cli import render

Captured = pytest.CaptureFixture[str]

ROWS = [
    ("0123456789ab", "complete", "872 MiB", "2.31 GiB", "100.0%", "2.32 GiB", "12", "3", "registry.example:5000/team/image"),
    ("fedcba987654", "unmounted", "1.2 KiB", "3.4 KiB", "0%", "1.1 KiB", "1", "0", "-"),
]
HEAD = ["layer", "served", "blob", "tar", "local", "on disk", "snapshots", "users", "from"]


def drawn(capsys: Captured, monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    render.table(HEAD, ROWS, right=[2, 3, 4, 5, 6, 7], drop=[3, 6, 5, 2])
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_a_table_that_fits_is_framed_and_whole(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = drawn(capsys, monkeypatch, 160)
    assert max(map(len, lines)) <= 160
    assert all(name in lines[1] for name in HEAD) and len(lines) == 6 and lines[0].startswith("┏")
    assert all(cell in lines[3] for cell in ROWS[0])


@pytest.mark.parametrize(("columns", "gone"), [(115, 0), (105, 1), (95, 2), (85, 3), (75, 4)])
def test_frame_and_columns_go_before_cells_are_torn(
    columns: int, gone: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line for line in drawn(capsys, monkeypatch, columns) if line]
    assert max(map(len, lines)) <= columns
    left = [name for name in HEAD if f" {name} " in f" {lines[0]} "]
    assert left == [name for name in HEAD if name not in ["tar", "snapshots", "on disk", "blob"][:gone]]
    assert len(lines) == 3 and ROWS[0][-1] in lines[1], "one line a row, no cell torn"


@pytest.mark.parametrize("columns", [20, 50, 66])
def test_a_reference_is_never_torn(columns: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal wraps a line that is too long for it; what is copied from there is whole."""
    lines = [line for line in drawn(capsys, monkeypatch, columns) if line]
    assert len(lines) == 3
    assert lines[1].endswith(ROWS[0][-1])
    assert all(name in lines[0] for name in ("layer", "local", "users", "from"))


def test_a_pipe_gets_all_columns(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    render.table(HEAD, ROWS, right=[2, 3, 4, 5, 6, 7], drop=[3, 6, 5, 2])
    out = capsys.readouterr().out
    assert all(cell in out.splitlines()[3] for cell in ROWS[0])


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_findings_are_wrapped_between_words(columns: int, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    seen = "no unpack_config entry for weenv \x1b[2J[red]"
    remedy = "add [[plugins.transfer.unpack_config]] with snapshotter = 'weenv' (list overlayfs too: they replace the default)"
    render.findings([("fail", "transfer service", seen, remedy), ("ok", "kernel", "Linux 6.18", "")])
    out = capsys.readouterr().out
    assert "\x1b" not in out and max(map(len, out.splitlines())) <= columns
    assert " ".join(out.split()) == (
        f"fail transfer service: {' '.join(render.plain(seen).split())} -> {remedy} ok kernel: Linux 6.18"
    )
    assert [line[:6].strip() for line in out.splitlines() if line[:6].strip()] == ["fail", "ok"]


def test_plural_forms() -> None:
    assert [render.counted(number, "layer") for number in (0, 1, 2)] == ["0 layers", "1 layer", "2 layers"]
    assert render.counted(1, "entry", "entries") == "1 entry" and render.counted(3, "entry", "entries") == "3 entries"
