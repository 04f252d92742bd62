"""Checks a worker's arguments against their variables; raises InvalidArgument."""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.parameter_server._rows import Gradient, Rows
from farandole.parameter_server._shards import Variable


def checked_rows(variable: Variable, at: Any) -> np.ndarray:
    name = variable.name
    indices = np.asarray(at)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or not variable.shape:
        raise InvalidArgument(f"pull: rows of '{name}' are {shown(at)}; they are indices, (n,)")
    if len(indices) and not 0 <= indices.min() <= indices.max() < variable.shape[0]:
        raise InvalidArgument(
            f"pull: rows of '{name}' from {indices.min()} to {indices.max()}; it has "
            f"{variable.shape[0]}"
        )
    return indices.astype(np.int64)


def checked_gradient(variable: Variable, gradient: Any, verb: str) -> Gradient:
    name = variable.name
    what = "value" if verb == "assign" else "gradient"
    if isinstance(gradient, Rows):
        fits = variable.shape and gradient.values.shape[1:] == variable.row
        dtype, shape = gradient.values.dtype, gradient.values.shape
        if fits and len(gradient.indices) and gradient.indices.max() >= variable.shape[0]:
            raise InvalidArgument(
                f"{verb}: {what} of '{name}' has row {gradient.indices.max()}; the variable "
                f"has {variable.shape[0]}"
            )
    else:
        gradient = np.asarray(gradient)
        dtype, shape = gradient.dtype, gradient.shape
        fits = shape == variable.shape
    # Bytes are sent as they are, and a name says nothing of their order.
    if not fits or dtype.name != variable.dtype or not dtype.isnative:
        raise InvalidArgument(
            f"{verb}: {what} of '{name}' is {dtype} of shape {shape}; the variable is "
            f"{variable.dtype} of shape {variable.shape}"
        )
    return gradient.summed() if isinstance(gradient, Rows) else gradient
