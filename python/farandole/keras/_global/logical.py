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

import os
from collections.abc import Mapping
from typing import Any

import keras

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole._limits import setting
from farandole.data._logical import Block, block_of
from farandole.keras._global.steps import Steps


def hold_updates(optimizer: Any, steps: Steps) -> None:
    """From now on the optimizer keeps gradients for later inside a step that says so."""
    apply = type(optimizer).apply.__get__(optimizer)
    stateless_apply = type(optimizer).stateless_apply.__get__(optimizer)

    def held_apply(grads: Any, trainable_variables: Any = None) -> Any:
        if steps.held is None:
            return apply(grads, trainable_variables)
        steps.held.append(list(grads))
        return None

    def held_stateless_apply(optimizer_variables: Any, grads: Any, trainable: Any) -> Any:
        if steps.held is None:
            return stateless_apply(optimizer_variables, grads, trainable)
        steps.held.append(list(grads))
        return trainable, optimizer_variables

    optimizer.apply, optimizer.stateless_apply = held_apply, held_stateless_apply


def block_here(logical_ranks: int, options: Mapping[str, Any]) -> Block:
    """This rank's.

    Raises:
        InvalidArgument: they do not go on this many ranks, or with what else is asked for.
    """
    if isinstance(logical_ranks, bool) or not isinstance(logical_ranks, int) or logical_ranks < 1:
        raise InvalidArgument(
            f"logical_ranks is {shown(logical_ranks)}; it is a whole number of at least 1"
        )
    for name in ("compression", "gradient_predivide_factor"):
        if name in options:
            raise InvalidArgument(
                f"Model(logical_ranks={logical_ranks}, {name}=…): {name} changes what each rank "
                "sends, so that bits depend on their number; leave out one of them"
            )
    if setting("FARANDOLE_LEVEL") == "fast":
        raise InvalidArgument(
            f"logical_ranks={logical_ranks} with FARANDOLE_LEVEL=fast, by which bits depend on the "
            "number of ranks; unset it"
        )
    _fix_kernels(logical_ranks)
    return block_of(_world.rank(), _world.size(), logical_ranks)


def _fix_kernels(logical_ranks: int) -> None:
    """A framework is to compute a part alike, whatever else it computes."""
    if keras.backend.backend() == "tensorflow":
        _fix_graphs()
    if keras.backend.backend() == "torch":
        _fix_threads(logical_ranks)


def _fix_graphs() -> None:
    """TensorFlow moves sums and products of a graph, across its parts."""
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})


def _fix_threads(logical_ranks: int) -> None:
    """PyTorch's kernels have other bits on another number of threads."""
    import torch

    threads = max(1, (os.cpu_count() or 1) // logical_ranks)
    if torch.get_num_threads() == threads:
        return
    torch.set_num_threads(threads)
    if _world.rank() == 0:
        print(
            f"farandole: each rank computes on {threads} threads, by {os.cpu_count()} cores and "
            f"logical_ranks={logical_ranks}, whatever the number of ranks (torch.set_num_threads)"
        )


def seed_states(model: Any) -> list[Any]:
    """Variables from which layers draw at random."""
    layers = model._flatten_layers()
    return [generator.state for layer in layers for generator in layer._seed_generators]
