"""Where gradients lie: parts of the reducer's buckets, which move when it has a better plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from farandole import _core
from farandole.torch._training.layouts import Strides


class Place(NamedTuple):
    """Where a parameter's gradient lies."""

    bucket: int
    offset: int  # bytes


# Note [Who has a view of a bucket]
#
# A program may replace what a tensor refers to: p.grad.data = ..., p.grad.set_(), and model.half(),
# which does the former to every gradient that stands. So no program ever gets a view that is used
# here again: it gets an alias, a new tensor for every pass. share_memory() replaces the memory
# of the storage itself, under all of its views; whole() and standing() notice that by its address.


class Bytes:
    """The memory of buckets as tensors of bytes."""

    def __init__(self) -> None:
        self._wholes: dict[int, tuple[torch.Tensor, int]] = {}  # by bucket, with the address

    def whole(self, bucket: int, memory: Callable[[int], _core.SharedMemory]) -> torch.Tensor:
        """The bucket's bytes. The tensor holds the memory object, which holds the memory."""
        if bucket not in self._wholes:
            made = torch.frombuffer(memory(bucket), dtype=torch.uint8)
            self._wholes[bucket] = made, made.data_ptr()
        return self._wholes[bucket][0]

    def versions(self) -> list[int]:
        """PyTorch's counters of what was written by way of tensors."""
        return [whole._version for whole, _ in self._wholes.values()]

    def standing(self) -> bool:
        """Whether all of them still refer to their bucket."""
        return all(whole.data_ptr() == address for whole, address in self._wholes.values())


class Buckets:
    """Every parameter's part of its bucket, as a tensor of its shape.

    Args:
        dtypes: what is sent of each parameter.
        strides: how its gradient lies; the same on all ranks.
    """

    def __init__(
        self,
        reducer: _core.Reducer,
        parameters: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        strides: Sequence[Strides],
    ) -> None:
        self._reducer, self._parameters, self._dtypes = reducer, parameters, dtypes
        self._strides = strides
        self.places: list[Place] = []
        self._bytes = Bytes()
        self._views: list[torch.Tensor | None] = []
        self._whole: dict[int, torch.Tensor] = {}
        self.addresses = [0] * len(parameters)  # of views that were made

    def forget(self) -> None:
        """Before they move. Views that users see keep their memory."""
        self._views.clear()
        self._whole.clear()
        self._bytes = Bytes()

    def learn(self, needed: Iterable[int]) -> None:
        """Looks up where gradients lie now. Makes the views of `needed` at once, not in the middle
        of a step; others, of large parameters, when they are needed."""
        self.forget()
        self.places = [Place(*place) for place in self._reducer.places]
        self._views = [None] * len(self._parameters)
        for i in needed:
            self.view(i)

    def versions(self) -> list[int]:
        """Others when a program has written into a gradient."""
        return self._bytes.versions()

    def standing(self) -> bool:
        """Whether the views still refer to the buckets."""
        return self._bytes.standing()

    def view(self, i: int) -> torch.Tensor:
        """The gradient's place. No program gets it: see Note [Who has a view of a bucket]."""
        view = self._views[i]
        if view is None:
            bucket, offset = self.places[i]
            whole = self._bytes.whole(bucket, self._reducer.memory)
            memory, p = whole[offset:], self._parameters[i]
            view = view_of(memory, p, self._dtypes[i], self._strides[i])
            self._views[i] = view
            self.addresses[i] = view.data_ptr()
        return view

    def whole(self, i: int) -> torch.Tensor:
        """All that stands in the bucket of parameter i, as numbers of its dtype, which all have."""
        known = self._whole.get(i)
        if known is None:
            bucket = self._bytes.whole(self.places[i].bucket, self._reducer.memory)
            real = self._dtypes[i].to_real()
            size = len(bucket) // real.itemsize * real.itemsize
            known = self._whole[i] = bucket[:size].view(real)
        return known

    def alias(self, i: int) -> torch.Tensor:
        """A new tensor over the gradient's place, for the program."""
        return self.view(i).detach()


def view_of(
    memory: torch.Tensor, p: torch.Tensor, dtype: torch.dtype, strides: Strides
) -> torch.Tensor:
    """The begin of `memory` as a gradient of the parameter, with these strides."""
    flat = memory[: p.numel() * dtype.itemsize].view(dtype)
    return torch.as_strided(flat, p.shape, strides)
