"""The collectives on tensors, with Horovod's names and signatures.

They work eagerly, in ``tf.function``, and in graphs of TensorFlow 1. In a graph an operation is an
asynchronous op: it starts when its tensor is there, holds no thread of TensorFlow's while it runs,
and is neither merged with an equal one nor folded away. All of them are differentiable.

Operations are keyed by name: ranks run them in any order, and one runs when all ranks of its
process set have come to that name. In a graph names are made unique; an operation without one is
called by its place, so every rank makes the same graph. Eagerly the n-th nameless call of a kind
meets the n-th of the other ranks.

Bad input raises ``tf.errors.InvalidArgumentError`` (which is ``farandole.InvalidArgument``, too)
where it can be seen when the call is made. What ranks disagree on is
``tf.errors.FailedPreconditionError`` on all of them when it runs: nothing has been reduced, and the
next call works. docs/tensorflow.md has the other errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import tensorflow as tf

from farandole import _world
from farandole.common._process_set import ProcessSet, global_process_set, members_of, number_of
from farandole.common._reduction import Adasum, Average, Sum, choose_op, core_op, op_name
from farandole.common._weights import note_join
from farandole.tensorflow import _sparse
from farandole.tensorflow._calls import (
    Request,
    number_when_run,
    run,
    tensor_from,
    tensors_from,
    variable_from,
)
from farandole.tensorflow._graph import as_written, in_tensorflow_1, refused, unsupported
from farandole.tensorflow.adasum import adasum_together
from farandole.tensorflow.compression import Compression, Compressor

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]


def _label(name: str | None, ignore_name_scope: bool) -> str | None:
    """With the scopes of a graph's names before it, as TensorFlow names ops."""
    if name is None or ignore_name_scope or tf.executing_eagerly():
        return name
    scope = tf.compat.v1.get_default_graph().get_name_scope()
    return f"{scope}/{name}" if scope else name


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",  # noqa: ARG001 - Horovod's signature
    device_sparse: str = "",  # noqa: ARG001
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces equal tensors of all ranks, elementwise; every rank gets the result.

    Args:
        tensor: of any shape; a ``tf.IndexedSlices`` is gathered instead, and stays one.
        average: deprecated, see ``op``.
        device_dense: accepted as Horovod does; tensors are sent from the host.
        device_sparse: likewise.
        compression: what is sent instead.
        op: ``Average`` (the default), ``Sum``, ``Min``, ``Max``, ``Product`` or ``Adasum`` (of
            floating dtypes); of slices only the first two.
        prescale_factor: a factor on every input.
        postscale_factor: a factor on the result.
        name: which tensor this is, on every rank.
        process_set: the ranks that take part.
        ignore_name_scope: in a graph, ``name`` is the whole name.

    Raises:
        tf.errors.InvalidArgumentError: bad input on this rank; nothing was sent.
        tf.errors.FailedPreconditionError: the ranks' tensors or options differ.

    Examples:
        >>> import tensorflow as tf, farandole.tensorflow as hvd
        >>> hvd.init()
        >>> hvd.allreduce(tf.ones(2), op=hvd.Sum).numpy().tolist()
        [1.0, 1.0]
    """
    chosen, factors = choose_op(average, op), (prescale_factor, postscale_factor)
    label = _label(name, ignore_name_scope)
    return _allreduce([tensor], compression, chosen, factors, label, process_set)[0]


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",  # noqa: ARG001 - Horovod's signature
    device_sparse: str = "",  # noqa: ARG001
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """:func:`allreduce` of many tensors as one operation: none starts before all ranks have all of
    them. Dtypes may differ, and there may be slices among them."""
    chosen, factors = choose_op(average, op), (prescale_factor, postscale_factor)
    label = _label(name, ignore_name_scope)
    return _allreduce(tensors, compression, chosen, factors, label, process_set)


def _allreduce(
    tensors: Sequence[Any],
    compression: type[Compressor],
    chosen: int,
    factors: tuple[float, float],
    label: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    word = "sum" if chosen == Adasum else core_op(chosen)
    number = number_of(process_set)
    if len(tensors) == 0:
        return []
    results: list[Any] = [None] * len(tensors)
    slices = [i for i, t in enumerate(tensors) if isinstance(t, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in slices]
    # Wrong ones are refused before slices are sent.
    wires = [compression.compress(tensor_from(tensors[i], f"tensor {i}")) for i in dense]
    if slices:
        if factors != (1.0, 1.0):
            raise unsupported("tf.IndexedSlices are reduced without factors only")
        joined = _sparse.reduce([tensors[i] for i in slices], chosen, label, process_set)
        for i, result in zip(slices, joined, strict=True):
            results[i] = result
    if dense:
        sources = [wire for wire, _ in wires]
        if chosen == Adasum:
            reduced = _adasum(sources, label, number, factors[0] * factors[1])
        else:
            reduced = run(Request("all_reduce", sources, label, number, word, *factors))
        for i, result, (_, context) in zip(dense, reduced, wires, strict=True):
            results[i] = compression.decompress(result, context)
    return results


def _adasum(
    sources: list[tf.Tensor], label: str | None, number: int, factor: float
) -> list[tf.Tensor]:
    """A factor on all of the tensors is one on the result."""
    folded = adasum_together(sources, label, number)
    return folded if factor == 1 else [each * tf.cast(factor, each.dtype) for each in folded]


@as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Joins all ranks' tensors along the first dimension, which may differ (and be 0)."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """:func:`allgather` of many tensors as one operation."""
    if len(tensors) == 0:
        return []
    sources = tensors_from(tensors)
    for i, tensor in enumerate(sources):
        _require_rows(tensor, f"tensor {i}", "allgather joins along the first")
    label = _label(name, ignore_name_scope)
    return run(Request("all_gather", sources, label, number_of(process_set)))


def _require_rows(tensor: tf.Tensor, what: str, why: str) -> None:
    if tensor.shape.rank == 0:
        raise refused(f"{what} has 0 dimensions; {why}")


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Returns the root's tensor on every rank; shapes and dtypes are equal on all ranks. Roots are
    ranks of the world, whatever the process set."""
    source, label = tensor_from(tensor, "tensor"), _label(name, ignore_name_scope)
    return run(Request("broadcast", [source], label, number_of(process_set), root=root_rank))[0]


@as_written
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Assigns the root's values to variables, as one operation; returns what ``assign`` does."""
    if len(variables) == 0:
        return []
    sources = [variable_from(v, getattr(v, "name", f"{i}")) for i, v in enumerate(variables)]
    results = run(Request("broadcast", sources, name, number_of(process_set), root=root_rank))
    return [v.assign(value) for v, value in zip(variables, results, strict=True)]


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows of the first dimension to each rank and joins those that come, by sender.

    Args:
        tensor: its rows, in the order of the ranks they go to.
        splits: how many rows go to each rank of the set (integers); default: equally many.
        name: see :func:`allreduce`.
        ignore_name_scope: likewise.
        process_set: the ranks that take part.

    Returns:
        The tensor of received rows; with splits also how many came from each rank (int32).
    """
    source = tensor_from(tensor, "tensor")
    _require_rows(source, "tensor", "alltoall splits the first")
    if splits is None:
        rows = tf.zeros([0], tf.int64)
    else:
        rows = tensor_from(splits, "splits")
        if not rows.dtype.is_integer or rows.shape.rank != 1:
            raise refused(f"splits is {splits!r}; it is a list of numbers of rows")
        rows = tf.cast(rows, tf.int64)
    label = _label(name, ignore_name_scope)
    result, received = run(
        Request("all_to_all", [source], label, number_of(process_set), splits=rows)
    )
    return result if splits is None else (result, received)


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",  # noqa: ARG001 - Horovod's signature
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces as :func:`allreduce` does (``Average`` or ``Sum``), and leaves part r of the first
    dimension on rank r; the first ranks get one row more where it does not divide."""
    label = _label(name, ignore_name_scope)
    factors = prescale_factor, postscale_factor
    return grouped_reducescatter([tensor], "", compression, op, process_set, *factors, name=label)[
        0
    ]


@as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",  # noqa: ARG001 - Horovod's signature
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    name: str | None = None,
) -> list[tf.Tensor]:
    """:func:`reducescatter` of many tensors as one operation."""
    word, number = core_op(op), number_of(process_set)
    if op not in (Average, Sum):
        raise refused(f"op={op_name(op)}: reducescatter reduces with Average or Sum only")
    if len(tensors) == 0:
        return []
    wires = []
    for i, tensor in enumerate(tensors_from(tensors)):
        _require_rows(tensor, f"tensor {i}", "reducescatter splits the first")
        wires.append(compression.compress(tensor))
    sources = [wire for wire, _ in wires]
    results = run(
        Request("reduce_scatter", sources, name, number, word, prescale_factor, postscale_factor)
    )
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, wires, strict=True)
    ]


@as_written
def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Complete when every rank of the set has come to it; in a graph of TensorFlow 1, an op."""
    op = run(Request("barrier", [], set=number_of(process_set)))[0]
    return op if in_tensorflow_1() else None


@as_written
def join() -> tf.Tensor:
    """Takes part in the others' operations, with nothing of its own, until all ranks have joined:
    for a rank that has no more batches. See ``farandole.torch.join``.

    Returns:
        The last rank to join (int32).
    """
    last = run(Request("join", []))[0]
    note_join()
    return last


# ---- numbers that are asked for when a graph runs ----


@as_written
def rank_op(name: str | None = None) -> tf.Tensor:
    """This process' rank (int32), when the graph runs."""
    return number_when_run(_world.rank, name)


@as_written
def local_rank_op(name: str | None = None) -> tf.Tensor:
    """This process' rank on its host (int32), when the graph runs."""
    return number_when_run(_world.local_rank, name)


@as_written
def local_size_op(name: str | None = None) -> tf.Tensor:
    """The number of ranks on this host (int32), when the graph runs."""
    return number_when_run(_world.local_size, name)


@as_written
def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks of a process set (int32), when the graph runs."""
    number = index(process_set_id)
    return number_when_run(lambda: len(members_of(number)[0]), name)


@as_written
def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 on members of a process set, 0 on others (int32), when the graph runs."""
    number = index(process_set_id)
    return number_when_run(lambda: int(members_of(number)[1] >= 0), name)
