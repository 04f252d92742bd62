"""When gradients are reduced, and how a backward pass ends: the same for every framework.

A *pass* is one backward. A pass either *reduces* (its gradients go to the reducer as they become
ready, while backward goes on) or only accumulates. The framework's hooks call, in this order::

    begin_pass()                   before the first gradient of a pass
    take(i)                        per gradient, if the pass is `reducing`
    finish_pass()                  at the end of backward; or fail_pass(), when it raised

Between them stands the rule for parameters without a gradient in this pass: one that has an older
gradient contributes that; one without stays without where no rank used it, and gets the reduced
gradient where some rank did.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, NoReturn

from farandole import _core, _world
from farandole._core import Error, InvalidArgument
from farandole._limits import Limits
from farandole._world import Group


class Parameter(NamedTuple):
    name: str
    elements: int
    dtype: str  # numpy's name
    group: int = -1  # those of one number are launched together; -1: by size


class Place(NamedTuple):
    """Where a parameter's gradient lies."""

    bucket: int
    offset: int  # bytes


class GradientExchange(ABC):
    """The gradients of one optimizer on their way to the mean (or sum) of all ranks.

    Collective: every rank makes one, with the same parameters in the same order.

    Args:
        group: the ranks.
        parameters: in the order in which their gradients probably become ready. The order that
            the first step shows is used from the second one on.
        op: ``mean`` or ``sum``.
        prescale, postscale: factors on every rank's gradient, and on the result.
        passes_per_step: every that many passes reduce; the others accumulate.
        limits: how large the buckets are.
        overlap: launch buckets during backward; else all of them at its end.
        sparse_as_dense: sparse gradients keep their room in the buckets.

    Raises:
        Mismatch: the ranks' parameters or options differ; says which.
    """

    def __init__(
        self,
        group: Group,
        parameters: Sequence[Parameter],
        *,
        op: str,
        prescale: float,
        postscale: float,
        passes_per_step: int,
        limits: Limits,
        overlap: bool,
        sparse_as_dense: bool = False,
    ) -> None:
        self.reducer = _core.Reducer(
            group,
            list(parameters),
            op,
            prescale,
            postscale,
            limits.bucket_bytes,
            limits.first_bucket_bytes,
            limits.in_place_bytes,
            overlap,
            sparse_as_dense=sparse_as_dense,
        )
        self.epoch = _world.epoch()
        self.names = [p.name for p in parameters]
        self.reducing = False  # the present pass
        self._is_mean = op == "mean" or math.isclose(prescale * postscale * group.size, 1)
        self._passes_per_step = passes_per_step
        self._passes = 0  # begun since gradients were last reduced
        self._held = 0  # depth of no_sync()
        self._marked = bytearray(len(parameters))
        # Reduced gradients stand where the framework accumulates, and nobody has used them up.
        self._standing = False
        # step() must still reduce: since the last reduction a step or a zero_grad was seen.
        self._due = True
        self._dropped = False  # a pass failed, and nothing was done about it
        exchanges.add(self)

    @abstractmethod
    def has_gradient(self, i: int) -> bool:
        """Whether parameter i has a gradient, of this pass or an older one."""

    @abstractmethod
    def still_stands(self, i: int) -> bool:
        """Whether the gradient of parameter i is the one that was shown, perhaps added to."""

    @abstractmethod
    def take(self, i: int) -> None:
        """Calls mark_ready() or lend() with parameter i's gradient."""

    @abstractmethod
    def show(self, i: int) -> None:
        """Makes the reduced gradient of parameter i what the user sees."""

    @abstractmethod
    def checksums(self) -> list[int]:
        """Of the parameters whose values ranks compare, which no step has changed meanwhile."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Forgets all gradients: they are incomplete, and their memory is another step's."""

    @abstractmethod
    def forget_places(self) -> None:
        """Drops the views of the buckets, which will move. Gradients that users see stay."""

    @abstractmethod
    def learn_places(self) -> None:
        """Makes views of places()."""

    def places(self) -> list[Place]:
        """By parameter."""
        return [Place(*place) for place in self.reducer.places]

    def mark_ready(self, i: int, pointer: int, sparse_dims: int = 0) -> None:
        self.reducer.mark_ready(i, pointer, sparse_dims)
        self._marked[i] = 1

    def lend(self, i: int, pointer: int, owner: object, sparse_dims: int = 0) -> None:
        """A large gradient is reduced where it lies, and stays there."""
        self.reducer.lend(i, pointer, owner, sparse_dims)
        self._marked[i] = 1

    def refuse_second_sum(self, i: int) -> None:
        """Before a gradient is taken. The mean of what was reduced already, and equal on all
        ranks, is that value; a sum would count it once per rank."""
        if self._standing and not self._is_mean and self.still_stands(i):
            raise InvalidArgument(
                f"the gradient of '{self.names[i]}' was already summed over the ranks and would "
                "be summed again\n  advice: call step() or zero_grad() between two backward "
                "passes, or accumulate with backward_passes_per_step or no_sync()"
            )

    # The pass.

    def begin_pass(self, *, ends: bool = True) -> None:
        """`ends`: whether finish_pass() will be called; else synchronize() reduces."""
        if (
            self._standing
            and self._passes_per_step > 1
            and any(self.still_stands(i) for i in range(len(self.names)))
        ):
            raise InvalidArgument(
                f"more than backward_passes_per_step={self._passes_per_step} backward passes "
                "without step()\n  advice: call step() or zero_grad() after every "
                f"{self._passes_per_step} passes"
            )
        due = self._held == 0 and self._passes + 1 >= self._passes_per_step
        self._begin(reducing=ends and due)
        self._passes += 1

    def _begin(self, *, reducing: bool) -> None:
        self._dropped = False
        if reducing:
            if self.reducer.step_open:
                self.reducer.drain()  # of a pass that failed
            if self.reducer.has_better_plan:
                self.forget_places()
                self.reducer.take_better_plan()
                self.learn_places()
            self._marked = bytearray(len(self._marked))
        self.reducing = reducing

    def launch_rest(self) -> None:
        """Hands in what this pass did not bring. Waits for nobody."""
        for i, marked in enumerate(self._marked):
            if not marked and self.has_gradient(i):
                self.take(i)
        if self.reducer.weights_due:
            self.reducer.show_weights(self.checksums())
        self.reducer.launch_rest()

    def finish_pass(self) -> None:
        """Waits for the reduced gradients, if this pass reduces."""
        if not self.reducing:
            return
        try:
            self.launch_rest()
            self.reducer.wait()
            self.show_reduced()
        except BaseException:
            self.fail_pass()
            raise
        self.reducing = False
        self._passes = 0
        self._standing, self._due = True, False

    def show_reduced(self) -> None:
        """What was used on no rank stays as it is."""
        for i in range(len(self._marked)):
            if self.reducer.used(i):
                self.show(i)

    def fail_pass(self) -> None:
        """Tells the other ranks, without waiting for them; the next pass will work again."""
        if not self.reducing:
            return
        self.reducing = False
        self._passes = 0
        self._standing, self._due, self._dropped = False, True, True
        self.drop_gradients()
        if self.reducer.step_open:
            with suppress(Error):  # of a group that has failed: the next call will say it
                self.reducer.abandon()

    def refuse_pass(self, why: InvalidArgument) -> NoReturn:
        """Raises it in place of a step, and tells the other ranks, which may have begun one.

        Raises:
            Error: the group has failed.
        """
        self._begin(reducing=True)
        try:
            self.reducer.abandon()
        finally:
            self.fail_pass()
        raise why

    # While this rank has joined, the reducer takes part in the others' steps by itself.

    def before_joining(self) -> None:
        """Ends what is open, and lets go of the buckets, which may move."""
        if self.reducing:
            self.finish_pass()
        elif self.reducer.step_open:
            self.reducer.drain()  # of a pass that failed
        self.forget_places()

    def after_joining(self, steps: int) -> None:
        """Takes the buckets up again. After any step of the others, the gradients that this rank
        still had stand in memory of theirs."""
        self.learn_places()
        if steps > 0:
            self._passes = 0
            self._standing, self._due = False, True
            self.drop_gradients()

    # What the optimizer sees.

    def synchronize(self) -> None:
        """Reduces what was accumulated and not reduced yet.

        Also where nothing was: other ranks may have gradients, and expect this one.
        """
        if not self.reducing:
            if self._passes == 0 and not self._due:
                return
            if self._dropped:
                self.refuse_pass(
                    InvalidArgument(
                        "the last backward() failed, on this rank or on another, and its gradients "
                        "were dropped: there is nothing to step with\n"
                        "  advice: call zero_grad(), and go on with the next batch"
                    )
                )
            self._begin(reducing=True)
        self.finish_pass()

    @property
    def reduced(self) -> bool:
        """Reduced gradients stand, and no step has used them."""
        return self._standing

    def note_step(self) -> None:
        self._standing, self._due = False, True

    def note_zero_grad(self) -> None:
        if self.reducing:
            raise InvalidArgument(
                "zero_grad() was called while gradients are being reduced\n"
                "  advice: call step() or synchronize() first"
            )
        self._passes = 0
        self._standing, self._due, self._dropped = False, True, False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Passes inside only accumulate."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @property
    def passes_per_step(self) -> int:
        return self._passes_per_step

    @passes_per_step.setter
    def passes_per_step(self, passes: int) -> None:
        self._passes_per_step = passes
        self._passes = 0


exchanges: weakref.WeakSet[GradientExchange] = weakref.WeakSet()  # all there are
