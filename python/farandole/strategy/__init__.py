"""The strategies of tf.distribute, in a process for each rank: ``import farandole.strategy``.

They are subclasses of ``tf.distribute.Strategy``, so everything else of a program stays as it is:
``tf.distribute.get_strategy()``, replica contexts, Keras' ``fit``, loops of its own.
"""

from __future__ import annotations

from typing import Any

from farandole.common._needs import tensorflow as _tensorflow
from farandole.strategy import coordinator
from farandole.strategy._parameter_server import ParameterServerStrategy
from farandole.strategy._preemption import PreemptionCheckpointHandler
from farandole.strategy._strategies import (
    CentralStorageStrategy,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    TPUStrategy,
)
from farandole.strategy.coordinator import ClusterCoordinator

OneDeviceStrategy: Any = _tensorflow.distribute.OneDeviceStrategy
get_strategy: Any = _tensorflow.distribute.get_strategy

__all__ = [
    "CentralStorageStrategy",
    "ClusterCoordinator",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "TPUStrategy",
    "coordinator",
    "get_strategy",
]
