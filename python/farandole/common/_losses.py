"""Errors that end a world, and not the program: after them an elastic job forms another one."""

from __future__ import annotations

import os

from farandole._core import (
    DeviceError,
    EarlyExit,
    InternalError,
    LinkError,
    MembershipChanged,
    PeerHung,
    PeerLost,
    RemoteError,
    RendezvousError,
    ResourceError,
    Stalled,
)

_OF_THE_RANKS = (
    EarlyExit, LinkError, MembershipChanged, PeerHung, PeerLost, RemoteError, RendezvousError,
    Stalled,
)  # fmt: skip
_OF_ONE_RANK = (DeviceError, InternalError, ResourceError)  # that rank would fail again


def ends_world(error: BaseException, rank: int | None) -> bool:
    """Whether the ranks that are left can go on without what has failed. The program's own faults
    (InvalidArgument, Mismatch, Deadlock and so on) would come again in every world.

    Args:
        rank: this process, in the world that has failed; None: the world had not formed. What is
            wrong with this process alone ends it, and the others go on.
    """
    if isinstance(error, _OF_THE_RANKS):
        return True
    if not isinstance(error, _OF_ONE_RANK) or error.rank is None:
        return False
    return error.pid != os.getpid() if rank is None else error.rank != rank
