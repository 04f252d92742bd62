"""Copies of a distributed optimizer, and of models that have one, are distributed, too.

Keras copies and pickles by its files, which name the plain optimizer (docs/keras.md): a copy would
step by itself, and ranks drift apart. So `__reduce__` adds to Keras' result how the optimizer was
made distributed. As with Keras, an optimizer that is copied without its model loses its state.

Copies may be made on some ranks alone, and outside of a world: a copy needs the other ranks, and
gets its label, when it first reduces.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import keras

from farandole._core import InvalidArgument
from farandole.common._process_set import global_process_set
from farandole.keras import _trainers
from farandole.keras._exchange import backend
from farandole.keras._reduction import Reduction
from farandole.keras._wrapped import State, child_of, distributed_in, state_of

_copies: Counter[str] = Counter()  # by name: how many copies have reduced


def make_distributed(optimizer: Any, state: State) -> None:
    """Makes the optimizer distributed in place, by a child of its class."""
    _learn()
    _trainers.learn()
    vars(optimizer)["_farandole"] = state
    own: Any = type(optimizer)
    optimizer.__class__ = child_of(own)


@dataclass(frozen=True)
class Pattern:
    """How an optimizer was made distributed. Variables are their positions in the optimizer's list,
    since a copy has other variables."""

    name: str
    reduction: Reduction
    local: tuple[int, ...]

    def __deepcopy__(self, memo: Any) -> Pattern:
        return self  # sets of ranks are the same ones in a copy

    def __reduce__(self) -> Any:
        if self.reduction.process_set is not global_process_set:
            raise InvalidArgument(
                f"{self.name} cannot be pickled: {self.reduction.process_set!r} is of this world\n"
                "  advice: save the model with model.save(), and use load_model(…, process_set=…)"
            )
        options = {f.name: getattr(self.reduction, f.name) for f in fields(Reduction)}
        del options["process_set"]
        return _pattern, (self.name, options, self.local)


def _pattern(name: str, options: dict[str, Any], local: tuple[int, ...]) -> Pattern:
    return Pattern(name, Reduction(**options, process_set=global_process_set), local)


class CopiedState(State):
    """The state of a copy: positions in the pattern become variables once the copy has them."""

    def __init__(self, pattern: Pattern) -> None:
        name = f"{pattern.name} copy"
        super().__init__(name, 1, pattern.reduction, backend())
        self.pattern = pattern

    def prepare(self, optimizer: Any) -> None:
        variables = optimizer._trainable_variables
        self.local |= {optimizer._var_key(variables[i]) for i in self.pattern.local}
        groups = self.pattern.reduction.groups
        if not isinstance(groups, int):
            named = [[variables[i] for i in group] for group in groups]
            self.reduction = replace(self.reduction, groups=named)
        _copies[self.name] += 1
        self.label = f"{self.name} {_copies[self.name]}"


def _pattern_of(optimizer: Any) -> Pattern:
    state = state_of(optimizer)
    copied = state.pattern if isinstance(state, CopiedState) else None
    waiting = copied if state.exchange is None else None  # its groups are positions still
    groups = (waiting or state).reduction.groups
    named: Sequence[Sequence[Any]] = () if waiting or isinstance(groups, int) else groups
    if (state.local or named) and not optimizer.built:
        raise InvalidArgument(
            f"{state.label} has local variables, or groups of variables, and cannot be copied "
            "before it is built\n  advice: optimizer.build(model.trainable_variables)"
        )
    keys = [optimizer._var_key(v) for v in optimizer._trainable_variables]
    if named:
        groups = [[keys.index(optimizer._var_key(v)) for v in group] for group in named]
    local = {i for i, key in enumerate(keys) if key in state.local}
    if copied:
        local |= set(copied.local)
    name = copied.name if copied else state.name
    return Pattern(name, replace(state.reduction, groups=groups), tuple(sorted(local)))


def _copied(rebuild: Any, arguments: Sequence[Any], inner: bool, pattern: Pattern) -> Any:
    copy = rebuild(*arguments)
    optimizer = copy.optimizer if isinstance(copy, keras.Model) else copy
    make_distributed(optimizer.inner_optimizer if inner else optimizer, CopiedState(pattern))
    return copy


@cache
def _learn() -> None:
    """Patches the pickling of Keras' models and optimizers that have a distributed optimizer."""
    for saveable in keras.Model.__mro__:
        if hasattr(saveable, "_unpickle_model") and "__reduce__" in vars(saveable):
            _teach(saveable)
            return


def _teach(saveable: Any) -> None:
    own = saveable.__reduce__

    def __reduce__(self: Any) -> Any:
        optimizer = distributed_in(self)
        if optimizer is None:
            return own(self)
        outer = self.optimizer if isinstance(self, keras.Model) else self
        # Not by the object's own class: ours has no name of its own.
        rebuild = saveable._unpickle_model
        return _copied, (rebuild, own(self)[1], optimizer is not outer, _pattern_of(optimizer))

    saveable.__reduce__ = __reduce__
