"""How large a schedule would be, before it is made: what takes too long is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from farandole import _core  # type: ignore[attr-defined, unused-ignore]
from farandole._tables import counted

# Limits for schedules that are planned, proved and shown within a second.
_MOST_STEPS = 40_000
_MOST_ELEMENTS = 10_000_000  # the proof follows each of them on every rank
_LARGEST = 2**31 - 1  # of any number: what the core's hold
_LEAST_SHARE = 512  # elements; less of a share costs no less
_HOLD_ALL = ("all_gather", "all_to_all", "gather", "scatter")  # of all ranks' shares, on one rank


@dataclass(frozen=True)
class Shape:
    """A collective whose schedules are planned.

    Args:
        collective: ``"all_reduce"``, ``"broadcast"``, …
        algorithm: the planner's name, as in ``_core.schedule.planners()``; None: the one that the
            default cost model picks.
        ranks: how many there are.
        count: elements of each rank's input; of a scatter's output; of an all_to_all's blocks.
        lanes: independent channels that share the data.
        segments: pieces in which a transfer goes, the unit of pipelining.
        root: of a broadcast, reduce, gather or scatter.
        counts: the elements of each rank's share, where they differ; of an all_to_all those of each
            block, at ``sender * ranks + receiver``. ``count`` does not count then.
        host_of: each rank's host, by any numbers; empty: all ranks share one.
    """

    collective: str
    algorithm: str | None
    ranks: int
    count: int
    lanes: int = 1
    segments: int = 1
    root: int = 0
    counts: Sequence[int] = ()
    host_of: Sequence[int] = ()

    @property
    def elements(self) -> str:
        counts = ",".join(map(str, self.counts))
        return f"counts {counts}" if counts else counted(self.count, "element")


def checked(shape: Shape, itemsize: int = 4) -> Shape:
    """The shape with its planner: the cost model's, if none is asked for. What is too large is
    refused at once.

    Raises:
        InvalidArgument: its schedules would be longer than anybody waits for or reads.
    """
    ranks, counts = shape.ranks, list(shape.counts)
    if shape.count < 0:
        raise _core.InvalidArgument(f"a collective has at least 0 elements, not {shape.count}")
    if min(counts, default=0) < 0:
        raise _core.InvalidArgument(f"a share has at least 0 elements, not {min(counts)}")
    share = max(counts, default=shape.count)
    numbers = {"ranks": ranks, "count": share, "lanes": shape.lanes, "segments": shape.segments}
    for name, number in numbers.items():
        if number > _LARGEST:
            raise _core.InvalidArgument(f"{name} is {number}; it may be at most {_LARGEST}")
    if ranks > 0 and not 0 <= shape.root < ranks:
        raise _core.InvalidArgument(f"root {shape.root} is not one of {counted(ranks, 'rank')}")
    if shape.algorithm is None:
        chosen = _core.schedule.choose(
            shape.collective, ranks, shape.count, itemsize,
            counts=counts, host_of=list(shape.host_of),
        )  # fmt: skip
        shape = replace(shape, algorithm=str(chosen))
    _check_elements(shape.collective, ranks, share)
    _check_steps(shape)
    return shape


def _check_elements(collective: str, ranks: int, share: int) -> None:
    holds_all = collective in _HOLD_ALL
    elements = 2 * ranks * ranks * max(share, _LEAST_SHARE) if holds_all else ranks * share
    if elements > _MOST_ELEMENTS:
        limit = (
            f"ranks x ranks x elements (or {_LEAST_SHARE}) may be at most {_MOST_ELEMENTS // 2:,}"
            if holds_all
            else f"ranks x elements may be at most {_MOST_ELEMENTS:,}"
        )
        raise _core.InvalidArgument(
            f"{counted(ranks, 'rank')} with {counted(share, 'element')} are too many to prove: "
            f"for {collective} {limit}"
        )


def _check_steps(shape: Shape) -> None:
    """By the planner's own costs, before anything is planned."""
    ranks, lanes, segments = shape.ranks, shape.lanes, shape.segments
    found = _core.schedule.planners(
        size=ranks, count=shape.count, lanes=lanes, segments=segments,
        collective=shape.collective, counts=list(shape.counts), host_of=list(shape.host_of),
    )  # fmt: skip
    for row in found:
        steps = ranks * lanes * int(row["rounds"] + row["messages"])
        if row["name"] == shape.algorithm and steps > _MOST_STEPS:
            raise _core.InvalidArgument(
                f"{shape.algorithm} has about {steps:,} steps with {counted(ranks, 'rank')}, "
                f"{counted(lanes, 'lane')} and {counted(segments, 'segment')}; at most "
                f"{_MOST_STEPS:,} are shown"
            )
