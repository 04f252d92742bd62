"""Batch normalization over the batches of all ranks, which may differ in length.

A rank's statistics are its count, mean and sum of squared distances from that mean. All ranks
gather those of all, and join them in rank order: every rank computes the same bits. In backward two
sums per channel are reduced. On one rank it is the plain layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from farandole import _world
from farandole._arguments import explained
from farandole._core import InvalidArgument
from farandole.torch._entries import entry, public
from farandole.torch._tensors import exchange

__all__ = ["SyncBatchNorm", "convert_sync_batchnorm"]


def _is_device(value: Any) -> bool:
    try:
        return value is None or isinstance(torch.device(value), torch.device)
    except (TypeError, RuntimeError, ValueError):
        return False


_A_DEVICE = ("a device of PyTorch", _is_device)


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.BatchNorm1d/2d/3d`` over the joined batch of all ranks.

    Every rank calls it in the same order, with (N, C, …) of the same C; N may differ, and be 0. In
    eval mode, and on one rank, nothing is exchanged. Works on the CPU.

    Args:
        num_features: C.
        eps: as in ``torch.nn.BatchNorm2d``.
        momentum: likewise.
        affine: likewise.
        track_running_stats: likewise.

    Raises:
        InvalidArgument: the input has fewer than two dimensions, or another C.
        ValueError: all ranks together have one value per channel only.

    Examples:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> layer = hvd.SyncBatchNorm(3)
        >>> layer(torch.randn(4, 3, 8, 8)).shape
        torch.Size([4, 3, 8, 8])
    """

    counts = True  # False: what this rank computes on belongs to no batch (GlobalBatch)

    @explained(device=_A_DEVICE)
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise InvalidArgument(
                f"input of shape {list(input.shape)} is not (N, {self.num_features}, …)"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)  # that of a program's class, where it is derived
        SyncBatchNorm._check_input_dim(self, input)
        vars(self)["_reached"] = True
        if not self.training or not _is_shared():
            return super().forward(input)
        return self._synchronized(input)

    @entry()
    def _synchronized(self, input: torch.Tensor) -> torch.Tensor:
        normalize: Any = _Normalize.apply
        out, mean, var, count = normalize(input, self.weight, self.bias, self.eps, self.counts)
        if self.track_running_stats and self.running_mean is not None:
            self._track(mean, var, int(count))
        result: torch.Tensor = out
        return result

    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        unbiased = var * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


@public
def convert_sync_batchnorm(module: torch.nn.Module) -> torch.nn.Module:
    """The module, in which every batch normalization (1d to 3d, and torch's own synchronized one)
    has become a `SyncBatchNorm`. Each layer stays the same object: it keeps its parameters,
    statistics, hooks and attributes. A layer of a class of your own also keeps what that class
    adds.

    Make the optimizer before or after.

    Raises:
        InvalidArgument: a lazy layer that has seen no batch, or one of a class derived from torch's
            synchronized layer; nothing was converted.

    Examples:
        >>> import torch, farandole.torch as hvd
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4))
        >>> type(hvd.convert_sync_batchnorm(model)[1]).__name__
        'SyncBatchNorm'
    """
    layers = [
        each
        for each in module.modules()
        if isinstance(each, _BatchNorm) and not isinstance(each, SyncBatchNorm)
    ]
    kinds = [_synchronized_class(type(layer)) for layer in layers]
    for layer, kind in zip(layers, kinds, strict=True):
        layer.__class__ = kind
    return module


_OF_TORCH = (
    torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm,
)  # fmt: skip


def _make_class(own: type[_BatchNorm]) -> type[SyncBatchNorm]:
    """The class of a converted layer. For a class of the program's it is a child, whose methods
    find those of SyncBatchNorm where they call torch's by super()."""
    if issubclass(own, torch.nn.modules.lazy.LazyModuleMixin):
        raise InvalidArgument(
            f"{own.__name__} does not know its features yet; run the model once first"
        )
    if own in _OF_TORCH:
        return SyncBatchNorm
    if issubclass(own, torch.nn.SyncBatchNorm):
        raise InvalidArgument(
            f"{own.__name__} is derived from torch.nn.SyncBatchNorm, which would go on exchanging "
            "by torch.distributed\n  advice: derive it from BatchNorm1d, 2d or 3d"
        )
    names = {name: getattr(own, name) for name in ("__module__", "__qualname__", "__doc__")}
    methods = {"forward": _checked_forward, "__reduce_ex__": _reduce, "_own": own}
    return type(own.__name__, (own, SyncBatchNorm), names | methods)


_cached: Any = cache(_make_class)  # a class is hashable, which mypy does not see
_synchronized_class: Callable[[type[_BatchNorm]], type[SyncBatchNorm]] = _cached


def _checked_forward(layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls forward() of the program's class, which must reach SyncBatchNorm's."""
    vars(layer)["_reached"] = False
    result = layer._own.forward(layer, *args, **kwargs)
    if layer.training and not layer._reached and _is_shared():
        raise InvalidArgument(
            f"forward() of {type(layer).__name__} normalizes by itself, with this rank's batch "
            "alone, where convert_sync_batchnorm() should normalize over all ranks\n"
            "  advice: call super().forward(input) in it"
        )
    return result


def _reduce(layer: Any, protocol: Any) -> Any:  # noqa: ARG001
    """Copies and pickles: the class is made again."""
    return _new, (layer._own,), vars(layer).copy()


def _new(own: type[_BatchNorm]) -> Any:
    kind: Any = _synchronized_class(own)
    return kind.__new__(kind)


def _is_shared() -> bool:
    return _world.is_initialized() and _world.size() > 1


def _channels(x: torch.Tensor, per_channel: torch.Tensor) -> torch.Tensor:
    """Per-channel values in a shape that broadcasts over x."""
    return per_channel.view(1, -1, *(1,) * (x.dim() - 2))


def _statistics(x: torch.Tensor, counted: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Mean and biased variance per channel, in float64, and the count, over all ranks; of this one
    nothing if it is not `counted`."""
    channels = x.shape[1]
    mine = torch.zeros(1 + 2 * channels, dtype=torch.float64)
    count = x.numel() // channels if counted else 0
    if count > 0:
        dims = [d for d in range(x.dim()) if d != 1]
        var, mean = torch.var_mean(x, dims, correction=0)
        mine[0] = count
        mine[1 : 1 + channels] = mean
        mine[1 + channels :] = var.double() * count
    table = torch.empty(_world.size(), len(mine), dtype=torch.float64)
    exchange("all_gather", mine, table, "statistics of SyncBatchNorm")
    counts, means, spreads = torch.split(table, [1, channels, channels], dim=1)
    total = int(counts.sum())
    if total <= 1:
        raise ValueError(
            f"all ranks together have {total} values per channel, and training needs at least 2"
        )
    mean = (counts * means).sum(0) / total
    # A rank's squared distances from its own mean, and that mean's from the common one.
    var = (spreads + counts * (means - mean) ** 2).sum(0) / total
    return mean, var, total


class _Normalize(torch.autograd.Function):
    """(out, mean, var, count) of an input; the last three are not differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        counts: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        mean, var, total = _statistics(wide, counts)
        inverse = torch.rsqrt(var + eps).to(wide.dtype)
        narrow_mean, narrow_var = mean.to(wide.dtype), var.to(wide.dtype)
        out = (
            functional.batch_norm(
                wide,
                narrow_mean,
                narrow_var,
                weight.to(wide.dtype) if weight is not None else None,
                bias.to(wide.dtype) if bias is not None else None,
                training=False,
                eps=eps,
            )
            if wide.numel() > 0
            else wide.clone()
        )
        ctx.save_for_backward(x, weight, narrow_mean, inverse)
        ctx.total, ctx.counts = total, counts
        count = torch.tensor(total)
        ctx.mark_non_differentiable(mean, var, count)
        return out.to(x.dtype), mean, var, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
        x, weight, mean, inverse = ctx.saved_tensors
        dims = [d for d in range(x.dim()) if d != 1]
        wide, grad = x.to(mean.dtype), grad.to(mean.dtype)
        centred = wide - _channels(x, mean)
        # Σ dy and Σ dy·(x - mean), of this rank: what the parameters' gradients are made of.
        sums = torch.stack([grad.sum(dims), (grad * centred).sum(dims)]).double()
        own = sums.clone()
        grad_x = None
        if ctx.needs_input_grad[0]:
            exchange("all_reduce", sums, sums, "gradients of SyncBatchNorm")
            grad_mean, grad_spread = (sums / ctx.total).to(mean.dtype)
            scale = inverse if weight is None else inverse * weight.to(mean.dtype)
            grad_x = grad - _channels(x, grad_mean)
            grad_x -= centred * _channels(x, inverse**2 * grad_spread)
            grad_x = (grad_x * _channels(x, scale) * ctx.counts).to(x.dtype)
        grad_bias, grad_weight = own[0], own[1] * inverse.double()
        return (
            grad_x,
            grad_weight.to(weight.dtype) if weight is not None else None,
            grad_bias.to(weight.dtype) if weight is not None else None,
            None,
            None,
        )
