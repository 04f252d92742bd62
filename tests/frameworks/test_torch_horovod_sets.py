"""Horovod's init() with process sets, and Adasum among the operations by name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks

import farandole as fd
import farandole.torch as hvd
from farandole.torch.adasum import adasum
from harness import World


@on_ranks(3)
def init_registers_process_sets() -> None:
    hvd.shutdown()
    ends, middle = hvd.ProcessSet([2, 0]), hvd.ProcessSet([1])
    hvd.init(process_sets=[ends, middle])
    mine = middle if hvd.rank() == 1 else ends
    assert sorted([ends.process_set_id, middle.process_set_id]) == [1, 2]
    total = hvd.allreduce(torch.tensor(float(hvd.rank())), op=hvd.Sum, process_set=mine)
    assert float(total) == (1.0 if hvd.rank() == 1 else 2.0)
    hvd.init(process_sets=[hvd.ProcessSet([0])])  # there is a world: does nothing
    hvd.shutdown()
    assert ends.process_set_id is None
    hvd.init(process_sets="dynamic")


@on_ranks(3)
def sets_without_rank_0_go_on_after_it_has_left() -> None:
    """Rank 0 orders operations by name for all sets."""
    others = hvd.add_process_set([1, 2])
    if hvd.rank() > 0:
        time.sleep(0.2)  # it leaves meanwhile
        for _ in range(3):
            total = hvd.allreduce(torch.tensor(hvd.rank()), op=hvd.Sum, process_set=others)
            assert int(total) == 3
        with pytest.raises(fd.EarlyExit, match="rank 0 "):
            hvd.allreduce(torch.ones(2))
    hvd.shutdown()
    hvd.init()


@on_ranks(2)
def objects_that_cannot_be_pickled_are_refused_on_every_rank() -> None:
    lock = threading.Lock()
    for rank in range(2):
        mine = lock if hvd.rank() == rank else 1
        with pytest.raises(fd.InvalidArgument, match=f"on rank {rank}: a lock cannot be pickled"):
            hvd.allgather_object(mine)
        with pytest.raises(fd.InvalidArgument, match=f"'x' on rank {rank}: a lock cannot"):
            hvd.broadcast_object(lock, rank, name="x")
    base = 10 * hvd.rank()
    assert [f(1) for f in hvd.allgather_object(lambda x: x + base)] == [1, 11]
    assert hvd.broadcast_object(lambda x: x + base, 1)(1) == 11


@on_ranks(3)
def process_sets_that_cannot_be_are_refused_on_every_rank() -> None:
    hvd.shutdown()
    first = hvd.ProcessSet([0])
    for bad, pattern in [
        ([first, hvd.ProcessSet([1])][: 1 + (fd_rank() == 0)], "ranks disagree on process_sets"),
        ([hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 0])], "of the same ranks exists"),
        ([hvd.ProcessSet([0, 1, 2])], "of all ranks exists"),
        ([[0]], "a list of ProcessSet"),
        ("static", "'dynamic'"),
    ]:
        with pytest.raises(ValueError, match=pattern):
            hvd.init(process_sets=bad)
        assert not hvd.is_initialized()
    hvd.init()


def fd_rank() -> int:
    import os

    return int(os.environ["RANK"])


@on_ranks(1, 2, 3)
def allreduce_takes_adasum() -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(hvd.rank()))
    right = adasum(x)
    torch.testing.assert_close(hvd.allreduce(x, op=hvd.Adasum), right)
    handle = hvd.allreduce_async_(x, op=hvd.Adasum, prescale_factor=2.0)
    assert hvd.synchronize(handle) is x
    torch.testing.assert_close(x, 2 * right)
    pair = hvd.grouped_allreduce([torch.ones(3), torch.ones(2, 2)], op=hvd.Adasum)
    assert all(torch.equal(t, torch.ones_like(t)) for t in pair)
    with pytest.raises(fd.InvalidArgument, match="Adasum takes floating"):
        hvd.allreduce(torch.ones(2, dtype=torch.int64), op=hvd.Adasum)


@on_ranks(2)
def adasum_of_different_shapes_is_a_mismatch_and_the_next_one_works() -> None:
    with pytest.raises(fd.Mismatch, match=r"'adasum\.w'"):
        hvd.allreduce(torch.ones(2 + hvd.rank()), op=hvd.Adasum, name="w")
    assert torch.equal(hvd.allreduce(torch.ones(2), op=hvd.Adasum, name="w"), torch.ones(2))


@on_ranks(2)
def adasum_compares_factors_and_meets_no_other_operation() -> None:
    x = torch.tensor([1.0, 2.0]) * (1 + hvd.rank())
    right = adasum(x)
    for name in ("f", None):
        for factor in ("prescale_factor", "postscale_factor"):
            with pytest.raises(fd.Mismatch, match=factor.removesuffix("_factor")):
                hvd.allreduce(x, op=hvd.Adasum, name=name, **{factor: 1.0 + hvd.rank()})
        torch.testing.assert_close(hvd.allreduce(x, op=hvd.Adasum, name=name), right)
    handle = hvd.allreduce_async(x, op=hvd.Adasum, name="g")
    assert hvd.allgather(x[None], name="g").shape == (2, 2)
    torch.testing.assert_close(hvd.synchronize(handle), right)
    gather = hvd.rank() == 0
    handle = hvd.allgather_async(x[None]) if gather else hvd.allreduce_async(x, op=hvd.Adasum)
    with pytest.raises(fd.Mismatch, match="number of tensors"):
        hvd.synchronize(handle)
    large = torch.ones(1 << 16)
    scaled = hvd.allreduce(large, op=hvd.Adasum, prescale_factor=2.0, postscale_factor=2.0)
    assert torch.equal(scaled, 4 * large)


@on_ranks(1, 2, 3)
def the_gradient_of_adasum_is_the_adasum_of_the_gradients() -> None:
    x = torch.ones(4, requires_grad=True)
    weights = torch.randn(4, generator=torch.Generator().manual_seed(hvd.rank()))
    (hvd.allreduce(x, op=hvd.Adasum, name="w", postscale_factor=2.0) * weights).sum().backward()
    torch.testing.assert_close(x.grad, 2 * adasum(weights))
    y = torch.ones(4, requires_grad=True)
    (hvd.grouped_allreduce([y], op=hvd.Adasum)[0] * weights).sum().backward()
    torch.testing.assert_close(y.grad, adasum(weights))


test_on_ranks = make_tests(__name__, "torch")


def meet_with_sets_on(alone: int) -> str:
    try:
        hvd.init(process_sets=[hvd.ProcessSet([0])] if fd_rank() == alone else None)
    except ValueError as error:
        return str(error)
    return "met"


@pytest.mark.parametrize("alone", [0, 1])
def test_process_sets_on_one_rank_alone_are_refused_when_ranks_meet(
    spawn: Callable[..., World], alone: int
) -> None:
    for said in spawn(2, "torch").run(meet_with_sets_on, alone):
        assert said.startswith("ranks disagree on process_sets")
