"""Gradients of a few rows of a variable, which are sent as rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole._core import InvalidArgument

LOOK_FOR_ROWS = 64 * 1024  # bytes of a gradient


class Rows:
    """The gradient of some rows of a variable; all other rows have none.

    Rows that are named twice are added up.

    Args:
        indices: (n,), whole numbers from 0: which rows, along the variable's first dimension.
        values: (n, …): the gradient of each, of the variable's dtype.

    Raises:
        InvalidArgument: the two do not fit each other, or an index is negative.
    """

    __slots__ = ("indices", "values")

    def __init__(self, indices: Any, values: Any) -> None:
        indices, values = np.asarray(indices), np.asarray(values)
        if indices.ndim != 1 or indices.dtype.kind not in "iu":
            raise InvalidArgument(
                f"Rows: indices are of shape {indices.shape} and dtype {indices.dtype}; they are "
                "whole numbers in one dimension"
            )
        if values.ndim == 0 or len(values) != len(indices):
            raise InvalidArgument(
                f"Rows: {len(indices)} indices with values of shape {values.shape}; the first "
                "dimension is that of the indices"
            )
        if len(indices) and indices.min() < 0:
            raise InvalidArgument(f"Rows: index {indices.min()} is negative")
        self.indices = indices.astype(np.int64)
        self.values = values

    @staticmethod
    def found_in(gradient: np.ndarray) -> Gradient:
        """The rows of a large gradient that are not zero, if they are few, as of an embedding."""
        if gradient.ndim < 2 or gradient.nbytes < LOOK_FOR_ROWS:
            return gradient
        rows = np.flatnonzero(gradient.any(axis=tuple(range(1, gradient.ndim))))
        return Rows(rows, gradient[rows]) if 2 * len(rows) <= len(gradient) else gradient

    def __repr__(self) -> str:
        return f"Rows({len(self.indices)} of {self.values.shape[1:]}, {self.values.dtype})"

    def summed(self) -> Rows:
        """The same with each row once, in order."""
        indices, place = np.unique(self.indices, return_inverse=True)
        if len(indices) == len(self.indices):
            order = np.argsort(self.indices, kind="stable")
            return Rows(self.indices[order], self.values[order])
        values = np.zeros((len(indices), *self.values.shape[1:]), self.values.dtype)
        np.add.at(values, place.reshape(-1), self.values)
        return Rows(indices, values)

    def between(self, begin: int, end: int) -> Rows:
        """The rows in [begin, end), counted from begin. All rows must be in order."""
        first, last = np.searchsorted(self.indices, [begin, end])
        return Rows(self.indices[first:last] - begin, self.values[first:last])

    def dense(self, shape: tuple[int, ...]) -> np.ndarray:
        """The whole gradient, with zeros; `shape` is the variable's."""
        whole = np.zeros(shape, self.values.dtype)
        np.add.at(whole, self.indices, self.values)
        return whole


Gradient = np.ndarray | Rows


def mean(gradients: list[Gradient], of: int, shape: tuple[int, ...]) -> Gradient:
    """The sum of one variable's gradients, in this order, divided by `of`."""
    if all(isinstance(each, Rows) for each in gradients):
        rows = Rows(
            np.concatenate([each.indices for each in gradients]),  # type: ignore[union-attr]
            np.concatenate([each.values for each in gradients]),  # type: ignore[union-attr]
        ).summed()
        return Rows(rows.indices, rows.values / rows.values.dtype.type(of))
    total = np.zeros(
        shape, gradients[0].values.dtype if isinstance(gradients[0], Rows) else gradients[0].dtype
    )
    for each in gradients:
        total += each.dense(shape) if isinstance(each, Rows) else each
    total /= total.dtype.type(of)
    return total
