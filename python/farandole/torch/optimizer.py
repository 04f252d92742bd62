"""DistributedOptimizer: an optimizer whose gradients are the mean over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar, cast

import torch

from farandole._core import InvalidArgument
from farandole._limits import Limits
from farandole.common._process_set import (
    ProcessSet,
    check_process_set,
    global_process_set,
    group_of,
)
from farandole.torch._entries import public
from farandole.torch._training.adasum import AdasumOptimizer
from farandole.torch._training.exchange import TorchExchange
from farandole.torch._training.hooked import take_over
from farandole.torch._training.parameters import groups_of, named_of
from farandole.torch._training.sharded import ShardedOptimizer, shard
from farandole.torch._training.silence import Silence
from farandole.torch._training.weights import TensorWeights
from farandole.torch._training.wrapped import WrappedOptimizer, check_passes
from farandole.torch.compression import Compression, Compressor
from farandole.torch.ops import Adasum, Average, Sum, op_name

_O = TypeVar("_O", bound=torch.optim.Optimizer)


class _Distributed(WrappedOptimizer):
    """What DistributedOptimizer puts before the optimizer's own class."""

    _exchange: TorchExchange | None  # None where there is one rank, and outside the process set
    _unmanaged: list[torch.Tensor]  # frozen when the optimizer was wrapped
    _skip: bool

    def step(self, closure: Any = None) -> Any:
        """The optimizer's own step. Gradients that were accumulated and not reduced yet (an
        interrupted accumulation) are reduced first; with a closure, whenever it returns."""
        exchange = self._exchange
        if exchange is None:
            return super().step(closure)
        exchange.check_alive()
        for p in self._unmanaged:
            if p.grad is not None:
                raise InvalidArgument(
                    f"a parameter of shape {tuple(p.shape)} was frozen when DistributedOptimizer "
                    "was made, and has a gradient now that no other rank knows\n"
                    "  advice: make the DistributedOptimizer after the parameters' requires_grad "
                    "is what it will be"
                )
        if closure is None:
            if not exchange.silence.over:
                exchange.refuse_silence()
            self._reduce_rest()
            result = super().step()
        else:
            result = super().step(partial(self._reduced, closure))
        exchange.note_step()
        return result

    def _reduced(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._reduce_rest()  # other ranks may have gradients where this closure made none
        return loss

    def _reduce_rest(self) -> None:
        if not self._skip:
            self.synchronize()

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._exchange is not None:
            self._exchange.note_zero_grad()
        super().zero_grad(set_to_none)

    def synchronize(self) -> None:
        """Reduces what was accumulated and not reduced yet. Not needed before clipping: gradients
        are reduced when ``backward()`` returns."""
        if self._exchange is not None:
            self._exchange.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Steps inside reduce nothing."""
        before, self._skip = self._skip, True
        try:
            yield
        finally:
            self._skip = before

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate; the first one outside reduces the sum."""
        if self._exchange is None:
            return nullcontext()
        self._exchange.check_alive()
        return self._exchange.held()

    def set_backward_passes_per_step(self, passes: int) -> None:
        check_passes(passes)
        if self._exchange is not None:
            self._exchange.passes_per_step = passes


@public
def DistributedOptimizer(
    optimizer: _O,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    bucket_bytes: int | None = None,
    first_bucket_bytes: int | None = None,
    in_place_bytes: int | None = None,
    overlap: bool = True,
    sharded_update: bool = False,
) -> _O:
    """Makes the optimizer step with gradients averaged over all ranks.

    Gradients are reduced while backward still computes others; when ``backward()`` returns they are
    the same on all ranks, so that clipping, ``GradScaler`` and your own code see reduced ones.

    As the first gradients have been reduced, ranks compare checksums of the optimizer's parameters:
    ``backward()`` (with Adasum and a sharded update ``step()``) raises ``Mismatch`` on every rank
    where they start from different ones. ``FARANDOLE_CHECK_WEIGHTS`` says how often.

    A parameter has one DistributedOptimizer: where one that is alive has it already, the new one
    takes over, and stepping with the older one is an error.

    The optimizer stays the same object, of a child class with its class' name: its state, LR
    schedulers, ``isinstance`` and ``state_dict()`` go on working. Where there is one rank, nothing
    else changes.

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

    Example:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> optimizer.step()
    """
    group = group_of(process_set)
    if isinstance(optimizer, WrappedOptimizer):
        raise InvalidArgument("the optimizer is a DistributedOptimizer already")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidArgument(f"optimizer is a {type(optimizer).__name__}, not a torch optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument(
            "LBFGS is not supported: its line search decides from the local loss, which differs "
            "between ranks"
        )
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise InvalidArgument(
            f"compression={compression!r} is not one of Compression.none, .fp16, .bf16, or a class "
            "with compress() and decompress()"
        )
    if op not in (Average, Sum, Adasum):
        raise InvalidArgument(
            f"op={op_name(op)}: DistributedOptimizer reduces with Average, Sum or Adasum only"
        )
    if op == Adasum and sharded_update:
        raise InvalidArgument("sharded_update=True does not support op=Adasum")
    if op == Adasum or sharded_update:
        check_process_set(process_set)
    if gradient_predivide_factor != 1.0 and op != Average:
        raise InvalidArgument("gradient_predivide_factor is supported with op=Average only")
    if not 0 < gradient_predivide_factor < math.inf:
        raise InvalidArgument(f"gradient_predivide_factor is {gradient_predivide_factor}")
    check_passes(backward_passes_per_step)
    named = named_of(optimizer, named_parameters)
    together = groups_of(groups, num_groups, named)
    names = {p: n for n, p in named}
    size = group.size if group is not None else 1
    if op == Adasum and size > 1:
        optimizer.__class__ = _child_of(optimizer, AdasumOptimizer)  # type: ignore[assignment]
        apart = cast(AdasumOptimizer, optimizer)
        apart._named = [(n, p) for n, p in named if p.requires_grad]
        apart._compression = compression
        apart._silence = Silence(
            [n for n, _ in reversed(apart._named)], [p for _, p in apart._named]
        )
        apart._weights = TensorWeights("Adasum", named)
        apart._parameter_names = names
        take_over(p for _, p in named)
        return optimizer
    limits = Limits.of(bucket_bytes, first_bucket_bytes, in_place_bytes)
    divided = gradient_predivide_factor != 1.0
    reduction: dict[str, Any] = {
        "op": "mean" if op == Average and not divided else "sum",
        "prescale": 1 / gradient_predivide_factor,
        "postscale": gradient_predivide_factor / size if divided else 1.0,
        "passes_per_step": backward_passes_per_step,
        "sparse_as_dense": sparse_as_dense,
        "limits": limits,
    }
    if sharded_update:
        assert group is not None
        if compression is not Compression.none:
            raise InvalidArgument("sharded_update=True does not support compression")
        shard(optimizer, _child_of(optimizer, ShardedOptimizer), group, named, **reduction)
        cast(ShardedOptimizer, optimizer)._parameter_names = names
        return optimizer
    exchange = None
    if group is not None and size > 1:
        exchange = TorchExchange(
            group,
            [(n, p) for n, p in reversed(named) if p.requires_grad and p.numel() > 0],
            weights=named,
            groups=together,
            process_set=process_set,
            compression=compression,
            overlap=overlap,
            **reduction,
        )
    optimizer.__class__ = _child_of(optimizer, _Distributed)  # type: ignore[assignment]
    distributed = cast(_Distributed, optimizer)
    distributed._exchange = exchange
    distributed._unmanaged = [p for _, p in named if not p.requires_grad]
    distributed._skip = False
    distributed._parameter_names = names
    if exchange is None:
        take_over(p for _, p in named)
    return optimizer


def _child_of(
    optimizer: torch.optim.Optimizer, mixin: type[torch.optim.Optimizer]
) -> type[torch.optim.Optimizer]:
    own = type(optimizer)
    return type(
        own.__name__,
        (mixin, own),
        {"__module__": own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__},
    )
