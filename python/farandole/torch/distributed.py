"""farandole as a backend of ``torch.distributed``, whose programs change one word:

    import farandole.torch.distributed  # PyTorch 2.5 and newer find it by its name
    torch.distributed.init_process_group("farandole")

Ranks meet through the store that ``init_process_group`` makes or is given; where they have called
``farandole.init()`` before, that world is used. Tensors on the CPU and, by way of the host, on CUDA
devices.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from farandole.torch._c10d.fallbacks import fallbacks, note_fallback
from farandole.torch._c10d.meeting import SeveralWorlds
from farandole.torch._c10d.process_group import FarandoleProcessGroup

__all__ = ["FarandoleProcessGroup", "fallbacks", "monitored_barrier"]


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """``torch.distributed.monitored_barrier``, for groups of any backend that has one.

    Over farandole every rank of the group gets the same error, which names all ranks that did not
    come, whatever ``wait_all_ranks`` says. The group has then failed.

    ``torch.distributed.monitored_barrier`` refuses every backend but gloo by its name; while this
    module is imported it is this function, which leaves groups of other backends to PyTorch's.

    Args:
        group: default: all ranks.
        timeout: how long to wait; default: the group's.

    Raises:
        Stalled: ranks did not come in time; ``error.values["missing"]`` lists them.
    """
    chosen = dist.group.WORLD if group is None else group
    if isinstance(chosen, FarandoleProcessGroup):
        chosen.monitored_barrier(timeout, wait_all_ranks)
    else:
        _of_pytorch(group, timeout, wait_all_ranks)


def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
    """``torch.distributed``'s, which knows the groups of its own backends alone."""
    chosen = dist.group.WORLD if group is None else group
    if isinstance(chosen, FarandoleProcessGroup):
        chosen.set_timeout(timeout)
    else:
        _pytorchs_set_pg_timeout(timeout, group)


def _made(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """A group. Ranks of several jobs, each with a world of its own, have no engine in common: such
    a group is gloo's."""
    try:
        return FarandoleProcessGroup(store, rank, size, timeout)
    except SeveralWorlds:
        note_fallback("a group over several farandole worlds")
        return dist.ProcessGroupGloo(PrefixStore("several worlds", store), rank, size, timeout)


def _register() -> None:
    dist.Backend.register_backend("farandole", _made, devices=["cpu", "cuda"])
    wrapped = functools.wraps(_of_pytorch)(monitored_barrier)
    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = wrapped
    dist.distributed_c10d._set_pg_timeout = functools.wraps(_pytorchs_set_pg_timeout)(
        _set_pg_timeout
    )


_of_pytorch: Any = dist.monitored_barrier
_pytorchs_set_pg_timeout: Any = dist.distributed_c10d._set_pg_timeout
_register()
