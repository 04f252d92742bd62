"""Sparse tensors (COO): two gathers, of indices and of values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.torch.ops import Average, Sum, allgather_async, op_name, synchronize

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: Any,
    name: str | None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts the sum or mean of sparse tensors of all ranks, whose indices may differ.

    Args:
        tensor: of layout ``torch.sparse_coo``, of equal shape and dtype on all ranks.
        name: compared between ranks; the gathers are called ``name.indices`` and ``name.values``.
        op: ``Average`` (the default) or ``Sum``.
        process_set: the ranks that take part. A rank that has joined has no entries, and counts in
            the mean.

    Returns:
        A function that waits and returns the result: a sparse tensor with the entries of all
        ranks, in rank order and not coalesced.

    Raises:
        InvalidArgument: the tensor is dense, op is another one, or this rank is not in the set.

    Example:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> x = torch.sparse_coo_tensor([[1]], [2.0], (3,))
        >>> hvd.sparse_allreduce_async(x, "x", op=hvd.Sum)().to_dense().tolist()
        [0.0, 2.0, 0.0]
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
        raise InvalidArgument("tensor is not of layout torch.sparse_coo; use allreduce_async")
    chosen = Average if op is None else op
    if chosen not in (Average, Sum):
        raise InvalidArgument(f"op={op_name(op)}: sparse tensors are reduced with Average or Sum")
    shape = tensor.shape
    # One row an entry, since ranks have different numbers of them; not coalesced: the result is
    # not either, and entries would be sorted for nothing.
    indices = tensor.detach()._indices().t().contiguous()
    values = tensor.detach()._values().contiguous()
    label = name or f"sparse {list(shape)}"
    flights = [
        allgather_async(indices, f"{label}.indices", process_set),
        allgather_async(values, f"{label}.values", process_set),
    ]
    size = process_set.size() or 1

    def finish() -> torch.Tensor:
        all_indices, all_values = (synchronize(flight) for flight in flights)
        if chosen == Average:
            all_values = all_values / size
        return torch.sparse_coo_tensor(all_indices.t(), all_values, shape, check_invariants=False)

    return finish
