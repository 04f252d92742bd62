"""A rank without further batches: it takes part in what the others do, with nothing of its own.

Operations by name are answered by the core alone, out of the order that rank 0 makes. Steps of a
DistributedOptimizer have no such order; here the core sees that a peer has begun one, and takes the
same step with zeros. What needs more of a rank than zeros is refused, on every rank.
"""

from __future__ import annotations

from farandole import _world
from farandole.torch._entries import public
from farandole.torch._operations import calls
from farandole.torch._operations.handles import wait
from farandole.torch._training.exchange import GradientExchange
from farandole.torch._training.hooked import hearing
from farandole.torch._training.shards import Shards

__all__ = ["join"]


@public
def join(device: int = -1) -> int:  # noqa: ARG001 - Horovod's signature
    """Takes part in the others' operations, with nothing of its own, until all ranks have joined:
    for a rank that has no more batches.

    To a reduction a joined rank adds nothing (zeros, and averages still divide by all ranks); of
    what is gathered it has no rows. A broadcast from a joined rank is a ``Mismatch``.

    In the steps of a ``DistributedOptimizer`` its gradients are zeros. Its own parameters and its
    optimizer's state stay as they are: broadcast them from the rank that joined last. Gradients
    that it still has, accumulated and not reduced, are dropped when others step.

    Returns:
        The last rank to join: the same on every rank.

    Raises:
        Deadlock: a rank began what a joined one cannot take part in (a step with ``op=Adasum`` or
            ``sharded_update=True``, SyncBatchNorm, making an optimizer); on every rank.
        EarlyExit: a rank ended without joining.

    Examples:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> hvd.join()
        0
    """
    epoch = _world.epoch()
    mine = [each for each in hearing if each.epoch == epoch]
    exchanges = [each for each in mine if isinstance(each, GradientExchange)]
    updates = [each.update for each in mine if isinstance(each, Shards)]
    names = calls.names()
    steps = [0] * len(exchanges)
    try:
        for each in exchanges:
            each.before_joining()
        handle = names.join()
        steps = names.serve_as_proxy(handle, [e.reducer for e in exchanges], updates)
        # A rank that hears later that all have joined must not stand in for a step of afterwards.
        _world.world().barrier("end of join", None)
        last: int = wait(handle)
    finally:
        for each, count in zip(exchanges, steps, strict=True):
            each.after_joining(count)
    return last
