"""Schedules of pipelines and which layers are a stage's, as values."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

import farandole as fd
from farandole.pipeline import _partition
from farandole.pipeline._schedules import (
    SCHEDULES,
    Action,
    bubble,
    check,
    forwards,
    most_in_flight,
    schedule_of,
)

SIZES = list(itertools.product((1, 2, 3, 5, 8), (1, 2, 3, 7, 16)))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_schedules_end_as_soon_as_can_be(name: str, stages: int, micro_batches: int) -> None:
    """Nobody waits forever, and what is idle is the bubble of the formula."""
    make = schedule_of(name.upper())
    schedules = [make(stages, stage, micro_batches) for stage in range(stages)]
    units = check(schedules, micro_batches, training=True)
    assert units == 2 * (micro_batches + stages - 1)
    assert 1 - 2 * micro_batches / units == pytest.approx(bubble(stages, micro_batches))
    for stage, actions in enumerate(schedules):
        bound = stages - stage if name == "1f1b" else micro_batches
        assert most_in_flight(actions) == min(bound, micro_batches)


def test_forwards_alone_are_a_schedule_too() -> None:
    assert check([forwards(4)] * 3, 4, training=False) == 4 + 2


F, B = (lambda k: Action("forward", k)), (lambda k: Action("backward", k))


@pytest.mark.parametrize(
    ("schedules", "words"),
    [
        ([[F(0), B(0)], [F(0)]], "stage 1 has not one backward of each"),
        ([[F(0), F(0), B(0)]], "stage 0 has not one forward of each"),
        ([[B(0), F(0)]], "backward of micro-batch 0 before its forward"),
        ([[F(0), F(1), B(0), B(1)], [F(1), F(0), B(0), B(1)]], "other orders of forward"),
        ([[F(0), F(1), B(0), B(1)], [F(0), F(1), B(1), B(0)]], "other orders of backward"),
        ([[F(0), B(0), F(1), B(1)], [F(0), F(1), B(0), B(1)]], "stage 0 after 1 actions, stage 1"),
    ],
)
def test_the_check_finds_what_is_wrong(schedules: Sequence[list[Action]], words: str) -> None:
    most = max(each.micro_batch for actions in schedules for each in actions)
    with pytest.raises(fd.InvalidArgument, match=words):
        check(schedules, most + 1, training=True)


def test_an_unknown_schedule_is_refused() -> None:
    for name in ("zero", 3):
        with pytest.raises(fd.InvalidArgument, match="it is 'gpipe' or '1f1b'"):
            schedule_of(name)


def test_stages_cost_as_equally_much_as_can_be() -> None:
    draw = random.Random(3)
    for _ in range(200):
        n = draw.randint(1, 7)
        stages = draw.randint(1, n)
        costs = [draw.choice([0, 0.25, 1, 2.5, 7]) for _ in range(n)]

        def key(bounds: Sequence[int], costs: Sequence[float] = costs) -> tuple[float, float]:
            sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
            return max(sums), sum(each * each for each in sums)

        points = itertools.combinations(range(1, n), stages - 1)
        assert key(_partition.balanced(costs, stages)) == min(key([0, *p, n]) for p in points)


def test_points_are_the_first_layers_of_stages() -> None:
    assert _partition.at((2, 5), 7, 3) == [0, 2, 5, 7]
    for points in ([2], [2, 2], [0, 3], [3, 7], [5, 2], [1.5, 2]):
        with pytest.raises(fd.InvalidArgument, match="split is"):
            _partition.at(points, 7, 3)
