"""Between the replicas of a stage: equal weights at the start, and the mean of gradients."""

from __future__ import annotations

from torch import nn

from farandole._limits import Limits
from farandole.common._process_set import ProcessSet, own_group_of
from farandole.common._reduction import Reduction
from farandole.torch._tensors import borrow
from farandole.torch._training.exchange import GradientExchange

_LINE = "pipeline.load_state_dict(state), of the same state on every rank"


def share_first_replica(module: nn.Module, replicas: ProcessSet) -> None:
    """Gives all replicas the values of the first. Collective."""
    group = own_group_of(replicas)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.numel() == 0:
            continue
        flat = tensor.detach().contiguous()
        data = borrow(flat)
        group.run("broadcast", data, data, root=0, name=f"first value of '{name}'")
        if group.rank > 0 and flat.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(flat)


def exchange_of(module: nn.Module, reduction: Reduction) -> GradientExchange | None:
    """The exchange that reduces gradients at the end of a step; None where the stage has no
    parameters that learn. Collective."""
    named = list(module.named_parameters())
    managed = [(n, p) for n, p in reversed(named) if p.requires_grad and p.numel() > 0]
    if not managed:
        return None
    exchange = GradientExchange(
        own_group_of(reduction.process_set),
        managed,
        reduction,
        weights=named,
        line=_LINE,
        limits=Limits.of(None, None, None),
        looks=False,  # a step does, for all stages
    )
    exchange.open = True  # backward passes only accumulate; a step's end reduces
    return exchange
