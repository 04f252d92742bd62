"""The table of a measurement, shown row by row while it is measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from farandole._bench.layouts import COLLECTIVES
from farandole._bench.statistics import format_microseconds, format_size
from farandole._progress import Progress
from farandole._tables import Column, head_of, row_of

_TIMES = ("min_us", "p50_us", "p99_us")
_BANDWIDTHS = ("algbw_gbs", "busbw_gbs")


class Rows:
    """Shows rows as they come; title and columns before the first, so that a mistake stands alone.

    Args:
        algorithm: the one that was asked for; empty: any path.
        total: how many rows there will be.
        terminal: its columns; 0: there is none.
        on_devices: rows have the device's own copy beside.
        of_torch: PyTorch's own operation that is shown beside; empty: none.
    """

    def __init__(
        self,
        collective: str,
        algorithm: str,
        placement: str,
        total: int,
        terminal: int,
        *,
        on_devices: bool = False,
        of_torch: str = "",
    ) -> None:
        self._moves = COLLECTIVES[collective].moves
        beside = ["copy"] * on_devices + [of_torch] * bool(of_torch)
        self._columns = _columns(self._moves, algorithm, beside)
        self._beside = ["copy_gbs"] * on_devices + ["torch_gbs"] * bool(of_torch)
        self._placement = placement
        self._progress = Progress(total, terminal)
        self._shown = 0
        self._collective = collective

    def begin(self, size: int, memory: str) -> None:
        """Shows which row is measured now."""
        what = f" of {format_size(size)}, memory {memory}" if self._moves else ""
        self._progress.now(self._collective + what, self._shown)

    def show(self, row: dict[str, Any]) -> None:
        lines = [] if self._shown else [_title(row, self._placement), "", head_of(self._columns)]
        self._progress.show("\n".join([*lines, row_of(self._columns, list(self._cells(row)))]))
        self._shown += 1

    def end(self) -> None:
        self._progress.clear()

    def _cells(self, row: dict[str, Any]) -> Iterable[str]:
        if self._moves:
            yield from (format_size(row["bytes"]), row["memory"], row["algorithm"])
        yield str(row["iterations"])
        yield from (format_microseconds(1e3 * row[name]) for name in _TIMES)
        if self._moves:
            yield from (f"{row[name]:.2f}" for name in _BANDWIDTHS)
        yield from (f"{row[name]:.2f}" for name in self._beside)
        yield str(row["errors"])


def _columns(moves: bool, algorithm: str, beside: list[str]) -> list[Column]:
    """Narrow enough for 80 letters."""
    what = [
        Column("size", len("256 KiB"), right=True),
        Column("memory"),
        Column("algorithm", len(algorithm)),
    ]
    times = [Column(name, right=True) for name in ("min us", "p50 us", "p99 us")]
    bandwidths = [Column(name, right=True) for name in ("algbw", "busbw")]
    calls, errors = Column("calls", right=True), Column("errors", right=True)
    if not moves:
        return [calls, *times, errors]
    others = [Column(name, right=True) for name in beside]
    return [*what, calls, *times, *bandwidths, *others, errors]


def _title(row: dict[str, Any], placement: str) -> str:
    what = [row["collective"], row["dtype"], row["op"], row["level"]]
    return f"{' '.join(w for w in what if w)}, {row['ranks']} ranks, {placement}"
