"""Gradients on CUDA devices: reduced there, or on their way into the reducer's buckets and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole import _core
from farandole._core import InvalidArgument
from farandole.torch import _devices


class OnDevices:
    """The gradients of one optimizer that are on devices; there may be none."""

    def __init__(self, reducer: _core.Reducer, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._devices = [_devices.device_of(p) for _, p in named]
        self.has = [device is not None for device in self._devices]
        self._names = [name for name, _ in named]
        self._brought: dict[int, torch.Tensor] = {}  # in this step
        self._carriers = {
            device: _core.DeviceGradients(reducer, device, [d == device for d in self._devices])
            for device in several(self._devices)
        }

    def bring(self, i: int, gradient: torch.Tensor, sparse_dims: int) -> None:
        """The reduced one will stand in the same memory."""
        device = self._devices[i]
        if device is None or _devices.device_of(gradient) != device:
            raise self.misplaced(i, gradient)
        stream = _devices.current_stream(device)
        self._carriers[device].bring(i, gradient.data_ptr(), stream, gradient, sparse_dims)
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

    def misplaced(self, i: int, gradient: torch.Tensor) -> InvalidArgument:
        return misplaced(self._names[i], gradient, self._devices[i])


def several(devices: Sequence[int | None]) -> list[int]:
    """The different devices in order, without the host (None)."""
    return sorted({device for device in devices if device is not None})


def misplaced(name: str, gradient: torch.Tensor, device: int | None) -> InvalidArgument:
    """`device`: where the parameter was; None: on the host."""
    was = "the CPU" if device is None else f"cuda:{device}"
    return InvalidArgument(
        f"the gradient of '{name}' is on {gradient.device}, and the parameter was on {was} when "
        "the DistributedOptimizer was made\n"
        "  advice: move the model first, and make the DistributedOptimizer then"
    )
