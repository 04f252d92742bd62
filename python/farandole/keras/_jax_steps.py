"""Training on JAX ends when a step has failed.

Keras looks at no result of a step before somebody wants to see its numbers: fit(verbose=0) would go
on after a failure, and return as if there had been none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import keras

from farandole._core import Error
from farandole._core import jax as _native
from farandole.keras._wrapped import distributed_in


@cache
def learn() -> None:
    """From now on, of a model whose optimizer is distributed: a step that comes after a failure
    raises the verdict, and so does the end of an epoch. On JAX alone."""
    if keras.backend.backend() == "jax":
        for trainer in keras.Model.__mro__:
            if {"make_train_function", "jax_state_sync"} <= vars(trainer).keys():
                _teach(trainer)
                return


def _teach(trainer: Any) -> None:
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
