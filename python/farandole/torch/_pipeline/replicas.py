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


class ReplicaGradients:
    """The gradients of a stage, which are reduced over its replicas at the end of a step.

    Collective, as are its methods.
    """

    def __init__(self, module: nn.Module, reduction: Reduction) -> None:
        self._module, self._reduction = module, reduction
        self._exchange: GradientExchange | None = None
        self.exchange()

    def exchange(self) -> GradientExchange | None:
        """The exchange; None while no parameter of the stage learns. It may be unfrozen later."""
        if self._exchange is not None:
            return self._exchange
        named = list(self._module.named_parameters())
        managed = [(n, p) for n, p in reversed(named) if p.requires_grad and p.numel() > 0]
        if not managed:
            return None
        self._exchange = GradientExchange(
            own_group_of(self._reduction.process_set),
            managed,
            self._reduction,
            weights=named,
            line=_LINE,
            limits=Limits.of(None, None, None),
            looks=False,  # a step does, for all stages
        )
        self._exchange.open = True  # backward passes only accumulate; a step's end reduces
        return self._exchange
