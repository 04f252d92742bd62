"""The order in which a stage computes: a schedule is a list of actions for each rank.

An action waits for what it needs from a neighbour, computes, and hands on what it made without
waiting for the neighbour to take it. What a stage keeps from a micro-batch's forward to its
backward are the activations *in flight*.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from farandole._arguments import shown
from farandole._core import InvalidArgument


class Action(NamedTuple):
    """One forward or backward of one micro-batch."""

    kind: Literal["forward", "backward"]
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch}"


Actions = list[Action]


def forwards(micro_batches: int) -> Actions:
    """The actions of a stage that does not train."""
    return [Action("forward", k) for k in range(micro_batches)]


def gpipe(stages: int, stage: int, micro_batches: int) -> Actions:
    """All forwards, then all backwards: simple, with all micro-batches in flight."""
    del stages, stage
    return forwards(micro_batches) + [Action("backward", k) for k in range(micro_batches)]


def one_f_one_b(stages: int, stage: int, micro_batches: int) -> Actions:
    """One forward, one backward, as soon as the first backward can be: equally long, with at most
    ``stages - stage`` micro-batches in flight, however many there are."""
    ahead = min(stages - stage - 1, micro_batches)
    actions = forwards(ahead)
    for k in range(micro_batches - ahead):
        actions += [Action("forward", ahead + k), Action("backward", k)]
    done = micro_batches - ahead
    return actions + [Action("backward", k) for k in range(done, micro_batches)]


SCHEDULES: dict[str, Callable[[int, int, int], Actions]] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def schedule_of(name: object) -> Callable[[int, int, int], Actions]:
    """The function of (stages, stage, micro_batches) by its name. Raises InvalidArgument."""
    if not isinstance(name, str) or name.lower() not in SCHEDULES:
        names = " or ".join(f"'{each}'" for each in SCHEDULES)
        raise InvalidArgument(f"schedule is {shown(name)}; it is {names}")
    return SCHEDULES[name.lower()]


def most_in_flight(actions: Sequence[Action]) -> int:
    """Micro-batches whose activations a stage keeps at a time, at most."""
    most = now = 0
    for action in actions:
        now += 1 if action.kind == "forward" else -1
        most = max(most, now)
    return most


def bubble(stages: int, micro_batches: int) -> float:
    """The share of a step in which a stage has nothing to do, where all stages take equally long
    and messages take no time: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def check(schedules: Sequence[Sequence[Action]], micro_batches: int, *, training: bool) -> int:
    """Runs the schedules of all stages by hand, one time unit an action.

    Returns:
        How many units it takes.

    Raises:
        InvalidArgument: an action is missing, doubled or out of order; neighbours disagree on the
            order of messages; or the stages wait for each other forever.
    """
    for stage, actions in enumerate(schedules):
        _check_complete(stage, actions, micro_batches, training=training)
    for stage, (one, other) in enumerate(pairwise(schedules)):
        for kind in ("forward", "backward"):
            if _order(one, kind) != _order(other, kind):
                raise InvalidArgument(f"stages {stage} and {stage + 1} have other orders of {kind}")
    return _run(schedules)


def _order(actions: Sequence[Action], kind: str) -> list[int]:
    return [each.micro_batch for each in actions if each.kind == kind]


def _check_complete(
    stage: int, actions: Sequence[Action], micro_batches: int, *, training: bool
) -> None:
    for kind, wanted in (("forward", True), ("backward", training)):
        if sorted(_order(actions, kind)) != list(range(micro_batches if wanted else 0)):
            raise InvalidArgument(f"stage {stage} has not one {kind} of each micro-batch")
    begun = set[int]()
    for action in actions:
        if action.kind == "forward":
            begun.add(action.micro_batch)
        elif action.micro_batch not in begun:
            raise InvalidArgument(f"stage {stage}: {action} before its forward")


def _run(schedules: Sequence[Sequence[Action]]) -> int:
    """Each unit, every stage does its next action, if what that needs was made before."""
    last = len(schedules) - 1
    done: list[set[Action]] = [set() for _ in schedules]
    units = 0
    while any(len(d) < len(s) for d, s in zip(done, schedules, strict=True)):
        ready = []
        for stage, actions in enumerate(schedules):
            if len(done[stage]) == len(actions):
                continue
            action = actions[len(done[stage])]
            source = stage - 1 if action.kind == "forward" else stage + 1
            if not 0 <= source <= last or action in done[source]:
                ready.append((stage, action))
        if not ready:
            stuck = [f"stage {s} after {len(d)} actions" for s, d in enumerate(done)]
            raise InvalidArgument(f"the stages wait for each other: {', '.join(stuck)}")
        for stage, action in ready:
            done[stage].add(action)
        units += 1
    return units
