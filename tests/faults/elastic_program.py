"""An elastic program for tests. It computes the same value, even if ranks die or join.

    python elastic_program.py [STEPS [SIZE]] [WHERE:WORKER:WORLD …]

It takes STEPS steps, and more until its world has SIZE ranks. WORKER dies in WORLD: at its second
`step`, in the midst of `sync`, or while the ranks `meet` (those of several hosts) or `open` their
world; or it kills the `agent` of its host. Each worker that comes to the end prints
'done STEPS VALUE'.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import farandole as fd
from farandole import _core, _elastic, _hosts, _world
from farandole.common._worlds import Framework
from farandole.common.elastic import ObjectState, run_fn

SAMPLES = 60
ARGUMENTS = sys.argv[1:] if __name__ == "__main__" else []  # in a test they would be pytest's
FAULTS = [fault.split(":") for fault in ARGUMENTS if ":" in fault]
NUMBERS = [int(number) for number in ARGUMENTS if ":" not in number]
STEPS, SIZE = [*NUMBERS, 10, 0][:2] if len(NUMBERS) != 1 else [NUMBERS[0], 0]


def contribution(step: int, samples: Any) -> int:
    return sum((7 * sample + 13 * step) % 101 for sample in samples)


def after(value: int, whole: int) -> int:
    return (3 * value + whole) % (1 << 40)


def serial(steps: int) -> int:
    """The value after that many steps, on any number of ranks."""
    value = 0
    for step in range(steps):
        value = after(value, contribution(step, range(SAMPLES)))
    return value


def is_due(where: str) -> bool:
    return [where, os.environ["FARANDOLE_WORKER"], str(_elastic.world())] in FAULTS


def die_if_due(where: str) -> None:
    if is_due(where):
        os.kill(os.getpid(), signal.SIGKILL)


def dying(where: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **others: Any) -> Any:
        die_if_due(where)
        return function(*arguments, **others)

    return call


class State(ObjectState):
    def sync(self) -> None:
        self._bcast_object(0)
        die_if_due("sync")
        super().sync()


def train(state: Any) -> None:
    print(f"world {_elastic.world()}: rank {fd.rank()} of {fd.size()} at {state.step}", flush=True)
    taken = 0
    while state.step < STEPS or fd.size() < SIZE:
        state.value *= 3  # half of a step, which restore() undoes
        taken += 1
        if taken == 2:
            die_if_due("step")
            if is_due("agent"):
                os.kill(os.getppid(), signal.SIGKILL)
        mine = contribution(state.step, range(fd.rank(), SAMPLES, fd.size()))
        whole = int(fd.all_reduce(np.array([mine], np.int64))[0])
        state.value = after(state.value // 3, whole)
        state.step += 1
        time.sleep(0.02)
        state.commit()


def main() -> None:
    _core.open_world = dying("open", _core.open_world)  # type: ignore[assignment]
    _hosts.meet = dying("meet", _hosts.meet)  # type: ignore[assignment]
    fd.init()
    state = State(step=0, value=0)
    run_fn(train, Framework(_world.init))(state)
    print(f"done {state.step} {state.value}", flush=True)


if __name__ == "__main__":
    main()
