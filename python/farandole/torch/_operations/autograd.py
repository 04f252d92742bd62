"""The collectives as autograd records them: forward is the call, backward another collective.

A gradient is itself recorded, so that it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._process_set import ProcessSet
from farandole.common._reduction import Adasum, Average, Sum, op_name, share
from farandole.torch._operations import calls
from farandole.torch._operations.calls import How
from farandole.torch._operations.handles import wait
from farandole.torch._tensors import check_tensor
from farandole.torch.compression import Compressor


def apply(function: Any, *arguments: Any) -> Any:
    """Runs one of the functions below, with the arguments of its call, and records it."""
    return function.apply(*arguments)


def reduced(
    function: Any, tensors: Sequence[torch.Tensor], compression: type[Compressor], how: How
) -> list[torch.Tensor]:
    """Runs one of the reductions below on the compressed form of each tensor."""
    given = [(f"tensor {i}", tensor) for i, tensor in enumerate(calls.listed(tensors))]
    return _reduced(function, given, compression, how, single=False)


def reduced_alone(
    function: Any, tensor: torch.Tensor, compression: type[Compressor], how: How
) -> torch.Tensor:
    return _reduced(function, [("tensor", tensor)], compression, how, single=True)[0]


def _reduced(
    function: Any,
    tensors: Sequence[tuple[str, torch.Tensor]],
    compression: type[Compressor],
    how: How,
    *,
    single: bool,
) -> list[torch.Tensor]:
    pairs = []
    for what, tensor in tensors:
        check_tensor(tensor, what, or_complex=how.op in (Average, Sum))
        pairs.append(compression.compress(tensor))
    results = apply(function, how, single, *(wire for wire, _ in pairs))
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


def _together(
    submit: Callable[..., int], tensors: Sequence[torch.Tensor], *how: Any, single: bool
) -> tuple[torch.Tensor, ...]:
    """The results as a tuple also for a single tensor, as autograd records them."""
    if single:
        return (wait(submit(tensors[0], *how, single=True)),)
    return tuple(wait(submit(list(tensors), *how)))


def _gradient_of(name: str | None) -> str | None:
    return f"gradient of {name}" if name else None


def _averaged(grad: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    how = How(_gradient_of(name), Average, 1.0, 1.0, process_set)
    (result,) = apply(AllReduce, how, True, grad.contiguous())
    return cast(torch.Tensor, result)


def _own_rows(
    grad: torch.Tensor, rows: int, name: str | None, process_set: ProcessSet
) -> torch.Tensor:
    """This rank's part of an average over the ranks, which contributed that many rows here."""
    # A name may be an allreduce's, too: backward's all-reduces are told apart.
    averaged = _averaged(grad, name and f"gathered {name}", process_set)
    by_rank = _by_rank(rows, name, process_set)
    if sum(by_rank.values()) != grad.shape[0]:
        raise InvalidArgument(
            f"allgather gave {grad.shape[0]} rows, and ranks have {by_rank} of them: a rank has "
            "joined between it and its backward"
        )
    begin = sum(n for rank, n in by_rank.items() if rank < _world.rank())
    return averaged[begin : begin + rows]


def _by_rank(rows: int, name: str | None, process_set: ProcessSet) -> dict[int, int]:
    """The rows that each rank has. A rank that has joined has none, and is not there."""
    mine = torch.tensor([[_world.rank(), rows]])
    label = f"rows of {name}" if name else None
    handle = calls.allgather(mine, label, process_set, single=True)
    return dict(wait(handle).tolist())


def _padded(rows: torch.Tensor, came: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """Rows of all members, with zeros for a member of whom none came: one that has joined."""
    if list(came) == list(wanted):
        return rows
    parts = zip(torch.split(rows, list(came)), wanted, strict=True)
    return torch.cat([p if len(p) == n else p.new_zeros(n, *p.shape[1:]) for p, n in parts])


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: How, single: bool, *tensors: torch.Tensor) -> Any:
        ctx.how, ctx.single = how, single
        return _together(calls.allreduce, tensors, how, single=single)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        how: How = ctx.how
        if how.op not in (Average, Sum, Adasum):
            what = "allreduce" if ctx.single else "grouped_allreduce"
            raise InvalidArgument(f"{what} with op={op_name(how.op)} has no gradient")
        how = how._replace(name=_gradient_of(how.name))
        whole = [grad.contiguous() for grad in grads]
        return None, None, *apply(AllReduce, how, ctx.single, *whole)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        result: torch.Tensor = wait(calls.broadcast(tensor, *how))
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        root, name, process_set = ctx.how
        averaged = _averaged(grad, name and f"broadcast {name}", process_set)
        if _world.rank() != root:
            averaged = torch.zeros_like(averaged)
        return (averaged, *(None for _ in ctx.how))


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, single: bool, *tensors: torch.Tensor
    ) -> Any:
        results = _together(calls.allgather, tensors, name, process_set, single=single)
        ctx.rows, ctx.how = [t.shape[0] for t in tensors], (name, process_set)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pairs = zip(grads, ctx.rows, strict=True)
        return None, None, None, *(_own_rows(g, n, *ctx.how) for g, n in pairs)


class AllToAll(torch.autograd.Function):
    """Returns the rows and the received splits."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, *how: Any) -> Any:
        ctx.splits = calls.checked_splits(splits)
        result, received = wait(calls.alltoall(tensor, ctx.splits, *how))
        ctx.how, ctx.received = how, received
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        name, process_set = ctx.how
        arguments = (grad.contiguous(), ctx.received, _gradient_of(name), process_set)
        result, came = apply(AllToAll, *arguments)
        return (_padded(result, came.tolist(), ctx.splits), None, None, None)


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: How, single: bool, *tensors: torch.Tensor) -> Any:
        results = _together(calls.reducescatter, tensors, how, single=single)
        ctx.rows, ctx.how = [t.shape[0] for t in tensors], how
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pairs = zip(grads, ctx.rows, strict=True)
        return None, None, *(_gathered(g, n, ctx.how) for g, n in pairs)


def _gathered(grad: torch.Tensor, rows: int, how: How) -> torch.Tensor:
    process_set = how.process_set
    size = process_set.size() or 1
    factor = how.prescale_factor * how.postscale_factor * (size if how.op == Sum else 1)
    scaled = (grad * factor).contiguous()
    (result,) = apply(AllGather, _gradient_of(how.name), process_set, True, scaled)
    if len(result) == rows:
        return cast(torch.Tensor, result)
    by_rank = _by_rank(len(grad), how.name, process_set)
    came = [by_rank.get(rank, 0) for rank in process_set.ranks]
    return _padded(result, came, [share(rows, size, place) for place in range(size)])
