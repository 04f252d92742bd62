"""Splits layers into stages: arithmetic alone.

*Bounds* of p stages are p + 1 numbers: stage s has the layers bounds[s] to bounds[s + 1] - 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Any

from farandole._arguments import is_whole, shown
from farandole._core import InvalidArgument


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Bounds that make the most expensive stage as cheap as can be, and then all of them as equal
    as can be: with the smallest sum of squares. Every stage has a layer.

    Args:
        costs: of layers, at least 0; at least ``stages`` of them.

    Examples:
        >>> balanced([5, 1, 1, 1, 4], 2)
        [0, 2, 5]
    """
    most, _ = _best(costs, stages, lambda so_far, cost: max(so_far, cost), inf)
    limit = most * (1 + 1e-12)  # sums may round otherwise
    return _best(costs, stages, lambda so_far, cost: so_far + cost * cost, limit)[1]


def _best(
    costs: Sequence[float], stages: int, add: Callable[[float, float], float], limit: float
) -> tuple[float, list[int]]:
    """The smallest total that `add` makes of the stages' costs, none of which is above the limit;
    and the bounds."""
    n = len(costs)
    sums = [0.0, *accumulate(costs)]
    # best[i]: of the first i layers in k stages; begins[k][i]: where the last of these begins.
    best = [0.0] + [inf] * n
    begins: list[list[int]] = []
    for k in range(stages):
        begin, now = [0] * (n + 1), [inf] * (n + 1)
        for i in range(k + 1, n + 1):
            for j in range(k, i):
                cost = sums[i] - sums[j]
                value = add(best[j], cost) if cost <= limit else inf
                if value < now[i]:
                    now[i], begin[i] = value, j
        best = now
        begins.append(begin)
    bounds = [n]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    return best[n], bounds[::-1]


def at(points: Any, layers: int, stages: int) -> list[int]:
    """Bounds of which the program gives the inner ones: the first layer of each stage but the
    first. Raises InvalidArgument."""
    points = list(points)
    if len(points) != stages - 1 or not all(map(is_whole, points)):
        raise InvalidArgument(
            f"split is {shown(points)}; with {stages} stages it is a list of {stages - 1} whole "
            "numbers, the first layer of each stage but the first"
        )
    bounds = [0, *map(int, points), layers]
    if any(a >= b for a, b in pairwise(bounds)):
        raise InvalidArgument(
            f"split is {points}; the numbers rise, and lie between 1 and {layers - 1}, as there "
            f"are layers 0 to {layers - 1} and every stage has one"
        )
    return bounds
