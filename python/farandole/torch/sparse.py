"""Sparse tensors (COO): a gather of indices and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from farandole._core import InvalidArgument
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.common._reduction import Average, Sum, op_name
from farandole.torch._entries import public
from farandole.torch._operations import calls
from farandole.torch._operations.handles import wait

__all__ = ["sparse_allreduce_async"]


@public
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: int | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Starts the sum or mean of sparse tensors of all ranks, whose indices may differ.

    Args:
        tensor: of layout ``torch.sparse_coo``, of equal shape and dtype on all ranks.
        name: which tensor this is, on every rank. Without one it counts as a nameless gather.
        op: ``Average`` (the default) or ``Sum``.
        process_set: the ranks that take part. A rank that has joined has no entries, and counts in
            the mean.

    Returns:
        A function that waits and returns the result: a sparse tensor with the entries of all
        ranks, in rank order and not coalesced.

    Raises:
        InvalidArgument: the tensor is dense, op is another one, or this rank is not in the set.
        Mismatch: the ranks' shapes, dtypes or ops differ; raised by the function.

    Examples:
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
    return partial(wait, calls.sparse_allreduce(tensor, name, chosen, process_set))
