"""The operations, under the name at which Horovod's programs import them."""

from __future__ import annotations

from farandole.common import _basics
from farandole.common._basics import *  # noqa: F403
from farandole.common._process_set import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from farandole.common.exceptions import HorovodInternalError
from farandole.common.util import (
    check_extension,
    check_installed_version,
    get_average_backwards_compatibility_fun,
    num_rank_is_power_2,
)
from farandole.torch import ops
from farandole.torch.compression import Compression
from farandole.torch.ops import *  # noqa: F403
from farandole.torch.sparse import sparse_allreduce_async

__all__ = [
    *_basics.__all__,
    *ops.__all__,
    "Compression",
    "HorovodInternalError",
    "ProcessSet",
    "add_process_set",
    "check_extension",
    "check_installed_version",
    "global_process_set",
    "handle_average_backwards_compatibility",
    "num_rank_is_power_2",
    "remove_process_set",
    "sparse_allreduce_async",
]

handle_average_backwards_compatibility = get_average_backwards_compatibility_fun(None)
