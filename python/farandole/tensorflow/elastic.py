"""Elastic training, which is not there yet: every name of Horovod's says so when it is used."""

from __future__ import annotations

from farandole.common._elastic import Absent, run

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]


class TensorFlowState(Absent):
    """Raises NotImplementedError."""


class TensorFlowKerasState(TensorFlowState):
    """Raises NotImplementedError."""
