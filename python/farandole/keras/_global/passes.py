"""Backward passes in a training step of the user's own on PyTorch, where ranks may have different
numbers of them: one for each sample, say.

Each backward() reduces. So before each but the first, and where a step asks autograd by itself or
gets to its optimizer, ranks say where they are. One that is at its optimizer takes part in the
passes of others with the gradients that it has, which are means already, until all are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from farandole._core import InvalidArgument
from farandole.common._objects import allgather_object, compare

_BACKWARD, _GRAD, _APPLY = "backward()", "torch.autograd.grad()", "its optimizer"
_ADVICE = "ask for gradients of the loss of a batch as often on every rank"


class _Place(NamedTuple):
    """Where a rank is."""

    at: str
    label: str = ""  # of the exchange that a backward() is of
    is_of_batch: bool = False  # what autograd is asked for
    changed: bool = False  # what the optimizer gets


class Passes:
    """Those of one model."""

    def __init__(self) -> None:
        self._step: Any = None  # its share
        self._begun = 0  # in this step, or since its last optimizer
        self._exchanges: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def begin(self, step: Any, exchange: Any) -> None:
        """Collective, but for the first one: a pass whose gradients this exchange reduces."""
        if self._step is not step:
            self._step, self._begun = step, 0
        self._begun += 1
        self._exchanges[exchange.label] = exchange
        if self._begun > 1:
            _agreed(_Place(_BACKWARD, label=exchange.label))

    @staticmethod
    def ask(*, is_of_batch: bool) -> bool:
        """Collective: whether the gradients that all ranks ask for are of the whole batch."""
        places = _agreed(_Place(_GRAD, is_of_batch=is_of_batch))
        return all(each.is_of_batch for each in places)

    def finish(self, *, changed: bool) -> None:
        """Collective: until all ranks are at their optimizers.

        Args:
            changed: the step has changed what the passes gave.
        """
        others = [mine := _Place(_APPLY, changed=changed)]
        while others:
            others = [each for each in _agreed(mine) if each.at != _APPLY]
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
    asks = any(each.is_of_batch for each in places) and there != {_GRAD}
    if asks or there == {_GRAD, _BACKWARD}:
        rows = {rank: [each.at] for rank, each in enumerate(places)}
        compare("what comes next in a train_step()", rows, _ADVICE)
    early = [rank for rank, each in enumerate(places) if each.changed]
    late = [rank for rank, each in enumerate(places) if each.at == _BACKWARD]
    if early and late:
        raise InvalidArgument(
            f"a train_step() calls backward() more often on rank {late[0]} than on rank "
            f"{early[0]}, which has changed the gradients that it got by fewer calls\n"
            f"  advice: {_ADVICE}; or the optimizer's clipnorm, clipvalue or global_clipnorm"
        )
    return places
