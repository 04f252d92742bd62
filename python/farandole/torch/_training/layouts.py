"""The order of elements in memory: one for a parameter, its state and its gradient on all ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import torch

from farandole import _json
from farandole._core import Mismatch
from farandole._world import Group
from farandole.common._objects import BUILD_ALIKE
from farandole.torch._tensors import borrow

Strides = tuple[int, ...]
_Row = tuple[Sequence[int], Sequence[int]]  # shape and strides of a parameter


def dense_strides(p: torch.Tensor) -> Strides:
    """The parameter's strides if they leave no gaps, as autograd's gradients have them; else those
    of a contiguous tensor of its shape."""
    expected = 1
    for stride, extent in sorted(zip(p.stride(), p.shape, strict=True)):
        if extent != 1 and stride != expected:
            return contiguous_strides(p.shape)
        expected *= extent
    return p.stride()


def contiguous_strides(shape: torch.Size) -> Strides:
    return torch.empty(shape, device="meta").stride()


def in_order_of(p: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """The gradient with its parameter's strides, if these leave no gaps. PyTorch's fused optimizers
    read both in the order of memory."""
    strides = dense_strides(p)
    if grad.stride() == strides:
        return grad
    return torch.empty_strided(p.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)


def lay_out_alike(
    group: Group,
    named: Sequence[tuple[str, torch.Tensor]],
    optimizer: torch.optim.Optimizer | None = None,
) -> list[Strides]:
    """Gives parameters one order of elements on all ranks, and the optimizer's state that of its
    parameters. Collective.

    Where strides differ between ranks, as when one rank alone has converted its model to
    channels_last, the parameter becomes contiguous on every rank: sums over an array, such as the
    norm of a gradient, round by the order of its elements. PyTorch's fused optimizers read state
    and parameters in the order of memory.

    Returns:
        By parameter the strides of its gradient.

    Raises:
        Mismatch: ranks have parameters of different shapes; on every rank, naming the first.
    """
    strides = _lay_out_parameters(group, named)
    if optimizer is not None:
        _lay_out_state(optimizer)
    return strides


def _lay_out_parameters(group: Group, named: Sequence[tuple[str, torch.Tensor]]) -> list[Strides]:
    mine = [dense_strides(p) for _, p in named]
    rows = [(p.shape, _order(p.shape, s)) for (_, p), s in zip(named, mine, strict=True)]
    written = json.dumps(rows).encode()
    digest = hashlib.sha256(written).digest()
    if group.size == 1 or len(set(_gathered(group, digest, "digest of layouts"))) == 1:
        return mine
    lengths = _gathered(group, len(written).to_bytes(8, "little"), "length of layouts")
    longest = max(int.from_bytes(length, "little") for length in lengths)
    texts = _gathered(group, written.ljust(longest), "layouts")
    by_rank: list[list[_Row]] = [_json.read(text) for text in texts]
    for i, (name, p) in enumerate(named):
        _refuse_other_shapes(group, name, [rows[i][0] for rows in by_rank])
        if any(rows[i][1] != by_rank[0][i][1] for rows in by_rank):
            mine[i] = contiguous_strides(p.shape)
            p.data = p.detach().contiguous()
    return mine


def _lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    for p, state in optimizer.state.items():
        if not isinstance(p, torch.Tensor) or p.layout != torch.strided:
            continue
        for key, value in state.items():
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
                continue
            if value.shape == p.shape and value.stride() != p.stride():
                lying = torch.empty_strided(
                    p.shape, p.stride(), dtype=value.dtype, device=value.device
                )
                state[key] = lying.copy_(value)


def _order(shape: Sequence[int], strides: Strides) -> Strides:
    """The strides that decide where an element lies: those of dimensions of one element do not."""
    return tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True))


def _gathered(group: Group, mine: bytes, what: str) -> list[bytes]:
    """Returns the bytes of every rank; all ranks pass equally many."""
    sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    table = torch.empty(group.size, len(mine), dtype=torch.uint8)
    group.run("all_gather", borrow(sent), borrow(table), name=f"{what} of parameters")
    return [bytes(row.tolist()) for row in table]


def _refuse_other_shapes(group: Group, name: str, shapes: Sequence[Sequence[int]]) -> None:
    if all(shape == shapes[0] for shape in shapes):
        return
    given = "; ".join(
        f"{tuple(shape)} on rank {rank}" for rank, shape in zip(group.ranks, shapes, strict=True)
    )
    raise Mismatch(
        f"ranks train different models: parameter '{name}' has shape {given}\n"
        f"  advice: {BUILD_ALIKE}"
    )
