"""How ``farandole bench`` shows the rows of its own measurement, and draws those of any."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from farandole._bench.statistics import format_microseconds, format_size
from farandole.cli._terminal import print_table

if TYPE_CHECKING:
    from farandole._bench.ranks import Request


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from farandole._bench.plotting import draw

    draw(rows, path)
    print(f"{path} shows it")


def show(request: Request, result: dict[str, Any]) -> None:
    """One row per size and kind of memory."""
    rows = result["rows"]
    moves = request.collective != "barrier"
    cells = []
    for row in rows:
        times = [format_microseconds(1e3 * row[name]) for name in ("min_us", "p50_us", "p99_us")]
        if moves:
            size = format_size(row["bytes"])
            bandwidth = [f"{row[name]:.2f}" for name in ("algbw_gbs", "busbw_gbs")]
            cells.append(
                [size, row["memory"], row["algorithm"], str(row["iterations"]), *times,
                 *bandwidth, str(row["errors"])]
            )  # fmt: skip
        else:
            cells.append([str(row["iterations"]), *times, str(row["errors"])])
    columns = ["iterations", "min us", "p50 us", "p99 us", "errors"]
    if moves:
        columns = ["size", "memory", "algorithm", *columns[:-1], "algbw", "busbw", "errors"]
    print_table(_title(rows[0], result["placement"]), columns, _right(columns, cells))


def _title(row: dict[str, Any], placement: str) -> str:
    what = [row["collective"], row["dtype"], row["op"], row["level"]]
    return f"{' '.join(w for w in what if w)}, {row['ranks']} ranks, {placement}"


def _right(columns: list[str], cells: list[list[str]]) -> list[list[str]]:
    """Numbers end in one column; words begin in one."""
    words = {"memory", "algorithm"}
    widths = [max(len(c), *(len(row[i]) for row in cells)) for i, c in enumerate(columns)]
    return [
        [
            cell if column in words else cell.rjust(width)
            for cell, column, width in zip(row, columns, widths, strict=True)
        ]
        for row in cells
    ]
