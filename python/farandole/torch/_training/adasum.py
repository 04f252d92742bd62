"""DistributedOptimizer(..., op=Adasum): every rank steps, and moves are exchanged."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch

from farandole._core import InvalidArgument
from farandole.common._process_set import global_process_set
from farandole.common._reduction import Min, check_passes
from farandole.torch import _devices
from farandole.torch._operations import calls
from farandole.torch._operations.handles import wait
from farandole.torch._tensors import check_tensor
from farandole.torch._training import worlds
from farandole.torch._training.finite import OwnGradients
from farandole.torch._training.hooked import Hooked, take_over
from farandole.torch._training.names import Names
from farandole.torch._training.parameters import Named
from farandole.torch._training.readers import watch_readers
from farandole.torch._training.silence import Silence
from farandole.torch._training.weights import TensorWeights
from farandole.torch._training.wrapped import OwnStep, WrappedOptimizer, become
from farandole.torch.adasum import adasum_together
from farandole.torch.compression import Compressor


class AdasumOptimizer(WrappedOptimizer):
    """The class that DistributedOptimizer puts before the optimizer's own with ``op=Adasum``. Every
    rank steps by itself; then the parameters move by the Adasum of all ranks' moves."""

    _all: Named
    _named: Named  # that are trained, or were
    _compression: type[Compressor]
    _silence: Silence
    _weights: TensorWeights
    _called: Names
    _finite: OwnGradients
    _alone: worlds.Alone | None = None  # in an elastic job

    def _distributed_step(self, own: OwnStep) -> Any:
        """The optimizer's own step, whose effect is then replaced by the Adasum of all ranks'.

        Raises:
            Mismatch: the ranks' parameters differ; no parameter has changed.
        """
        if self._alone is not None:
            self._alone.check()
        self._refuse_replaced()
        self._take_unfrozen()
        if own.closure is None:
            self._silence.refuse()
        self._called.compare_once("names of Adasum")
        self._weights.compare()
        if own.closure is None and self._finite.looks:
            self._finite.judge(self._finite.found())
        parameters = [p for _, p in self._named]
        before = [p.detach().clone() for p in parameters]
        result = own()
        with torch.no_grad():
            moves = [p - old for p, old in zip(parameters, before, strict=True)]
            packed = [self._compression.compress(move) for move in moves]
            # Moves on a device are folded on the host, with its bits.
            sent = [_devices.on_host(wire) for wire, _ in packed]
            folded = adasum_together(sent, "moves of Adasum")
            for p, old, move, (_, context) in zip(parameters, before, folded, packed, strict=True):
                there = move if _devices.device_of(p) is None else _devices.copied_to(p, move)
                p.copy_(old + self._compression.decompress(there, context))
        return result

    def prepare_unscale(self) -> None:
        """Ranks step with their own gradients, and a scaler skips where these overflow.
        An overflow on one rank becomes one on all ranks, so that they skip alike."""
        if self._alone is not None:
            self._alone.check()
        self._take_unfrozen()
        gradients = [p.grad for _, p in self._named if p.grad is not None]
        mine = all(bool(torch.isfinite(_values(g)).all()) for g in gradients)
        if not _on_all_ranks(mine):
            for g in gradients[:1]:
                _values(g).fill_(math.inf)

    def _take_unfrozen(self) -> None:
        """Parameters that were frozen until now move with the others from this step on."""
        known = {n for n, _ in self._named}
        named = [(n, p) for n, p in self._all if p.requires_grad or n in known]
        if len(named) > len(known):
            self._named = named
            self._finite = OwnGradients(named[::-1])

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Passes add up by themselves: as many as there are before a ``step()``."""
        check_passes(passes)

    def no_sync(self) -> AbstractContextManager[None]:
        """Passes add up anyway, and gradients are not exchanged."""
        return nullcontext()

    def synchronize(self) -> None:
        """Does nothing: gradients are not exchanged, moves are, in ``step()``."""

    def skip_synchronize(self) -> NoReturn:
        raise InvalidArgument("with op=Adasum step() exchanges; skip_synchronize() is not possible")

    # In an elastic job (worlds.py).

    def _hooked(self) -> Hooked | None:
        return self._alone

    def is_superseded(self) -> bool:
        return self._alone is not None and self._alone.taken is not None

    def described(self) -> str:
        return f"an optimizer with Adasum, of {len(self._named)} parameters"

    def leave_world(self) -> None:
        for _, p in self._named:
            p.grad = None
        self._alone = worlds.Alone(self._named, outside=True)

    def enter_world(self) -> None:
        """Begins anew, as ranks compare their parameters at the start of every world."""
        for _, p in self._named:
            p.grad = None
        self._alone = worlds.Alone(self._named, outside=False)
        self.begin()

    def begin(self) -> None:
        """Begins all checks anew, as if no step had been taken."""
        parameters = [p for _, p in self._named]
        self._silence = Silence([n for n, _ in reversed(self._named)], parameters)
        self._weights = TensorWeights("Adasum", self._all)
        self._called = Names(self._named)
        self._finite = OwnGradients(self._named[::-1])


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _on_all_ranks(mine: bool) -> bool:
    """Collective."""
    how = calls.How("finite gradients of Adasum", Min, 1.0, 1.0, global_process_set)
    total: torch.Tensor = wait(calls.allreduce(torch.tensor(float(mine)), how, single=True))
    return bool(total)


def distribute(
    optimizer: torch.optim.Optimizer, named: Named, compression: type[Compressor]
) -> None:
    """`named`: the optimizer's parameters in registration order."""
    watch_readers()
    for name, p in named:
        check_tensor(p, f"op=Adasum: '{name}'")
    apart = become(optimizer, AdasumOptimizer, named)
    apart._all = named
    apart._named = [(n, p) for n, p in named if p.requires_grad]
    apart._compression = compression
    apart.begin()
    if worlds.makes_later():
        apart._alone = worlds.Alone(apart._named, outside=True)
        worlds.follow(apart)
    else:
        take_over(p for _, p in named)
