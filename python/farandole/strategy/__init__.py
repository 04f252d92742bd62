"""The strategies of tf.distribute, in a process for each rank: ``import farandole.strategy``.

They are subclasses of ``tf.distribute.Strategy``, so everything else of a program stays as it is:
``tf.distribute.get_strategy()``, replica contexts, Keras' ``fit``, loops of its own.

Every public name of ``tf.distribute`` and ``tf.distribute.experimental`` is here: ours, or
TensorFlow's own where there is nothing to change.
"""

from __future__ import annotations

from typing import Any

from farandole.common._needs import tensorflow as _tensorflow
from farandole.strategy import experimental
from farandole.strategy._strategies import MirroredStrategy
from farandole.strategy.coordinator import ClusterCoordinator
from farandole.strategy.experimental import *  # noqa: F403

# TensorFlow's own.
CrossDeviceOps: Any = _tensorflow.distribute.CrossDeviceOps
DistributedDataset: Any = _tensorflow.distribute.DistributedDataset
DistributedIterator: Any = _tensorflow.distribute.DistributedIterator
DistributedValues: Any = _tensorflow.distribute.DistributedValues
HierarchicalCopyAllReduce: Any = _tensorflow.distribute.HierarchicalCopyAllReduce
InputContext: Any = _tensorflow.distribute.InputContext
InputOptions: Any = _tensorflow.distribute.InputOptions
InputReplicationMode: Any = _tensorflow.distribute.InputReplicationMode
NcclAllReduce: Any = _tensorflow.distribute.NcclAllReduce
OneDeviceStrategy: Any = _tensorflow.distribute.OneDeviceStrategy
ReduceOp: Any = _tensorflow.distribute.ReduceOp
ReductionToOneDevice: Any = _tensorflow.distribute.ReductionToOneDevice
ReplicaContext: Any = _tensorflow.distribute.ReplicaContext
RunOptions: Any = _tensorflow.distribute.RunOptions
Server: Any = _tensorflow.distribute.Server
Strategy: Any = _tensorflow.distribute.Strategy
StrategyExtended: Any = _tensorflow.distribute.StrategyExtended
cluster_resolver: Any = _tensorflow.distribute.cluster_resolver
experimental_set_strategy: Any = _tensorflow.distribute.experimental_set_strategy
get_replica_context: Any = _tensorflow.distribute.get_replica_context
get_strategy: Any = _tensorflow.distribute.get_strategy
has_strategy: Any = _tensorflow.distribute.has_strategy
in_cross_replica_context: Any = _tensorflow.distribute.in_cross_replica_context

__all__ = [
    *experimental.__all__,
    "ClusterCoordinator",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
