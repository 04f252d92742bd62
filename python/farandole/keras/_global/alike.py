"""Variables that are equal on all ranks of a model, besides the weights that they update."""

from __future__ import annotations

from typing import Any

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
