"""Elastic training, which is not there yet: what every name of Horovod's for it says."""

from __future__ import annotations

from typing import Any, NoReturn


def refuse(name: str, checkpoints: str) -> NoReturn:
    raise NotImplementedError(
        f"hvd.elastic.{name}: there is no elastic training yet; save checkpoints {checkpoints}, "
        "and start the job again with farandole run"
    )


def run(func: Any) -> NoReturn:  # noqa: ARG001 - Horovod's signature
    """Raises NotImplementedError."""
    refuse("run", Absent.checkpoints)


class Absent:
    """Raises NotImplementedError."""

    checkpoints = "on rank 0"  # how to save them meanwhile

    def __init__(self, *arguments: Any, **others: Any) -> None:  # noqa: ARG002
        refuse(type(self).__name__, self.checkpoints)
