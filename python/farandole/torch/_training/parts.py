"""Gradients of batches that a rank computes in several parts, as so many ranks would.

Note [Gradients in parts]

Autograd adds to what stands in p.grad, one part after the other. Here every part begins without
gradients, and its own are taken away as its backward ends. They fold in the canonical tree over all
parts, of which a rank has a subtree (data/_logical.py); what a rank's parts give goes into the sum
over ranks, which is the upper part of that tree. A part in which a parameter has no gradient counts
as zeros, if another part has one, as it does between ranks.

The backward of the last part reduces: each gradient is folded with those of the parts before it as
autograd leaves it, and is sent while backward goes on. Not where gradients stood as the batch
began, and not in the first batch: that shows whether autograd comes to a parameter twice in a
backward (reentrant checkpoints do that), which would be sent too early.

A hook before autograd's accumulation is what clears p.grad, and not the loop, so that it does not
matter where a program calls zero_grad(). What stands there as a batch begins (a program adds up
several batches) is added to the sum of the batch when that is known.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch

from farandole._core import Error, InvalidArgument
from farandole.data._logical import Folding
from farandole.torch._training.exchange import GradientExchange
from farandole.torch._training.gradients import part_of_a_graph
from farandole.torch._training.hooked import Hooked, hearing
from farandole.torch._training.passes import Pass, graph_task, has_no_end, untraced
from farandole.torch._training.weighing import not_weighed, zeroed_midway
from farandole.torch._training.wrapped import refuse_unmanaged

_Gradients = dict[int, torch.Tensor]  # by parameter, where there is one
_NONE = -2  # of the numbers of graph tasks, of which -1 is outside of a backward


class _Stands(enum.Enum):
    """The state of the present batch."""

    NOWHERE = enum.auto()  # there is none
    COMPUTING = enum.auto()  # a (micro-)batch was given out
    COMPUTED = enum.auto()  # and its backward is over
    REDUCED = enum.auto()  # that of the last one, too
    FAILED = enum.auto()


class PartGradients(Hooked):
    """The gradients of one optimizer; see Note [Gradients in parts].

    Args:
        named: the parameters that get gradients.
        unmanaged: those that were frozen when the optimizer was wrapped.
        exchange: that reduces; None where there is one rank.
        of_batch: parts, on all ranks.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        unmanaged: Sequence[torch.Tensor],
        exchange: GradientExchange | None,
        of_batch: int,
    ) -> None:
        super().__init__(named, ())
        self.weighed_only = True
        self.of_batch = of_batch
        self.reduced: Callable[[], None] = lambda: None  # called when a batch's gradients are
        self.buffers: Mapping[str, torch.Tensor] = {}  # the model's, as the batch began
        self._unmanaged, self._exchange = unmanaged, exchange
        self._numbers = {id(p): i for i, p in enumerate(self.parameters)}
        self._stands = _Stands.NOWHERE
        self._graph = _NONE  # the last one that the running pass has entered
        self._comes_once: bool | None = None  # autograd, in a backward; None before the first batch
        self.forget()
        if exchange is not None:
            exchange.open = True  # its own passes only accumulate, but that of a last backward
        self._heard: dict[int, tuple[Any, Any]] = {}  # nodes, and hooks there, by parameter
        self._hear_before()
        hearing.add(self)

    def _hear_before(self) -> None:
        """Hooks the nodes that accumulate, and holds them, as autograd does not keep them alive. A
        parameter has another one after its dtype has changed, even for a while."""
        me: weakref.ref[PartGradients] = weakref.ref(self)
        for i, node in enumerate(_nodes_of(self.parameters)):
            known, hook = self._heard.get(i, (None, None))
            if node is None or node is known:
                continue
            if hook is not None:
                hook.remove()
            self._heard[i] = node, node.register_prehook(partial(_before, me, i))
        self._hooks = [hook for _, hook in self._heard.values()]

    # The loop over the parts.

    def begin_batch(self) -> None:
        self.forget()
        self._hear_before()

    def forget(self) -> None:
        """Leaves the present batch. Gradients from before it, if not zeroed, are restored."""
        if self._stands in (_Stands.COMPUTING, _Stands.COMPUTED):
            for i, before in self._before.items():
                self.parameters[i].grad = before
        self._stands = _Stands.NOWHERE
        self._part, self._last = -1, False
        self._before: _Gradients = {}  # what stood as the batch began
        self._touched: set[int] = set()  # in this batch
        self._seen: set[int] = set()  # in this backward
        self._mine: _Gradients = {}  # of the present part, so far
        self._folding: Folding[_Gradients] = Folding(_sum)
        self._stop_sending()

    def expect(self, part: int, *, last: bool) -> None:
        """A (micro-)batch is given out; `last`: of this rank's of the batch."""
        if self._stands is _Stands.FAILED:
            return
        if part != self._part and self._part >= 0:
            self._close_part()
        self._part, self._last = part, last
        self._stands = _Stands.COMPUTING

    def _close_part(self) -> None:
        self._folding.push(self._mine)
        self._mine = {}

    # A backward.

    def hear_before(self, i: int) -> None:
        """Autograd is about to accumulate the gradient of parameter i."""
        graph = graph_task()
        if graph != self._graph:
            self._enter(graph)
        if i in self._seen:
            self._comes_once = False  # a reentrant backward comes to it once more
            return
        self._seen.add(i)
        self._clear(i)

    def _enter(self, graph: int) -> None:
        with self._entering:
            present = self.present_pass()
            if present is None:
                self._begin_pass(graph)
                present = Pass(self)
                self._pass = weakref.ref(present)
            present.enter(graph)
            self._graph = graph

    def _begin_pass(self, graph: int) -> None:
        self.check_alive()
        if self._stands is _Stands.FAILED:
            raise _failed()
        if has_no_end(graph):
            self.refuse(
                InvalidArgument(
                    "logical_ranks under compiled autograd, which does not tell when backward() "
                    "ends\n  advice: torch.compile the model, and not backward()"
                )
            )
        if self._stands is _Stands.NOWHERE:
            self.refuse(
                InvalidArgument(
                    "backward() outside of the loop over the GlobalBatch(logical_ranks=…) that has "
                    "the optimizer"
                )
            )
        if self._stands is not _Stands.COMPUTING:
            self.refuse(
                InvalidArgument(
                    "a second backward() of one part of a GlobalBatch(logical_ranks=…)\n"
                    "  advice: add the losses, and call backward() of their sum"
                )
            )
        self._seen.clear()
        if self._last and self._may_send():
            self._start_sending()

    def _clear(self, i: int) -> None:
        p = self.parameters[i]
        if p.grad is not None:
            if i in self._touched:
                self.refuse(
                    InvalidArgument(
                        f"the gradient of '{self.names[i]}' was set between two parts of a batch, "
                        "where it has none\n  advice: change gradients after the last part, if "
                        "batches.sync_gradients"
                    )
                )
            self._before[i] = p.grad
        self._touched.add(i)
        p.grad = self._mine.get(i)

    def end(self, *, failed: bool) -> None:
        unweighed = not failed and self.lacks_weight()
        self._pass, self._graph = None, _NONE
        if failed:
            self._fail()
            return
        if unweighed:
            self.refuse(not_weighed())
        with torch.no_grad():
            if not self._sending:
                self._take()
            self._stands = _Stands.COMPUTED
            if self._last:
                self.finish()

    def _take(self) -> None:
        """Takes away the gradients that this backward has accumulated."""
        for i in sorted(self._seen):
            self._take_one(i)
        self._seen.clear()

    def _take_one(self, i: int) -> None:
        p = self.parameters[i]
        if p.grad is None:
            return
        if p.grad.requires_grad:
            self.refuse(part_of_a_graph(self.names[i]))
        if p.grad.layout != torch.strided:
            self.refuse(
                InvalidArgument(
                    f"the gradient of '{self.names[i]}' is sparse, which logical_ranks do not "
                    "support\n  advice: torch.nn.Embedding(sparse=False)"
                )
            )
        self._mine[i] = p.grad
        p.grad = None

    # The last backward of a batch, which the exchange reduces as it goes on.

    def _may_send(self) -> bool:
        stand = self._before or any(p.grad is not None for p in self.parameters)
        return self._exchange is not None and bool(self._comes_once) and not stand

    def _start_sending(self) -> None:
        assert self._exchange is not None
        self._exchange.open, self._exchange.completes = False, self
        self._sending, self._unsent = True, set(range(len(self.parameters)))
        self._failures = self._exchange.failures

    def _stop_sending(self) -> None:
        self._sending, self._unsent = False, set[int]()
        if self._exchange is not None:
            self._exchange.open, self._exchange.completes = True, None

    def _is_reduced(self) -> bool:
        """Whether the exchange's own pass has reduced all, as that has ended."""
        assert self._exchange is not None
        return not self._unsent and not self._exchange.reducing

    def complete(self, p: torch.Tensor) -> None:
        i = self._numbers.get(id(p))
        if i is None:  # the exchange has taken up what was unfrozen
            refuse_unmanaged([p])
            return
        self._complete(i)

    def complete_rest(self) -> None:
        """Completes parameters that this backward did not reach; other parts may have."""
        for i in sorted(self._unsent):
            self._complete(i)

    def _complete(self, i: int) -> None:
        self._unsent.discard(i)
        self._take_one(i)
        self.parameters[i].grad = self._folded(i)

    def _folded(self, i: int) -> torch.Tensor | None:
        """Folds the parts' gradients, and frees them while their memory is in the cache."""
        gradient = self._mine.pop(i, None)
        for lower in self._folding.downwards():
            there = lower.pop(i, None)
            if gradient is not None or there is not None:
                gradient = _add(there, gradient)
        return gradient

    @torch.no_grad()
    def finish(self) -> None:
        """Collective: the batch's gradients become those of all parts, on every rank. Nothing where
        they are, or where there is no batch."""
        if self._stands is _Stands.FAILED:
            raise _failed()
        if self._stands in (_Stands.NOWHERE, _Stands.REDUCED):
            return
        self.check_alive()
        self._stands = _Stands.FAILED  # unless it comes to its end
        homes: _Gradients = {}
        if not self._sending:
            self._close_part()
            for i, gradient in self._set_aside(homes).items():
                self.parameters[i].grad = gradient
        refuse_unmanaged(self._unmanaged)
        if self._exchange is not None and not (self._sending and self._is_reduced()):
            self._exchange.reduce()
        self._stop_sending()
        self._folding = Folding(_sum)
        if self._comes_once is None:
            self._comes_once = True
        if self._exchange is not None:
            older = [self.parameters[i] for i in self._before]
            self._exchange.note_reduced_before([p for p in older if p.grad is None])
        for i, before in self._before.items():
            p = self.parameters[i]
            whole = before if p.grad is None else p.grad.add_(before)
            if whole.data_ptr() != homes[i].data_ptr():
                homes[i].copy_(whole)
            p.grad = homes[i]  # the program may have it elsewhere, too
        self._before = {}
        self._stands = _Stands.REDUCED
        self.reduced()

    def _set_aside(self, homes: _Gradients) -> _Gradients:
        """Clears p.grad; returns the gradients of this rank's parts. Copies earlier gradients, as
        the reduction may overwrite their memory, which `homes` takes."""
        for i, p in enumerate(self.parameters):
            if i not in self._touched and p.grad is not None:
                self._before[i] = p.grad
            p.grad = None
        homes.update(self._before)
        self._before = {i: before.clone() for i, before in self._before.items()}
        return self._folding.result()

    def is_due(self) -> bool:
        """Whether the last part of this rank has had no backward: its gradients are all None."""
        return self._last and self._stands in (_Stands.COMPUTING, _Stands.COMPUTED)

    def reduce_now(self) -> None:
        self.finish()

    # Failures.

    def _fail(self) -> None:
        """Ends a batch whose backward raised; notifies the other ranks without waiting for them."""
        if self._stands is _Stands.FAILED:
            return
        told = self._sending and self._exchange and self._exchange.failures > self._failures
        self.forget()
        self._stands = _Stands.FAILED
        self._drop()
        if self._exchange is not None and not told:
            with suppress(Error):  # of a group that has failed: the next call will say it
                self._exchange.abandon()

    def refuse(self, why: InvalidArgument) -> NoReturn:
        self.forget()
        self._stands = _Stands.FAILED
        self._drop()
        if self._exchange is not None:
            self._exchange.refuse(why)
        raise why

    def _drop(self) -> None:
        for p in self.parameters:
            p.grad = None

    def refuse_zero_grad(self) -> None:
        """Refuses it in the middle of a batch, whose parts would be lost."""
        if self._stands in (_Stands.COMPUTING, _Stands.COMPUTED) and (self._mine or self._folding):
            self.refuse(zeroed_midway())


class _Uses(torch.autograd.Function):
    """Its node leads to those that accumulate the gradients of its inputs."""

    @staticmethod
    def forward(_: Any, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0].new_zeros(())


def _nodes_of(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """None for a parameter that takes no gradient now."""
    if not parameters:
        return []
    with torch.enable_grad():
        node = _Uses.apply(*parameters).grad_fn  # type: ignore[no-untyped-call]
    if node is None:
        return [None] * len(parameters)
    return [each for each, _ in node.next_functions]


def _failed() -> InvalidArgument:
    return InvalidArgument(
        "an earlier backward() of this batch failed, and its gradients were dropped\n"
        "  advice: call zero_grad(), and go on with the next batch"
    )


def _sum(lower: _Gradients, upper: _Gradients) -> _Gradients:
    return {i: _add(lower.get(i), upper.get(i)) for i in sorted(lower.keys() | upper.keys())}


def _add(lower: torch.Tensor | None, upper: torch.Tensor | None) -> torch.Tensor:
    """The sum of both, or a copy of the one that is not None."""
    if lower is None or upper is None:
        there = upper if lower is None else lower
        assert there is not None
        return there + 0  # as between ranks: another zero where it is -0
    return lower.add_(upper)  # they were taken from p.grad, and are ours


@untraced
def _before(parts: weakref.ref[PartGradients], i: int, _: Any) -> None:
    present = parts()
    if present is not None:
        present.hear_before(i)
