"""Logical ranks: several in one process, and the same bits for any number of processes.

Note [Same bits for any number of ranks]

A batch is cut for G logical ranks, whatever the number of ranks P. What a step makes of a part
depends on the part alone: its loss weighs count / total, its metrics begin at zero, its random
layers draw with a seed of the logical rank. A rank folds what its parts give in the canonical tree
over all G parts, of which it has a subtree (data/_logical.py); the sum over ranks goes on in the
same tree, since that over P ranks is its upper part, and what all have in the end is

    weights     one update with the sum of all parts' gradients
    metrics     the state before, plus the sum of what all parts added
    statistics  (moving averages) the mean of what they became in each part, beginning alike
    seeds       what they were, drawn from as often as in one part

So it is the same in every bit for each P, as far as the framework computes a part alike each time:

    PyTorch     computes part by part; other numbers of threads have other bits, so their number
                follows from G
    JAX         compiles a part as a program of its own, which is the same for each P
    TensorFlow  has one graph of all of a rank's parts, in which its optimizer would move sums and
                products from one part to another: it is told not to
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from farandole._core import InvalidArgument
from farandole.data import _logical
from farandole.data._logical import Block
from farandole.keras._global.steps import Steps

_CHANGED = (
    "logical_ranks={}: train_step() changes gradients before the optimizer gets them, where it has "
    "those of one part of the batch\n"
    "  advice: the optimizer's clipnorm, clipvalue or global_clipnorm, or no logical_ranks"
)
_TWICE = (
    "logical_ranks={}: train_step() applies its optimizer more than once, or to variables that the "
    "model does not train; the parts of a batch are computed one by one, and updated once\n"
    "  advice: no logical_ranks"
)


def hold_updates(model: Any, steps: Steps) -> None:
    """From now on the optimizer keeps gradients for later inside a step that says so.

    Raises, in such a step:
        InvalidArgument: it would not have the gradients of the whole batch.
    """
    optimizer = model.optimizer
    apply = type(optimizer).apply.__get__(optimizer)
    stateless_apply = type(optimizer).stateless_apply.__get__(optimizer)

    def held_apply(grads: Any, trainable_variables: Any = None) -> Any:
        if steps.held is None:
            return apply(grads, trainable_variables)
        _hold(model, steps, grads, trainable_variables)
        return None

    def held_stateless_apply(optimizer_variables: Any, grads: Any, trainable: Any) -> Any:
        if steps.held is None:
            return stateless_apply(optimizer_variables, grads, trainable)
        _hold(model, steps, grads, None)
        return trainable, optimizer_variables

    optimizer.apply, optimizer.stateless_apply = held_apply, held_stateless_apply


def _hold(model: Any, steps: Steps, given: Iterable[Any], variables: Iterable[Any] | None) -> None:
    """Keeps the gradients of a part, in the order of the model's variables."""
    assert steps.held is not None
    assert steps.block is not None
    gradients, ours = list(given), model.trainable_variables
    theirs = ours if variables is None else list(variables)
    places = {id(v): i for i, v in enumerate(ours)}
    if steps.held or len(gradients) != len(theirs) or not places.keys() >= set(map(id, theirs)):
        raise InvalidArgument(_TWICE.format(steps.block.parts))
    if steps.are_changed(gradients, theirs):
        raise InvalidArgument(_CHANGED.format(steps.block.parts))
    kept = [None] * len(ours)
    for variable, gradient in zip(theirs, steps.weighed(gradients), strict=True):
        kept[places[id(variable)]] = gradient
    steps.held.append(kept)


def block_here(logical_ranks: int, options: Mapping[str, Any]) -> Block:
    """This rank's.

    Raises:
        InvalidArgument: they do not go on this many ranks, or with what else is asked for.
    """
    block = _logical.block_here(logical_ranks, "Model", options)
    _fix_kernels(logical_ranks)
    return block


def _fix_kernels(logical_ranks: int) -> None:
    """A framework is to compute a part alike, whatever else it computes."""
    if keras.backend.backend() == "tensorflow":
        _fix_graphs()
    if keras.backend.backend() == "torch":
        _logical.fix_torch_threads(logical_ranks)


def _fix_graphs() -> None:
    """TensorFlow moves sums and products of a graph, across its parts."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})


def seed_states(model: Any) -> list[Any]:
    """Variables from which layers draw at random."""
    layers = model._flatten_layers()
    return [generator.state for layer in layers for generator in layer._seed_generators]
