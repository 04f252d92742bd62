"""What every kind of DistributedOptimizer refuses."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from farandole._core import InvalidArgument


def check_passes(passes: object) -> None:
    """Raises InvalidArgument for what backward_passes_per_step cannot be."""
    if not isinstance(passes, int) or passes < 1:
        raise InvalidArgument(
            f"backward_passes_per_step is {passes!r}; it is a whole number of at least 1"
        )


class WrappedOptimizer(torch.optim.Optimizer):
    """Stands before the optimizer's own class, behind what the kind does itself."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        raise InvalidArgument(
            "adding parameters to a DistributedOptimizer is not supported; add them to the "
            "optimizer before it is wrapped"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgument(
            "a DistributedOptimizer cannot be copied or pickled; use state_dict()"
        )
