"""Where gradients and parameters lie: in buckets, which move when a reducer has a better plan."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from farandole import _core
from farandole.torch._training.held import is_held
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


# A bucket's memory, which supports the buffer protocol.
Memory = Callable[[int], "_core.SharedMemory | bytearray"]


class Bytes:
    """The memory of buckets as tensors of bytes."""

    def __init__(self) -> None:
        self._wholes: dict[int, tuple[torch.Tensor, int]] = {}  # by bucket, with the address

    def whole(self, bucket: int, memory: Memory) -> torch.Tensor:
        """The bucket's bytes. The tensor holds the memory object, which holds the memory."""
        if bucket not in self._wholes:
            made = torch.frombuffer(memory(bucket), dtype=torch.uint8)
            self._wholes[bucket] = made, made.data_ptr()
        return self._wholes[bucket][0]

    def versions(self) -> dict[int, int]:
        """By bucket, PyTorch's counter of what was written by way of tensors."""
        return {bucket: whole._version for bucket, (whole, _) in self._wholes.items()}

    def standing(self) -> bool:
        """Whether all of them still refer to their bucket."""
        return all(whole.data_ptr() == address for whole, address in self._wholes.values())


class Buckets:
    """Every parameter's part of its bucket, as a tensor of its shape.

    Args:
        dtypes: what lies there of each parameter.
        strides: in which order; the same on all ranks.
        memory: of a bucket; the step's is that of gradients.
    """

    def __init__(
        self,
        step: _core.BucketStep,
        parameters: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        strides: Sequence[Strides],
        memory: Memory | None = None,
    ) -> None:
        self._step, self._parameters, self._dtypes = step, parameters, dtypes
        self._strides = strides
        self._memory = memory or step.memory
        self.places: list[Place] = []
        self._bytes = Bytes()
        self._views: list[torch.Tensor | None] = []
        self._whole: dict[int, torch.Tensor] = {}
        self.addresses = [0] * len(parameters)  # of views that were made
        self._given: list[weakref.ref[torch.Tensor] | None] = [None] * len(parameters)  # aliases

    def forget(self) -> None:
        """Before they move. Views that users see keep their memory."""
        self._views.clear()
        self._whole.clear()
        self._bytes = Bytes()

    def learn(self, needed: Iterable[int]) -> None:
        """Looks up where gradients lie now. Makes the views of `needed` at once, not in the middle
        of a step; others, of large parameters, when they are needed."""
        self.forget()
        self.places = [Place(*place) for place in self._step.places]
        self._views = [None] * len(self._parameters)
        for i in needed:
            self.view(i)

    def versions(self) -> dict[int, int]:
        """Others when a program has written into a gradient."""
        return self._bytes.versions()

    def standing(self) -> bool:
        """Whether the views still refer to the buckets."""
        return self._bytes.standing()

    def memory(self, bucket: int) -> torch.Tensor:
        """Its bytes."""
        return self._bytes.whole(bucket, self._memory)

    def view(self, i: int) -> torch.Tensor:
        """The gradient's place. No program gets it: see Note [Who has a view of a bucket]."""
        view = self._views[i]
        if view is None:
            bucket, offset = self.places[i]
            p, dtype = self._parameters[i], self._dtypes[i]
            memory = self.memory(bucket)[offset : offset + p.numel() * dtype.itemsize]
            view = torch.as_strided(memory.view(dtype), p.shape, self._strides[i])
            self._views[i] = view
            self.addresses[i] = view.data_ptr()
        return view

    def whole(self, i: int) -> torch.Tensor:
        """All that stands in the bucket of parameter i, as numbers of its dtype, which all have."""
        known = self._whole.get(i)
        if known is None:
            bucket = self.memory(self.places[i].bucket)
            real = self._dtypes[i].to_real()
            size = len(bucket) // real.itemsize * real.itemsize
            known = self._whole[i] = bucket[:size].view(real)
        return known

    def alias(self, i: int) -> torch.Tensor:
        """A new tensor over the gradient's place, for the program, before that is written to.
        An older one that it still has, and not as ``p.grad``, keeps its values."""
        alias, given = self.view(i).detach(), self._given[i]
        older = None if given is None else given()
        if (
            older is not None
            and older is not self._parameters[i].grad
            and older.data_ptr() == alias.data_ptr()
        ):
            older.data = older.detach().clone()
        self._given[i] = weakref.ref(alias)
        return alias

    def is_held(self, i: int, grad: torch.Tensor) -> bool:
        """Whether the program has the gradient elsewhere than here, by another way than ``p.grad``.
        The caller has it in one variable."""
        return grad.data_ptr() != self.addresses[i] and is_held(grad, self._given[i])
