"""A new reduce operation, of a formula that there is: by any call, for every dtype."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import farandole as fd
from core_testing import testing
from farandole import _core, _world
from harness import World


def reduce_by_it() -> None:
    fd.init()
    for dtype in (d for d in _core.dtypes if d != "bfloat16"):
        all_of_them = [np.arange(700) * (r + 2) % 7 for r in range(fd.size())]
        mine = all_of_them[fd.rank()].astype(dtype)
        largest = np.stack([x.astype(dtype) for x in all_of_them]).max(axis=0)
        assert (fd.all_reduce(mine, op="dummy") == largest).all()
        assert (fd.all_reduce(mine, op="dummy", algorithm="binomial") == largest).all()


def reduce_by_name() -> None:
    fd.init()
    x = np.full(9, fd.rank())
    names = _core.names_of(_world.world())
    _core.wait_by_number(names.submit("all_reduce", "x", [(x, x, x.shape)], op="dummy"))
    assert (x == fd.size() - 1).all()


def test_it_folds() -> None:
    lower, upper = np.arange(10) % 4, np.arange(10) % 3
    assert "dummy" in _core.reduce_ops
    for isa in _core.instruction_sets():
        folded = testing.fold("int64", "dummy", lower, upper, isa)
        assert folded == np.maximum(lower, upper).tobytes()


def test_ranks_reduce_by_it(spawn: Callable[..., World]) -> None:
    for size in (1, 3):
        spawn(size).run(reduce_by_it)
        spawn(size).run(reduce_by_name)
