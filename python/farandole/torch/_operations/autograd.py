"""The collectives as autograd records them: forward is the call, backward another collective.

A gradient is itself recorded, so that it can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._process_set import ProcessSet
from farandole.common._reduction import Adasum, Average, Sum, op_name, share
from farandole.torch._operations import calls
from farandole.torch._operations.handles import wait
from farandole.torch._tensors import check_tensor
from farandole.torch.compression import Compressor


def apply(function: Any, *arguments: Any) -> Any:
    """Runs one of the functions below, with the arguments of its call, and records it."""
    return function.apply(*arguments)


def apply_together(
    function: Any,
    tensors: Sequence[torch.Tensor],
    compression: type[Compressor],
    how: tuple[Any, ...],
) -> list[torch.Tensor]:
    """Runs a function of many tensors on what is sent of each. `how`: its other arguments."""
    pairs = []
    for i, tensor in enumerate(calls.listed(tensors)):
        check_tensor(tensor, f"tensor {i}")
        pairs.append(compression.compress(tensor))
    results = apply(function, *(wire for wire, _ in pairs), *how, len(pairs))
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]


def _gradient_of(name: str | None) -> str | None:
    return f"gradient of {name}" if name else None


def _require_gradient(what: str, op: int) -> None:
    if op not in (Average, Sum, Adasum):
        raise InvalidArgument(f"{what} with op={op_name(op)} has no gradient")


def _averaged(grad: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    how = (_gradient_of(name), Average, 1.0, 1.0, process_set)
    result: torch.Tensor = apply(AllReduce, grad.contiguous(), *how)
    return result


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
    handle = calls.grouped_allgather(mine, label, process_set, single=True)
    return dict(wait(handle).tolist())


def _padded(rows: torch.Tensor, came: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """Rows of all members, with zeros for a member of whom none came: one that has joined."""
    if list(came) == list(wanted):
        return rows
    parts = zip(torch.split(rows, list(came)), wanted, strict=True)
    return torch.cat([p if len(p) == n else p.new_zeros(n, *p.shape[1:]) for p, n in parts])


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        result: torch.Tensor = wait(calls.allreduce(tensor, *how))
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        name, op, *rest = ctx.how
        _require_gradient("allreduce", op)
        result = apply(AllReduce, grad.contiguous(), _gradient_of(name), op, *rest)
        return (result, *(None for _ in ctx.how))


class GroupedAllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *how, count = arguments[-6:]
        ctx.how = how
        return tuple(wait(calls.grouped_allreduce(list(arguments[:count]), *how)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        name, op, *rest = ctx.how
        _require_gradient("grouped_allreduce", op)
        whole = [grad.contiguous() for grad in grads]
        results = apply(GroupedAllReduce, *whole, _gradient_of(name), op, *rest, len(whole))
        return (*results, *(None for _ in ctx.how), None)


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
        ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        handle = calls.grouped_allgather(tensor, name, process_set, single=True)
        result: torch.Tensor = wait(handle)
        ctx.rows, ctx.how = tensor.shape[0], (name, process_set)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (_own_rows(grad, ctx.rows, *ctx.how), None, None)


class GroupedAllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *tensors, name, process_set = arguments
        results = wait(calls.grouped_allgather(tensors, name, process_set))
        ctx.rows, ctx.how = [t.shape[0] for t in tensors], (name, process_set)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pairs = zip(grads, ctx.rows, strict=True)
        return (*(_own_rows(g, n, *ctx.how) for g, n in pairs), None, None)


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
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        name, op, process_set, prescale_factor, postscale_factor = how
        handle = calls.grouped_reducescatter(
            tensor, name, op, process_set, prescale_factor, postscale_factor, single=True
        )
        result: torch.Tensor = wait(handle)
        ctx.rows = tensor.shape[0]
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (_gathered(grad, ctx.rows, *ctx.how), *(None for _ in ctx.how))


class GroupedReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        *how, count = arguments[-6:]
        ctx.how = how
        results = wait(calls.grouped_reducescatter(list(arguments[:count]), *how))
        ctx.rows = [tensor.shape[0] for tensor in arguments[:count]]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        pairs = zip(grads, ctx.rows, strict=True)
        return (*(_gathered(g, n, *ctx.how) for g, n in pairs), *(None for _ in ctx.how), None)


def _gathered(
    grad: torch.Tensor,
    rows: int,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> torch.Tensor:
    size = process_set.size() or 1
    factor = prescale_factor * postscale_factor * (size if op == Sum else 1)
    scaled = (grad * factor).contiguous()
    result: torch.Tensor = apply(AllGather, scaled, _gradient_of(name), process_set)
    if len(result) == rows:
        return result
    by_rank = _by_rank(len(grad), name, process_set)
    came = [by_rank.get(rank, 0) for rank in process_set.ranks]
    return _padded(result, came, [share(rows, size, place) for place in range(size)])
