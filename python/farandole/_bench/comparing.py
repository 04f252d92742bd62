"""Peers measured in turns, and what their times say about each other.

A round asks every variant once, in an order shuffled anew; while one is asked the others sleep. A
round's value of a variant is the median of its block, and ratios pair values of the same round, so
a machine that becomes slow or fast for a while disturbs all alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from farandole._bench import data
from farandole._bench.layouts import COLLECTIVES
from farandole._bench.peers.finding import Found
from farandole._bench.peers.hosts import Hosts
from farandole._bench.peers.table import PeerError
from farandole._bench.peers.workers import Workers, started
from farandole._bench.statistics import (
    Interval,
    gigabytes_per_second,
    median,
    ratio_to_best,
    summarize,
)

OURS = "farandole"
_WARM = 3  # calls of every block that are not timed; one where calls are slow
_FEWEST, _MOST = 3, 400  # timed calls of a block


@dataclass(frozen=True)
class Question:
    """The parameters of a comparison, the same at every size."""

    collective: str
    sizes: Sequence[int]
    dtype: str = "float32"
    ranks: int = 2
    rounds: int = 11
    block_seconds: float = 0.03  # about how long a block takes
    hot: bool = False
    patience: float = 0.25  # seconds that a call may take, or its variant rests from there on
    hosts: Hosts | None = None  # else all ranks are on this one


@dataclass
class Variant:
    """A peer on one kind of memory, and what was measured of it at one size."""

    workers: Workers
    memory: str
    options: Mapping[str, Any] = field(default_factory=dict)
    setting: str = ""  # what is special about it, where a peer appears more than once
    dtype: str = ""  # another than the question's, of as many elements
    times: list[int] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)  # their medians
    wrong: int = 0
    bytes: int = 0
    path: str = ""
    sent: int = 0  # bytes of a call that left all hosts, in packets
    iterations: int = _FEWEST
    warm: int = _WARM

    @property
    def name(self) -> str:
        setting = f", {self.setting}" if self.setting else ""
        return f"{self.workers.peer.label} ({self.memory}{setting})"

    def begin(self, question: Question, size: int) -> str:
        """Makes the buffers and finds how many calls a block has; returns why it cannot, or ''."""
        self.times, self.rounds, self.wrong = [], [], 0
        unable, wall = self._block(question, size, 1, 2)
        if unable:
            return unable
        if wall / 3 > question.patience * 1e9:
            return f"a call takes {wall / 3e9:.2f} s"
        self.times, self.rounds = [], []
        unable, wall = self._block(question, size, 3, 5)
        fit = int(question.block_seconds * 1e9 * 8 / max(wall, 1)) - _WARM
        self.iterations = max(_FEWEST, min(_MOST, fit))
        self.warm = _WARM if fit > _FEWEST else 1
        self.times, self.rounds = [], []
        return unable

    def measure(self, question: Question, size: int) -> None:
        self._block(question, size, self.warm, self.iterations)

    def _block(self, question: Question, size: int, warm: int, calls: int) -> tuple[str, int]:
        """Why it is unable, or '', and how long all took. A call's time is the slowest rank's."""
        dtype = self.dtype or question.dtype
        answers = self.workers.ask(
            {
                "collective": question.collective,
                "bytes": size // _item(question.dtype) * _item(dtype),
                "dtype": dtype,
                "keep": [question.collective, size],
                "memory": self.memory,
                "options": dict(self.options),
                "hot": question.hot,
                "warm": warm,
                "iterations": calls,
            }
        )
        if unable := next((a["unable"] for a in answers if "unable" in a), ""):
            return unable, 0
        slowest = [max(times) for times in zip(*(a["times"] for a in answers), strict=True)]
        self.times += slowest
        self.rounds.append(median(slowest))
        self.wrong += sum(a["wrong"] for a in answers)
        self.bytes, self.path = answers[0]["bytes"], answers[0]["path"]
        if question.hosts is not None:
            self.sent = sum(answers[rank]["sent"] for rank in question.hosts.witnesses())
            if self.sent < self.bytes:
                return f"only {self.sent} bytes of a call crossed the network", 0
        return "", max(a["wall"] for a in answers)


def start(
    peers: Iterable[Found],
    ranks: int,
    stack: ExitStack,
    tell: Callable[[str], None],
    hosts: Hosts | None = None,
) -> list[Workers]:
    """Starts the ranks of every peer that starts; reports the others."""
    running = []
    for found in peers:
        try:
            running.append(stack.enter_context(started(found, ranks, hosts)))
        except PeerError as error:
            tell(str(error))
    return running


def compare(
    question: Question,
    variants: Sequence[Variant],
    tell: Callable[[str], None],
    watch: Callable[[int, int], None] = lambda size, rounds: None,  # noqa: ARG005
) -> Iterator[list[dict[str, Any]]]:
    """The rows, size by size. Variants that cannot run, or are far too slow, are left out.

    `watch` is called before each round with the size, and how many rounds were before.
    """
    present = list(variants)
    order = random.Random(0)
    for turn, size in enumerate(sorted(question.sizes)):
        watch(size, turn * question.rounds)
        present = list(_able(question, size, present, tell))
        if not present:
            return
        for number in range(question.rounds):
            watch(size, turn * question.rounds + number)
            for variant in order.sample(present, len(present)):
                try:
                    variant.measure(question, size)
                except PeerError as error:
                    tell(str(error))
                    present.remove(variant)
        yield [_row(question, variant, present) for variant in present]


def _able(
    question: Question, size: int, variants: list[Variant], tell: Callable[[str], None]
) -> Iterator[Variant]:
    for variant in variants:
        try:
            why_not = variant.begin(question, size)
        except PeerError as error:
            why_not = str(error)
        if why_not:
            tell(f"without {variant.name} from {size} bytes of {question.dtype} on: {why_not}")
        else:
            yield variant


def _item(dtype: str) -> int:
    return data.storage(dtype).itemsize


def _row(question: Question, variant: Variant, present: list[Variant]) -> dict[str, Any]:
    is_ours = variant.workers.peer.library == "ours"
    least, _, p99 = summarize(variant.times)
    middle = median(variant.rounds)
    bandwidth = gigabytes_per_second(variant.bytes, middle)
    return {
        "collective": question.collective,
        "ranks": question.ranks,
        "bytes": variant.bytes,
        "dtype": variant.dtype or question.dtype,
        "memory": variant.memory,
        "setting": variant.setting,
        "peer": variant.workers.peer.name,
        "version": variant.workers.version,
        "algorithm": variant.path or None,
        "level": variant.options.get("level", "canonical") if is_ours else None,
        "hot": question.hot,
        "hosts": str(question.hosts) if question.hosts else None,
        "network_bytes": variant.sent if question.hosts else None,
        "rounds": len(variant.rounds),
        "iterations": len(variant.times),
        "min_us": least / 1e3,
        "p50_us": middle / 1e3,
        "p99_us": p99 / 1e3,
        "rounds_us": [nanoseconds / 1e3 for nanoseconds in variant.rounds],
        "algbw_gbs": bandwidth,
        "busbw_gbs": bandwidth * COLLECTIVES[question.collective].bus_factor(question.ranks),
        "errors": variant.wrong,
        "verified": variant.wrong == 0,
        "ratios": _ratios(variant, present) if is_ours else {},
    }


def _ratios(ours: Variant, present: list[Variant]) -> dict[str, dict[str, Any]]:
    """Our time over each peer's, and over that of the best MPI and of the best of all."""
    others = {v.workers.peer.name: v for v in present if v.workers.peer.library != "ours"}
    found = {name: _as_dict(ratio_to_best(ours.rounds, [v.rounds])) for name, v in others.items()}
    groups = {
        "best": {n: v for n, v in others.items() if v.workers.peer.library in ("mpi", "gloo")},
        "best_mpi": {n: v for n, v in others.items() if v.workers.peer.library == "mpi"},
    }
    for group, members in groups.items():
        if members:
            best = min(members, key=lambda name: median(members[name].rounds))
            ratio = ratio_to_best(ours.rounds, [v.rounds for v in members.values()])
            found[group] = {"peer": best, **_as_dict(ratio)}
    return found


def _as_dict(ratio: Interval) -> dict[str, Any]:
    return {
        "ratio": ratio.median,
        "low": ratio.low,
        "high": ratio.high,
        "confidence": ratio.confidence,
    }
