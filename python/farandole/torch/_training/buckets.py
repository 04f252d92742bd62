"""Where gradients lie: parts of the reducer's buckets, which move when it has a better plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from farandole import _core


class Place(NamedTuple):
    """Where a parameter's gradient lies."""

    bucket: int
    offset: int  # bytes


class Buckets:
    """Every parameter's part of its bucket, as a tensor of its shape.

    Args:
        dtypes: what is sent of each parameter.
    """

    def __init__(
        self,
        reducer: _core.Reducer,
        parameters: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self._reducer, self._parameters, self._dtypes = reducer, parameters, dtypes
        self._places: list[Place] = []
        self._bytes_of: dict[int, torch.Tensor] = {}  # by bucket
        self._views: list[torch.Tensor | None] = []

    def forget(self) -> None:
        """Before they move. Views that users see keep their memory."""
        self._views.clear()
        self._bytes_of.clear()

    def learn(self, needed: Iterable[int]) -> None:
        """Where they are now. The views of `needed` are made at once: not in the middle of a step;
        others, of large parameters, when they are needed."""
        self.forget()
        self._places = [Place(*place) for place in self._reducer.places]
        self._views = [None] * len(self._parameters)
        for i in needed:
            self.view(i)

    def view(self, i: int) -> torch.Tensor:
        view = self._views[i]
        if view is None:
            bucket, offset = self._places[i]
            if bucket not in self._bytes_of:
                self._bytes_of[bucket] = bytes_of(self._reducer.memory(bucket))
            view = view_of(self._bytes_of[bucket][offset:], self._parameters[i], self._dtypes[i])
            self._views[i] = view
        return view


def bytes_of(memory: _core.SharedMemory) -> torch.Tensor:
    """It holds the memory object, which holds the memory."""
    return torch.frombuffer(memory, dtype=torch.uint8)


def view_of(memory: torch.Tensor, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The begin of `memory` as a gradient of the parameter."""
    flat = memory[: p.numel() * dtype.itemsize].view(dtype)
    return torch.as_strided(flat, p.shape, dense_strides(p))


def dense_strides(p: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides if they leave no gaps, as autograd's gradients have them; else those
    of a contiguous tensor of its shape."""
    expected = 1
    for stride, extent in sorted(zip(p.stride(), p.shape, strict=True)):
        if extent != 1 and stride != expected:
            return torch.empty(p.shape, device="meta").stride()
        expected *= extent
    return p.stride()
