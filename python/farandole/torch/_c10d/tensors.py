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
    """The same memory in a dtype of the engine's. What is only moved may have any."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(
            f"a tensor is on {tensor.device}; the farandole backend takes those on the CPU and on "
            "CUDA devices"
        )
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"a tensor has the layout {tensor.layout}; pass a dense one")
    tensor = tensor.detach()
    if tensor.dtype in DTYPE_NAMES:
        return tensor
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    if tensor.is_quantized or folded:
        raise InvalidArgument(
            f"a tensor has dtype {tensor.dtype}, which is not supported here; there are "
            + ", ".join(DTYPE_NAMES.values())
        )
    return tensor.view(torch.uint8)


def buffer(tensor: torch.Tensor) -> Any:
    """Of a contiguous tensor as the engine sees it."""
    return pointed(tensor, in_graphs=True)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_neg()


def sent(tensor: torch.Tensor, *, folded: bool = False) -> torch.Tensor:
    """What to read: the tensor's own memory, or a copy."""
    tensor = as_engine_sees(tensor, folded=folded)
    return tensor if _is_plain(tensor) else tensor.resolve_neg().contiguous()


def received(tensor: torch.Tensor, *, folded: bool = False) -> tuple[torch.Tensor, Finish | None]:
    """Where to write, and what is then to be done."""
    home = as_engine_sees(tensor, folded=folded)
    if _is_plain(home):
        return home, None
    landing = _devices.new_empty(home, home.shape)
    return landing, lambda: _copy(home, landing)


def in_place(tensor: torch.Tensor, *, folded: bool = False) -> tuple[torch.Tensor, Finish | None]:
    """What to read and overwrite, and what is then to be done."""
    home = as_engine_sees(tensor, folded=folded)
    if _is_plain(home):
        return home, None
    copy = home.resolve_neg().contiguous()
    return copy, lambda: _copy(home, copy)


def _copy(home: torch.Tensor, landed: torch.Tensor) -> None:
    with torch.no_grad():
        home.copy_(landed.view(home.shape))
    device = _devices.device_of(home)
    if device is not None:
        _devices.finish_work(device)  # others than this thread may wait for the same work


def _joined(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The tensors as one, where they lie one after the other in one storage."""
    first = views[0]
    at = first.storage_offset()
    for view in views:
        if not _is_plain(view) or view.dtype != first.dtype or view.storage_offset() != at:
            return None
        if view.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        at += view.numel()
    return torch.as_strided(first, (at - first.storage_offset(),), (1,))


def sent_list(tensors: Sequence[torch.Tensor], *, folded: bool = False) -> torch.Tensor:
    """What to read for tensors that travel one after the other."""
    views = [as_engine_sees(t, folded=folded) for t in tensors]
    joined = _joined(views)
    return joined if joined is not None else torch.cat([v.resolve_neg().reshape(-1) for v in views])


def received_list(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Finish | None]:
    """Where to write for tensors that arrive one after the other, and what is then to be done."""
    homes = [as_engine_sees(t, folded=False) for t in tensors]
    joined = _joined(homes)
    if joined is not None:
        return joined, None
    landing = _devices.new_empty(homes[0], (sum(h.numel() for h in homes),))

    def distribute() -> None:
        for home, part in zip(homes, torch.split(landing, [h.numel() for h in homes]), strict=True):
            _copy(home, part)

    return landing, distribute


def pairs(rows: list[tuple[torch.Tensor, Finish | None]]) -> tuple[Any, list[Finish | None]]:
    """Of several tensors: those that are read or written, and what is then to be done."""
    return [tensor for tensor, _ in rows], [finish for _, finish in rows]
