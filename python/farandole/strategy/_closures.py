"""Closures of a ClusterCoordinator, and how they ended, as bytes between ranks."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from farandole import _world
from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.common._pickles import sealed, unsealed


def _outcome_of(number: int) -> str:
    return f"the outcome of closure {number}"


class Outcome(NamedTuple):
    """The outcome of one closure. `data` is sealed: the result, or a `_Failure`."""

    number: int  # of the closure
    good: bool
    data: bytes


class _Failure(NamedTuple):
    error: bytes | None  # sealed; None where it cannot be sent
    what: str
    where: str  # "closure 3 (step_fn) on rank 2"
    trace: str


class ClosureFailed(InvalidArgument, RuntimeError):
    """A closure raised an error that cannot be sent to other ranks."""


class TracebackOfRank(Exception):
    """The cause of an error that a closure raised: its traceback on that rank."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(eq=False)
class Closure:
    """A function that was scheduled. All ranks number them alike."""

    number: int
    function: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    # On the chief:
    known_from: int = 0  # to workers that have so many entries of the log
    outcome: Outcome | None = None  # once it has ended

    @property
    def label(self) -> str:
        named = getattr(self.function, "python_function", self.function)
        name = getattr(named, "__qualname__", None) or type(named).__name__
        return f"closure {self.number} ({name.rpartition('.')[2]})"


def result(closure: Closure, value: Any) -> Outcome:
    """The outcome of a closure that succeeded. Tensors become numpy arrays."""
    flat = [_as_numpy(each) for each in tf.nest.flatten(value)]
    return _made(closure, True, tf.nest.pack_sequence_as(value, flat))


def _made(closure: Closure, good: bool, content: Any) -> Outcome:
    return Outcome(closure.number, good, sealed(content, _outcome_of(closure.number)))


def _as_numpy(value: Any) -> Any:
    if tf.is_tensor(value) or isinstance(value, tf.Variable):
        if hasattr(value, "numpy"):
            return value.numpy()
        raise InvalidArgument(f"a closure returned {type_of(value)}; tensors are sent")
    return value


def failure(closure: Closure, error: BaseException) -> Outcome:
    where = f"{closure.label} on rank {_world.rank()}"
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    what = f"{type(error).__name__}: {error}"
    return _made(closure, False, _Failure(_sendable(closure, error), what, where, trace))


def _sendable(closure: Closure, error: BaseException) -> bytes | None:
    what = _outcome_of(closure.number)
    try:
        data = sealed(_without_operation(error), what)
        return data if isinstance(unsealed(data, what), BaseException) else None
    except Exception:
        return None


def _without_operation(error: BaseException) -> BaseException:
    """The error without the operation of TensorFlow's errors, which is not sent."""
    if not isinstance(error, tf.errors.OpError):
        return error
    told: Any = error
    found: BaseException
    try:
        found = type(told)(None, None, told.message)
    except TypeError:
        found = tf.errors.OpError(None, None, told.message, told.error_code)
    return found


def cancelled(closure: Closure, by: Outcome) -> Outcome:
    """The outcome of a closure that was not begun, as another one had failed."""
    where = unsealed(by.data, _outcome_of(by.number)).where
    text = f"{closure.label} was cancelled, as {where} had failed; schedule it again if need be"
    error = tf.errors.CancelledError(None, None, text)
    return _made(closure, False, _Failure(_sendable(closure, error), text, where, ""))


def value_of(outcome: Outcome) -> Any:
    """The result.

    Raises:
        Exception: what the closure raised.
    """
    what = _outcome_of(outcome.number)
    if outcome.good:
        return unsealed(outcome.data, what)
    failed: _Failure = unsealed(outcome.data, what)
    error: BaseException
    if failed.error is None:
        error = ClosureFailed(f"{failed.where} raised {failed.what}")
    else:
        error = unsealed(failed.error, what)
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"raised by {failed.where}")
    raise error from TracebackOfRank(f"{failed.where}:\n{failed.trace}")
