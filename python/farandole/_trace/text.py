"""Summaries as people and programs read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from farandole._tables import counted, plain_table
from farandole._trace.figures import OperationSummary, RankSummary, Summary

T = TypeVar("T")
Columns: TypeAlias = Mapping[str, Callable[[T], str]]  # by name: the cell of a row


def render(found: Summary) -> str:
    """A summary as text."""
    return "\n".join([_title(found), *_notes(found), "", *_tables(found)])


def to_json(found: Sequence[Summary]) -> str:
    """One summary as a JSON object, several as a list of them."""
    values = [asdict(summary) for summary in found]
    return json.dumps(values[0] if len(values) == 1 else values, indent=2)


def compare(first: Summary, second: Summary) -> str:
    """Two runs side by side, such as one with overlap and one without."""
    rows = []
    for name, show, values in _measures(first, second):
        before, after = values
        change = f"{after / before - 1:+.0%}" if before and after is not None else "-"
        rows.append((name, show(before), show(after), change))
    names = _short_names(first.directory, second.directory)
    notes = [f"{s.directory}: {n}" for s in (first, second) for n in _notes(s)]
    return "\n".join([*notes, plain_table("two runs", ("", *names, "change"), rows)])


def _measures(first: Summary, second: Summary) -> Iterator[tuple[str, Any, tuple[Any, Any]]]:
    def both(name: str) -> tuple[Any, Any]:
        return getattr(first, name), getattr(second, name)

    yield "ranks", _count, both("ranks")
    yield "steps", _count, both("steps")
    yield "step, median", _time, both("step_median")
    yield "blocked in the final wait, per step", _time, both("final_wait_per_step")
    yield "gradients on their way, per step", _time, both("communicating_per_step")
    yield "overlap", _share, both("overlap")
    if first.device_overlap is not None or second.device_overlap is not None:
        yield "overlap on devices", _share, both("device_overlap")
    for name in ("other_waits", "reduced_bytes", "late_by_total"):
        sums = tuple(sum(getattr(r, name) for r in s.by_rank) for s in (first, second))
        show = _bytes if name == "reduced_bytes" else _time
        yield name.replace("_", " ") + ", all ranks", show, (sums[0], sums[1])


def _title(found: Summary) -> str:
    ranks = f"{found.directory}: {counted(found.ranks, 'rank')}"
    if not found.steps:
        return f"{ranks}, no training steps"
    return (
        f"{ranks}, {counted(found.steps, 'step')} of "
        f"{_time(found.step_median)} (median); for {_share(found.overlap)} of the time that "
        f"gradients were on their way, the program went on"
    )


def _notes(found: Summary) -> list[str]:
    notes = []
    if found.missing_ranks:
        ranks = ", ".join(map(str, found.missing_ranks))
        notes.append(f"note: nothing of rank {ranks}: killed, still running, or not traced")
    if found.lost_events:
        notes.append(
            f"note: {found.lost_events} older events were overwritten; this is about the time "
            "after them"
        )
    if found.device_overlap is not None:
        notes.append(
            "note: gradients were reduced on devices: step, final wait, on their way and overlap "
            "tell of the host, which does not wait for them"
        )
    if found.clocks_within:
        worst = _time(max(found.clocks_within.values()))
        hosts = ", ".join(found.clocks_within)
        notes.append(f"note: clocks of {hosts} lined up with rank 0's to within {worst}")
    if found.clocks_unknown:
        hosts = ", ".join(found.clocks_unknown)
        notes.append(f"note: times of {hosts} are by another clock than rank 0's; do not compare")
    if found.stale_parts:
        notes.append(f"note: parts of older runs are left out: {', '.join(found.stale_parts)}")
    return notes


_OF_RANKS: Columns[RankSummary] = {
    "rank": lambda r: str(r.rank),
    "steps": lambda r: str(r.steps),
    "step": lambda r: _time(r.step_median),
    "final wait": lambda r: _time(r.final_wait),
    "on their way": lambda r: _time(r.communicating),
    "overlap": lambda r: _share(r.overlap),
    "other waits": lambda r: _time(r.other_waits),
    "operations": lambda r: (
        str(r.operations) + f" ({r.failed_operations} failed)" * bool(r.failed_operations)
    ),
    "reduced": lambda r: _bytes(r.reduced_bytes),
}
_ON_DEVICES: Columns[RankSummary] = {
    "rank": lambda r: str(r.rank),
    "reducing": lambda r: _time(r.on_devices),
    "after the last gradient": lambda r: _time(r.after_the_last),
    "at most": lambda r: _time(r.most_after_the_last),
    "overlap": lambda r: _share(r.device_overlap),
}
_SLOWEST: Columns[OperationSummary] = {
    "operation": lambda o: (
        f"{o.collective} #{o.sequence}" + f" '{o.name}'" * (o.name != o.collective)
    ),
    "bytes": lambda o: _bytes(o.bytes),
    "path": lambda o: o.path,
    "took": lambda o: _time(o.took),
    "waited for the last rank": lambda o: f"{_time(o.waited)} (rank {o.last_rank})",
}


def _tables(found: Summary) -> Iterator[str]:
    whole = "where the time went (step: median; times: sums over all steps)"
    yield _table(whole, _OF_RANKS, found.by_rank)
    if found.device_overlap is not None:
        there = "on devices, by their own clocks (per step: median)"
        yield _table(there, _ON_DEVICES, found.by_rank)
    if count := found.compared_operations:
        late: Columns[RankSummary] = {
            "rank": lambda r: str(r.rank),
            "last to arrive": lambda r: str(r.last_to_arrive),
            "share": lambda r: _share(r.last_to_arrive / count),
            "late by (median)": lambda r: _time(r.late_by_median),
            "late by (sum)": lambda r: _time(r.late_by_total),
        }
        who = f"who is late (of {count} operations; how long all others waited)"
        yield _table(who, late, found.by_rank)
        slowest = "slowest operations (first rank in to last rank out)"
        yield _table(slowest, _SLOWEST, found.slowest)
    if found.spans:
        rows = [(name, _time(time)) for name, time in found.spans.items()]
        yield plain_table("spans of the program", ("name", "median"), rows)


def _table(title: str, columns: Columns[T], rows: Iterable[T]) -> str:
    cells = [[show(row) for show in columns.values()] for row in rows]
    return plain_table(title, list(columns), cells)


def _short_names(first: str, second: str) -> tuple[str, str]:
    """The last parts of two paths, unless they are the same."""
    names = Path(first).name, Path(second).name
    return names if all(names) and names[0] != names[1] else (first, second)


def _count(value: int) -> str:
    return str(value)


def _time(microseconds: float | None) -> str:
    if microseconds is None:
        return "-"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            value = microseconds / size
            return f"{value:.0f} {unit}" if value >= 1000 else f"{value:.3g} {unit}"
    return f"{microseconds:.3g} µs"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _bytes(count: int) -> str:
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
