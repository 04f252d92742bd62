"""The ranks of a check, one on each host.

In a round of a tournament every host is in one pair at most, so no two measurements share a host's
link. Of a pair, one sends and the other one answers: words of four bytes for the latency, then
arrays one way and the other for the bandwidth, for about a third of a second each.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import farandole as fd
from farandole import _core

_WORDS = 200  # round trips, after the first few
_WARM = 20
_QUICK = 0.25  # of them: slower ones tell of what else the hosts do
_BYTES = 4 << 20  # of an array
_SECONDS = 0.3  # of arrays one way, at least three of them
_MEMORY = 64 << 20  # more than caches hold
_CLOCKS = 20  # questions for the time; the quickest answer counts
_FOLDED = 1 << 16


class Host(NamedTuple):
    """Facts of one host."""

    name: str
    cores: int  # that the rank may use
    instructions: str  # that its folds use
    python: str
    numpy: str
    memory: float  # bytes a second, copied by one core
    clock: float  # seconds by which its clock is ahead of the first host's
    clock_error: float  # half of the quickest round trip
    wrong: int  # elements of a sum with another host that are not those of IEEE 754


class Link(NamedTuple):
    """Between two hosts, by their numbers."""

    first: int
    second: int
    latency: float  # seconds, one way
    there: float  # bytes a second, from the first to the second
    back: float
    resent: float  # the share of TCP's segments that were sent again by either


class Found(NamedTuple):
    hosts: list[Host]
    links: list[Link]

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        return {
            "hosts": [host._asdict() for host in self.hosts],
            "links": [link._asdict() for link in self.links],
        }


def measure() -> Found:
    """Joins the world of one rank on each host; the same result on every rank.

    Raises:
        InvalidArgument: ranks share a host.
    """
    fd.init()
    if fd.local_size() != 1:
        raise fd.InvalidArgument(
            f"one rank on each host checks them; {fd.local_size()} ranks share this one"
        )
    ahead, error = _clock()
    links: list[Link] = []
    wrong = 0
    for number, pairs in enumerate(rounds(fd.size())):
        fd.barrier()
        mine = next((pair for pair in pairs if fd.rank() in pair), None)
        if number < 2:  # in two rounds each host is in a pair, also if their number is odd
            wrong += _wrong_sums(mine)
        if mine is not None and (link := _measure_link(*mine)):
            links.append(link)
    host = Host(
        name=platform.node(),
        cores=len(os.sched_getaffinity(0)),
        instructions=_core.instruction_sets()[-1],
        python=platform.python_version(),
        numpy=np.__version__,
        memory=_memory(),
        clock=ahead,
        clock_error=error,
        wrong=wrong,
    )
    everyone = _gathered((host._asdict(), [link._asdict() for link in links]))
    return Found(
        [Host(**host) for host, _ in everyone],
        sorted(Link(**link) for _, links in everyone for link in links),
    )


def rounds(hosts: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of so many, each once, in rounds in which nobody is in two (the circle method)."""
    seats: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield sorted((min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None)
        seats.insert(1, seats.pop())


def _measure_link(first: int, second: int) -> Link | None:
    """By the first of the two."""
    before = _segments()
    leads = fd.rank() == first
    other = second if leads else first
    latency = _latency(other, leads=leads)
    there = _bandwidth(other, sends=leads)
    back = _bandwidth(other, sends=not leads)
    sent, again = (now - then for now, then in zip(_segments(), before, strict=True))
    both = np.array([sent, again], np.int64)
    if not leads:
        fd.send(both, other)
        return None
    theirs = fd.recv(np.empty_like(both), other)
    total, resent = (both + theirs).tolist()
    return Link(first, second, latency, there, back, resent / total if total > 0 else 0.0)


def _latency(other: int, *, leads: bool) -> float:
    word = np.zeros(1, np.float32)
    times = []
    for _ in range(_WARM + _WORDS):
        start = time.perf_counter()
        if leads:
            fd.send(word, other)
            fd.recv(word, other)
        else:
            fd.recv(word, other)
            fd.send(word, other)
        times.append(time.perf_counter() - start)
    return float(np.quantile(times[_WARM:], _QUICK)) / 2


def _bandwidth(other: int, *, sends: bool) -> float:
    """Bytes a second, as the sender sees it; the receiver gets the same number."""
    data = np.zeros(_BYTES, np.uint8)
    times: list[float] = []
    goes_on = np.ones(1)
    while goes_on[0]:
        start = time.perf_counter()
        if sends:
            fd.send(data, other)
            times.append(time.perf_counter() - start)
            goes_on[0] = len(times) < 4 or sum(times[1:]) < _SECONDS
            fd.send(goes_on, other)
        else:
            fd.recv(data, other)
            fd.recv(goes_on, other)
    found = np.array([_BYTES / float(np.median(times[1:])) if sends else 0.0])
    if sends:
        fd.send(found, other)
    else:
        fd.recv(found, other)
    return float(found[0])


def _clock() -> tuple[float, float]:
    """(seconds that this host's clock is ahead of the first one's, by how much that may be wrong):
    the middle of the quickest of some round trips, as NTP does it."""
    best = (0.0, float("inf"))
    told = np.zeros(1)
    for other in range(1, fd.size()):
        for _ in range(_CLOCKS):
            if fd.rank() == other:
                start = time.time()
                fd.send(told, 0)
                fd.recv(told, 0)
                end = time.time()
                best = min(best, ((start + end) / 2 - told[0], (end - start) / 2), key=_error)
            elif fd.rank() == 0:
                fd.recv(told, other)
                told[0] = time.time()
                fd.send(told, other)
    return (0.0, 0.0) if fd.rank() == 0 else (float(best[0]), best[1])


def _error(reading: tuple[float, float]) -> float:
    return reading[1]


def _wrong_sums(pair: tuple[int, int] | None) -> int:
    """How many elements of the sum of two hosts differ from numpy's: an addition has one right
    result, and each of the two folds a half."""
    group = fd.split(None if pair is None else pair[0])
    if pair is None or group is None:
        return 0
    mine, theirs = _numbers(fd.rank()), _numbers(pair[pair[0] == fd.rank()])
    total = fd.all_reduce(mine, group=group)
    return int((total.view(np.uint32) != (mine + theirs).view(np.uint32)).sum())


def _numbers(rank: int) -> NDArray[np.float32]:
    """The same on every host: whole numbers, whose conversion has one right result, too."""
    mixed = (np.arange(_FOLDED, dtype=np.uint64) + 1) * np.uint64(2654435761 + 2 * rank)
    return ((mixed % (1 << 32)).astype(np.float64) / (1 << 32) - 0.5).astype(np.float32)


def _memory() -> float:
    source, target = np.ones(_MEMORY, np.uint8), np.zeros(_MEMORY, np.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return _MEMORY / float(min(times))


def _gathered(found: Any) -> list[Any]:
    """That of all ranks, by rank; what JSON has."""
    text = np.frombuffer(json.dumps(found).encode(), np.uint8)
    sizes = fd.all_gather(np.array([text.size])).tolist()
    whole = iter(fd.all_gather(text, uneven=True).tobytes())
    return [json.loads(bytes(islice(whole, size))) for size in sizes]


def _segments() -> tuple[int, int]:
    """(segments that this host's TCP has sent, those sent again); (0, 0) where it does not say."""
    try:
        names, values = (
            line.split() for line in Path("/proc/net/snmp").read_text().splitlines()
            if line.startswith("Tcp:")
        )  # fmt: skip
    except (OSError, ValueError):
        return 0, 0
    row = dict(zip(names, values, strict=False))
    return int(row.get("OutSegs", 0)), int(row.get("RetransSegs", 0))
