"""The collectives as autograd records them: forward is the call, backward another collective.

A gradient is itself recorded, so that it can be differentiated again.
"""

from __future__ import annotations

from typing import Any

import torch

from farandole import _world
from farandole._core import InvalidArgument
from farandole.torch import _calls
from farandole.torch._process_set import global_process_set
from farandole.torch._reductions import Average, Sum, op_name


def apply(function: Any, *arguments: Any) -> torch.Tensor:
    """Runs one of the functions below, with the arguments of its call, and records it."""
    result: torch.Tensor = function.apply(*arguments)
    return result


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        return _calls.allreduce(tensor, *how).run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        name, op, *rest = ctx.how
        if op not in (Average, Sum):
            raise InvalidArgument(f"allreduce with op={op_name(op)} has no gradient")
        result = apply(AllReduce, grad.contiguous(), name and f"gradient of {name}", op, *rest)
        return (result, *(None for _ in ctx.how))


def _averaged(grad: torch.Tensor) -> torch.Tensor:
    return apply(AllReduce, grad.contiguous(), None, Average, 1.0, 1.0, global_process_set)


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        return _calls.broadcast(tensor, *how).run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        averaged = _averaged(grad)
        if _world.rank() != ctx.how[0]:
            averaged = torch.zeros_like(averaged)
        return (averaged, *(None for _ in ctx.how))


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        call = _calls.allgather(tensor, *how)
        ctx.how, ctx.rows = how, tensor.shape[0]
        return call.run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        averaged = _averaged(grad)
        rows = _calls.allgather(torch.tensor([ctx.rows]), None, global_process_set).run()
        begin = int(rows[: _world.rank()].sum())
        return (averaged[begin : begin + ctx.rows], *(None for _ in ctx.how))


class ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.how = how
        return _calls.reducescatter(tensor, *how).run()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _, op, _, prescale_factor, postscale_factor = ctx.how
        factor = prescale_factor * postscale_factor * (_world.size() if op == Sum else 1)
        whole = apply(AllGather, (grad * factor).contiguous(), None, global_process_set)
        return (whole, *(None for _ in ctx.how))
