"""Operations on tensors, submitted by name: checked, laid out and put on their way.

Each function returns a handle at once. Nothing here is recorded by autograd. An operation writes
into a new tensor unless `into` is given.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from farandole import _core, _world
from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.common._process_set import ProcessSet, number_of
from farandole.common._reduction import Adasum, Average, Sum, core_op, op_name, share
from farandole.torch import _devices
from farandole.torch._tensors import DTYPES, as_reals, borrow, check_tensor
from farandole.torch.adasum import check_foldable, fold_rows
from farandole.typing import HandleNumber

bump_version = torch.autograd.graph.increment_version


def names() -> _core.Names:
    """The operations by name of this world. Raises NotInitialized."""
    return _core.names_of(_world.world())


def in_place(tensor: Any, what: str) -> Any:
    """The tensor, unless autograd would have to notice that `what` overwrites it."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{what} works in place on a tensor that requires grad, which autograd would not "
            f"notice; use {what.rstrip('_').removesuffix('_async')}(), tensor.detach() or "
            "torch.no_grad()"
        )
    return tensor


def listed(tensors: Any) -> list[torch.Tensor]:
    """Raises InvalidArgument for what is no list of tensors, or an empty one."""
    if isinstance(tensors, torch.Tensor) or not isinstance(tensors, Sequence):
        raise InvalidArgument(f"tensors is {type_of(tensors)}; pass a list of tensors")
    if not tensors:
        raise InvalidArgument("the list of tensors is empty")
    return list(tensors)


def _prefixed(prefix: str, name: Any) -> Any:
    """The user's name with a prefix, so that it does not match an allgather of that name."""
    return f"{prefix}.{name}" if name and isinstance(name, str) else name


_Row = tuple[Any, Any, tuple[int, ...]]


def _row(tensor: torch.Tensor, target: torch.Tensor | None) -> _Row:
    """The core's arguments for one tensor: source, target and shape."""
    source = borrow(tensor)
    if target is tensor:
        bump_version(target)
        return source, source, tuple(tensor.shape)
    return source, None if target is None else borrow(target, "result"), tuple(tensor.shape)


def _real_row(tensor: torch.Tensor, target: torch.Tensor) -> _Row:
    """The same for a tensor that may be complex; the result has its shape, or fewer rows."""
    source = as_reals(tensor)
    return _row(source, source if target is tensor else as_reals(target))


def _tensor(made: tuple[Any, str, tuple[int, ...]], source: torch.Tensor) -> torch.Tensor:
    """The core's result as a tensor: over the core's own memory, or copied to the device of
    `source`."""
    memory, dtype, shape = made
    if isinstance(memory, _core.StagedResult):
        result = _devices.new_empty(source, shape)
        memory.deliver(borrow(result))
        return result
    if 0 in shape:
        return torch.empty(shape, dtype=DTYPES[dtype])
    flat = torch.frombuffer(memory, dtype=DTYPES[dtype], count=math.prod(shape))
    return flat.view(shape)


# ---- reductions ----


class How(NamedTuple):
    """The arguments of a reduction, besides its tensors."""

    name: str | None
    op: int
    prescale_factor: float
    postscale_factor: float
    process_set: ProcessSet


def _sources(tensors: Any, single: bool) -> list[tuple[str, Any]]:
    """The tensors, with their names in messages."""
    if single:
        return [("tensor", tensors)]
    return [(f"tensor {i}", tensor) for i, tensor in enumerate(listed(tensors))]


def allreduce(
    tensors: Any, how: How, into: Any = None, *, single: bool = False
) -> HandleNumber[Any]:
    """`single`: of one tensor, which is given instead of a list, as `into` is."""
    sources = _sources(tensors, single)
    targets = None if into is None else [into] if single else listed(into)
    if how.op == Adasum:
        return _adasum(sources, how, targets, single)
    word, number = core_op(how.op), number_of(how.process_set)
    for what, tensor in sources:
        check_tensor(tensor, what, or_complex=how.op in (Average, Sum))
    if targets is None:
        targets = [_devices.new_empty(tensor, tensor.shape) for _, tensor in sources]
    return _submit_reduction("all_reduce", word, number, how, sources, targets, single)


def _submit_reduction(
    kind: str,
    word: str,
    number: int,
    how: How,
    sources: Sequence[tuple[str, Any]],
    targets: Sequence[torch.Tensor],
    single: bool,
) -> HandleNumber[Any]:
    return names().submit(
        kind,
        how.name,
        [_real_row(source, target) for (_, source), target in zip(sources, targets, strict=True)],
        set=number,
        op=word,
        prescale=how.prescale_factor,
        postscale=how.postscale_factor,
        result=targets[0] if single else targets,
    )


def _adasum(
    sources: Sequence[tuple[str, Any]], how: How, targets: list[torch.Tensor] | None, single: bool
) -> HandleNumber[Any]:
    """Gathers the tensors of all ranks; they are folded when the result is asked for. A factor on
    all of them is one on the result."""
    number = number_of(how.process_set)
    factor = how.prescale_factor * how.postscale_factor
    for _, tensor in sources:
        check_foldable(tensor, "tensor")

    def finish(made: list[Any], _: Any) -> Any:
        results = [fold_rows(_tensor(m, s)) for m, (_, s) in zip(made[:-1], sources, strict=True)]
        if factor != 1:
            results = [result * factor for result in results]
        if targets is not None:
            for target, result in zip(targets, results, strict=True):
                target.detach().copy_(result)
            results = targets
        return results[0] if single else results

    # One row a rank, so that shapes are compared; nothing beside them, since a nameless one would
    # meet a nameless allgather of such rows.
    parts = [*(tensor.detach().unsqueeze(0) for _, tensor in sources), torch.empty(0)]
    return names().submit(
        "all_gather",
        _prefixed("adasum", how.name),
        [_row(part, None) for part in parts],
        set=number,
        prescale=how.prescale_factor,
        postscale=how.postscale_factor,
        finish=finish,
    )


def sparse_allreduce(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet
) -> HandleNumber[Any]:
    """Gathers the entries of a tensor of layout COO, all ranks' together; a mean divides by all."""
    number, size = number_of(process_set), process_set.size() or 1
    # One row an entry, since ranks have different numbers of them; not coalesced: the result is
    # not either, and entries would be sorted for nothing.
    indices = tensor.detach()._indices().t().contiguous()
    values = tensor.detach()._values().contiguous()
    whole = values.new_empty(0, *tensor.shape)  # no rows: only what ranks compare, as the op

    def finish(made: list[Any], _: Any) -> torch.Tensor:
        places, entries = _tensor(made[1], indices), _tensor(made[2], values)
        if op == Average:
            entries = entries / size
        return torch.sparse_coo_tensor(places.t(), entries, tensor.shape, check_invariants=False)

    return names().submit(
        "all_gather",
        _prefixed("sparse", name),
        [_row(part, None) for part in (whole, indices, values)],
        set=number,
        op=core_op(op),
        finish=finish,
    )


def _scattered(tensor: torch.Tensor, what: str, process_set: ProcessSet) -> torch.Tensor:
    """Room for this rank's rows."""
    check_tensor(tensor, what)
    if tensor.dim() == 0:
        raise InvalidArgument(f"{what} has no dimension; reducescatter splits the first")
    _world.world()  # raises NotInitialized
    size, place = process_set.size(), process_set.rank()
    assert size is not None
    assert place is not None
    return _devices.new_empty(tensor, (share(tensor.shape[0], size, place), *tensor.shape[1:]))


def reducescatter(tensors: Any, how: How, *, single: bool = False) -> HandleNumber[Any]:
    """`single`: of one tensor, which is given instead of a list."""
    word, number = core_op(how.op), number_of(how.process_set)
    if how.op not in (Average, Sum):
        raise InvalidArgument(
            f"op={op_name(how.op)}: reducescatter reduces with Average or Sum only"
        )
    sources = _sources(tensors, single)
    targets = [_scattered(tensor, what, how.process_set) for what, tensor in sources]
    return _submit_reduction("reduce_scatter", word, number, how, sources, targets, single)


# ---- movements ----


def broadcast(
    tensor: Any, root_rank: int, name: str | None, process_set: ProcessSet, into: Any = None
) -> HandleNumber[Any]:
    number = number_of(process_set)
    check_tensor(tensor, "tensor", or_complex=True)
    target = _devices.new_empty(tensor, tensor.shape) if into is None else into
    return names().submit(
        "broadcast", name, [_real_row(tensor, target)], set=number, root=root_rank, result=target
    )


def allgather(
    tensors: Any, name: str | None, process_set: ProcessSet, *, single: bool = False
) -> HandleNumber[Any]:
    number = number_of(process_set)
    sources = [tensors] if single else listed(tensors)

    def finish(made: list[Any], _: Any) -> Any:
        results = [_tensor(row, s) for row, s in zip(made, sources, strict=True)]
        return results[0] if single else results

    return names().submit(
        "all_gather", name, [_row(t, None) for t in sources], set=number, finish=finish
    )


def alltoall(
    tensor: Any, splits: Any, name: str | None, process_set: ProcessSet
) -> HandleNumber[Any]:
    """The result is the tensor, or (tensor, received splits) when splits are given."""
    number = number_of(process_set)
    row = _row(tensor, None)
    parts = even_splits(tensor, process_set) if splits is None else checked_splits(splits)

    def finish(made: list[Any], received: list[int]) -> Any:
        result = _tensor(made[0], tensor)
        return result if splits is None else (result, torch.tensor(received, dtype=torch.int32))

    return names().submit("all_to_all", name, [row], set=number, splits=parts, finish=finish)


def even_splits(tensor: torch.Tensor, process_set: ProcessSet) -> list[int]:
    number_of(process_set)
    if tensor.dim() == 0:
        raise InvalidArgument("tensor has 0 dimensions; alltoall splits the first")
    rows, size = tensor.shape[0], process_set.size() or 1
    if rows % size != 0:
        raise InvalidArgument(
            f"tensor has {rows} rows, which {size} ranks do not divide; pass splits"
        )
    return [rows // size] * size


def checked_splits(splits: Any) -> list[int]:
    if isinstance(splits, torch.Tensor):
        if splits.dim() != 1 or splits.dtype.is_floating_point or splits.device.type != "cpu":
            raise InvalidArgument("splits is not a tensor of integers of one dimension on the CPU")
        splits = splits.tolist()
    try:
        return [operator.index(n) for n in splits]
    except TypeError:
        raise InvalidArgument(f"splits={splits!r} is not a list of numbers of rows") from None


# ---- without data ----


def barrier(process_set: ProcessSet) -> HandleNumber[Any]:
    return names().submit("barrier", None, [], set=number_of(process_set))
