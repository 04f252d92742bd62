"""Gradients on CUDA devices: reduced there, or on their way into the reducer's buckets and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, TypeVar

import torch

from farandole import _core
from farandole._core import InvalidArgument
from farandole.torch import _devices

C = TypeVar("C", _core.DeviceGradients, _core.DeviceShards)


class Carriers(Generic[C]):
    """The parameters of one optimizer that are on devices, each brought by its device's carrier;
    there may be none.

    Args:
        make: a device's, from whether each parameter lies there.
    """

    def __init__(
        self, make: Callable[[int, list[bool]], C], named: Sequence[tuple[str, torch.Tensor]]
    ) -> None:
        self._devices = [_devices.device_of(p) for _, p in named]
        self.has = [device is not None for device in self._devices]
        self._names = [name for name, _ in named]
        several = sorted({device for device in self._devices if device is not None})
        self._carriers: dict[int, C] = {
            d: make(d, [of == d for of in self._devices]) for d in several
        }

    def _of(self, i: int, gradient: torch.Tensor) -> tuple[C, int]:
        """The carrier of a gradient, and the stream in which it is made."""
        device = self._devices[i]
        if device is None or _devices.device_of(gradient) != device:
            raise self.misplaced(i, gradient)
        return self._carriers[device], _devices.current_stream(device)

    def misplaced(self, i: int, gradient: torch.Tensor) -> InvalidArgument:
        device = self._devices[i]
        was = "the CPU" if device is None else f"cuda:{device}"
        return InvalidArgument(
            f"the gradient of '{self._names[i]}' is on {gradient.device}, and the parameter was on "
            f"{was} when the DistributedOptimizer was made\n"
            "  advice: move the model first, and make the DistributedOptimizer then"
        )


class OnDevices(Carriers[_core.DeviceGradients]):
    """Gradients that are reduced."""

    def __init__(self, reducer: _core.Reducer, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        super().__init__(partial(_core.DeviceGradients, reducer), named)
        self._brought: dict[int, torch.Tensor] = {}  # in this step

    def bring(self, i: int, gradient: torch.Tensor, sparse_dims: int) -> None:
        """The reduced one will stand in the same memory."""
        carrier, stream = self._of(i, gradient)
        carrier.bring(i, gradient.data_ptr(), stream, gradient, sparse_dims)
        self._brought[i] = gradient

    def take_back(self, wanted: Sequence[int]) -> None:
        """Called when the step's buckets are reduced: work that this thread queues on its streams
        from now on finds the reduced gradients. The host does not wait."""
        for device, carrier in self._carriers.items():
            back = [i for i in wanted if i in self._brought and self._devices[i] == device]
            carrier.take_back(back, _devices.current_stream(device))

    def taken(self, i: int) -> torch.Tensor | None:
        """The gradient, once; None where this rank had none in this step."""
        return self._brought.pop(i, None)

    def forget(self) -> None:
        self._brought.clear()
