"""All queries of PyTorch about CUDA devices. Other modules go by what these functions return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole._core import InvalidArgument


def device_of(tensor: torch.Tensor) -> int | None:
    """The device that the tensor lies on, by number; None on the host."""
    return tensor.device.index if tensor.device.type == "cuda" else None


def current_stream(device: int) -> int:
    """The handle of this thread's current stream, as the driver knows it.

    Raises:
        InvalidArgument: the stream is being captured.
    """
    if is_captured(device):
        raise captured(device)
    return current_stream_or_graph(device)


def current_stream_or_graph(device: int) -> int:
    """The same for an operation that may become part of a graph, if the stream is captured."""
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream


def is_captured(device: int) -> bool:
    """Whether work that this thread queues on its stream becomes part of a CUDA graph."""
    if torch.cuda.current_device() == device:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def captured(device: int) -> InvalidArgument:
    """An operation runs once, when ranks have agreed on it: in a graph its event would never come,
    and the operation would wait for it for ever."""
    return InvalidArgument(
        f"the current stream of cuda:{device} is being captured (torch.cuda.graph), and no "
        "operation of farandole.torch can be part of a graph\n"
        "  advice: capture torch.distributed's collectives or farandole.all_reduce and its "
        "siblings, or what lies between operations"
    )


def new_empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A contiguous tensor where `like` lies, of its dtype."""
    return like.detach().new_empty(shape)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor if it is on the host, else a copy. Waits for the copy."""
    return tensor.cpu()


def read_later(tensor: torch.Tensor) -> Callable[[], float]:
    """A function that returns the one number of a tensor, as it is after the work now queued on
    this thread's stream. Calling it waits for that work."""
    device = tensor.device
    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    here.copy_(tensor, non_blocking=True)
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))

    def read() -> float:
        event.synchronize()
        return float(here.item())

    return read


def laid_out(tensor: torch.Tensor, strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A copy on the same device, of its shape and with these strides."""
    there = torch.empty_strided(tensor.shape, strides, dtype=dtype, device=tensor.device)
    return there.copy_(tensor)


def copied_to(like: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor on the host where `like` lies, of the same strides. Waits until it has
    been read."""
    return tensor.to(like.device, copy=True)


def finish_work(device: int) -> None:
    """Waits for the work that this thread has queued on its stream, unless that is captured."""
    if not is_captured(device):
        torch.cuda.current_stream(device).synchronize()


def future_of(tensors: Sequence[torch.Tensor]) -> torch.futures.Future[object]:
    """A future whose value has these tensors. On devices, the waiting thread's streams wait for the
    work that the completing thread has queued on its own."""
    devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
    return torch.futures.Future(devices=list(devices)) if devices else torch.futures.Future()


def knows_cuda() -> bool:
    """Whether this PyTorch was built for devices, whether or not there are any."""
    return torch.version.cuda is not None
