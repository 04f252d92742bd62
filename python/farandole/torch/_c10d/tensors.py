"""Tensors of torch.distributed's callers as the engine takes them: contiguous, of its dtypes.

What is not contiguous goes through a copy; a ``Landing`` brings the result home.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole.torch import _devices
from farandole.torch._tensors import DTYPE_NAMES, pointed

Finish = Callable[[], None]


def as_engine_sees(tensor: torch.Tensor, *, folded: bool) -> torch.Tensor:
    """The same memory in a dtype of the engine's; the tensor reads as it lies. What is only moved
    may have any dtype."""
    if tensor.dtype in DTYPE_NAMES:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.is_quantized or folded:
        raise InvalidArgument(
            f"a tensor has dtype {tensor.dtype}, which is not supported here; there are "
            + ", ".join(DTYPE_NAMES.values())
        )
    return tensor.view(torch.uint8)


def engine_numel(tensor: torch.Tensor) -> int:
    """How many elements the engine sees in it, in what is only moved."""
    if tensor.dtype in DTYPE_NAMES:
        return tensor.numel()
    return tensor.numel() * (2 if tensor.is_complex() else tensor.itemsize)


def buffer(tensor: torch.Tensor) -> Any:
    """Of a contiguous tensor as the engine sees it."""
    return pointed(tensor, in_graphs=True)


def _checked(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"a tensor is on {tensor.device}; the farandole backend takes those on the CPU and on "
            "CUDA devices"
        )
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"a tensor has the layout {tensor.layout}; pass a dense one")
    return tensor.detach()


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """Raises InvalidArgument before anything is exchanged."""
    tensor = _checked(tensor)
    if any(n > 1 and stride == 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidArgument(
            f"a tensor of shape {tuple(tensor.shape)} is expanded: several elements of the result "
            "would lie in one place\n  advice: pass tensor.clone()"
        )
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory holds its elements, one after the other. Lazy views (z.conj()) hold
    others, which writing to them negates again."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy."""
    return tensor if _is_plain(tensor) else tensor.resolve_conj().resolve_neg().contiguous()


def sent(tensor: torch.Tensor, *, folded: bool = False) -> torch.Tensor:
    """What to read: the tensor's own memory, or a copy."""
    return as_engine_sees(_plain(_checked(tensor)), folded=folded)


def received(tensor: torch.Tensor, *, folded: bool = False) -> tuple[torch.Tensor, Finish | None]:
    """Where to write, and what is then to be done."""
    home = _writable(tensor)
    if _is_plain(home):
        return as_engine_sees(home, folded=folded), None
    landing = _devices.new_empty(home, home.shape)
    return as_engine_sees(landing, folded=folded), lambda: _copy(home, landing)


def in_place(tensor: torch.Tensor, *, folded: bool = False) -> tuple[torch.Tensor, Finish | None]:
    """What to read and overwrite, and what is then to be done."""
    home = _writable(tensor)
    copy = _plain(home)
    seen = as_engine_sees(copy, folded=folded)
    return seen, None if copy is home else lambda: _copy(home, copy)


def _copy(home: torch.Tensor, landed: torch.Tensor) -> None:
    with torch.no_grad():
        home.copy_(landed.view(home.shape))
    device = _devices.device_of(home)
    if device is not None:
        _devices.finish_work(device)  # others than this thread may wait for the same work


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one, where they lie one after the other in one storage."""
    first = tensors[0]
    at = first.storage_offset()
    for tensor in tensors:
        if not _is_plain(tensor) or tensor.dtype != first.dtype or tensor.storage_offset() != at:
            return None
        if tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        at += tensor.numel()
    return torch.as_strided(first, (at - first.storage_offset(),), (1,))


def sent_list(tensors: Sequence[torch.Tensor], *, folded: bool = False) -> torch.Tensor:
    """What to read for tensors that travel one after the other."""
    checked = [_checked(t) for t in tensors]
    joined = _joined(checked)
    if joined is not None:
        return as_engine_sees(joined, folded=folded)
    views = [as_engine_sees(_plain(t), folded=folded) for t in checked]
    return torch.cat([v.reshape(-1) for v in views])


def received_list(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Finish | None]:
    """Where to write for tensors that arrive one after the other, and what is then to be done."""
    homes = [_writable(t) for t in tensors]
    joined = _joined(homes)
    if joined is not None:
        return as_engine_sees(joined, folded=False), None
    landing = _devices.new_empty(homes[0], (sum(h.numel() for h in homes),))

    def distribute() -> None:
        for home, part in zip(homes, torch.split(landing, [h.numel() for h in homes]), strict=True):
            _copy(home, part)

    return as_engine_sees(landing, folded=False), distribute


def pairs(rows: list[tuple[torch.Tensor, Finish | None]]) -> tuple[Any, list[Finish | None]]:
    """Of several tensors: those that are read or written, and what is then to be done."""
    return [tensor for tensor, _ in rows], [finish for _, finish in rows]
