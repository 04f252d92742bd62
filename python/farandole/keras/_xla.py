"""XLA cannot compile our ops inside TensorFlow's programs: models that have them go without."""

from __future__ import annotations

from functools import cache
from typing import Any

import keras

from farandole import _world
from farandole.keras._wrapped import distributed_in


@cache
def say_without() -> None:
    """Once in a process."""
    if _world.rank() == 0:
        print(
            "farandole: XLA cannot compile collectives inside TensorFlow's programs; "
            "the model runs with jit_compile=False"
        )


@cache
def learn() -> None:
    """From now on a model whose optimizer is distributed answers, when it makes its training
    function, that it is not to be compiled; what it was told stays in its files. Models with other
    optimizers are as before. On TensorFlow alone."""
    if keras.backend.backend() == "tensorflow":
        for trainer in keras.Model.__mro__:
            if isinstance(vars(trainer).get("jit_compile"), property):
                _teach(trainer)
                return


def _teach(trainer: Any) -> None:
    own = trainer.jit_compile

    def jit_compile(self: Any) -> Any:
        told = own.fget(self)
        if not told or distributed_in(self) is None:
            return told
        say_without()
        return False

    trainer.jit_compile = property(jit_compile, own.fset, own.fdel, own.__doc__)
