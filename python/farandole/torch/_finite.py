"""Whether numbers of a tensor are finite: by their sum, and one by one where that is not."""

from __future__ import annotations

import torch

from farandole._numerics import INFINITE, NAN


def total_of(values: torch.Tensor) -> torch.Tensor:
    """The sum: finite where all values are, unless it overflows."""
    values = _numbers_of(values)
    return values.sum(dtype=torch.float32) if values.dtype == torch.float16 else values.sum()


def kind_of(total: torch.Tensor) -> int | None:
    """NAN or INFINITE, by the one number of `total`; None if it is finite."""
    number = total.item()
    return None if number - number == 0 else NAN if number != number else INFINITE


def exact_kind(values: torch.Tensor, total: torch.Tensor) -> int | None:
    """The same by the values themselves, as a sum of finite values may overflow."""
    numbers = _numbers_of(values)
    if kind_of(total) is None or bool(torch.isfinite(numbers).all()):
        return None
    return NAN if bool(torch.isnan(numbers).any()) else INFINITE


def _numbers_of(values: torch.Tensor) -> torch.Tensor:
    """Those that a sparse tensor has."""
    return values._values() if values.is_sparse else values
