"""Where the time of a run went: the arithmetic."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from farandole._trace.parts import OnDevice, Operation, Part, Span, load

SLOWEST = 5  # operations that a summary shows


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
    on_devices: float  # of a step, median: any gradients in a device's streams, begin to done
    after_the_last: float  # the part of it after the step's last gradients were ready there, median
    most_after_the_last: float  # of any step
    device_overlap: float | None
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
    device_overlap: float | None
    compared_operations: int  # that several ranks took part in
    by_rank: list[RankSummary]
    slowest: list[OperationSummary]
    spans: dict[str, float]  # the program's own: median duration
    clocks_within: dict[str, float]  # by host with a clock of its own: how far that may be off
    clocks_unknown: list[str]  # hosts whose times cannot be compared with the others'


def summary(directory: str | Path) -> Summary:
    """Sums up the newest run in a directory.

    Raises:
        TraceError: the directory cannot be read or holds no trace.
    """
    run = load(Path(directory))
    by_rank = [_of_rank(part) for part in run.parts]
    compared = together(run.parts)
    _note_lateness(by_rank, compared)
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
        device_overlap=overlap_share(
            sum(r.after_the_last for r in by_rank), sum(r.on_devices for r in by_rank)
        ),
        compared_operations=len(compared),
        by_rank=by_rank,
        slowest=sorted(map(_of_operation, compared), key=lambda o: -o.took)[:SLOWEST],
        spans={name: median(times) for name, times in spans.items()},
        clocks_within=run.clocks_within,
        clocks_unknown=run.clocks_unknown,
    )


def _of_rank(part: Part) -> RankSummary:
    durations = [end - begin for begin, end in part.steps]
    final = sum(union(spans) for spans in part.final_waits.values())
    waits = sum(union(spans) for spans in part.waits.values())
    gradients = [(o.launched, o.end) for o in part.operations if o.stream in part.step_streams]
    on_devices = _on_devices(part) or [(0.0, 0.0)]
    reduced_there = median(busy for busy, _ in on_devices)
    after_the_last = median(after for _, after in on_devices)
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
        on_devices=reduced_there,
        after_the_last=after_the_last,
        most_after_the_last=max(after for _, after in on_devices),
        device_overlap=overlap_share(after_the_last, reduced_there),
    )


def _on_devices(part: Part) -> list[tuple[float, float]]:
    """For each step, how long devices reduced, and for how much of that all gradients were ready.

    The host runs ahead of devices: its sequence numbers tell steps apart, its times do not.
    """
    steps: dict[tuple[str, int], list[OnDevice]] = {}
    ends = {
        stream: sorted(
            o.sequence for o in part.operations if o.stream == stream and o.name == "used"
        )
        for stream in part.step_streams
    }
    for one in part.on_devices:
        if one.stream in ends:
            step = bisect(ends[one.stream], one.sequence)
            steps.setdefault((one.stream, step), []).append(one)
    return [(_reducing(step), _reducing(step, _last_ready(step))) for step in steps.values()]


def _last_ready(step: Iterable[OnDevice]) -> float:
    return max(one.ready for one in step)


def _reducing(step: Iterable[OnDevice], since: float = float("-inf")) -> float:
    return union((max(one.begin, since), max(one.end, since)) for one in step)


def together(parts: Iterable[Part]) -> list[list[Operation]]:
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
