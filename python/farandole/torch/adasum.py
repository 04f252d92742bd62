"""Adasum: a sum that adds what is new. Of two gradients that point the same way it makes their
mean, of two that are orthogonal their sum::

    a ⊕ b = (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b

Any number of ranks are folded pairwise along the canonical tree (docs/determinism.md). Each rank
folds one part of every tensor:

    1. all-to-all     part r of all ranks' tensors goes to rank r
    2. per level      the dot products of the parts are summed over all ranks; each folds its part
    3. all-gather     the parts of the result

Folds and products are in float64, and the result is rounded once; all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from farandole import _world
from farandole._core import InvalidArgument
from farandole.torch._tensors import check_on_host, check_tensor, exchange

__all__ = ["adasum", "adasum_together", "fold_rows"]

_Columns = list[tuple[torch.Tensor, torch.Tensor]]

# Below it a tensor counts as zero, and the other one is taken as it is.
_LEAST_NORM = 2.0**-511


def adasum(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """The Adasum of equal tensors of all ranks, as a new tensor.

    Args:
        tensor: of a floating dtype and any shape, left as it is.
        name: compared between ranks, and part of errors.

    Raises:
        InvalidArgument: a tensor that cannot be sent, or is not of a floating dtype.
        Mismatch: the ranks' tensors differ.

    Examples:
        >>> import torch
        >>> import farandole.torch as hvd
        >>> from farandole.torch.adasum import adasum
        >>> hvd.init()
        >>> adasum(torch.ones(2)).tolist()
        [1.0, 1.0]
    """
    return adasum_together([tensor], name)[0]


def check_foldable(tensor: torch.Tensor, what: str) -> None:
    """Raises InvalidArgument for what cannot be sent, or is no tensor of floating point."""
    check_tensor(tensor, what)
    if not tensor.is_floating_point():
        raise InvalidArgument(f"{what} is of {tensor.dtype}; Adasum takes floating dtypes")


def adasum_together(tensors: Sequence[torch.Tensor], name: str | None = None) -> list[torch.Tensor]:
    """:func:`adasum` of each, in fewer messages; dot products are of each tensor by itself."""
    for i, tensor in enumerate(tensors):
        check_on_host(tensor, f"tensor {i}")
        check_foldable(tensor, f"tensor {i}")
    results: list[torch.Tensor] = [tensor.detach().clone() for tensor in tensors]
    if _world.size() == 1:
        return results
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        folded = _of_one_dtype([results[i] for i in places], dtype, name)
        for i, result in zip(places, folded, strict=True):
            results[i] = result
    return results


def _of_one_dtype(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, name: str | None
) -> list[torch.Tensor]:
    size = _world.size()
    widths = [-(-tensor.numel() // size) for tensor in tensors]  # of a rank's part
    whole = sum(widths)
    label = f"{name or 'adasum'} {[list(tensor.shape) for tensor in tensors]}"
    sent = torch.zeros(size, whole, dtype=dtype)
    for tensor, column in zip(tensors, _split(sent, widths), strict=True):
        padded = torch.zeros(column.numel(), dtype=dtype)
        padded[: tensor.numel()] = tensor.reshape(-1)
        column.copy_(padded.view(column.shape))
    parts = torch.empty_like(sent)
    exchange("all_to_all", sent, parts, label)
    mine = _fold(parts.double(), widths, lambda sums: exchange("all_reduce", sums, sums, label)).to(
        dtype
    )
    table = torch.empty_like(sent)
    exchange("all_gather", mine, table, label)
    return [
        column.reshape(-1)[: tensor.numel()].view(tensor.shape)
        for tensor, column in zip(tensors, _split(table, widths), strict=True)
    ]


def fold_rows(rows: torch.Tensor) -> torch.Tensor:
    """The Adasum of whole tensors that are here already, one a row; nothing is exchanged.

    Examples:
        >>> import torch
        >>> from farandole.torch.adasum import fold_rows
        >>> fold_rows(torch.tensor([[1.0, 0.0], [0.0, 1.0]])).tolist()
        [1.0, 1.0]
    """
    flat = rows.detach().reshape(len(rows), -1).double()
    if flat.data_ptr() == rows.data_ptr():
        flat = flat.clone()
    return _fold(flat, [flat.shape[1]], lambda _: None).to(rows.dtype).view(rows.shape[1:])


def _fold(
    parts: torch.Tensor, widths: Sequence[int], add_up: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """A part of the result, of all ranks' parts (one a row), which are overwritten. `add_up` makes
    dot products of parts those of whole tensors."""
    stride = 1
    while stride < len(parts):
        pairs = [(a, a + stride) for a in range(0, len(parts) - stride, 2 * stride)]
        products = torch.tensor(
            [
                [(x @ y, x @ x, y @ y) for x, y in _columns(parts[a], parts[b], widths)]
                for a, b in pairs
            ],
            dtype=torch.float64,
        )
        add_up(products)
        for (a, b), of_tensors in zip(pairs, products, strict=True):
            for (x, y), product in zip(
                _columns(parts[a], parts[b], widths), of_tensors.tolist(), strict=True
            ):
                dot, norm_x, norm_y = product
                x.mul_(_share(dot, norm_x)).add_(y, alpha=_share(dot, norm_y))
        stride *= 2
    return parts[0]


def _split(table: torch.Tensor, widths: Sequence[int]) -> Sequence[torch.Tensor]:
    """Each tensor's columns, or elements of a row."""
    return torch.split(table, list(widths), dim=-1)


def _columns(a: torch.Tensor, b: torch.Tensor, widths: Sequence[int]) -> _Columns:
    """Each tensor's part in two rows."""
    return list(zip(_split(a, widths), _split(b, widths), strict=True))


def _share(dot: float, norm: float) -> float:
    """How much of a tensor goes into the fold."""
    return 1.0 if norm < _LEAST_NORM else 1.0 - dot / norm * 0.5
