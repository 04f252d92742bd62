"""Tables, and numbers with their nouns, as text."""

from __future__ import annotations

from collections.abc import Sequence


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


def counted(number: int, noun: str) -> str:
    """As "1 rank" or "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """As "rank 2" or "ranks 0, 2"."""
    return f"{noun}{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers))}"
