"""Predictions of all ranks, in the order of the data."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from farandole import _world
from farandole._core import InvalidArgument
from farandole.data._logical import Block, ranks_own
from farandole.data._share import places
from farandole.data._tree import leaves
from farandole.keras import _host
from farandole.keras._global.marks import unmarked_outputs


def in_order(outputs: Any, block: Block | None = None) -> Any:
    """Collective: turns the outputs of this rank's steps into those of all samples.

    Args:
        block: of logical ranks, whose outputs are a list.

    Raises:
        InvalidArgument: an output has not a row for each sample.
    """
    mine, shares = unmarked_outputs(outputs)
    parts = [mine] if block is None else list(mine)
    # The shares of each part, by batch. Rows of a sample that does not count are dropped.
    by_part = [shares[i :: len(parts)] for i in range(len(parts))]
    real = [
        np.concatenate([np.full(max(s.samples, 1), s.samples > 0) for s in each])
        for each in by_part
    ]
    where = places([share.total for share in by_part[0]], (block or ranks_own()).parts)
    order = np.concatenate([np.fromiter(r, int, len(r)) for part in where for r in part])

    def whole(*parts_of_leaf: Any) -> Any:
        rows = [np.asarray(leaf) for leaf in parts_of_leaf]
        for each, counts in zip(rows, real, strict=True):
            if each.shape[:1] != counts.shape:
                raise InvalidArgument(
                    f"predict(): an output has shape {list(each.shape)}, for {len(counts)} samples "
                    f"of rank {_world.rank()}; outputs have a row for each"
                )
        own = np.concatenate([each[counts] for each, counts in zip(rows, real, strict=True)])
        gathered = _host.all_gather(own, "predictions") if _world.size() > 1 else own
        result = np.empty_like(gathered)
        result[order] = gathered
        return result

    if not leaves(mine):
        raise InvalidArgument("predict(): the model has no outputs")
    return keras.tree.map_structure(whole, *parts)
