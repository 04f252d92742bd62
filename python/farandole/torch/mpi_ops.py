"""The operations, under the name at which Horovod's programs import them."""

from __future__ import annotations

from farandole.common import _basics
from farandole.common._basics import *  # noqa: F403
from farandole.common.util import (
    AverageFun,
    check_extension,
    check_installed_version,
    get_average_backwards_compatibility_fun,
    num_rank_is_power_2,
)
from farandole.torch import ops
from farandole.torch._operations.allreduce import *  # noqa: F403
from farandole.torch._operations.movements import *  # noqa: F403
from farandole.torch._operations.reducescatter import *  # noqa: F403
from farandole.torch.compression import Compression
from farandole.torch.ops import barrier, join, poll, synchronize
from farandole.torch.sparse import sparse_allreduce_async

__all__ = [
    *_basics.__all__,
    *ops.__all__,
    "Compression",
    "barrier",
    "join",
    "poll",
    "synchronize",
    "check_extension",
    "check_installed_version",
    "handle_average_backwards_compatibility",
    "num_rank_is_power_2",
    "sparse_allreduce_async",
]

handle_average_backwards_compatibility: AverageFun = get_average_backwards_compatibility_fun(None)
