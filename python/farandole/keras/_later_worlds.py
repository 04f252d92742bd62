"""A model that is trained in one world after another.

Keras keeps the training function that it has made. One with a distributed optimizer has what is of
its world: sizes, or what ranks have agreed on while it was traced.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

import keras

from farandole import _world
from farandole.keras._wrapped import distributed_in

_made_in: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # a world, by model


@cache
def learn() -> None:
    """From now on a model whose optimizer is distributed makes its training function anew in each
    world. Models with other optimizers are as before."""
    for trainer in keras.Model.__mro__:
        if "make_train_function" in vars(trainer):
            _teach(trainer)
            return


def _teach(trainer: Any) -> None:
    own = trainer.make_train_function

    def make_train_function(self: Any, force: bool = False) -> None:
        if distributed_in(self) is None:
            own(self, force)
            return
        own(self, force or _made_in.get(self, _world.epoch()) != _world.epoch())
        _made_in[self] = _world.epoch()

    trainer.make_train_function = make_train_function
