"""Agreements of ranks before they compute: an error on one rank is an error on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from farandole._arguments import shown
from farandole.common._objects import agree_prepared, attempt
from farandole.data._same import checksum
from farandole.keras import _host
from farandole.keras._global.how import Source

ADVICE = "every rank passes the same data, the batch of all ranks, and the same arguments"

Prepared = tuple[list[Source], list[str]]  # data, and lines to compare besides theirs


def agreed(what: str, prepare: Callable[[], Prepared], due: bool) -> tuple[list[Source], bool]:
    """Collective: what `prepare` makes on every rank, and whether `due` is true on any.

    Raises:
        InvalidArgument: another rank could not prepare; says which, and why. On that rank, its own
            error.
        Mismatch: the ranks' data or arguments differ; says how.
    """
    made, error = attempt(prepare)
    sources, rows = made or ([], [])
    rows = [*rows, *(row for source in sources for row in source.rows)]
    dues = agree_prepared(what, f"the arguments of {what}", rows, error, ADVICE, due)
    return sources, any(dues)


def require_same_batch(what: str, source: Source | None, error: Exception | None) -> None:
    """Collective: compares the batches of all ranks, in few bytes if they are equal.

    Args:
        source: the batch; None where it could not be read, because of the error.

    Raises:
        InvalidArgument: another rank could not read; says which, and why. On that rank, its own
            error.
        Mismatch: the ranks' batches differ; says how.
    """
    rows = [] if source is None else source.rows
    size = _NONE if source is None else source.batch or 0
    mine = np.array([[size, checksum(rows)]], np.int64)
    theirs = _host.all_gather(mine, f"batch of {what}")
    if (theirs != theirs[0]).any() or size == _NONE:
        advice = "every rank passes the same batch, that of all ranks"
        agree_prepared(what, f"the batch of {what}", rows, error, advice, None)


_NONE = -1  # samples of a batch that a rank does not have


def rows_of_compiled(model: Any) -> list[str]:
    """Losses and metrics as they were passed to compile(), or None."""
    loss = getattr(model, "_compile_loss", None)
    metrics = getattr(model, "_compile_metrics", None)
    weights = getattr(loss, "_user_loss_weights", None)
    weighted = getattr(metrics, "_user_weighted_metrics", None)
    return [
        f"loss {_named(getattr(loss, '_user_loss', None))}, loss_weights {shown(weights)}",
        f"metrics {_named(getattr(metrics, '_user_metrics', None))}, weighted_metrics "
        f"{_named(weighted)}",
    ]


def _named(given: Any) -> str:
    """Omits names that Keras numbers, since ranks may have made other models before."""
    if given is None or isinstance(given, str):
        return str(given)
    if isinstance(given, Mapping):
        return "{" + ", ".join(f"{key}: {_named(each)}" for key, each in given.items()) + "}"
    if isinstance(given, (list, tuple)):
        return "[" + ", ".join(map(_named, given)) + "]"
    reduction = getattr(given, "reduction", None)
    name = getattr(given, "__name__", type(given).__name__)
    return name if reduction is None else f"{name}(reduction={reduction!r})"
