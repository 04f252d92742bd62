"""Worlds that a process joins one after the other, of all ranks and of some: what belongs to one of
them is of no use in the next, also where ranks have joined different numbers of worlds."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import farandole as fd
from farandole import _world
from farandole import parameter_server as ps
from harness import World

WORLDS: list[list[int] | None] = [None, [0, 1], [1, 0], None, [2, 1]]


def serves_in_each() -> list[Any]:
    """The result of a parameter server in each world that this rank is in."""
    found: list[Any] = []
    epochs = [_world.epoch()]
    for ranks in WORLDS:
        if ranks is not None and int(os.environ["RANK"]) not in ranks:
            continue
        fd.init(ranks=ranks)
        epochs.append(_world.epoch())
        node = ps.join({"w": np.zeros(3)}, ps.SGD(1.0))
        if isinstance(node, ps.Server):
            found.append(node.serve().updates)
        else:
            with node:
                for _ in node.steps(4):
                    node.push({"w": np.ones(3)})
                found.append(node.pull()["w"].tolist())
        fd.shutdown()
    assert epochs == list(range(len(found) + 1))
    return found


def test_a_parameter_server_in_each_of_several_worlds(spawn: Callable[..., World]) -> None:
    weights = [-4.0] * 3
    assert spawn(3).run(serves_in_each) == [
        [weights, weights, 4, weights],
        [weights, 4, weights, weights, 4],
        [4, 4, weights],
    ]
