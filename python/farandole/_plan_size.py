"""How large a schedule would be, before it is made: what takes too long is refused at once."""

from __future__ import annotations

from collections.abc import Sequence

from farandole import _core  # type: ignore[attr-defined, unused-ignore]
from farandole._tables import counted

# Limits for schedules that are planned, proved and shown within a second.
_MOST_STEPS = 40_000
_MOST_ELEMENTS = 10_000_000  # the proof follows each of them on every rank
_LARGEST = 2**31 - 1  # of any number: what the core's hold
_LEAST_SHARE = 512  # elements; less of a share costs no less
_HOLD_ALL = ("all_gather", "all_to_all", "gather", "scatter")  # of all ranks' shares, on one rank


def checked_algorithm(
    collective: str,
    algorithm: str | None,
    ranks: int,
    count: int,
    lanes: int = 1,
    segments: int = 1,
    root: int = 0,
    counts: Sequence[int] = (),
    itemsize: int = 4,
    host_of: Sequence[int] = (),
) -> str:
    """The planner that is asked for, else the cost model's; what is too large is refused at once.

    Raises:
        InvalidArgument: its schedules would be longer than anybody waits for or reads.
    """
    if count < 0:
        raise _core.InvalidArgument(f"a collective has at least 0 elements, not {count}")
    if min(counts, default=0) < 0:
        raise _core.InvalidArgument(f"a share has at least 0 elements, not {min(counts)}")
    share = max(counts, default=count)
    for name, number in (
        ("ranks", ranks),
        ("count", share),
        ("lanes", lanes),
        ("segments", segments),
    ):
        if number > _LARGEST:
            raise _core.InvalidArgument(f"{name} is {number}; it may be at most {_LARGEST}")
    if ranks > 0 and not 0 <= root < ranks:
        raise _core.InvalidArgument(f"root {root} is not one of {counted(ranks, 'rank')}")
    if algorithm is None:
        algorithm = str(
            _core.schedule.choose(
                collective, ranks, count, itemsize, counts=list(counts), host_of=list(host_of)
            )
        )
    _check_elements(collective, ranks, share)
    _check_steps(collective, algorithm, ranks, count, lanes, segments, counts, host_of)
    return algorithm


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


def _check_steps(
    collective: str,
    algorithm: str,
    ranks: int,
    count: int,
    lanes: int,
    segments: int,
    counts: Sequence[int],
    host_of: Sequence[int],
) -> None:
    """By the planner's own costs, before anything is planned."""
    found = _core.schedule.planners(
        size=ranks, count=count, lanes=lanes, segments=segments, collective=collective,
        counts=list(counts), host_of=list(host_of),
    )  # fmt: skip
    for row in found:
        steps = ranks * lanes * int(row["rounds"] + row["messages"])
        if row["name"] == algorithm and steps > _MOST_STEPS:
            raise _core.InvalidArgument(
                f"{algorithm} has about {steps:,} steps with {counted(ranks, 'rank')}, "
                f"{counted(lanes, 'lane')} and {counted(segments, 'segment')}; at most "
                f"{_MOST_STEPS:,} are shown"
            )
