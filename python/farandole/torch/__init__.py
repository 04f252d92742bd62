"""farandole for PyTorch, in Horovod's words: ``import farandole.torch as hvd``."""

from __future__ import annotations

from farandole import _watch
from farandole.common import _basics
from farandole.common._basics import *  # noqa: F403
from farandole.common._needs import torch as _torch  # noqa: F401 - or how to get it
from farandole.common.util import check_extension
from farandole.learning_rate import LearningRate
from farandole.torch import elastic, functions, mpi_ops, ops
from farandole.torch._c10d.comm_hook import ddp_comm_hook
from farandole.torch._operations.allreduce import *  # noqa: F403
from farandole.torch._operations.movements import *  # noqa: F403
from farandole.torch._operations.reducescatter import *  # noqa: F403
from farandole.torch.compression import Compression
from farandole.torch.functions import *  # noqa: F403
from farandole.torch.global_batch import GlobalBatch
from farandole.torch.metrics import Metrics
from farandole.torch.ops import barrier, join, poll, synchronize
from farandole.torch.optimizer import DistributedOptimizer
from farandole.torch.pipeline import Pipeline
from farandole.torch.sparse import sparse_allreduce_async
from farandole.torch.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

_watch.libraries.add("torch")

__all__ = [
    *_basics.__all__,
    *ops.__all__,
    *functions.__all__,
    "Compression",
    "barrier",
    "join",
    "poll",
    "synchronize",
    "DistributedOptimizer",
    "GlobalBatch",
    "LearningRate",
    "Metrics",
    "Pipeline",
    "SyncBatchNorm",
    "check_extension",
    "convert_sync_batchnorm",
    "ddp_comm_hook",
    "elastic",
    "mpi_ops",
    "sparse_allreduce_async",
]
