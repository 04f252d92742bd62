"""Reads what `FARANDOLE_TRACE` wrote: puts the ranks' parts together, and sums up where time went.

A part is `rank-N.jsonl`: one event of Chrome's trace format a line, the first of which says which
run and rank it is of. Times are microseconds of the host's steady clock, which its ranks share.
Needs neither numpy nor the native core.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

MERGED = "trace.json"
SLOWEST = 5  # operations that a summary shows

Span = tuple[float, float]  # begin, end


class TraceError(Exception):
    """Why a directory cannot be read as a trace, in one line."""


# -- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Header:
    """The first line of a part."""

    path: Path
    run: str
    rank: int
    size: int
    events: int
    lost: int
    complete_since: float  # whatever ended later is there


@dataclass(frozen=True)
class Operation:
    """One rank's share of an operation. `stream` and `sequence` are the same on all ranks."""

    rank: int
    stream: str
    sequence: int
    name: str
    collective: str
    path: str
    bytes: int
    launched: float
    begin: float  # when its turn came in its stream
    end: float
    failed: bool


@dataclass
class Part:
    """The events of one rank, by what they say."""

    header: Header
    operations: list[Operation] = field(default_factory=list)
    steps: list[Span] = field(default_factory=list)
    step_streams: set[str] = field(default_factory=set)  # where gradients are reduced
    waits: dict[int, list[Span]] = field(default_factory=dict)  # of any kind, by thread
    final_waits: dict[int, list[Span]] = field(default_factory=dict)
    parked: list[Span] = field(default_factory=list)
    spans: dict[str, list[Span]] = field(default_factory=dict)  # the program's own, by name


@dataclass
class Run:
    """The parts of the newest run in a directory, by rank."""

    directory: Path
    parts: list[Part]
    missing: list[int]
    stale: list[Path]  # parts of older runs


def headers(directory: Path) -> list[Header]:
    """Of every part in the directory, the newest part first."""
    try:
        found = [p for p in directory.iterdir() if re.fullmatch(r"rank-\d+\.jsonl", p.name)]
    except FileNotFoundError:
        raise TraceError(f"there is no directory {directory}") from None
    except OSError as error:
        raise TraceError(f"{directory} cannot be read: {error.strerror}") from error
    found.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return [_header(path) for path in found]


def _header(path: Path) -> Header:
    try:
        with path.open("rb") as file:
            says = json.loads(file.readline())["args"]
        return Header(
            path,
            str(says["run"]),
            int(says["rank"]),
            int(says["size"]),
            int(says["events"]),
            int(says["lost"]),
            float(says["complete_since"]),
        )
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        raise TraceError(f"{path} is not part of a trace") from None


def newest(directory: Path) -> tuple[list[Header], list[int], list[Path]]:
    """The newest run's parts by rank, the ranks that left none, and the parts of older runs."""
    found = headers(directory)
    if not found:
        raise TraceError(
            f"{directory} holds no trace (rank-N.jsonl); "
            f"run the job with FARANDOLE_TRACE={directory}"
        )
    mine = sorted((h for h in found if h.run == found[0].run), key=lambda h: h.rank)
    missing = sorted(set(range(mine[0].size)) - {h.rank for h in mine})
    return mine, missing, sorted(h.path for h in found if h.run != found[0].run)


def runs_in(directory: Path) -> list[Path]:
    """The directory itself; or its two subdirectories that hold traces where it holds none."""
    if headers(directory):
        return [directory]
    found = sorted(p for p in directory.iterdir() if p.is_dir() and headers(p))
    if len(found) > 2 or len(found) == 1:
        names = ", ".join(map(str, found))
        raise TraceError(f"{directory} holds no trace, but these do: {names}")
    return found or [directory]


def load(directory: Path) -> Run:
    """Reads the newest run in a directory. What some rank has lost is left out of all of them."""
    mine, missing, stale = newest(directory)
    since = max(h.complete_since for h in mine)
    return Run(directory, [_read(h, since) for h in mine], missing, stale)


def _read(header: Header, since: float) -> Part:
    part = Part(header)
    for event in _events(header.path):
        if event["ph"] != "X":
            continue
        begin = float(event["ts"])
        end = begin + float(event["dur"])
        if end <= since:
            continue
        _sort_in(part, event, (begin, end))
    return part


def _events(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
            except ValueError:
                raise TraceError(f"{path}, line {number} is not an event") from None
            if not isinstance(event, dict):
                raise TraceError(f"{path}, line {number} is not an event")
            yield event


def _sort_in(part: Part, event: dict[str, Any], span: Span) -> None:
    kind, says = event["cat"], event.get("args", {})
    if kind == "operation":
        part.operations.append(
            Operation(
                rank=part.header.rank,
                stream=says["stream"],
                sequence=says["sequence"],
                name=event["name"],
                collective=says["collective"],
                path=says["path"],
                bytes=says["bytes"],
                launched=float(says["launched"]),
                begin=span[0],
                end=span[1],
                failed=says.get("failed", False),
            )
        )
    elif kind == "step":
        part.steps.append(span)
        part.step_streams.add(says["stream"])
    elif kind in ("wait", "final_wait"):
        part.waits.setdefault(event["tid"], []).append(span)
        if kind == "final_wait":
            part.final_waits.setdefault(event["tid"], []).append(span)
    elif kind == "parked":
        part.parked.append(span)
    elif kind == "user":
        part.spans.setdefault(event["name"], []).append(span)


# -- merging ----------------------------------------------------------------------------------


def merge(directory: str | Path) -> Path:
    """Puts the parts of the newest run into one file that Perfetto and Chrome open.

    The rows of ranks that left no part (they were killed) say so.

    Returns:
        The file, ``trace.json`` in the directory, readable by this user alone.

    Raises:
        TraceError: the directory cannot be read or written, or holds no trace.
    """
    folder = Path(directory)
    mine, missing, _ = newest(folder)
    target, beside = folder / MERGED, folder / f".{MERGED}.{os.getpid()}"
    try:
        beside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
            about = {"run": mine[0].run, "ranks": mine[0].size, "missing_ranks": missing}
            head = {"displayTimeUnit": "ms", "otherData": about}
            file.write(json.dumps(head).encode()[:-1] + b', "traceEvents": [\n')
            file.write(b",\n".join(_lines(mine, missing)))
            file.write(b"\n]}\n")
        beside.rename(target)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise TraceError(f"{target} cannot be written: {error.strerror}") from error
    return target


def _lines(mine: Sequence[Header], missing: Iterable[int]) -> Iterator[bytes]:
    """Lines are events already; nothing needs to be parsed."""
    for header in mine:
        with header.path.open("rb") as file:
            for line in file:
                yield line.rstrip(b"\n")
    for rank in missing:
        name = {"name": f"rank {rank} (left no trace)"}
        event = {"ph": "M", "pid": rank, "name": "process_name", "args": name}
        yield json.dumps(event).encode()


def merge_if_complete(directory: str, size: int) -> None:
    """Merges when all `size` ranks of the newest run have left their parts.

    Every rank calls this after it has written its own; for the last one it is true.
    """
    mine, _, _ = newest(Path(directory))
    if len(mine) == size:
        merge(directory)


# -- arithmetic -------------------------------------------------------------------------------


def union(spans: Iterable[Span]) -> float:
    """The time that is covered by at least one of the spans."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


def overlap_share(blocked: float, communicating: float) -> float | None:
    """How much of the communication did not hold the program up: 1 all of it, 0 nothing."""
    if communicating <= 0:
        return None
    return max(0.0, 1 - blocked / communicating)


@dataclass
class RankSummary:
    """Where one rank's time went; times in microseconds."""

    rank: int
    events: int
    lost_events: int
    steps: int
    step_median: float | None
    final_wait: float  # blocked until a step's gradients were reduced
    communicating: float  # any gradients on their way: union of launch to done
    overlap: float | None
    other_waits: float  # blocked in operations of the program
    parked: float
    operations: int
    failed_operations: int
    reduced_bytes: int
    last_to_arrive: int = 0  # operations that it entered after all others
    late_by_median: float = 0.0  # after the last but one, in these
    late_by_total: float = 0.0


@dataclass(frozen=True)
class OperationSummary:
    """One operation over all ranks; times in microseconds."""

    name: str
    sequence: int
    collective: str
    path: str
    bytes: int
    took: float  # first rank in to last rank out
    waited: float  # first rank in to last rank in
    last_rank: int


@dataclass
class Summary:
    """Where the time of a run went; times in microseconds."""

    directory: str
    ranks: int
    missing_ranks: list[int]
    lost_events: int
    stale_parts: list[str]
    steps: int
    step_median: float | None
    final_wait_per_step: float | None
    communicating_per_step: float | None
    overlap: float | None
    compared_operations: int  # that several ranks took part in
    by_rank: list[RankSummary]
    slowest: list[OperationSummary]
    spans: dict[str, float]  # the program's own: median duration


def summary(directory: str | Path) -> Summary:
    """Sums up the newest run in a directory.

    Raises:
        TraceError: the directory cannot be read or holds no trace.
    """
    run = load(Path(directory))
    by_rank = [_of_rank(part) for part in run.parts]
    together = _together(run.parts)
    _note_lateness(by_rank, together)
    durations = [end - begin for part in run.parts for begin, end in part.steps]
    blocked = sum(r.final_wait for r in by_rank)
    communicating = sum(r.communicating for r in by_rank)
    count = len(durations)
    spans: dict[str, list[float]] = {}
    for part in run.parts:
        for name, times in part.spans.items():
            spans.setdefault(name, []).extend(end - begin for begin, end in times)
    return Summary(
        directory=str(directory),
        ranks=run.parts[0].header.size,
        missing_ranks=run.missing,
        lost_events=sum(r.lost_events for r in by_rank),
        stale_parts=[path.name for path in run.stale],
        steps=max(r.steps for r in by_rank),
        step_median=median(durations) if durations else None,
        final_wait_per_step=blocked / count if count else None,
        communicating_per_step=communicating / count if count else None,
        overlap=overlap_share(blocked, communicating),
        compared_operations=len(together),
        by_rank=by_rank,
        slowest=sorted(map(_of_operation, together), key=lambda o: -o.took)[:SLOWEST],
        spans={name: median(times) for name, times in spans.items()},
    )


def _of_rank(part: Part) -> RankSummary:
    durations = [end - begin for begin, end in part.steps]
    final = sum(union(spans) for spans in part.final_waits.values())
    waits = sum(union(spans) for spans in part.waits.values())
    gradients = [(o.launched, o.end) for o in part.operations if o.stream in part.step_streams]
    reducing = [o for o in part.operations if o.collective in ("all_reduce", "reduce_scatter")]
    return RankSummary(
        rank=part.header.rank,
        events=part.header.events,
        lost_events=part.header.lost,
        steps=len(durations),
        step_median=median(durations) if durations else None,
        final_wait=final,
        communicating=union(gradients),
        overlap=overlap_share(final, union(gradients)),
        other_waits=waits - final,
        parked=union(part.parked),
        operations=len(part.operations),
        failed_operations=sum(o.failed for o in part.operations),
        reduced_bytes=sum(o.bytes for o in reducing if not o.failed),
    )


def _together(parts: Iterable[Part]) -> list[list[Operation]]:
    """The shares of every operation that several ranks have, in the order in which they came."""
    shares: dict[tuple[str, int], list[Operation]] = {}
    for part in parts:
        for operation in part.operations:
            shares.setdefault((operation.stream, operation.sequence), []).append(operation)
    return [sorted(s, key=lambda o: o.begin) for s in shares.values() if len(s) > 1]


def _note_lateness(by_rank: Iterable[RankSummary], together: Iterable[list[Operation]]) -> None:
    late: dict[int, list[float]] = {}
    for *_, last_but_one, last in together:
        late.setdefault(last.rank, []).append(last.begin - last_but_one.begin)
    for rank in by_rank:
        delays = late.get(rank.rank, [])
        rank.last_to_arrive = len(delays)
        rank.late_by_median = median(delays) if delays else 0.0
        rank.late_by_total = sum(delays)


def _of_operation(shares: Sequence[Operation]) -> OperationSummary:
    first, last = shares[0], shares[-1]
    return OperationSummary(
        name=first.name,
        sequence=first.sequence,
        collective=first.collective,
        path=first.path,
        bytes=first.bytes,
        took=max(o.end for o in shares) - first.begin,
        waited=last.begin - first.begin,
        last_rank=last.rank,
    )


# -- showing ----------------------------------------------------------------------------------


def summarize(directory: str | Path) -> str:
    """Where the time of the newest run in a directory went, for people.

    Raises:
        TraceError: the directory cannot be read or holds no trace.
    """
    return render(summary(directory))


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
    return "\n".join([*notes, _table("two runs", ("", *names, "change"), rows)])


def _measures(first: Summary, second: Summary) -> Iterator[tuple[str, Any, tuple[Any, Any]]]:
    def both(name: str) -> tuple[Any, Any]:
        return getattr(first, name), getattr(second, name)

    yield "ranks", _count, both("ranks")
    yield "steps", _count, both("steps")
    yield "step, median", _time, both("step_median")
    yield "blocked in the final wait, per step", _time, both("final_wait_per_step")
    yield "gradients on their way, per step", _time, both("communicating_per_step")
    yield "overlap", _share, both("overlap")
    for name in ("other_waits", "reduced_bytes", "late_by_total"):
        sums = tuple(sum(getattr(r, name) for r in s.by_rank) for s in (first, second))
        show = _bytes if name == "reduced_bytes" else _time
        yield name.replace("_", " ") + ", all ranks", show, (sums[0], sums[1])


def _title(found: Summary) -> str:
    ranks = f"{found.directory}: {_number(found.ranks, 'rank')}"
    if not found.steps:
        return f"{ranks}, no training steps"
    return (
        f"{ranks}, {_number(found.steps, 'step')} of "
        f"{_time(found.step_median)} (median); {_share(found.overlap)} of the gradients' time on "
        f"their way was overlapped with computation"
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
    if found.stale_parts:
        notes.append(f"note: parts of older runs are left out: {', '.join(found.stale_parts)}")
    return notes


def _tables(found: Summary) -> Iterator[str]:
    columns = (
        "rank", "steps", "step", "final wait", "on their way", "overlap", "other waits",
        "operations", "reduced",
    )  # fmt: skip
    yield _table(
        "where the time went (step: median; times: sums over all steps)",
        columns,
        [
            (
                str(r.rank),
                str(r.steps),
                _time(r.step_median),
                _time(r.final_wait),
                _time(r.communicating),
                _share(r.overlap),
                _time(r.other_waits),
                str(r.operations)
                + (f" ({r.failed_operations} failed)" * bool(r.failed_operations)),
                _bytes(r.reduced_bytes),
            )
            for r in found.by_rank
        ],
    )
    if found.compared_operations:
        yield _table(
            f"who is late (of {found.compared_operations} operations; how long all others waited)",
            ("rank", "last to arrive", "share", "late by (median)", "late by (sum)"),
            [
                (
                    str(r.rank),
                    str(r.last_to_arrive),
                    _share(r.last_to_arrive / found.compared_operations),
                    _time(r.late_by_median),
                    _time(r.late_by_total),
                )
                for r in found.by_rank
            ],
        )
        yield _table(
            "slowest operations (first rank in to last rank out)",
            ("operation", "bytes", "path", "took", "waited for the last rank"),
            [
                (
                    f"{o.collective} #{o.sequence}" + (f" '{o.name}'" * (o.name != o.collective)),
                    _bytes(o.bytes),
                    o.path,
                    _time(o.took),
                    f"{_time(o.waited)} (rank {o.last_rank})",
                )
                for o in found.slowest
            ],
        )
    if found.spans:
        rows = [(name, _time(time)) for name, time in found.spans.items()]
        yield _table("spans of the program", ("name", "median"), rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    from farandole.cli._terminal import plain_table

    return plain_table(title, columns, rows)


def _short_names(first: str, second: str) -> tuple[str, str]:
    """The last parts of two paths, unless they are the same."""
    names = Path(first).name, Path(second).name
    return names if all(names) and names[0] != names[1] else (first, second)


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}" + "s" * (count != 1)


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
