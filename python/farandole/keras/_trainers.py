"""What Keras' trainers do otherwise with a model whose optimizer is distributed.

On TensorFlow: XLA cannot compile our ops inside its programs: models that have them go without.

On JAX: training ends when a step has failed. Keras looks at no result of a step before somebody
wants to see its numbers: fit(verbose=0) would go on after a failure, and return as if there had
been none.

On each: a model may be trained in one world after another. Keras keeps the training function that
it has made. One with a distributed optimizer has what is of its world: sizes, or what ranks have
agreed on while it was traced.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import keras

from farandole import _world
from farandole._core import Error
from farandole._core import jax as _native
from farandole.keras._wrapped import distributed_in


@cache
def learn() -> None:
    """From now on. Models with other optimizers are as before."""
    backend = keras.backend.backend()
    if backend == "tensorflow" and (trainer := _with("jit_compile")):
        _go_without_xla(trainer)
    if backend == "jax" and (trainer := _with("make_train_function", "jax_state_sync")):
        _end_by_failures(trainer)
    if trainer := _with("make_train_function"):
        _make_functions_anew(trainer)


def _with(*names: str) -> Any:
    """The class among a model's that has these; None: Keras has changed."""
    return next((each for each in keras.Model.__mro__ if set(names) <= vars(each).keys()), None)


# ---- TensorFlow ----


@cache
def say_without_xla() -> None:
    """Once in a process."""
    if _world.rank() == 0:
        print(
            "farandole: XLA cannot compile collectives inside TensorFlow's programs; "
            "the model runs with jit_compile=False"
        )


def _go_without_xla(trainer: Any) -> None:
    """A model answers, when it makes its training function, that it is not to be compiled; what it
    was told stays in its files."""
    own = trainer.jit_compile

    def jit_compile(self: Any) -> Any:
        told = own.fget(self)
        if not told or distributed_in(self) is None:
            return told
        say_without_xla()
        return False

    trainer.jit_compile = property(jit_compile, own.fset, own.fdel, own.__doc__)


# ---- JAX ----


def _end_by_failures(trainer: Any) -> None:
    """A step that comes after a failure raises the verdict, and so does the end of an epoch."""
    own_make, own_sync = trainer.make_train_function, trainer.jax_state_sync

    def make_train_function(self: Any, force: bool = False) -> None:
        before = self.train_function
        own_make(self, force)
        if self.train_function is not before and distributed_in(self) is not None:
            self.train_function = _checked(self.train_function)

    def jax_state_sync(self: Any) -> None:
        trained = getattr(self, "_jax_state", None) and not self._jax_state_synced
        own_sync(self)
        if trained and distributed_in(self) is not None:
            _settle()

    trainer.make_train_function, trainer.jax_state_sync = make_train_function, jax_state_sync


def _checked(step: Callable[..., Any]) -> Callable[..., Any]:
    def checked_step(*arguments: Any) -> Any:
        _require_success()
        try:
            result = step(*arguments)
        except RuntimeError:  # of JAX, for what a failure has left
            _require_success()
            raise
        _require_success()
        return result

    return checked_step


def _require_success() -> None:
    failed = _native.failure()
    if failed is not None:
        raise failed from None


def _settle() -> None:
    """At the end of an epoch, and of fit: the steps so far are over."""
    from farandole.jax import _call

    if isinstance(sys.exc_info()[1], Error | RuntimeError):  # fit ends with it
        return
    try:
        _call.settle()
    except RuntimeError:
        _require_success()
        raise


# ---- worlds ----

_made_in: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # a world, by model


def _make_functions_anew(trainer: Any) -> None:
    """A model makes its training function anew in each world."""
    own = trainer.make_train_function

    def make_train_function(self: Any, force: bool = False) -> None:
        if distributed_in(self) is None:
            own(self, force)
            return
        own(self, force or _made_in.get(self, _world.epoch()) != _world.epoch())
        _made_in[self] = _world.epoch()

    trainer.make_train_function = make_train_function
