"""Tells whether a loss gives a value for each sample, made from that sample alone.

Only then is the loss of a batch made of the losses of its parts. A loss that gives one number, one
that compares samples with each other (pairs, a softmax over the batch), and one that leaves some
out is not: it gets the whole batch (losses.py).

Keras' own losses are known. Another one is tried on a few made-up samples, once: a batch must give
what its halves give, and as many values as samples whatever their values are, also with a target
that programs leave out, as -1. What cannot be tried counts as a loss of the whole batch, which is
right for every loss, and slower for most; but not one that has a state, or reaches a model, in
which it finds values of the rank's own samples. What calls change in Python is put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FunctionType
from typing import Any

import keras
import numpy as np

from farandole._core import InvalidArgument
from farandole.data._logical import Block

_FEW = 2  # samples in each half
_OPEN = 3  # the length of a dimension that is not known
MIXING = {"circle", "dice", "tversky"}  # functions of Keras that look at several samples
_CLOSE = 1e-4  # relative; sums of other lengths are rounded otherwise
# Targets by which programs mark what does not count, beside numbers that they compare with.
_LEFT_OUT = (-1, 0, -100, 255, np.nan)
_MOST_MARKS = 16  # that are tried
_MOST_NUMBERS = 10_000  # of a sample that a metric is tried with

_Array = np.ndarray[Any, Any]

DECLARED = "state_is_sum"  # an attribute of a metric of the user's own

# What needs the whole batch, and what to do instead.
LOSS = (
    "loss {} is of the whole batch",
    "return a loss for each sample, made from that sample alone",
)
MASKED = (
    "loss {} leaves samples out, and Keras divides it by what is left of the whole batch",
    "reduction='sum', or sample weights, which say what counts",
)
DIVISOR = "the loss is divided by {} of the whole batch", "a loss with reduction='sum'"
FUNCTION = (
    "metric {} gives one number for all samples of a batch",
    "return a value for each sample",
)
METRIC = (
    "metric {} has an update_state() of its own for the whole batch",
    f"{DECLARED} = True in its class, if its state is nothing but sums over samples",
)


def needs_whole_batch(kind: tuple[str, str], name: Any, block: Block | None) -> InvalidArgument:
    """`block`: of logical ranks; None: what computes a part is a micro-batch of a Pipeline."""
    what, advice = kind[0].format(name), kind[1]
    if block is None:
        return InvalidArgument(
            f"{what}, which a micro-batch of a Pipeline does not know\n"
            f"  advice: {advice}, or a Pipeline with micro_batches=1 and one replica"
        )
    return InvalidArgument(
        f"logical_ranks={block.parts}: {what}, which a logical rank does not know when it computes "
        f"its part\n  advice: {advice}, or no logical_ranks"
    )


def keeps_samples_apart(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether the loss of a batch is made of those of its parts.

    Args:
        y_true, y_pred: what it is called with; of these shapes and dtypes are looked at.
    """
    if type(loss).__call__ is not keras.losses.Loss.__call__:  # it says what that of a batch is
        return False
    with left_as_it_was(loss, _function_of(loss)):
        return _keeps_apart(loss, y_true, y_pred)


def _keeps_apart(loss: Any, y_true: Any, y_pred: Any) -> bool:
    reached = keras.tree.flatten(list(_reached(loss)))
    if any(map(_has_state, reached)):
        return not _is_symbolic_number(loss, y_true, y_pred)  # a call would change its state
    if any(isinstance(each, keras.Layer) for each in reached):  # and that of some layers
        with suppress(Exception):  # it may reach what stands in this step alone
            return not _is_symbolic_number(loss, y_true, y_pred)
        return not _gives_one_number(loss, y_true, y_pred)
    if _gives_one_number(loss, y_true, y_pred):
        return False
    name = _name_in_keras(loss)
    if name is not None:
        return not mixes_samples(loss, y_pred)
    try:
        trial = _Trial(loss.call, loss.dtype, y_true, y_pred)
        return trial.has_numbers() and not trial.mixes(_marks(loss))
    except Exception:  # made-up values may be none that the function takes
        return False


def is_seen_to_mix(metric: Any, y_true: Any, y_pred: Any) -> bool:
    """Whether the function of a metric, which gives a value for each sample, makes it from others,
    too. Not seen of one that cannot be tried: it has state, or much would have to be made up."""
    function, options = metric._fn, metric._fn_kwargs
    tensors = keras.tree.flatten((y_true, y_pred))
    if not isinstance(function, FunctionType) or sum(map(_size_of_sample, tensors)) > _MOST_NUMBERS:
        return False
    reached = keras.tree.flatten([*_reached_by(function), *options.values()])
    if any(_has_state(each) or isinstance(each, keras.Layer) for each in reached):
        return False
    with suppress(Exception):
        trial = _Trial(lambda y, out: function(y, out, **options), metric.dtype, y_true, y_pred)
        return trial.mixes(_numbers([*_LEFT_OUT, *reached, *_constants_of(function)]))
    return False


def mixes_samples(loss: Any, y_pred: Any) -> bool:
    """Whether it is one of Keras' that are known to look at several samples."""
    name = _name_in_keras(loss)
    return name is not None and is_mixing(name, getattr(loss, "_fn_kwargs", {}), y_pred)


def is_mixing(name: str, options: Any, y_pred: Any) -> bool:
    """The same of a function of Keras with these options, as one along the axis of samples."""
    if name in MIXING:
        return True
    shapes = [np.shape(each) for each in keras.tree.flatten(y_pred)[:1]]
    axes, rank = options.get("axis", -1), max(map(len, shapes), default=0)
    given = axes if isinstance(axes, tuple | list) else (axes,)
    return any(axis is None or axis % max(rank, 1) == 0 < rank for axis in given)


@contextmanager
def left_as_it_was(owner: Any, function: Any) -> Iterator[None]:
    """Puts back what calls of a function of the user's change: attributes, what it has by name, and
    what is in lists of these. A trial is none of the program's calls."""
    own, names = dict(vars(owner)), _globals_of(function)
    cells = [(cell, cell.cell_contents) for cell in getattr(function, "__closure__", None) or ()]
    values = [*own.values(), *names.values(), *(value for _, value in cells)]
    filled = [(each, each.copy()) for each in values if isinstance(each, list | dict | set)]
    try:
        yield
    finally:
        vars(owner).clear()
        vars(owner).update(own)
        if names:
            function.__globals__.update(names)
        for cell, value in cells:
            cell.cell_contents = value
        for each, content in filled:
            each.clear()
            (each.extend if isinstance(each, list) else each.update)(content)


def _globals_of(function: Any) -> dict[str, Any]:
    """The values of the names that a function has in its module."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    known = function.__globals__
    return {name: known[name] for name in code.co_names if name in known}


def _function_of(loss: Any) -> Any:
    return getattr(loss, "fn", type(loss).call)


def _marks(loss: Any) -> list[float]:
    """Targets that it may leave out."""
    return _numbers([*_LEFT_OUT, *_reached(loss), *_constants_of(_function_of(loss))])


def _constants_of(function: Any) -> tuple[Any, ...]:
    constants: tuple[Any, ...] = getattr(getattr(function, "__code__", None), "co_consts", ())
    return constants


def _numbers(values: list[Any]) -> list[float]:
    numbers = [n for n in values if isinstance(n, int | float) and not isinstance(n, bool)]
    return list(dict.fromkeys(numbers))[:_MOST_MARKS]


def _gives_one_number(loss: Any, y_true: Any, y_pred: Any) -> bool:
    """A call shows it, whose result is not used."""

    def as_read(tensor: Any) -> Any:
        return keras.ops.convert_to_tensor(tensor, dtype=loss.dtype)

    y_true, y_pred = (keras.tree.map_structure(as_read, each) for each in (y_true, y_pred))
    shape = keras.ops.convert_to_tensor(loss.call(y_true, y_pred)).shape  # it may be a list
    return bool((shape.rank if hasattr(shape, "rank") else len(shape)) == 0)  # of none, in a graph


def _has_state(each: Any) -> bool:
    kinds = keras.Variable, keras.random.SeedGenerator
    return isinstance(each, kinds) or hasattr(each, "assign")


def _is_symbolic_number(loss: Any, y_true: Any, y_pred: Any) -> bool:
    def symbol(tensor: Any) -> Any:
        return keras.KerasTensor(tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))

    symbols = keras.tree.map_structure(symbol, (y_true, y_pred))
    spec = keras.src.backend.compute_output_spec(loss.call, *symbols)
    return len(spec.shape) == 0


def _reached(loss: Any) -> Iterator[Any]:
    """The objects that a loss, or its function, has by name."""
    yield from vars(loss).values()
    yield from _reached_by(_function_of(loss))


def _reached_by(function: Any) -> Iterator[Any]:
    yield from (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    yield from _globals_of(function).values()


def _name_in_keras(loss: Any) -> str | None:
    function = getattr(loss, "fn", type(loss))
    modules = (type(loss).__module__, getattr(function, "__module__", None) or "")
    return function.__name__ if all(m.startswith("keras.") for m in modules) else None


def _made_up(tensor: Any, dtype: Any, seed: int) -> _Array:
    """Samples between 0 and 1, which are classes as well as probabilities; outputs by another seed
    than targets, as many a loss of what is equal is 0."""
    shape = [_OPEN if length is None else length for length in tuple(tensor.shape)[1:]]
    given = keras.backend.standardize_dtype(tensor.dtype)
    random = np.random.default_rng([len(shape), seed])
    values: _Array = random.uniform(0.05, 0.95, (2 * _FEW, *shape))
    if not keras.backend.is_float_dtype(given):
        values = values.round()
    return values.astype(given if dtype is None else dtype)


def _size_of_sample(tensor: Any) -> int:
    return math.prod(_OPEN if n is None else n for n in tuple(tensor.shape)[1:])


def _of_two_values(targets: _Array) -> _Array:
    """So that some samples are of one class, as losses of pairs look for."""
    return (
        np.where(targets > 0.5, 2, 1).astype(targets.dtype)
        if targets.dtype.kind == "f"
        else targets
    )


class _Trial:
    """Calls of a function with made-up samples."""

    def __init__(self, call: Callable[..., Any], dtype: Any, y_true: Any, y_pred: Any) -> None:
        self._targets, self._outputs = (
            keras.tree.map_structure(lambda tensor, i=i: _made_up(tensor, dtype, i), each)
            for i, each in enumerate((y_true, y_pred))
        )
        alike = keras.tree.map_structure(_of_two_values, self._targets)
        self._attempt = _TRY[keras.backend.backend()](call)
        self._found = [
            _whole_and_halves(self._attempt, (each, self._outputs))
            for each in (self._targets, alike)
        ]

    def has_numbers(self) -> bool:
        return all(bool(np.isfinite(whole).all()) for whole, _ in self._found)

    def mixes(self, marks: list[float]) -> bool:
        """Whether a batch gives other values than its halves, or with a target that is marked."""
        if not all(_are_close(whole, halves) for whole, halves in self._found):
            return True
        return any(_mixes(self._attempt, self._targets, self._outputs, mark) for mark in marks)


def _mixes(attempt: Callable[..., Any], targets: Any, outputs: Any, mark: float) -> bool:
    """Whether a target that is marked as left out changes the values of other samples."""
    # It may be none that the function takes. On a device, a wrong index would end the process.
    with suppress(Exception), keras.device("cpu"):
        marked = keras.tree.map_structure(lambda array: _marked(array, mark), targets)
        return not _are_close(*_whole_and_halves(attempt, (marked, outputs)))
    return False


def _marked(targets: _Array, mark: float) -> _Array:
    """The first one is, so that the halves have different numbers of them."""
    changed = targets.copy()
    changed[0] = mark
    return changed


def _whole_and_halves(attempt: Callable[..., Any], given: Any) -> tuple[_Array, _Array]:
    def of(rows: slice) -> _Array:
        values = attempt(keras.tree.map_structure(lambda array: array[rows], given))
        return np.asarray(values, np.float64)

    return of(slice(None)), np.concatenate([of(slice(_FEW)), of(slice(_FEW, None))])


def _are_close(whole: _Array, halves: _Array) -> bool:
    if whole.shape != halves.shape:
        return False
    largest = np.abs(whole[np.isfinite(whole)]).max(initial=0.0)
    return np.allclose(whole, halves, rtol=_CLOSE, atol=_CLOSE * float(largest), equal_nan=True)


class _Uneven(Exception):
    """As many values as the samples' values ask for."""


def _require_rows(shape: Any, given: Any) -> None:
    if shape[0] != len(keras.tree.flatten(given)[0]):
        raise _Uneven


def _by_tensorflow(call: Callable[..., Any]) -> Callable[..., Any]:
    import tensorflow as tf

    program = tf.function(call)

    def attempt(given: Any) -> Any:
        with tf.init_scope():
            concrete = program.get_concrete_function(
                *tf.nest.map_structure(lambda a: tf.TensorSpec(a.shape, a.dtype), given)
            )
            _require_rows(concrete.structured_outputs.shape, given)
            return concrete(*tf.nest.map_structure(tf.constant, given))

    return attempt


def _by_torch(call: Callable[..., Any]) -> Callable[..., Any]:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    def attempt(given: Any) -> Any:
        def tensors() -> Any:
            return keras.tree.map_structure(keras.ops.convert_to_tensor, given)

        with torch.no_grad():
            with FakeTensorMode(allow_non_fake_inputs=True):
                _require_rows(call(*tensors()).shape, given)
            return call(*tensors()).cpu()

    return attempt


def _by_jax(call: Callable[..., Any]) -> Callable[..., Any]:
    import jax

    def attempt(given: Any) -> Any:
        with jax.ensure_compile_time_eval():
            _require_rows(jax.eval_shape(call, *given).shape, given)
            return call(*keras.tree.map_structure(keras.ops.convert_to_tensor, given))

    return attempt


_TRY = {"tensorflow": _by_tensorflow, "torch": _by_torch, "jax": _by_jax}
