"""Tables, and numbers with their nouns, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table, each column as wide as its widest cell."""
    cells = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([title, "", text[0], rule, *text[1:], ""])


class Column(NamedTuple):
    """A column of a table that is shown row by row: its width is known before its cells are."""

    name: str
    width: int = 0  # of the cells; a longer one moves what follows
    right: bool = False  # numbers end in one column, words begin in one


def head_of(columns: Sequence[Column]) -> str:
    rule = ["-" * max(column.width, len(column.name)) for column in columns]
    return row_of(columns, [column.name for column in columns]) + "\n" + "  ".join(rule)


def row_of(columns: Sequence[Column], cells: Sequence[str]) -> str:
    widths = [max(column.width, len(column.name)) for column in columns]
    return "  ".join(
        cell.rjust(width) if column.right else cell.ljust(width)
        for column, cell, width in zip(columns, cells, widths, strict=True)
    ).rstrip()


def counted(number: int, noun: str) -> str:
    """As "1 rank" or "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """As "rank 2" or "ranks 0, 2"."""
    return f"{noun}{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"


def in_runs(numbers: Sequence[int]) -> str:
    """Ascending ones, as "2, 4-5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
