"""Elastic training, which is not there yet: every name of Horovod's says so when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

from farandole.common._elastic import Absent, refuse

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class _Absent(Absent):
    checkpoints = "on rank 0 (hvd.callbacks.BestModelCheckpoint)"


def run(func: Any) -> NoReturn:  # noqa: ARG001 - Horovod's signature
    """Raises NotImplementedError."""
    refuse("run", _Absent.checkpoints)


class KerasState(_Absent):
    """Raises NotImplementedError."""


class CommitStateCallback(_Absent):
    """Raises NotImplementedError."""


class UpdateBatchStateCallback(_Absent):
    """Raises NotImplementedError."""


class UpdateEpochStateCallback(_Absent):
    """Raises NotImplementedError."""
