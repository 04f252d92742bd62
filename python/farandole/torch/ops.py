"""The collectives on tensors, with Horovod's names and signatures.

Operations match in program order, on every rank; names and shapes are compared, not used to find
partners. The forms that end in ``_`` work in place, those with ``_async`` return a handle for
``synchronize()``. Only the plain forms (``allreduce``, ``allgather``, ``broadcast``,
``reducescatter``) are differentiable.

Every function raises ``InvalidArgument`` (a ``ValueError``) for a tensor that cannot be sent
(sparse, not contiguous, not on the CPU, of an unsupported dtype), before anything is sent.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch

from farandole import _world
from farandole._core import Error, InvalidArgument, Mismatch
from farandole.torch._process_set import ProcessSet, check_process_set, global_process_set
from farandole.torch._tensors import borrow, check_tensor
from farandole.torch.compression import Compression, Compressor

Average, Sum, Adasum, Min, Max, Product = range(6)

_OPS = {Average: "mean", Sum: "sum", Min: "min", Max: "max", Product: "product"}
_HOROVODS_NAMES = ("Average", "Sum", "Adasum", "Min", "Max", "Product")


def op_name(op: Any) -> str:
    """For messages."""
    known = isinstance(op, int) and 0 <= op < len(_HOROVODS_NAMES)
    return _HOROVODS_NAMES[op] if known else repr(op)


def _core_op(op: Any) -> str:
    if op == Adasum:
        raise InvalidArgument("op=Adasum is not built yet")
    if op not in _OPS:
        raise InvalidArgument(f"op={op!r} is unknown; there are Average, Sum, Min, Max and Product")
    return _OPS[op]


def _choose_op(average: bool | None, op: int | None) -> int:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise InvalidArgument("average and op are both given; average is the deprecated one")
    warnings.warn("average= is deprecated; use op=", DeprecationWarning, stacklevel=3)
    return Average if average else Sum


# Handles.


class _Handles:
    """Operations in flight, by number."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._pending: dict[int, tuple[Any, Callable[[Any], Any]]] = {}
        self._lock = threading.Lock()

    def add(self, handle: Any, finish: Callable[[Any], Any]) -> int:
        with self._lock:
            number = next(self._numbers)
            self._pending[number] = (handle, finish)
        return number

    def look(self, number: int) -> Any:
        with self._lock:
            if number in self._pending:
                return self._pending[number][0]
        raise InvalidArgument(f"handle {number!r} is unknown, or was synchronized already")

    def wait(self, number: int) -> Any:
        handle = self.look(number)
        try:
            result = handle.wait()
        except Error:
            self._forget(number)
            raise
        return self._forget(number)(result)

    def _forget(self, number: int) -> Callable[[Any], Any]:
        with self._lock:
            return self._pending.pop(number)[1]


_handles = _Handles()


def synchronize(handle: int) -> torch.Tensor:
    """Waits for an asynchronous operation and returns its result; raises its error.

    Raises:
        InvalidArgument: the handle is unknown, or was synchronized already.
    """
    result: torch.Tensor = _handles.wait(handle)
    return result


def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return at once."""
    done: bool = _handles.look(handle).done()
    return done


def _same(result: Any) -> Any:
    return result


def _refuse_recorded(tensor: Any, what: str) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{what} works in place on a tensor that requires grad, which autograd would not "
            f"notice; use {what.rstrip('_').removesuffix('_async')}(), tensor.detach() or "
            "torch.no_grad()"
        )


class _Call:
    """One collective: what is sent, where to, and what ranks compare."""

    def __init__(self, kind: str, source: torch.Tensor, target: torch.Tensor, **options: Any):
        self.kind = kind
        self.source = borrow(source)
        self.target = self.source if target is source else borrow(target)
        self.result = target
        self.options = options
        if target is source:
            torch.autograd.graph.increment_version(target)

    def run(self) -> torch.Tensor:
        _world.world().run(self.kind, self.source, self.target, **self.options)
        return self.result

    def start(self, finish: Callable[[Any], Any] = _same) -> int:
        handle = _world.world().start(
            self.kind, self.source, self.target, self.result, **self.options
        )
        return _handles.add(handle, finish)


def _label(name: str | None, tensor: torch.Tensor) -> str:
    """Ranks compare it: equal counts in other shapes are a mistake as well."""
    return f"{list(tensor.shape)} {name}" if name else str(list(tensor.shape))


def _apply(function: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*arguments)
    return result


# allreduce


def _allreduce(
    tensor: Any,
    target: Any,
    name: str | None,
    op: int,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> _Call:
    check_process_set(process_set)
    core_op = _core_op(op)
    check_tensor(tensor, "tensor")
    return _Call(
        "all_reduce",
        tensor,
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if target is None
        else target,
        op=core_op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=_label(name, tensor),
    )


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        return _allreduce(tensor, None, *how).run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        name, op, *rest = ctx.how
        if op not in (Average, Sum):
            raise InvalidArgument(f"allreduce with op={op_name(op)} has no gradient")
        result = _apply(_AllReduce, grad.contiguous(), name and f"gradient of {name}", op, *rest)
        return (result, *(None for _ in ctx.how))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces equal tensors of all ranks, elementwise; every rank gets the result.

    Args:
        tensor: of any shape; left as it is.
        average: deprecated, see ``op``.
        name: compared between ranks, and part of errors.
        compression: what is sent instead.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max`` or ``Product``.
        prescale_factor, postscale_factor: factors on every input, and on the result.
        process_set: only ``global_process_set`` yet.

    Raises:
        InvalidArgument: bad input on this rank; nothing was sent.
        Mismatch: the ranks called with different tensors or options; the next call works.

    Example:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()
        [1.0, 1.0]
    """
    chosen = _choose_op(average, op)
    check_tensor(tensor, "tensor")
    wire, context = compression.compress(tensor)
    result = _apply(_AllReduce, wire, name, chosen, prescale_factor, postscale_factor, process_set)
    return compression.decompress(result, context)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce`, at once with a handle; not differentiable."""
    chosen = _choose_op(average, op)
    return _allreduce(
        tensor, None, name, chosen, prescale_factor, postscale_factor, process_set
    ).start()


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """:func:`allreduce` in place."""
    _refuse_recorded(tensor, "allreduce_")
    chosen = _choose_op(average, op)
    return _allreduce(
        tensor, tensor, name, chosen, prescale_factor, postscale_factor, process_set
    ).run()


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`allreduce` in place, at once with a handle."""
    _refuse_recorded(tensor, "allreduce_async_")
    chosen = _choose_op(average, op)
    return _allreduce(
        tensor, tensor, name, chosen, prescale_factor, postscale_factor, process_set
    ).start()


# broadcast


def _broadcast(
    tensor: Any, target: Any, root_rank: int, name: str | None, process_set: ProcessSet
) -> _Call:
    check_process_set(process_set)
    check_tensor(tensor, "tensor")
    return _Call(
        "broadcast",
        tensor,
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        if target is None
        else target,
        root=root_rank,
        name=_label(name, tensor),
    )


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root = root_rank
        return _broadcast(tensor, None, root_rank, name, process_set).run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        averaged = allreduce(grad.contiguous(), op=Average)
        if _world.rank() != ctx.root:
            averaged = torch.zeros_like(averaged)
        return averaged, None, None, None


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Returns the root's tensor on every rank; shapes and dtypes are equal on all ranks."""
    return _apply(_Broadcast, tensor, root_rank, name, process_set)


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`broadcast`, at once with a handle; not differentiable."""
    return _broadcast(tensor, None, root_rank, name, process_set).start()


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrites the tensor with the root's."""
    _refuse_recorded(tensor, "broadcast_")
    return _broadcast(tensor, tensor, root_rank, name, process_set).run()


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """:func:`broadcast_`, at once with a handle."""
    _refuse_recorded(tensor, "broadcast_async_")
    return _broadcast(tensor, tensor, root_rank, name, process_set).start()


# allgather

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
    _Call("all_gather", mine, rows, name="shapes for allgather " + (name or "")).run()
    inner = {tuple(int(d) for d in row if d >= 0) for row in rows[:, 1:]}
    if len(inner) > 1:
        shapes = (f"rank {r}: {[int(d) for d in row if d >= 0]}" for r, row in enumerate(rows))
        raise Mismatch(
            f"ranks disagree on the shape of allgather{f' {name!r}' if name else ''} beyond the "
            f"first dimension: {'; '.join(shapes)}\n"
            "  advice: make every rank submit the same operation"
        )
    return [int(extent) for extent in rows[:, 0]]


def _allgather(
    tensor: Any, name: str | None, process_set: ProcessSet
) -> tuple[_Call, Callable[[Any], torch.Tensor]]:
    """The call, and what makes its result whole."""
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

    def finish(result: torch.Tensor) -> torch.Tensor:
        if not uneven:
            return result
        return torch.cat([result[r * most : r * most + n] for r, n in enumerate(extents)])

    call = _Call("all_gather", sent.detach(), target, name=_label(name, sent))
    return call, finish


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        call, finish = _allgather(tensor, name, process_set)
        ctx.rows = tensor.shape[0]
        return finish(call.run())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        averaged = allreduce(grad.contiguous(), op=Average)
        rows = allgather(torch.tensor([ctx.rows]))
        begin = int(rows[: _world.rank()].sum())
        return averaged[begin : begin + ctx.rows], None, None


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Joins all ranks' tensors along the first dimension, which may differ (and be 0).

    Raises:
        Mismatch: the other dimensions, or the dtypes, differ; the next call works.
    """
    return _apply(_AllGather, tensor, name, process_set)


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """:func:`allgather` with a handle; not differentiable. The ranks' shapes are exchanged before
    it returns."""
    call, finish = _allgather(tensor, name, process_set)
    return call.start(finish)


# reducescatter


def _reducescatter(
    tensor: Any,
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale_factor: float,
    postscale_factor: float,
) -> tuple[_Call, Callable[[Any], torch.Tensor]]:
    check_process_set(process_set)
    core_op = _core_op(op)
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
    call = _Call(
        "reduce_scatter",
        sent,
        tensor.new_empty(most, *inner),
        op=core_op,
        prescale=prescale_factor,
        postscale=postscale_factor,
        name=_label(name, tensor),
    )
    return call, lambda result: result if mine == most else result[:mine].clone()


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        call, finish = _reducescatter(tensor, *how)
        return finish(call.run())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _, op, _, prescale_factor, postscale_factor = ctx.how
        factor = prescale_factor * postscale_factor * (_world.size() if op == Sum else 1)
        whole = allgather((grad * factor).contiguous())
        return (whole, *(None for _ in ctx.how))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces as :func:`allreduce` does, and leaves part r of the first dimension on rank r; the
    first ranks get one row more where it does not divide."""
    check_tensor(tensor, "tensor")
    wire, context = compression.compress(tensor)
    result = _apply(_ReduceScatter, wire, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(result, context)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """:func:`reducescatter`, at once with a handle; not differentiable."""
    call, finish = _reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor)
    return call.start(finish)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank has called it."""
    check_process_set(process_set)
    _world.world().barrier()
