"""A sharded update's gradients and parameters that lie on CUDA devices: updated there, or on their
way into the update's buckets, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from farandole import _core
from farandole._core import InvalidArgument
from farandole.torch import _devices
from farandole.torch._training.layouts import Strides
from farandole.torch._training.on_device import Carriers


class DeviceShards(Carriers[_core.DeviceShards]):
    """Parameters and gradients of a sharded update. They stay where they are.

    Args:
        named: the parameters, in the update's order.
        strides: of each parameter and its gradient; the same on all ranks.
    """

    def __init__(
        self,
        update: _core.ShardedUpdate,
        named: Sequence[tuple[str, torch.Tensor]],
        strides: Sequence[Strides],
    ) -> None:
        super().__init__(partial(_core.DeviceShards, update), named)
        self._named = named
        self._strides = strides
        self._update = update
        # By parameter: address and version of the gradient that stands in the bucket.
        self._brought: dict[int, tuple[int, int]] = {}
        for (_, p), there, agreed in zip(named, self.has, strides, strict=True):
            if there and p.stride() != agreed:  # with gaps, or others than another rank's
                p.data = _devices.laid_out(p.detach(), agreed, p.dtype)
        self._steps = list(update.steps)  # before the present update

    def bring(self, i: int, gradient: torch.Tensor) -> torch.Tensor:
        """Copies a gradient to its bucket, after the work now in this thread's stream. Returns the
        gradient to use from now on: the same, unless it had to be laid out otherwise."""
        carrier, stream = self._of(i, gradient)
        _, p = self._named[i]
        if gradient.stride() != self._strides[i] or gradient.dtype != p.dtype:
            gradient = _devices.laid_out(gradient, self._strides[i], p.dtype)
        carrier.bring(i, gradient.data_ptr(), stream, gradient)
        self._brought[i] = gradient.data_ptr(), gradient._version
        return gradient

    def stands(self, i: int, gradient: torch.Tensor) -> bool:
        """Whether that gradient is in its bucket, with all that PyTorch counts as changes."""
        return self._brought.get(i) == (gradient.data_ptr(), gradient._version)

    def bring_values(self) -> None:
        """Before an update."""
        self._steps = list(self._update.steps)
        streams = {device: _devices.current_stream(device) for device in self._carriers}
        for i, (name, p) in enumerate(self._named):
            device = self._devices[i]
            if device is None:
                continue
            if _devices.device_of(p) != device or p.stride() != self._strides[i]:
                raise moved_away(name)
            self._carriers[device].bring_value(i, p.data_ptr(), streams[device])

    def end(self) -> None:
        """Called after an update: work that this thread queues on its streams from now on finds the
        new parameters. The host does not wait."""
        if not self._carriers:
            return
        back: dict[int, list[tuple[int, int]]] = {}
        new = enumerate(zip(self._named, self._steps, self._update.steps, strict=True))
        for i, ((_, p), before, after) in new:
            device = self._devices[i]
            if device is not None and after != before:
                back.setdefault(device, []).append((i, p.data_ptr()))
        for device, values in back.items():
            self._carriers[device].take_back(values, _devices.current_stream(device))

    def forget(self) -> None:
        """Gradients that were brought count no more."""
        self._brought.clear()


def changed_since(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"the gradient of '{name}', or one that shares its bucket, was changed after backward(), "
        "where gradients are this rank's own and not yet the mean\n  advice: clip with "
        "optimizer.clip_grad_norm_(); what else changes gradients needs sharded_update=False"
    )


def read_by_torch() -> InvalidArgument:
    return InvalidArgument(
        "clip_grad_norm_(), clip_grad_value_() or get_total_norm() of torch.nn.utils with "
        "sharded_update=True: they would see this rank's own gradients, and not the mean\n"
        "  advice: clip with optimizer.clip_grad_norm_(), which returns the norm; what else reads "
        "gradients needs sharded_update=False"
    )


def moved_away(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"parameter '{name}' was converted, reshaped or moved to or on a device after "
        "DistributedOptimizer(sharded_update=True) was made\n"
        "  advice: move and convert models before"
    )
