"""Elastic training, which is not there yet: every name of Horovod's says so when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["ElasticSampler", "TorchState", "run"]


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"hvd.elastic.{name}: elastic training comes later; save checkpoints on rank 0, and start "
        "the job again with farandole run"
    )


def run(func: Any) -> NoReturn:  # noqa: ARG001 - Horovod's signature
    """Raises NotImplementedError."""
    _refuse("run")


class TorchState:
    """Raises NotImplementedError."""

    def __init__(self, *arguments: Any, **others: Any) -> None:  # noqa: ARG002
        _refuse("TorchState")


class ElasticSampler:
    """Raises NotImplementedError."""

    def __init__(self, *arguments: Any, **others: Any) -> None:  # noqa: ARG002
        _refuse("ElasticSampler")
