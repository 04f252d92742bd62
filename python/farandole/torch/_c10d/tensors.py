"""Tensors of torch.distributed's callers as the engine takes them: contiguous, of its dtypes.

A tensor that is not contiguous goes through a copy; a `Finish` copies the result back.
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
    """The same memory in a dtype of the engine's; `tensor` is no lazy view. A tensor that is only
    moved may have any dtype."""
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
    """How many elements the engine sees in a tensor that is only moved."""
    if tensor.dtype in DTYPE_NAMES:
        return tensor.numel()
    return tensor.numel() * (2 if tensor.is_complex() else tensor.itemsize)


def buffer(tensor: torch.Tensor) -> Any:
    """The engine's buffer of a contiguous tensor that `as_engine_sees` has given."""
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
    """The tensor to read: the caller's own memory, or a contiguous copy."""
    return as_engine_sees(_plain(_checked(tensor)), folded=folded)


def received(tensor: torch.Tensor, *, folded: bool = False) -> tuple[torch.Tensor, Finish | None]:
    """The tensor to write, and what copies the result home: None if there is no need."""
    home = _writable(tensor)
    if _is_plain(home):
        return as_engine_sees(home, folded=folded), None
    landing = _devices.new_empty(home, home.shape)
    return as_engine_sees(landing, folded=folded), lambda: _copy(home, landing)


def in_place(tensor: torch.Tensor, *, folded: bool = False) -> tuple[torch.Tensor, Finish | None]:
    """The tensor to read and overwrite, and what copies the result home, as in `received`."""
    home = _writable(tensor)
    copy = _plain(home)
    seen = as_engine_sees(copy, folded=folded)
    return seen, None if copy is home else lambda: _copy(home, copy)


def _copy(home: torch.Tensor, landed: torch.Tensor) -> None:
    with torch.no_grad():
        home.copy_(landed.view(home.shape))
    device = _devices.device_of(home)
    if device is not None:
        _devices.finish_work(device)  # other threads may wait for the same work


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
    """One tensor to read, which holds all of these one after the other."""
    checked = [_checked(t) for t in tensors]
    joined = _joined(checked)
    if joined is not None:
        return as_engine_sees(joined, folded=folded)
    views = [as_engine_sees(_plain(t), folded=folded) for t in checked]
    return torch.cat([v.reshape(-1) for v in views])


def received_list(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Finish | None]:
    """One tensor to write, which takes these one after the other, and what copies them home."""
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
    """Splits rows of several tensors into the tensors, and what copies their results home."""
    return [tensor for tensor, _ in rows], [finish for _, finish in rows]
