"""PyTorch's tensors on the fake driver's device. PyTorch here knows no devices: these are CPU
tensors in the fake device's memory, of which farandole.torch is told that they lie there. What
PyTorch does to them it does at once, not in the order of a stream: a test lets the device come to
rest before it looks at a result, and leaves alone what is on its way. All else is as on a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from fake_device import Rank

from farandole.torch import _devices


class _Block:
    """For Machine.leave(), which frees it."""

    def __init__(self, rank: Rank, nbytes: int, device: int) -> None:
        self.machine, self.device = rank.machine, device
        with self.machine.on(device):
            self.address = self.machine.allocate(nbytes)
        self.machine.arrays.append(self)  # type: ignore[arg-type]

    def free(self) -> None:
        self.machine.call("cuMemFree_v2", ctypes.c_ulonglong(self.address))


class Tensors:
    """Makes them, and stands for what _devices asks PyTorch."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.blocks: list[tuple[int, int, int]] = []  # begin, end, device
        self.streams_asked_for = 0
        self.captures = False  # as if a graph were being captured
        for name in vars(_devices).keys() & vars(type(self)).keys():
            if not name.startswith("_"):
                setattr(_devices, name, getattr(self, name))

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: int = 0) -> torch.Tensor:
        count = torch.Size(shape).numel()
        nbytes = max(count, 1) * dtype.itemsize
        block = _Block(self.rank, nbytes, device)
        self.blocks.append((block.address, block.address + nbytes, device))
        memory = (ctypes.c_char * nbytes).from_address(block.address)
        return torch.frombuffer(memory, dtype=dtype)[:count].view(shape)

    def put(self, tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
        return self.laid_out(tensor.detach(), tensor.stride(), tensor.dtype, device)

    def settle(self) -> None:
        """The program's streams have nothing left to do; what they wait for is done."""
        for device, stream in self.rank.machine.streams.items():
            with self.rank.machine.on(device):
                self.rank.machine.call("cuStreamSynchronize", stream)

    # The functions of _devices.

    def device_of(self, tensor: torch.Tensor) -> int | None:
        address = tensor.untyped_storage().data_ptr()  # which an empty tensor has, too
        return next((d for begin, end, d in self.blocks if begin <= address < end), None)

    def current_stream(self, device: int) -> int:
        if self.captures:
            raise _devices.captured(device)
        return self.current_stream_or_graph(device)

    def current_stream_or_graph(self, device: int) -> int:
        self.streams_asked_for += 1
        return self.rank.machine.streams[device].value or 0

    def is_captured(self, device: int) -> bool:  # noqa: ARG002
        return self.captures

    def new_empty(self, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        device = self.device_of(like)
        if device is None:
            return like.detach().new_empty(shape)
        return self.empty(shape, like.dtype, device)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def read_later(self, tensor: torch.Tensor) -> Callable[[], float]:
        return tensor.item  # type: ignore[return-value]

    def laid_out(
        self,
        tensor: torch.Tensor,
        strides: Sequence[int],
        dtype: torch.dtype,
        device: int | None = None,
    ) -> torch.Tensor:
        there = self.empty(
            (tensor.numel(),), dtype, self.device_of(tensor) or 0 if device is None else device
        )
        return torch.as_strided(there, tensor.shape, strides).copy_(tensor)

    def finish_work(self, device: int) -> None:  # noqa: ARG002
        self.settle()

    def future_of(self, tensors: Sequence[torch.Tensor]) -> torch.futures.Future[object]:
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        return torch.futures.Future()

    def copied_to(self, like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        return self.put(tensor, self.device_of(like) or 0)


def here_and_there(
    make: Callable[[], torch.nn.Module], tensors: Tensors, device: int = 0
) -> Iterator[Any]:
    """A module on the host, then one like it on a device."""
    for on_device in (False, True):
        module = make()
        if on_device:
            list(parameters_on(tensors, module, device))
        yield module
        del module


def parameters_on(
    tensors: Tensors, module: torch.nn.Module, device: int = 0
) -> Iterator[torch.nn.Parameter]:
    """Moves a module to a device. Its gradients are made on the host, and moved there before
    anybody hears of them."""

    def moved(p: torch.Tensor) -> None:
        assert p.grad is not None
        if tensors.device_of(p.grad) is None:
            p.grad = tensors.put(p.grad, device)

    for p in module.parameters():
        p.data = tensors.put(p.data, device)
        p.register_post_accumulate_grad_hook(moved)
        yield p
