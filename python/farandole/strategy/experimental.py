"""tf.distribute.experimental for farandole.strategy: ours, or TensorFlow's own."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from farandole.strategy import coordinator
from farandole.strategy._parameter_server import ParameterServerStrategy
from farandole.strategy._preemption import PreemptionCheckpointHandler
from farandole.strategy._strategies import (
    CentralStorageStrategy,
    MultiWorkerMirroredStrategy,
    TPUStrategy,
)

CollectiveCommunication: Any = tf.distribute.experimental.CollectiveCommunication
CollectiveHints: Any = tf.distribute.experimental.CollectiveHints
CommunicationImplementation: Any = tf.distribute.experimental.CommunicationImplementation
CommunicationOptions: Any = tf.distribute.experimental.CommunicationOptions
PreemptionWatcher: Any = tf.distribute.experimental.PreemptionWatcher
TerminationConfig: Any = tf.distribute.experimental.TerminationConfig
ValueContext: Any = tf.distribute.experimental.ValueContext
partitioners: Any = tf.distribute.experimental.partitioners
rpc: Any = tf.distribute.experimental.rpc

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "ValueContext",
    "coordinator",
    "partitioners",
    "rpc",
]
