"""Tables as text."""

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
