"""DistributedOptimizer: an optimizer whose gradients are the mean over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole._limits import Limits
from farandole._one_world import refuse_in_elastic_jobs
from farandole.common import _reduction
from farandole.common._process_set import (
    ProcessSet,
    check_process_set,
    global_process_set,
    group_of,
)
from farandole.common._reduction import Adasum, Average, Sum, check_passes
from farandole.torch._entries import public
from farandole.torch._training import adasum, reduced, sharded, worlds
from farandole.torch._training.parameters import groups_of, named_of
from farandole.torch._training.wrapped import WrappedOptimizer
from farandole.torch.compression import Compression, Compressor

if TYPE_CHECKING:

    class Distributed(torch.optim.Optimizer, Any):  # type: ignore[misc]
        """The optimizer that was given, with these methods, too. Python has no type for both: by
        `Any` it may stand where the optimizer's own class is asked for, and has its attributes."""

        def synchronize(self) -> None: ...
        def skip_synchronize(self) -> AbstractContextManager[None]: ...
        def no_sync(self) -> AbstractContextManager[None]: ...
        def set_backward_passes_per_step(self, passes: int) -> None: ...
        def clip_grad_norm_(
            self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
        ) -> torch.Tensor: ...


class _Reduction(_reduction.Reduction):
    ops: ClassVar[tuple[int, ...]] = (Average, Sum, Adasum)


@public
def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | None = None,
    in_place_bytes: int | None = None,
    overlap: bool = True,
    sharded_update: bool = False,
) -> Distributed:
    """Makes the optimizer step with gradients averaged over all ranks.

    Gradients are reduced while backward still computes others; when ``backward()`` returns they are
    the same on all ranks, so that clipping, ``GradScaler`` and your own code see reduced ones.

    As the first gradients have been reduced, ranks compare checksums of the optimizer's parameters:
    ``backward()`` (with Adasum and a sharded update ``step()``) raises ``Mismatch`` on every rank
    where they start from different ones, or have come to differ in the second step, or every 2000
    steps later. ``FARANDOLE_CHECK_WEIGHTS`` says how often.

    A parameter has one DistributedOptimizer: where one that is alive has it already, the new one
    takes over, and stepping with the older one is an error.

    The optimizer stays the same object, of a child class with its class' name: its state, LR
    schedulers, ``isinstance`` and ``state_dict()`` go on working. Where there is one rank, nothing
    else changes.

    Where a gradient is NaN or infinite on some rank, ``step()`` warns once, naming rank and tensor,
    or raises ``NumericsError`` on every rank, as ``FARANDOLE_NUMERICS`` says.

    In an elastic job making it exchanges nothing: it reduces inside of ``elastic.run``, in one
    world after another, and to step elsewhere is an error.

    Args:
        optimizer: any optimizer but LBFGS. Every rank's has the same parameters.
        named_parameters: ``model.named_parameters()``: names for errors and traces.
        compression: what is sent: ``Compression.none``, ``.fp16``, ``.bf16``, or your own class.
        backward_passes_per_step: gradients are summed over that many passes, then reduced.
        op: ``Average`` or ``Sum`` of gradients; or ``Adasum``, with which every rank steps with its
            own gradients, and parameters move by the Adasum of all ranks' moves, in ``step()``.
        gradient_predivide_factor: divides gradients before they are summed, and multiplies the
            sum, so that halves do not overflow; with ``Average`` only.
        num_groups: the older name of a number of ``groups``.
        groups: what is reduced together, none of it before all of it is ready: a number of groups
            of about equally many parameters, or a list of lists of parameters. Parameters that no
            list names, and all of them where it is 0 or None, are put together by size. With
            Adasum and with ``sharded_update`` everything is reduced together.
        sparse_as_dense: reduce sparse gradients as dense ones; they are sparse again when
            ``backward()`` returns. Without it the entries of all ranks are gathered.
        process_set: the ranks that reduce. On others the optimizer steps by itself.
        bucket_bytes: gradients reduced together; 0 is one all-reduce per tensor. Default
            ``FARANDOLE_BUCKET_BYTES``.
        first_bucket_bytes: the first of them, small, so that communication starts early. Default
            ``FARANDOLE_FIRST_BUCKET_BYTES``.
        in_place_bytes: a gradient of so much is reduced where it lies, not copied into a bucket.
            Default ``FARANDOLE_IN_PLACE_BYTES``.
        overlap: False launches everything at the end of backward.
        sharded_update: every rank updates 1/n of the parameters and holds 1/n of the optimizer's
            state, inside ``step()``; SGD, Adam and AdamW over float32 and float64 parameters.
            Until then ``p.grad`` is this rank's own: clip with ``optimizer.clip_grad_norm_()``,
            and call ``state_dict()`` on every rank. See docs/pytorch.md. Buckets are not launched
            during backward, whatever `overlap` says.

    Raises:
        InvalidArgument: an argument is wrong; the optimizer is as before.
        Mismatch: the ranks' models or options differ; says which parameter.

    Examples:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """
    group = group_of(process_set)
    _check_optimizer(optimizer)
    wrapped = cast("Distributed", optimizer)  # it stays the same object
    reduction = _Reduction(op, gradient_predivide_factor, compression, sparse_as_dense, process_set)
    if op == Adasum and sharded_update:
        raise InvalidArgument("sharded_update=True does not support op=Adasum")
    if op == Adasum or sharded_update:
        check_process_set(process_set)
    if process_set is not global_process_set:
        refuse_in_elastic_jobs("process_set", "its ranks are those of one world")
    if sharded_update:
        refuse_in_elastic_jobs(
            "sharded_update=True", "a rank that is lost takes its part of the state with it"
        )
    check_passes(backward_passes_per_step)
    named = named_of(optimizer, named_parameters)
    together = groups_of(groups, num_groups, named)
    if op == Adasum and (reduction.members > 1 or worlds.makes_later()):
        adasum.distribute(optimizer, named, compression)
        return wrapped
    limits = Limits.of(bucket_bytes, first_bucket_bytes, in_place_bytes)
    if sharded_update:
        assert group is not None
        if compression is not Compression.none:
            raise InvalidArgument("sharded_update=True does not support compression")
        sharded.distribute(optimizer, named, group, reduction, backward_passes_per_step, limits)
        return wrapped
    reduced.distribute(
        optimizer,
        named,
        reduction,
        groups=together,
        passes_per_step=backward_passes_per_step,
        limits=limits,
        overlap=overlap,
    )
    return wrapped


def _check_optimizer(optimizer: object) -> None:
    if isinstance(optimizer, WrappedOptimizer):
        raise InvalidArgument("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer is {type_of(optimizer)}, not a torch optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument(
            "LBFGS is not supported: its line search decides from the local loss, which differs "
            "between ranks"
        )
