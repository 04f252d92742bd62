"""Schedules as text: who sends what to whom, and which folds happen."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from farandole import _core  # type: ignore[attr-defined, unused-ignore]
from farandole._plan_size import Shape, checked
from farandole._tables import counted

Step = dict[str, Any]  # as `_core.schedule.plan` gives it; slices are (space, offset, count)
Lanes = list[list[Step]]


@dataclass(frozen=True)
class Totals:
    """The cost of a world of schedules. Counts are elements; lists are by rank."""

    rounds: int
    """The longest chain of messages each of which had to wait for the one before."""
    messages: list[int]
    sent: list[int]
    folded: list[int]
    order: str


def plan_world(shape: Shape) -> list[Lanes]:
    """Every rank's lanes.

    Raises:
        InvalidArgument: there is no such algorithm for the collective, or the shape makes no sense.
    """
    return [
        _core.schedule.plan(
            shape.collective, str(shape.algorithm), rank, shape.ranks, shape.count, shape.lanes,
            shape.segments, shape.root, list(shape.counts), host_of=list(shape.host_of),
        )
        for rank in range(shape.ranks)
    ]  # fmt: skip


def rounds_of(world: list[Lanes]) -> list[list[list[int]]]:
    """For each rank, lane and step the round in which the step is complete.

    Sending waits for nothing and a message takes one round, so a step is complete when what came
    before it is and its message, sent in round r by the other side, has arrived in round r + 1.
    Several messages may travel in one round.
    """
    rounds: list[list[list[int]]] = [[[] for _ in lanes] for lanes in world]
    travelling: dict[tuple[int, int, int], deque[int]] = defaultdict(deque)
    sent: set[tuple[int, int]] = set()  # lanes whose present step has sent
    moved = True
    while moved:
        moved = False
        for rank, lanes in enumerate(world):
            for number, steps in enumerate(lanes):
                done = rounds[rank][number]
                while len(done) < len(steps):
                    step, now = steps[len(done)], done[-1] if done else 0
                    local = step["to"] == rank
                    if step["to"] is not None and not local and (rank, number) not in sent:
                        travelling[rank, step["to"], number].append(now + 1)
                        sent.add((rank, number))
                        moved = True
                    if step["from"] is not None and not local:
                        arriving = travelling[step["from"], rank, number]
                        if not arriving:
                            break
                        now = max(now, arriving.popleft())
                    done.append(now)
                    sent.discard((rank, number))
                    moved = True
    if any(
        len(d) < len(s)
        for pair in zip(rounds, world, strict=True)
        for d, s in zip(*pair, strict=True)
    ):
        raise RuntimeError("these schedules do not fit together")
    return rounds


def totals(world: list[Lanes], order: str) -> Totals:
    """Counts rounds, messages, elements sent and folds of every rank."""
    messages, sent, folded = ([0] * len(world) for _ in range(3))
    for rank, lanes in enumerate(world):
        for step in (step for steps in lanes for step in steps):
            if step["to"] is not None and step["to"] != rank:
                messages[rank] += 1
                sent[rank] += step["send"][2]
            if step["action"] != "store":
                folded[rank] += step["recv"][2]
    ends = (done[-1] for rank in rounds_of(world) for done in rank if done)
    return Totals(max(ends, default=0), messages, sent, folded, order)


def link_elements(world: list[Lanes], host_of: Sequence[int]) -> int:
    """The most elements that go into, or out of, one host."""
    out, into = Counter[int](), Counter[int]()
    for rank, lanes in enumerate(world):
        for step in (step for steps in lanes for step in steps):
            if step["to"] is not None and host_of[step["to"]] != host_of[rank]:
                out[host_of[rank]] += step["send"][2]
                into[host_of[step["to"]]] += step["send"][2]
    return max([*out.values(), *into.values()], default=0)


def _slice(value: tuple[str, int, int]) -> str:
    space, offset, count = value
    return f"{space}[{offset}:{offset + count}]"


def _receives(step: Step, rank: int) -> str:
    """The step's receiving half as an assignment; ⊕ has the lower ranks' operand on its left."""
    if step["from"] is None:
        return ""
    arrived = _slice(step["send"]) if step["from"] == rank else f"from {step['from']}"
    if step["leaf_arrived"]:
        arrived = f"prescale({arrived})"
    value = arrived
    if step["action"] != "store":
        held = _slice(step["held"])
        if step["leaf_held"]:
            held = f"prescale({held})"
        lower, upper = (held, arrived) if step["action"] == "fold_upper" else (arrived, held)
        value = f"{lower} ⊕ {upper}"
    if step["finish"]:
        value = f"postscale({value})"
    return f"{_slice(step['recv'])} = {value}"


def _sends(step: Step, rank: int) -> str:
    if step["to"] is None or step["to"] == rank:
        return ""
    return f"{_slice(step['send'])} to {step['to']}"


def _table(lane: list[Step], rounds: list[int], rank: int) -> list[str]:
    rows = [("round", "sends", "receives")]
    rows += [
        (str(r), _sends(s, rank), _receives(s, rank)) for s, r in zip(lane, rounds, strict=True)
    ]
    width = max(len(sends) for _, sends, _ in rows)
    return [f"  {number:>5}  {sends:<{width}}  {text}".rstrip() for number, sends, text in rows]


def render(shape: Shape, *, rank: int | None = None, itemsize: int = 4) -> str:
    """The schedules of all ranks as a table for each rank and lane, and what they add up to.

    Args:
        rank: the only rank whose steps are shown; the totals are those of all.
        itemsize: bytes of an element, for the totals.

    Raises:
        InvalidArgument: there is no such algorithm for the collective, or the shape makes no sense.

    >>> print(render(Shape("broadcast", "binomial", 2, 8)))
    broadcast by binomial: 2 ranks, 8 elements, 1 lane, 1 segment
    <BLANKLINE>
    rank 0
      round  sends            receives
          0  input[0:8] to 1
          0                   output[0:8] = input[0:8]
    <BLANKLINE>
    rank 1
      round  sends  receives
          1         output[0:8] = from 0
    <BLANKLINE>
    rounds  1
    sent    at most 32 bytes by a rank, in 1 message; 32 bytes by all
    folded  at most 0 bytes by a rank
    order   canonical (proved, apart and in place)
    """
    if rank is not None and not 0 <= rank < shape.ranks:
        raise _core.InvalidArgument(f"rank {rank} is not one of {shape.ranks}")
    shape = checked(shape, itemsize)
    collective, algorithm, host_of = shape.collective, str(shape.algorithm), shape.host_of
    world = plan_world(shape)
    orders = set()
    places = (False, True) if _core.schedule.goes_in_place(collective) else (False,)
    for in_place in places:
        problem, order = _core.schedule.prove(
            collective, algorithm, shape.ranks, shape.count, shape.lanes, shape.segments,
            shape.root, in_place, list(shape.counts), host_of=list(host_of),
        )  # fmt: skip
        if problem:
            raise RuntimeError(f"{algorithm} is wrong: {problem}")
        orders.add(order)
    sums = totals(world, min(orders, key=["same_on_all_ranks", "canonical"].index))

    lines = [
        f"{collective} by {algorithm}: {counted(shape.ranks, 'rank')}, {shape.elements}, "
        f"{counted(shape.lanes, 'lane')}, {counted(shape.segments, 'segment')}"
        + (f", {counted(len(set(host_of)), 'host')}" if host_of else "")
    ]
    for shown, rounds in enumerate(rounds_of(world)):
        if rank not in (None, shown):
            continue
        for number, lane in enumerate(world[shown]):
            title = f"rank {shown}" + (f", lane {number}" if len(world[shown]) > 1 else "")
            lines += ["", title, *_table(lane, rounds[number], shown)]
    links = link_elements(world, host_of) * itemsize if host_of else 0
    lines += [
        "",
        f"rounds  {sums.rounds}",
        f"sent    at most {max(sums.sent) * itemsize} bytes by a rank, "
        f"in {counted(max(sums.messages), 'message')}; {sum(sums.sent) * itemsize} bytes by all",
        *[f"links   at most {links} bytes into or out of a host"] * bool(host_of),
        f"folded  at most {max(sums.folded) * itemsize} bytes by a rank",
        f"order   {sums.order} (proved, {'apart and in place' if len(places) > 1 else 'apart'})",
    ]
    return "\n".join(lines)
