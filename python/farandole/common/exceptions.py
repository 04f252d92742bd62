"""Horovod's exceptions. ``HorovodInternalError`` is the class of every error of ours.

try:
    loss = hvd.allreduce(loss)
except HorovodInternalError as error:    # PeerLost, Mismatch, Stalled, …: docs/errors.md
    print(error.rank, error.advice)
"""

from __future__ import annotations

from farandole._core import Error as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):
    """The ranks of an elastic job are to change: raised by ``state.commit()`` for
    ``hvd.elastic.run``, on every rank.

    Args:
        skip_sync: all ranks of the next world have the state.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework is another version than at build time. Nothing raises it: nothing of ours is
    built against a framework."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"built for {name} {version}, but {installed_version} is installed")
        self.name: str = name
        self.version = version
        self.installed_version = installed_version
