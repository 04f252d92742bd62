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

from collections.abc import Mapping
from typing import Any

import keras

from farandole.data import _logical
from farandole.data._logical import Block
from farandole.keras._global.steps import Steps


def hold_updates(optimizer: Any, steps: Steps) -> None:
    """From now on the optimizer keeps gradients for later inside a step that says so."""
    apply = type(optimizer).apply.__get__(optimizer)
    stateless_apply = type(optimizer).stateless_apply.__get__(optimizer)

    def held_apply(grads: Any, trainable_variables: Any = None) -> Any:
        if steps.held is None:
            return apply(grads, trainable_variables)
        steps.held.append(steps.weighed(grads))
        return None

    def held_stateless_apply(optimizer_variables: Any, grads: Any, trainable: Any) -> Any:
        if steps.held is None:
            return stateless_apply(optimizer_variables, grads, trainable)
        steps.held.append(steps.weighed(grads))
        return trainable, optimizer_variables

    optimizer.apply, optimizer.stateless_apply = held_apply, held_stateless_apply


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
