"""One collective on this rank: its tensors are checked and laid out, then it runs or starts.

Nothing here is recorded by autograd. A call works into a new tensor unless it is told `into` which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farandole import _world
from farandole._core import InvalidArgument, Mismatch
from farandole.torch._handles import handles
from farandole.torch._process_set import ProcessSet, check_process_set
from farandole.torch._reductions import Average, Sum, core_op, op_name
from farandole.torch._tensors import borrow, check_tensor


def _same(result: torch.Tensor) -> torch.Tensor:
    return result


class Call:
    """What is sent, where to, what ranks compare, and what makes the result whole."""

    def __init__(
        self,
        kind: str,
        source: torch.Tensor,
        target: torch.Tensor,
        finish: Callable[[torch.Tensor], torch.Tensor] = _same,
        **options: Any,
    ) -> None:
        self.kind = kind
        self.source = borrow(source)
        self.target = self.source if target is source else borrow(target)
        self.result = target
        self.finish = finish
        self.options = options
        if target is source:
            torch.autograd.graph.increment_version(target)

    def run(self) -> torch.Tensor:
        """Returns the result."""
        _world.world().run(self.kind, self.source, self.target, **self.options)
        return self.finish(self.result)

    def start(self) -> int:
        """Returns a handle at once."""
        handle = _world.world().start(
            self.kind, self.source, self.target, self.result, **self.options
        )
        return handles.add(handle, self.finish)


def _label(name: str | None, tensor: torch.Tensor) -> str:
    """Ranks compare it: equal counts in other shapes are a mistake as well."""
    return f"{list(tensor.shape)} {name}" if name else str(list(tensor.shape))


def _room_for(tensor: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    if into is not None:
        return into
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def in_place(tensor: Any, what: str) -> Any:
    """The tensor, unless autograd would have to notice that `what` overwrites it."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{what} works in place on a tensor that requires grad, which autograd would not "
            f"notice; use {what.rstrip('_').removesuffix('_async')}(), tensor.detach() or "
            "torch.no_grad()"
        )
    return tensor


def allreduce(
    tensor: Any,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
    into: Any = None,
) -> Call:
    check_process_set(process_set)
    word = core_op(op)
    check_tensor(tensor, "tensor")
    return Call(
        "all_reduce",
        tensor,
        _room_for(tensor, into),
        op=word,
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=_label(name, tensor),
    )


def broadcast(
    tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet, into: Any = None
) -> Call:
    check_process_set(process_set)
    check_tensor(tensor, "tensor")
    target = _room_for(tensor, into)
    return Call("broadcast", tensor, target, root=root_rank, name=_label(name, tensor))


_MOST_DIMENSIONS = 15


def _shapes(tensor: torch.Tensor, name: str | None) -> list[int]:
    """Every rank's first dimension. Raises Mismatch on every rank if the others differ."""
    if not 0 < tensor.dim() <= _MOST_DIMENSIONS:
        raise InvalidArgument(
            f"tensor has {tensor.dim()} dimensions; allgather joins along the first of 1 to "
            f"{_MOST_DIMENSIONS}"
        )
    mine = torch.full((_MOST_DIMENSIONS,), -1, dtype=torch.int64)
    mine[: tensor.dim()] = torch.tensor(tensor.shape)
    rows = torch.empty(_world.size(), _MOST_DIMENSIONS, dtype=torch.int64)
    Call("all_gather", mine, rows, name="shapes for allgather " + (name or "")).run()
    inner = {tuple(int(d) for d in row if d >= 0) for row in rows[:, 1:]}
    if len(inner) > 1:
        shapes = (f"rank {r}: {[int(d) for d in row if d >= 0]}" for r, row in enumerate(rows))
        raise Mismatch(
            f"ranks disagree on the shape of allgather{f' {name!r}' if name else ''} beyond the "
            f"first dimension: {'; '.join(shapes)}\n"
            "  advice: make every rank submit the same operation"
        )
    return [int(extent) for extent in rows[:, 0]]


def allgather(tensor: Any, name: str | None, process_set: ProcessSet) -> Call:
    """Exchanges the ranks' shapes before it returns."""
    check_process_set(process_set)
    borrow(tensor)  # before anything is sent
    extents = _shapes(tensor, name)
    most = max(extents)
    uneven = min(extents) != most
    # Ranks send equally much; what is short is filled up, and cut off again.
    sent = tensor
    if uneven:
        sent = tensor.new_zeros(most, *tensor.shape[1:])
        sent[: tensor.shape[0]] = tensor.detach()
    target = tensor.new_empty(most * len(extents), *tensor.shape[1:])

    def cut(result: torch.Tensor) -> torch.Tensor:
        if not uneven:
            return result
        return torch.cat([result[r * most : r * most + n] for r, n in enumerate(extents)])

    return Call("all_gather", sent.detach(), target, cut, name=_label(name, sent))


def reducescatter(
    tensor: Any,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> Call:
    check_process_set(process_set)
    word = core_op(op)
    if op not in (Average, Sum):
        raise InvalidArgument(f"op={op_name(op)}: reducescatter reduces with Average or Sum only")
    borrow(tensor)
    if tensor.dim() == 0:
        raise InvalidArgument("tensor has no dimension; reducescatter splits the first")
    size, rank = _world.size(), _world.rank()
    rows, inner = tensor.shape[0], tensor.shape[1:]
    most = -(-rows // size)
    mine = rows // size + (rank < rows % size)
    sent = tensor.detach()
    if rows % size != 0:
        # The engine splits evenly: every part is filled up to the longest, and cut off again.
        sent = tensor.new_zeros(size, most, *inner)
        begin = 0
        for r in range(size):
            count = rows // size + (r < rows % size)
            sent[r, :count] = tensor.detach()[begin : begin + count]
            begin += count
    return Call(
        "reduce_scatter",
        sent,
        tensor.new_empty(most, *inner),
        lambda result: result if mine == most else result[:mine].clone(),
        op=word,
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=_label(name, tensor),
    )
