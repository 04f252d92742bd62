"""Backward passes in a training step of the user's own on PyTorch, where ranks may have different
numbers of them: one for each sample, say.

Each backward() reduces. So before each but the first, and where a step asks autograd by itself or
gets to its optimizer, ranks say where they are. One that is at its optimizer takes part in the
passes of others with the gradients that it has, which are means already, until all are there.

Of the first one nobody is told, as most steps have no other. So a rank without any takes part in
one of its optimizer's before it says where it is, unless the gradients that ranks had last came by
torch.autograd.grad.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from farandole._core import InvalidArgument
from farandole.common._objects import allgather_object, compare

_BACKWARD, _GRAD, _APPLY = "backward()", "torch.autograd.grad()", "its optimizer"
_ADVICE = "ask for gradients of the loss of a batch as often on every rank"
_CLIP = f"{_ADVICE}; or the optimizer's clipnorm, clipvalue or global_clipnorm"
_CHANGED, _LEFT = "gradients that it has changed", "gradients as backward() leaves them"


class _Place(NamedTuple):
    """Where a rank is."""

    at: str
    label: str = ""  # of the exchange that a backward() is of
    is_of_batch: bool = False  # what autograd is asked for
    known: Sequence[str] = ()  # labels of exchanges that one at its optimizer can take part in
    changed: bool = False  # what passes gave, before the optimizer gets it


class Passes:
    """Those of one model."""

    def __init__(self) -> None:
        self._step: Any = None  # its share
        self._begun = 0  # in this step, or since its last optimizer
        self._asks = False  # gradients last came by torch.autograd.grad, on some rank
        self._exchanges: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def begin(self, step: Any, exchange: Any) -> None:
        """Collective, but for the first one: a pass whose gradients this exchange reduces."""
        self._enter(step)
        self._begun += 1
        self._asks = False
        self.know(exchange)
        if self._begun > 1:
            _agreed(_Place(_BACKWARD, label=exchange.label))

    def know(self, exchange: Any) -> None:
        """This rank can take part in passes whose gradients this exchange reduces."""
        self._exchanges[exchange.label] = exchange

    def _enter(self, step: Any) -> None:
        if self._step is not step:
            self._step, self._begun = step, 0

    def ask(self, *, is_of_batch: bool) -> bool:
        """Collective: whether the gradients that all ranks ask for are of the whole batch."""
        self._asks = True
        places = _agreed(_Place(_GRAD, is_of_batch=is_of_batch))
        return all(each.is_of_batch for each in places)

    def lacks_one(self, step: Any) -> bool:
        """Whether other ranks may have begun a pass that this one has to take part in."""
        self._enter(step)
        return self._begun == 0 and not self._asks

    def finish(self, *, changed: bool) -> None:
        """Collective: until all ranks are at their optimizers.

        Args:
            changed: the step has changed what the passes gave.
        """
        known = sorted(self._exchanges)
        others = [mine := _Place(_APPLY, known=known, changed=self._begun > 0 and changed)]
        while others:
            others = [each for each in _agreed(mine) if each.at != _APPLY]
            self._asks = self._asks or any(each.at == _GRAD for each in others)
            for label in {each.label for each in others if each.at == _BACKWARD}:
                self._exchanges[label].reduce_again()
        self._begun = 0

    def have_changed(self) -> bool:
        """Whether the step has written into what they gave."""
        return any(each.has_changed() for each in self._exchanges.values())


def _agreed(mine: _Place) -> Sequence[_Place]:
    """Collective: where all ranks are. Raises on every rank if they cannot go on from there."""
    told = allgather_object(mine._asdict(), "places in a train_step()")
    places = [_Place(**each) for each in told]
    there = {each.at for each in places}
    passes = {each.label for each in places if each.at == _BACKWARD}
    asks = any(each.is_of_batch for each in places) and there != {_GRAD}
    lost = any(passes.difference(each.known) for each in places if each.at == _APPLY)
    if asks or lost or {_GRAD, _BACKWARD} <= there:
        rows = {rank: [_words(each)] for rank, each in enumerate(places)}
        compare("what comes next in a train_step()", rows, _ADVICE)
    if there == {_APPLY}:  # one that has had no pass cannot change what others got by theirs
        rows = {rank: [_CHANGED if each.changed else _LEFT] for rank, each in enumerate(places)}
        compare("what a train_step() gives its optimizer", rows, _CLIP)
    early = [rank for rank, each in enumerate(places) if each.changed]
    late = [rank for rank, each in enumerate(places) if each.at == _BACKWARD]
    if early and late:
        raise InvalidArgument(
            f"a train_step() calls backward() more often on rank {late[0]} than on rank "
            f"{early[0]}, which has changed the gradients that it got by fewer calls\n"
            f"  advice: {_CLIP}"
        )
    return places


def _words(place: _Place) -> str:
    return f"{place.at} of {place.label}" if place.label else place.at


class Hooks:
    """Those of one model's parameters, in a step of the user's own."""

    def __init__(self) -> None:
        self.unweighed: set[int] = set()  # ids of variables whose gradients have no weight
        self._asks = False

    @contextmanager
    def weighing(self, variables: Iterable[Any], weight: float) -> Iterator[None]:
        """A context for a step, in which backward() weighs gradients."""
        weighed = [] if weight == 1.0 else list(variables)
        hooks = [v.value.register_hook(self._weighing(id(v), weight)) for v in weighed]
        self.unweighed.clear()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _weighing(self, variable: int, weight: float) -> Callable[[Any], Any]:
        def hook(gradient: Any) -> Any:
            if self._asks:
                return gradient
            self.unweighed.discard(variable)
            return gradient * weight

        return hook

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A context for torch.autograd.grad, which gives gradients without a weight."""
        self._asks = True
        try:
            yield
        finally:
            self._asks = False


def is_made_of(loss: Any, losses: Iterable[Any]) -> bool:
    """Whether autograd's graph of a loss has one of these in it."""
    known = {each.grad_fn for each in losses} - {None}
    waiting = [loss.node if hasattr(loss, "node") else loss.grad_fn]  # of an edge, or a tensor
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node in known:
            return True
        if node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return False
