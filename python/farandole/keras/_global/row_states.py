"""Layers that keep a state for each sample of a batch from batch to batch (stateful RNNs).

A program builds them for the whole batch. A rank has the states of its own samples, which are the
same ones in every batch.
"""

from __future__ import annotations

from typing import Any

import keras

from farandole import _world
from farandole._core import InvalidArgument
from farandole.data._logical import Block
from farandole.data._share import taken

_CUT = "_farandole_cut"  # of a layer


def cut_row_states(model: Any, block: Block | None) -> None:
    """Cuts states that the program has made for the whole batch; the rest is built afterwards.

    Raises:
        InvalidArgument: with logical ranks, which would share a layer's state.
    """
    for layer in model._flatten_layers():
        states = getattr(layer, "states", None) if getattr(layer, "stateful", False) else None
        if not states or _CUT in vars(layer):
            continue
        if block is not None:
            raise InvalidArgument(
                f"Model(logical_ranks={block.parts}): layer '{layer.name}' is stateful; the parts "
                "of a batch would share its state\n  advice: no logical_ranks"
            )
        vars(layer)[_CUT] = True
        rows = int(keras.tree.flatten(states)[0].shape[0])
        mine = taken(rows, _world.size(), _world.rank())[0]
        count = mine.stop - mine.start
        if count != rows:
            layer._create_state_variables(count)
            layer._expected_batch_size = count
