"""Horovod's names beside the operations: init, questions, sparse tensors, compression, elastic."""

from __future__ import annotations

import doctest
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks, raises, refused
from torch import nn

import farandole as fd
import farandole.torch as hvd
from farandole.common.exceptions import HorovodInternalError
from farandole.testing import run_ranks

# -- init -------------------------------------------------------------------------------------


@on_ranks(1, 2)
def init_twice_is_one_world_and_shutdown_ends_it() -> None:
    before = fd.world()
    hvd.init()
    assert fd.world() is before
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.shutdown()
    for question in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.is_homogeneous):
        with raises(fd.NotInitialized, "has not been initialized"):
            question()
    hvd.init()
    assert float(hvd.allreduce(torch.ones(()), op=hvd.Sum)) == hvd.size()


@on_ranks(3)
def some_of_the_ranks_may_be_a_world() -> None:
    mine, started = hvd.rank(), hvd.size()
    hvd.shutdown()
    if mine != 1:
        hvd.init([2, 0])
        assert (hvd.size(), hvd.rank(), hvd.local_rank()) == (2, [2, 0].index(mine), hvd.rank())
        assert hvd.allgather(torch.tensor([mine])).tolist() == [2, 0]
        hvd.shutdown()
    else:
        for bad, pattern in [
            ([0, 2], "rank 1 calls init(ranks=[0, 2]) and is not among them"),
            ([1, 1], "are not different ranks of the 3"),
            ([1, 3], "are not different ranks of the 3"),
            ([], "are not different ranks of the 3"),
            ("01", "comm is a str"),
            (3, "comm is an int"),
        ]:
            refused(lambda bad=bad: hvd.init(bad), pattern)  # type: ignore[misc]
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (mine, started)
    hvd.barrier()


class Communicator:
    def Get_rank(self) -> int:
        return 0


def test_sizes_of_process_sets_are_unknown_before_init() -> None:
    assert not hvd.is_initialized()
    assert (hvd.global_process_set.size(), hvd.global_process_set.rank()) == (None, None)
    with pytest.raises(fd.NotInitialized):
        hvd.reducescatter(torch.ones(2))


def test_compressors_have_horovods_names() -> None:
    compression = importlib.import_module("farandole.torch.compression")
    assert compression.FP16Compressor is hvd.Compression.fp16
    assert compression.NoneCompressor is hvd.Compression.none


def test_what_only_looks_like_an_mpi_communicator_is_refused() -> None:
    refused(lambda: hvd.init(Communicator()), "communicator of mpi4py")


def place_by_horovods_names() -> tuple[int, int, int]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    hvd.init()
    return hvd.rank(), hvd.size(), hvd.local_rank()


def test_ranks_may_be_told_their_place_by_horovods_names() -> None:
    assert run_ranks(2, place_by_horovods_names) == [(0, 2, 0), (1, 2, 1)]


# -- questions ----------------------------------------------------------------------------------


@on_ranks(1, 2)
def questions_have_true_answers() -> None:
    assert hvd.is_homogeneous()
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    answers = [
        hvd.mpi_built(), hvd.mpi_enabled(), hvd.gloo_built(), hvd.gloo_enabled(), hvd.ddl_built(),
        hvd.ccl_built(), hvd.cuda_built(), hvd.rocm_built(), bool(hvd.nccl_built()),
    ]  # fmt: skip
    assert answers == [False] * 9
    refused(hvd.mpi_threads_supported, "MPI is not used")


@on_ranks(2)
def errors_are_horovods_internal_errors() -> None:
    assert hvd.HorovodInternalError is HorovodInternalError
    with pytest.raises(HorovodInternalError):
        hvd.allreduce(torch.ones(2 + hvd.rank()))
    hvd.barrier()


@on_ranks(2)
def a_timeline_shows_operations_on_tensors() -> None:
    name = hvd.broadcast_object(f"/tmp/farandole-test-{os.getpid()}.json")
    hvd.start_timeline(name)
    hvd.allreduce(torch.ones(10), name="seen")
    hvd.stop_timeline()
    hvd.barrier()
    if hvd.rank() == 0:
        text = Path(name).read_text()
        Path(name).unlink()
        events = json.loads(text)["traceEvents"]
        seen = {e["pid"] for e in events if "seen" in str(e.get("name"))}
        assert seen == {0, 1}


# -- sparse tensors ----------------------------------------------------------------------------


def sparse(rank: int, entries: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """`entries` of them, some twice in one place."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randint(0, shape[0], (1, entries), generator=generator)
    values = torch.randint(0, 9, (entries, *shape[1:]), generator=generator).to(dtype)
    return torch.sparse_coo_tensor(rows, values, shape, check_invariants=True)


@on_ranks(1, 2, 3)
def sparse_tensors_are_summed_wherever_their_entries_are() -> None:
    for shape in [(7,), (5, 3)]:
        for dtype in (torch.float32, torch.float64, torch.int64):
            tensors = [sparse(r, 2 * r, shape, dtype) for r in range(hvd.size())]  # rank 0: none
            entries = sum(t._nnz() for t in tensors)
            x = tensors[hvd.rank()]
            finish = hvd.sparse_allreduce_async(x, "x", op=hvd.Sum)
            result = finish()
            assert result.is_sparse
            assert result._nnz() == entries
            whole = torch.stack([t.to_dense() for t in tensors]).sum(0)
            assert torch.equal(result.to_dense(), whole)
            if dtype.is_floating_point:
                mean = hvd.sparse_allreduce_async(x, "x")().to_dense()
                torch.testing.assert_close(mean, whole / hvd.size())


@on_ranks(2)
def several_sparse_tensors_fly_together() -> None:
    xs = [sparse(hvd.rank() + i, 3, (9,), torch.float32) for i in range(5)]
    flights = [hvd.sparse_allreduce_async(x, f"x{i}", hvd.Sum) for i, x in enumerate(xs)]
    for i, finish in enumerate(flights):
        both = [sparse(r + i, 3, (9,), torch.float32).to_dense() for r in range(2)]
        assert torch.equal(finish().to_dense(), both[0] + both[1])


@on_ranks(2)
def sparse_tensors_that_differ_are_a_mismatch_and_the_next_ones_work() -> None:
    me = hvd.rank()
    x = sparse(me, 3, (9, 2), torch.float32)
    for other, op, says in [
        (sparse(me, 3, (8, 2), torch.float32), hvd.Sum, "shape"),
        (sparse(me, 3, (9, 3), torch.float32), hvd.Sum, "shape"),
        (sparse(me, 3, (9,), torch.float32), hvd.Sum, "shape"),
        (sparse(me, 3, (9, 2), torch.float64), hvd.Sum, "dtype"),
        (x, hvd.Average, "op"),
    ]:
        for name in ("x", None):
            finish = hvd.sparse_allreduce_async(*((x, name, hvd.Sum), (other, name, op))[me])
            with pytest.raises(fd.Mismatch, match=says):
                finish()
            x2 = hvd.sparse_allreduce_async(x, name, hvd.Sum)()
            assert torch.equal(x2.to_dense(), hvd.allreduce(x.to_dense(), op=hvd.Sum))
    # By one name, beside an operation of another kind.
    finish = hvd.sparse_allreduce_async(x, "x", hvd.Sum)
    assert hvd.allgather(torch.ones(1, 2), name="x").shape == (2, 2)
    assert finish()._nnz() == 6


@on_ranks(2)
def dense_tensors_and_other_operations_are_refused() -> None:
    refused(lambda: hvd.sparse_allreduce_async(torch.ones(3), "x"), "use allreduce_async")
    x = torch.ones(3).to_sparse()
    refused(lambda: hvd.sparse_allreduce_async(x, "x", hvd.Max), "op=Max")


# -- compression ---------------------------------------------------------------------------------


class Signs:
    """A class of the user's own: what is sent is not of the tensor's dtype."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.sign().to(torch.int8), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


@on_ranks(2, 3)
def users_compressors_work_in_operations_and_optimizers() -> None:
    x = torch.tensor([1.5, -2.0, 0.0]) * (hvd.rank() + 1)
    assert hvd.allreduce(x, compression=Signs, op=hvd.Sum).tolist() == [hvd.size(), -hvd.size(), 0]
    model = nn.Linear(3, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), compression=Signs, op=hvd.Sum
    )
    model(x).backward()
    assert model.weight.grad.tolist() == [[hvd.size(), -hvd.size(), 0.0]]
    optimizer.step()


@on_ranks(2)
def bf16_sends_half_and_leaves_integers_alone() -> None:
    third = torch.tensor([1 / 3])
    got = hvd.allreduce(third, compression=hvd.Compression.bf16)
    assert got.dtype == torch.float32
    assert got == third.to(torch.bfloat16).float()
    counts = torch.tensor([257])
    assert hvd.allreduce(counts, compression=hvd.Compression.bf16, op=hvd.Sum).tolist() == [514]


@on_ranks(1)
def examples_in_docstrings_are_true() -> None:
    for name in ("common._basics", "torch.sparse", "torch.adasum", "torch.sync_batch_norm"):
        results = doctest.testmod(importlib.import_module(f"farandole.{name}"))
        assert results.failed == 0, name
        assert results.attempted > 0, name


test_on_ranks = make_tests(__name__, "torch")
