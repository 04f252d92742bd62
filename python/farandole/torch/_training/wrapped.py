"""What every kind of DistributedOptimizer refuses."""

from __future__ import annotations

import copy
from typing import Any, NoReturn, cast

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

    _parameter_names: dict[torch.Tensor, str]  # as Horovod calls it; programs read it

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002
        raise InvalidArgument(
            "adding parameters to a DistributedOptimizer is not supported; add them to the "
            "optimizer before it is wrapped"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.optim.Optimizer:
        """The optimizer that was wrapped, over copies of its parameters: a copy of a model that
        holds its optimizer is a plain one, which reduces nothing."""
        plain: Any = type(self).__bases__[1]
        copied = memo[id(self)] = plain.__new__(plain)
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return cast(torch.optim.Optimizer, copied)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InvalidArgument(
            "a DistributedOptimizer cannot be copied or pickled; use state_dict()"
        )
