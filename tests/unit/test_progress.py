"""Work that takes long shows its rows at once and, on a terminal, how far it is."""

from __future__ import annotations

import io
import re
import sys

import pytest

from farandole import _progress
from farandole._progress import Progress
from farandole._tables import Column, head_of, row_of

ERASE = "\r\x1b[K"


Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "_PACE", 0.0)


def test_in_a_pipe_rows_are_all_there_is(capsys: Output) -> None:
    progress = Progress(2)
    progress.now("one", 0)
    progress.show("row 1")
    assert capsys.readouterr().out == "row 1\n"
    progress.now("two", 1)
    progress.show("row 2")
    progress.clear()
    assert capsys.readouterr().out == "row 2\n"


class Counting(io.StringIO):
    """Counts how often it was flushed."""

    flushes = 0

    def flush(self) -> None:
        self.flushes += 1


def test_every_row_is_flushed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Counting()
    monkeypatch.setattr(sys, "stdout", stream)
    Progress(1).show("row")
    assert stream.flushes == 1


def test_on_a_terminal_a_line_below_the_rows_tells_how_far(capsys: Output) -> None:
    pytest.importorskip("rich")
    progress = Progress(2, 70)
    progress.now("all_reduce of 4 B [bold]", 0)
    progress.show("row 1")
    progress.now("all_reduce of 1 MiB", 1)
    progress.clear()
    progress.clear()
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    first, second, rest = shown.split(ERASE)
    assert re.match(r"all_reduce of 4 B \[bold\] .* 0/2.*left$", first)
    assert second.startswith("row 1\nall_reduce of 1 MiB ")
    assert " 1/2" in second
    assert rest == ""


def test_the_line_is_never_wider_than_the_terminal(capsys: Output) -> None:
    pytest.importorskip("rich")
    Progress(10.0, 40).now("a description that is longer than forty letters are", 5.0)
    shown = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert 10 < len(shown) < 40
    assert "\n" not in shown


def test_without_rich_rows_are_plain_on_a_terminal_too(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    progress = Progress(2, 80)
    progress.now("one", 0)
    progress.show("row 1")
    progress.clear()
    assert capsys.readouterr().out == "row 1\n"


def test_columns_have_their_widths_before_any_cell() -> None:
    columns = [Column("size", 7, right=True), Column("memory"), Column("us", right=True)]
    assert head_of(columns) == "   size  memory  us\n-------  ------  --"
    assert row_of(columns, ["4 B", "ours", "1"]) == "    4 B  ours     1"
    assert row_of(columns, ["123456789", "x", "100"]) == "123456789  x       100"
