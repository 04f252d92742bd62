"""Predictions of all ranks, in the order of the data."""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole import _world
from farandole._core import InvalidArgument
from farandole.data._share import places
from farandole.data._tree import leaves, map_leaves
from farandole.keras import _host
from farandole.keras._global.steps import unmarked_outputs


def in_order(outputs: Any) -> Any:
    """Collective: what Keras has put together of this rank's steps, as that of all samples.

    Raises:
        InvalidArgument: an output has not a row for each sample.
    """
    mine, shares = unmarked_outputs(outputs)
    size = _world.size()
    # Rows of a sample that does not count go.
    real = np.concatenate([np.full(max(s.samples, 1), s.samples > 0) for s in shares])
    where = places([share.total for share in shares], size)
    order = np.concatenate([np.fromiter(r, int, len(r)) for ranks in where for r in ranks])

    def whole(leaf: Any) -> Any:
        rows = np.asarray(leaf)
        if rows.shape[:1] != real.shape:
            raise InvalidArgument(
                f"predict(): an output has shape {list(rows.shape)}, for {len(real)} samples of "
                f"rank {_world.rank()}; outputs have a row for each"
            )
        gathered = _host.all_gather(rows[real], "predictions") if size > 1 else rows
        result = np.empty_like(gathered)
        result[order] = gathered
        return result

    if not leaves(mine):
        raise InvalidArgument("predict(): the model has no outputs")
    return map_leaves(whole, mine)
