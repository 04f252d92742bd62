"""Gradients on a CUDA device, on their way into the reducer's buckets and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farandole import _core
from farandole._core import InvalidArgument
from farandole.torch import _devices


def device_of_all(named: Sequence[tuple[str, torch.Tensor]]) -> int | None:
    """The device of the parameters that lie on one. Raises InvalidArgument for several."""
    first: dict[int, str] = {}
    for name, p in named:
        if (device := _devices.device_of(p)) is not None:
            first.setdefault(device, name)
    if len(first) > 1:
        places = " and ".join(f"'{name}' on cuda:{device}" for device, name in first.items())
        raise InvalidArgument(
            f"the parameters of a DistributedOptimizer are on several devices: {places}\n"
            "  advice: give those of each device an optimizer of their own, or each device a rank"
        )
    return next(iter(first), None)


class OnDevice:
    """Those of one optimizer's gradients that lie on a device; it may have none.

    Args:
        device: what :func:`device_of_all` says of `named`.
    """

    def __init__(
        self,
        reducer: _core.Reducer,
        named: Sequence[tuple[str, torch.Tensor]],
        device: int | None,
    ) -> None:
        self.has = [_devices.device_of(p) is not None for _, p in named]
        self._names = [name for name, _ in named]
        self._device = device
        self._brought: dict[int, torch.Tensor] = {}  # in this step
        self._carrier = None
        if device is not None:
            self._carrier = _core.DeviceGradients(reducer, device, self.has)

    def bring(self, i: int, gradient: torch.Tensor, sparse_dims: int) -> None:
        """The reduced one will stand in the same memory."""
        if _devices.device_of(gradient) != self._device:
            raise self.misplaced(i, gradient)
        assert self._carrier is not None
        assert self._device is not None
        stream = _devices.current_stream(self._device)
        self._carrier.bring(i, gradient.data_ptr(), stream, gradient, sparse_dims)
        self._brought[i] = gradient

    def take_back(self, wanted: Sequence[int]) -> None:
        """When the step's buckets are reduced: what this thread puts into its stream from now on
        finds the reduced gradients. Waits for nobody."""
        if self._carrier is None:
            return
        assert self._device is not None
        back = [i for i in wanted if i in self._brought]
        self._carrier.take_back(back, _devices.current_stream(self._device))

    def taken(self, i: int) -> torch.Tensor | None:
        """Once; None where this rank had no gradient in this step."""
        return self._brought.pop(i, None)

    def forget(self) -> None:
        self._brought.clear()

    def misplaced(self, i: int, gradient: torch.Tensor) -> InvalidArgument:
        return misplaced(self._names[i], gradient, self._device if self.has[i] else None)


def misplaced(name: str, gradient: torch.Tensor, device: int | None) -> InvalidArgument:
    """`device`: where the parameter was; None: on the host."""
    was = "the CPU" if device is None else f"cuda:{device}"
    return InvalidArgument(
        f"the gradient of '{name}' is on {gradient.device}, and the parameter was on {was} when "
        "the DistributedOptimizer was made\n"
        "  advice: move the model first, and make the DistributedOptimizer then"
    )
