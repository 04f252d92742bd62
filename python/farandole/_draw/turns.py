"""A schedule run turn by turn, over channels that buffer nothing, with what every message carries.

A message begins when both its ends have come to it and takes one turn, whatever its size. Every
cell of every rank's memory holds which element it is and which ranks' contributions are in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farandole._plan import Lanes, Step

RANKS = 64  # at most: a set of ranks is a word of bits
UNSET = -1


@dataclass(frozen=True)
class Message:
    """A message from one rank to another during turn `turn`. The first turn is 1."""

    turn: int
    sender: int
    receiver: int
    folded: bool  # rather than stored
    share: float  # of all the data of the lane
    place: float | None  # of its middle among the data, 0 to 1; None: all of it, or here and there


@dataclass(frozen=True)
class Event:
    """The fold or finish of a rank at the end of a turn, with sets of ranks as bits."""

    turn: int
    rank: int
    lower: int
    upper: int  # 0: nothing was folded
    finish: bool


@dataclass(frozen=True)
class Course:
    """All that happens in one lane."""

    turns: int
    messages: list[Message]
    events: list[Event]
    by_owner: bool  # data lie in the order of the ranks that own them, not of one rank's input

    @property
    def folds(self) -> bool:
        return any(event.upper for event in self.events)


@dataclass
class _Cells:
    element: NDArray[np.int64]
    ranks: NDArray[np.uint64]

    def part(self, begin: int, count: int) -> _Cells:
        return _Cells(self.element[begin : begin + count], self.ranks[begin : begin + count])


def course_of(world: Sequence[Lanes], lane: int = 0) -> Course:
    """Runs one lane of every rank's schedule.

    Raises:
        ValueError: there are more than `RANKS` ranks.
        RuntimeError: the schedules do not fit together.
    """
    if len(world) > RANKS:
        raise ValueError(f"at most {RANKS} ranks can be drawn, not {len(world)}")
    return _Execution([lanes[lane] for lanes in world]).run()


class _Execution:
    def __init__(self, lanes: Sequence[list[Step]]) -> None:
        self.lanes = lanes
        self.at = [0] * len(lanes)  # the step at which each rank stands
        self.since = [0] * len(lanes)  # the turn at whose end it came there
        self.until = [0] * len(lanes)  # the turn at whose end its halves that are done were done
        self.sent = [False] * len(lanes)
        self.received = [False] * len(lanes)
        self.messages: list[Message] = []
        self.events: list[Event] = []
        self._lay_out()

    def _lay_out(self) -> None:
        """Memory large enough for all slices, where input holds what the lane reads of it."""
        read = [[(s, o, n) for s, o, n in _slices(lane) if s == "input"] for lane in self.lanes]
        folding = any(step["action"] != "store" for lane in self.lanes for step in lane)
        self.by_owner = not folding and sum(map(bool, read)) > 1
        begins = [min((o for _, o, _ in r), default=0) for r in read]
        sizes = [
            max((o + n for _, o, n in r), default=b) - b for r, b in zip(read, begins, strict=True)
        ]
        self.total = sum(sizes) if self.by_owner else max(sizes, default=0)
        self.memory: list[dict[str, _Cells]] = []
        first = 0
        for rank, lane in enumerate(self.lanes):
            extents = {"input": 0, "output": 0, "scratch": 0}
            for space, offset, count in _slices(lane):
                extents[space] = max(extents[space], offset + count)
            spaces = {
                space: _Cells(np.full(extent, UNSET), np.zeros(extent, np.uint64))
                for space, extent in extents.items()
            }
            mine = spaces["input"].part(begins[rank], sizes[rank])
            mine.element[:] = first + np.arange(sizes[rank])
            mine.ranks[:] = 1 << rank
            first += sizes[rank] if self.by_owner else 0
            self.memory.append(spaces)

    def run(self) -> Course:
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.lanes)):
                moved |= self._advance(rank)
        if any(at < len(lane) for at, lane in zip(self.at, self.lanes, strict=True)):
            raise RuntimeError("these schedules do not fit together")
        turns = max((m.turn for m in self.messages), default=0)
        return Course(turns, self.messages, self.events, self.by_owner)

    def _step(self, rank: int) -> Step | None:
        lane = self.lanes[rank]
        return lane[self.at[rank]] if self.at[rank] < len(lane) else None

    def _advance(self, rank: int) -> bool:
        """Does what this rank can: a local step, sending, going to the next step."""
        step = self._step(rank)
        if step is None:
            return False
        to, moved = step["to"], False
        if to == rank:
            self._receive(rank, step, self._slice(rank, step["send"]), self.since[rank])
            return self._next(rank)
        if to is not None and not self.sent[rank]:
            moved = self._send(rank, step)
        if (to is None or self.sent[rank]) and (step["from"] is None or self.received[rank]):
            return self._next(rank)
        return moved

    def _next(self, rank: int) -> bool:
        self.at[rank] += 1
        self.since[rank] = self.until[rank] = max(self.since[rank], self.until[rank])
        self.sent[rank] = self.received[rank] = False
        return True

    def _send(self, rank: int, step: Step) -> bool:
        peer = step["to"]
        other = self._step(peer)
        if other is None or other["from"] != rank or self.received[peer]:
            return False
        turn = max(self.since[rank], self.since[peer]) + 1
        carried = self._slice(rank, step["send"])
        share, place = self._place_of(carried)
        folded = other["action"] != "store"
        self.messages.append(Message(turn, rank, peer, folded, share, place))
        self._receive(peer, other, carried, turn)
        self.sent[rank] = self.received[peer] = True
        for end in (rank, peer):
            self.until[end] = max(self.until[end], turn)
        return True

    def _slice(self, rank: int, where: tuple[str, int, int]) -> _Cells:
        return self.memory[rank][where[0]].part(*where[1:])

    def _receive(self, rank: int, step: Step, arrived: _Cells, turn: int) -> None:
        ranks, lower, upper = arrived.ranks, 0, 0
        if step["action"] != "store":
            held = self._slice(rank, step["held"]).ranks
            below, above = (held, ranks) if step["action"] == "fold_upper" else (ranks, held)
            lower, upper, ranks = int(below[0]), int(above[0]), below | above
        into = self._slice(rank, step["recv"])
        into.element[:], into.ranks[:] = arrived.element.copy(), ranks.copy()
        if upper or step["finish"]:
            self.events.append(Event(turn, rank, lower, upper, step["finish"]))

    def _place_of(self, carried: _Cells) -> tuple[float, float | None]:
        element = carried.element[carried.element != UNSET]
        if element.size == 0 or self.total == 0:
            return 0.0, None
        first, last = int(element.min()), int(element.max())
        share = element.size / self.total
        whole = last + 1 - first == self.total or last + 1 - first != element.size
        return share, None if whole else (first + last + 1) / 2 / self.total


def _slices(lane: Iterable[Step]) -> Iterable[tuple[str, int, int]]:
    for step in lane:
        for key in ("send", "recv", "held"):
            if step[key] is not None:
                yield step[key]


def name_of(ranks: int, size: int) -> str:
    """A set of ranks in a few letters: '3', '0-3', '6-1' around the end, or how many they are."""
    members = [rank for rank in range(size) if ranks >> rank & 1]
    if not members:
        return ""
    starts = [rank for rank in members if not ranks >> (rank - 1) % size & 1]
    if len(starts) > 1:
        return f"{len(members)} of {size}"
    first = starts[0] if starts else 0
    last = (first + len(members) - 1) % size
    return str(first) if first == last else f"{first}–{last}"  # noqa: RUF001
