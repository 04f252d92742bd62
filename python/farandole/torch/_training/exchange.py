"""When gradients are reduced, and how a backward pass ends.

A *pass* is one backward. A pass either *reduces* (its gradients go to the reducer as they become
ready, while backward goes on) or only accumulates. Autograd calls, in this order::

    on_gradient(i)                 per gradient; the first one begins the pass
    end()                          at the end of backward, or when it raised

Between them stands the rule for parameters without a gradient in this pass: one that has an older
gradient contributes that; one without stays without where no rank used it, and gets the reduced
gradient where some rank did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import NoReturn, Protocol

import torch

from farandole import _world
from farandole._core import Error, InvalidArgument, Mismatch
from farandole._limits import Limits
from farandole._world import Group
from farandole.common._reduction import Reduction
from farandole.torch._training.hooked import Hooked
from farandole.torch._training.passes import graph_task, running, untraced
from farandole.torch._training.plan import How, Plan
from farandole.torch._training.watched import has_changed, watch
from farandole.torch._training.weighing import not_weighed
from farandole.torch._training.weights import BROADCAST
from farandole.torch._training.wrapped import too_many_passes


class Completes(Protocol):
    """Turns accumulated gradients into those that are reduced."""

    def complete(self, p: torch.Tensor) -> None:
        """The gradient of that parameter is there, in a pass that reduces."""

    def complete_rest(self) -> None:
        """No other comes in this pass."""


class GradientExchange(Hooked):
    """The gradients of one optimizer on their way to the mean (or sum) of all ranks.

    Collective: every rank makes one, with the same parameters in the same order.

    Args:
        group: the ranks; this is one of them.
        named: the parameters in the order in which their gradients probably become ready. The
            order that the first step shows is used from the second one on.
        weights: all parameters of the optimizer, in the model's order, whose values are compared;
            those that are unfrozen later are reduced from then on.
        line: of a program, that makes weights equal.
        groups: by a parameter's id, which it is launched together with.
        passes_per_step: every that many passes reduce; the others accumulate.
        limits: how large the buckets are.
        overlap: launch buckets during backward; else all of them at its end.
        looks: whether gradients are finite.
        optimizer: gives the one whose state is laid out as its parameters, if there is one.

    Raises:
        InvalidArgument: parameters are on a device that cannot be used.
        Mismatch: the ranks' parameters or options differ; says which.
    """

    def __init__(
        self,
        group: Group,
        named: Sequence[tuple[str, torch.Tensor]],
        reduction: Reduction,
        *,
        weights: Sequence[tuple[str, torch.Tensor]],
        line: str = BROADCAST,
        groups: Mapping[int, int] = MappingProxyType({}),
        passes_per_step: int = 1,
        limits: Limits,
        overlap: bool = True,
        looks: bool = True,
        optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None,
    ) -> None:
        super().__init__(named, weights, line)
        self._how = How(group, reduction, weights, groups, limits, overlap, looks, optimizer)
        self._take_plan(Plan(self._how, named))
        self.reducing = False  # the present pass
        scale = reduction.prescale * reduction.postscale * group.size
        self.is_mean = reduction.op == "mean" or math.isclose(scale, 1)
        self._passes_per_step = passes_per_step
        self._passes = 0  # begun since gradients were last reduced
        self._held = 0  # depth of no_sync()
        # Reduced gradients stand where autograd accumulates, and no step has used them up.
        self._standing = False
        self.completes: Completes | None = None
        self.failures = 0  # of passes that reduced, of which the others know
        # step() must still reduce: since the last reduction a step or a zero_grad was seen.
        self._due = True
        self._spent = False  # a step has used the gradients, and nothing was heard since
        self._by_hand = False  # gradients that were reduced last came by no backward
        self._is_sum_of_all = False  # those that stand, unless the program has set them to zero
        self._stamp = self._gradients.stamp()  # as ranks last had them alike
        self._dropped = False  # a pass failed, and nothing was done about it
        # By parameter, the stamp of a gradient whose backward had no end; and that backward.
        self._left: dict[int, tuple[int, int] | None] = {}
        self._left_graph = -1
        self.hear()

    def _take_plan(self, plan: Plan) -> None:
        self._plan, self._gradients, self._late = plan, plan.gradients, plan.late
        self.reducer, self.finite = plan.reducer, plan.finite
        self._watch_weights()

    def _watch_weights(self) -> None:
        self.compared.watch(self.reducer)

    def _plan_anew(self) -> None:
        """Before a step is begun, where the parameters are others than those of the plan."""
        added = self._plan.added(self.parameters)
        if added is None:
            return
        old = self._gradients
        named = [*zip(self.names, self.parameters, strict=True), *added]
        self._take_plan(Plan(self._how, named))
        old.retire()
        self.hear_also(added)

    # The pass, as autograd tells it.

    def on_gradient(self, i: int, *, final: bool) -> None:
        with self._entering:
            present = self.entered(i, final=final)
        if present is None or not final:
            return  # launch_rest() takes the latter
        if not self.reducing or (self.weighed_only and self.lacks_weight()):
            return  # what has no weight yet is not sent before it is known to have one
        try:
            if self.completes is not None:
                self.completes.complete(self.parameters[i])
            self._take(i)
        except BaseException:
            if not self.reducer.step_open:  # its first gradient; the others shall know
                with suppress(Error):  # of a group that has failed
                    self.reducer.abandon()
            present.fail()  # now, since the traceback may keep the pass alive
            raise

    def begin_backward(self, i: int, graph: int, *, final: bool, ends: bool) -> None:
        if not ends:
            self._leave_to_step(i, graph, final)
            return
        self._begin_pass(i, ends=True)
        running.add(self)

    def end(self, *, failed: bool) -> None:
        unweighed = not failed and self.lacks_weight()
        self._pass = None
        running.discard(self)
        if failed:
            self._fail_pass()
        elif unweighed:
            self.refuse(not_weighed())
        else:
            self._finish_pass()

    def _leave_to_step(self, i: int, graph: int, final: bool) -> None:
        """The pass is one that only accumulates."""
        if graph != self._left_graph or not self._left:
            self._begin_pass(i, ends=False)
            self._left_graph = graph
        if final:
            grad = self.parameters[i].grad
            self._left[i] = _stamp(grad)
            watch(grad)

    def _refuse_changes(self) -> None:
        """Refuses changes of gradients that step() still has to reduce, such as clipping."""
        for i, stamp in self._left.items():
            grad = self.parameters[i].grad
            if _stamp(grad) != stamp or has_changed(grad):
                self.refuse(
                    InvalidArgument(
                        f"the gradient of '{self.names[i]}' was changed after backward(), which "
                        "does not reduce gradients under compiled autograd\n  advice: call "
                        "optimizer.synchronize() after backward(), before clipping and unscaling"
                    )
                )

    # The pass, from its begin to its end.

    def _begin_pass(self, i: int, *, ends: bool) -> None:
        """`i`: whose gradient is the first one; `ends`: whether autograd tells the end; else
        synchronize() reduces."""
        if self._standing:
            self._standing = self._any_stands(but=i)
        if self._standing and self._passes_per_step > 1:
            raise too_many_passes(self._passes_per_step)
        self._refuse_sums(but=i)
        held = self._held > 0 or self.open
        due = not held and self._passes + 1 >= self._passes_per_step
        self._begin(reducing=ends and due)
        self._passes += 1

    def _any_stands(self, but: int) -> bool:
        """Whether the program has left reduced gradients as they were, and not set them to zero by
        itself. `but`: has been added to, so it is not looked at where another one stands."""
        others = self._standing_besides(but)
        return any(map(self._has_values, others)) if others else self._is_there(but)

    def _standing_besides(self, but: int) -> list[int]:
        """Parameters whose reduced gradient is there, with whatever values."""
        return [i for i in range(len(self.names)) if i != but and self._is_there(i)]

    def _is_there(self, i: int) -> bool:
        return self.parameters[i].grad is not None and self._gradients.still_stands(i)

    def _has_values(self, i: int) -> bool:
        grad = self.parameters[i].grad
        return grad is not None and bool(_values(grad).any())

    def _refuse_sums(self, but: int) -> None:
        """Refuses sums of all ranks that still stand after a step and would be summed again. A
        mean of what all ranks have alike is the same once more. `but`: has been added to."""
        if not self._is_sum_of_all or self._standing:  # _take() refuses the latter
            return
        others = self._standing_besides(but)
        for i in filter(self._has_values, others):
            raise _summed_already(self.names[i])
        if others:
            self._is_sum_of_all = False  # the program has set them to zero by itself

    def _begin(self, *, reducing: bool) -> None:
        self.check_alive()
        self._left.clear()
        self._dropped = self._spent = self._by_hand = False
        if reducing:
            self._plan_anew()
            self._gradients.begin()
        self.reducing = reducing

    def _take(self, i: int) -> None:
        """The mean of what was reduced already, and equal on all ranks, is that value; a sum would
        count it once per rank."""
        if self._standing and not self.is_mean and self._gradients.still_stands(i):
            raise _summed_already(self.names[i])
        self._gradients.take(i)

    def launch_rest(self) -> None:
        """Hands in what this pass did not bring. Waits for nobody."""
        if self.lacks_weight():
            self.reducer.abandon()  # nothing was sent; the others shall know
            raise not_weighed()
        if self.completes is not None:
            self.completes.complete_rest()
        self._plan.settings.show(self.reducer)
        for i in self._gradients.missing():
            self._take(i)
        self.compared.show(self.reducer)
        self._gradients.launch()

    def _finish_pass(self) -> None:
        """Waits for the reduced gradients, if this pass reduces."""
        if not self.reducing:
            return
        try:
            self.launch_rest()
            self._wait()
            self._plan.settings.compare(self.reducer)
            self._late.places = self._gradients.show()
        except BaseException:
            self._fail_pass()
            raise
        self.reducing = False
        self._passes = 0
        self._standing, self._due = True, False
        self._is_sum_of_all = not self.is_mean
        self.note_alike()

    def _wait(self) -> None:
        try:
            self.reducer.wait()
        except Mismatch:  # on every rank; weights differ where other ones are in their places
            self._plan.settings.compare_names(self.reducer)
            raise

    def _fail_pass(self) -> None:
        """Tells the other ranks, without waiting for them; the next pass will work again."""
        if not self.reducing:
            return
        self.failures += 1
        self.reducing = False
        self._passes = 0
        self._standing, self._due, self._dropped = False, True, True
        self._gradients.abandon()

    def refuse(self, why: InvalidArgument) -> NoReturn:
        """Raises it in place of a step, and tells the other ranks, which may have begun one.

        Raises:
            Error: the group has failed.
        """
        self.abandon()
        raise why

    def reduce(self) -> None:
        """Reduces what stands, whether or not a pass of this rank brought it, or what the running
        pass has brought. For gradients that a rank has computed in several parts (parts.py)."""
        if not self.reducing:
            self._begin(reducing=True)
        self._finish_pass()

    def note_reduced_before(self, parameters: Sequence[torch.Tensor]) -> None:
        """No rank had gradients of these when all were reduced last; they have older ones again,
        which step() is not to reduce once more."""
        self._late.leave_out(parameters)

    def abandon(self) -> None:
        """Tells the other ranks, which may have begun a step, that this one takes none.

        Raises:
            Error: the group has failed.
        """
        if not self.reducing:
            self._begin(reducing=True)
        try:
            self.reducer.abandon()
        finally:
            self._fail_pass()

    def retire(self) -> None:
        """Its world has ended: what it was reducing is gone, and so are gradients in its memory.
        Whatever keeps the pass alive, its end changes nothing any more."""
        self._fail_pass()
        for p in self.parameters:
            p.grad = None

    # While this rank has joined, the reducer takes part in the others' steps by itself.

    def before_joining(self) -> None:
        """Ends what is open, and lets go of the buckets, which may move."""
        if self.reducing:
            self._finish_pass()
        else:
            self.reducer.drain()  # of a pass that failed
        self._gradients.forget_places()

    def after_joining(self, steps: int) -> None:
        """Takes the buckets up again. After any step of the others, the gradients that this rank
        still had stand in memory of theirs."""
        self._gradients.learn_places()
        self.reducer.count_updates_anew()
        if steps > 0:
            self._passes = 0
            self._standing, self._due = False, True
            self._gradients.drop()

    # The optimizer calls these.

    @untraced
    def refuse_silence(self) -> None:
        """Before a step."""
        why = self.silence.check()
        if why is not None:
            self.refuse(why)

    @untraced
    def synchronize(self) -> None:
        """Reduces what was accumulated and not reduced yet.

        Also where nothing was: other ranks may have gradients, and expect this one.
        """
        self.check_alive()
        self._refuse_changes()
        by_hand = not self.reducing and self._passes == 0
        if not self.reducing:
            if by_hand and not self._awaits_reduction():
                self._late.reduce()
                return
            if self._dropped:
                self.refuse(
                    InvalidArgument(
                        "the last backward() failed, on this rank or on another, and its gradients "
                        "were dropped: there is nothing to step with\n"
                        "  advice: call zero_grad(), and go on with the next batch"
                    )
                )
            self._begin(reducing=True)
        self._finish_pass()
        self._by_hand = by_hand
        if by_hand:
            self._gradients.watch()

    def _awaits_reduction(self) -> bool:
        """Where no backward has come since the last reduction: whether gradients that stand are to
        be reduced in the next step."""
        if not self._due:
            return self._by_hand and self.is_mean and self.has_changed()
        # A second step with one sum of all ranks.
        return self.is_mean or not self._spent or self.has_changed() or self._has_none()

    def has_changed(self) -> bool:
        """Whether a program has written into gradients since ranks last had them alike."""
        return self._gradients.have_changed(self._stamp)

    def _has_none(self) -> bool:
        return not any(map(self._gradients.still_stands, range(len(self.parameters))))

    def is_due(self) -> bool:
        """The same on every rank, also where a rank has no gradient. Not in backward, and not
        between a step and what follows it, where the gradients are those of the step."""
        if self.open or graph_task() >= 0 or self.epoch != _world.epoch():
            return False
        if self.reducing or self._passes > 0:
            return True
        if not self._due:
            return self._late.are_there() or self._awaits_reduction()
        return not self._spent or self.has_changed() or self._has_none()

    @property
    def has_left(self) -> bool:
        """Whether a backward has left its gradients to step(), as it has no end."""
        return bool(self._left)

    def reduce_now(self) -> None:
        self.synchronize()

    def note_alike(self) -> None:
        """What stands now is alike on all ranks: clipping, say, has changed it on all."""
        self._stamp = self._gradients.stamp()
        if self._spent or self._by_hand:  # else gradients that come by no backward are not reduced
            self._gradients.watch()

    def show_plain(self) -> None:
        """The optimizer is about to read the gradients, which are plain tensors then."""
        self._gradients.unwatch()

    def managed(self) -> list[torch.Tensor]:
        return [*self.parameters, *(p for _, p in self._plan.unfrozen())]

    def awaits(self, p: torch.Tensor) -> bool:
        """Whether a gradient that this parameter gets now would still have to be reduced, where
        others are `reduced`."""
        return self._late.awaits(p)

    @property
    def reduced(self) -> bool:
        """Reduced gradients stand, and no step has used them."""
        return self._standing

    @untraced
    def note_step(self) -> None:
        self._standing, self._due, self._spent = False, True, True
        self.reducer.note_update()
        self.note_alike()

    @untraced
    def note_zero_grad(self) -> None:
        if self.reducing:
            raise InvalidArgument(
                "zero_grad() was called while gradients are being reduced\n"
                "  advice: call step() or synchronize() first"
            )
        self._passes = 0
        self._standing, self._due, self._dropped = False, True, False
        self._spent = self._is_sum_of_all = False
        self._left.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Passes inside only accumulate."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def set_passes_per_step(self, passes: int) -> None:
        self._passes_per_step = passes
        self._passes = 0


def _values(gradient: torch.Tensor) -> torch.Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _summed_already(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"the gradient of '{name}' was already summed over the ranks and would be summed again\n"
        "  advice: call step() and zero_grad() between two backward passes, or accumulate with "
        "backward_passes_per_step or no_sync(); op=Average may go on from what stands"
    )


def _stamp(grad: torch.Tensor | None) -> tuple[int, int] | None:
    """Another one when the gradient has changed."""
    if grad is None:
        return None
    return 0 if grad.is_sparse else grad.data_ptr(), grad._version
