"""How a GlobalBatch begins: its arguments, and that all ranks begin alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument, NotInitialized
from farandole.common._objects import agree_prepared, attempt
from farandole.common._reduction import Sum
from farandole.torch._training import worlds
from farandole.torch._training.reduced import ReducedOptimizer
from farandole.torch._training.sharded import ShardedOptimizer
from farandole.torch._training.weights import RestOfModel
from farandole.torch._training.wrapped import WrappedOptimizer
from farandole.torch.functions import broadcast_optimizer_state, broadcast_parameters
from farandole.torch.optimizer import DistributedOptimizer
from farandole.torch.sync_batch_norm import SyncBatchNorm


def prepare_alike(
    prepare: Callable[[], None], model: Any, optimizer: Any, logical_ranks: Any
) -> None:
    """Prepares each rank by itself; if one of them fails, all raise an error. Collective.

    Not collective in an elastic job, where ranks begin at different times (_training/worlds.py)."""
    _, error = attempt(prepare)
    if _world.size() > 1 and not worlds.makes_later():
        rows = [
            "no model" if model is None else "a model",
            "no optimizer" if optimizer is None else "an optimizer",
            f"logical_ranks={logical_ranks}",
        ]
        advice = "give every rank the same arguments"
        agree_prepared("GlobalBatch()", "the arguments of GlobalBatch", rows, error, advice, None)
    elif error is not None:
        raise error


def check_arguments(
    loader: Any, model: Any, optimizer: Any, at_once: Any, count: Any, options: dict[str, Any]
) -> None:
    for name, value, kind, what in [
        ("loader", loader, DataLoader, "a torch.utils.data.DataLoader"),
        ("model", model, torch.nn.Module, "a module of PyTorch"),
        ("optimizer", optimizer, torch.optim.Optimizer, "an optimizer of PyTorch"),
    ]:
        if not isinstance(value, kind) and not (value is None and name != "loader"):
            raise InvalidArgument(f"GlobalBatch(): {name} is {shown(value)}; it is {what}")
    whole = isinstance(at_once, int) and not isinstance(at_once, bool) and at_once > 0
    if at_once is not None and not whole:
        raise InvalidArgument(
            f"GlobalBatch(): micro_batch_size is {shown(at_once)}; it is a whole number of at "
            "least 1, the samples that a rank computes on at once"
        )
    if count is not None and not callable(count):
        raise InvalidArgument(
            f"GlobalBatch(): count is {shown(count)}; it is a function of a batch"
        )
    for name in ("op", "backward_passes_per_step", "process_set"):
        if name in options:
            raise InvalidArgument(
                f"GlobalBatch() takes no {name}: gradients are averaged over all ranks, once per "
                "batch"
            )
    if options and optimizer is None:
        raise InvalidArgument(
            f"GlobalBatch(): {', '.join(options)} without an optimizer, whose options these are"
        )
    if optimizer is not None and model is None:
        raise InvalidArgument("GlobalBatch(): an optimizer without its model")


def share_between_ranks(
    model: Any, optimizer: Any, options: dict[str, Any], logical_ranks: int | None
) -> None:
    """Gives all ranks the same weights, and an optimizer that updates them alike. Collective. In an
    elastic job, ranks share their state later."""
    shares = _world.size() > 1 and not worlds.makes_later()
    if model is not None and shares:
        broadcast_parameters(model.state_dict(), root_rank=0)
    if optimizer is None or model is None:
        return
    if isinstance(optimizer, WrappedOptimizer):
        _check_wrapped(optimizer, options, logical_ranks)
    else:
        if shares:
            broadcast_optimizer_state(optimizer, root_rank=0)
        if logical_ranks is not None:
            options = {**options, "op": Sum}
        DistributedOptimizer(optimizer, model.named_parameters(), **options)
    assert isinstance(optimizer, WrappedOptimizer)
    optimizer.take_weighed_losses_only()


def _check_wrapped(
    optimizer: WrappedOptimizer, options: dict[str, Any], logical_ranks: int | None
) -> None:
    """Refuses a DistributedOptimizer unless it is that of another GlobalBatch like this one."""
    if options or not optimizer.weighed_only:
        raise InvalidArgument(
            "GlobalBatch(): the optimizer is a DistributedOptimizer already\n  advice: pass "
            "the optimizer of one process, and options of DistributedOptimizer here"
        )
    parts = optimizer.parts if isinstance(optimizer, ReducedOptimizer) else None
    before = None if parts is None else parts.of_batch
    if before != logical_ranks:
        raise InvalidArgument(
            f"GlobalBatch(): logical_ranks={logical_ranks}, and the optimizer is that of another "
            f"GlobalBatch, of logical_ranks={before}\n  advice: the same for both"
        )


def compare_everything(model: Any, optimizer: Any) -> None:
    """From now on ranks compare all tensors that should be equal. Collective."""
    if isinstance(optimizer, WrappedOptimizer):
        sharded = isinstance(optimizer, ShardedOptimizer)
        optimizer.compare_also(RestOfModel(model, optimizer, _buffers_alike, sharded=sharded))


def _buffers_alike(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """With logical ranks all, as the batch began. Else a buffer may have what a rank's own samples
    gave, but for those of layers that normalize over all samples."""
    parts = optimizer.parts if isinstance(optimizer, ReducedOptimizer) else None
    shared = model.state_dict(keep_vars=True).keys()  # by the broadcast
    buffers = {n: buffer for n, buffer in model.named_buffers() if n in shared}
    if parts is not None:
        return {n: parts.buffers.get(n, buffer) for n, buffer in buffers.items()}
    joint = {n for n, each in model.named_modules() if isinstance(each, SyncBatchNorm)}
    return {n: buffer for n, buffer in buffers.items() if n.rpartition(".")[0] in joint}


def refuse_other_worlds(kept: bool, epoch: int | None) -> None:
    """Before a loop. Raises InvalidArgument or NotInitialized.

    Args:
        kept: a state has the GlobalBatch, or it is of one world.
        epoch: of the world that it is in; None: it waits for its first one.
    """
    if not kept:
        raise InvalidArgument(
            "a GlobalBatch in an elastic job is a part of the state, which would else go back "
            "without it\n  advice: hvd.elastic.TorchState(model, optimizer, batches=batches)"
        )
    if epoch is None:
        raise InvalidArgument(
            "a loop over a GlobalBatch outside of elastic.run, in an elastic job: other ranks may "
            "be elsewhere\n  advice: loop inside of the function that it decorates"
        )
    if epoch != _world.epoch():
        raise NotInitialized(
            "the world that this GlobalBatch was made in has ended\n  advice: make it again after "
            "init(); in an elastic job make it before elastic.run"
        )
