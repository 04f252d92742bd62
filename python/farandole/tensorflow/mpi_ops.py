"""The operations, under the name at which Horovod's programs import them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from farandole.common import _basics
from farandole.common._basics import *  # noqa: F403
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.common._reduction import Sum
from farandole.common.util import (
    AverageFun,
    check_extension,
    get_average_backwards_compatibility_fun,
    get_ext_suffix,
    gpu_available,
    num_rank_is_power_2,
)
from farandole.tensorflow import ops
from farandole.tensorflow.ops import *  # noqa: F403

__all__ = [
    *_basics.__all__,
    *ops.__all__,
    "check_extension",
    "check_num_rank_power_of_2",
    "get_ext_suffix",
    "gpu_available",
    "handle_average_backwards_compatibility",
]

handle_average_backwards_compatibility: AverageFun = get_average_backwards_compatibility_fun(None)


def check_num_rank_power_of_2(num_rank: int) -> bool:
    return num_rank_is_power_2(num_rank)


def _allreduce(tensor: Any, *how: Any, **more: Any) -> Any:
    """``allreduce``, of which the sum is the default; arguments as of the next one."""
    return _grouped_allreduce([tensor], *how, **more)[0]


def _grouped_allreduce(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Sum,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """``grouped_allreduce``, of which the sum is the default."""
    return ops.grouped_allreduce(
        tensors,
        op=op,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        ignore_name_scope=ignore_name_scope,
        process_set=process_set,
    )
