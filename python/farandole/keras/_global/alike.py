"""What is equal on all ranks of a model besides the weights that an optimizer updates, and whether
it still is after a program's callbacks have run.

A callback may do on one rank what it does not on another, and gradients would have the same shapes.
Weights are compared with the gradients of some steps, too (_exchange.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from farandole import _core, _world
from farandole.common._objects import allgather_object, compare
from farandole.common._weights import period
from farandole.data._logical import Block
from farandole.keras._accumulated import inner_of
from farandole.keras._exchange import Alike, label_of
from farandole.keras._global.logical import seed_states
from farandole.keras._global.normalization import Normalization


def weights_alike(model: Any, block: Block | None, normalization: Normalization) -> list[Any]:
    """Weights, trained or frozen, and statistics over all samples; other statistics differ by rank.
    With logical ranks the seeds are equal, too, and each step merges the rest."""
    made_trainable = [v for layer in model._flatten_layers() for v in layer._trainable_variables]
    if block is None:
        joint = normalization.joint()
        return [*made_trainable, *(v for each in joint for v in each.non_trainable_variables)]
    return [*made_trainable, *seed_states(model)]


def rows_of_alike(optimizer: Any, weights: list[Any], state: list[Any]) -> list[Alike]:
    """A row for each of them, without those that the optimizer updates."""
    updated = set(map(id, inner_of(optimizer)._trainable_variables))
    others = {id(v): v for v in weights if id(v) not in updated}
    kinds = [*((v, False) for v in others.values()), *((v, True) for v in state)]
    return [
        Alike(label_of(i, v), v, is_state) for i, (v, is_state) in enumerate(kinds, len(updated))
    ]


_ADVICE = (
    "what changes the learning rate, the optimizer or weights is a callback that every rank has, "
    "and follows what all ranks know; rank 0 alone has callbacks that derive from ModelCheckpoint, "
    "CSVLogger, TensorBoard and others that write"
)


def agree_after(when: str, stop: bool, optimizers: Sequence[Any], weights: Sequence[Any]) -> bool:
    """Collective: whether any rank is to stop.

    Raises:
        Mismatch: the ranks' optimizers or weights differ; on every rank, naming the first that do.
    """
    if _world.size() == 1:
        return stop
    rows = [row for optimizer in optimizers for row in _options_of(optimizer)]
    arrays = [] if period() is None else [_bytes_of(v) for v in weights]
    sums = _core.checksums(arrays)
    digest = _core.checksums([np.array(sums, np.uint64)])
    theirs = allgather_object((stop, rows, digest), when)
    compare(f"the optimizer, {when}", {r: each for r, (_, each, _) in enumerate(theirs)}, _ADVICE)
    if len({tuple(each) for _, _, each in theirs}) > 1:
        mine = [_row_of(i, v, s) for i, (v, s) in enumerate(zip(weights, sums, strict=True))]
        every = allgather_object(mine, f"weights, {when}")
        compare(f"the weights, {when}", dict(enumerate(every)), _ADVICE)
    return any(each for each, _, _ in theirs)


def _options_of(optimizer: Any) -> list[str]:
    """Its numbers: the learning rate, momentum and so on."""
    inner = inner_of(optimizer)
    try:
        config = inner.get_config()
    except Exception:  # a class of the user's own may have none
        config = {}
    rate = {"learning_rate": float(keras.ops.convert_to_numpy(inner.learning_rate))}
    return [f"{key} {value}" for key, value in (config | rate).items() if _is_number(value)]


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | float | int)


def _bytes_of(variable: Any) -> np.ndarray[Any, Any]:
    array = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
    return array.reshape(-1).view(np.uint8)


def _row_of(number: int, variable: Any, checksum: int) -> str:
    values = np.asarray(keras.ops.convert_to_numpy(variable), np.float64)
    return f"'{label_of(number, variable)}' norm {np.linalg.norm(values)!s} ({checksum:016x})"
