"""farandole for TensorFlow, in Horovod's words: ``import farandole.tensorflow as hvd``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farandole import _watch
from farandole.common import _basics
from farandole.common._basics import *  # noqa: F403
from farandole.common._needs import tensorflow as _tensorflow  # noqa: F401 - or how to get it
from farandole.common.util import check_extension, gpu_available
from farandole.tensorflow import _gradients as _gradients  # registers them
from farandole.tensorflow import elastic, functions, gradient_tape, mpi_ops, ops, util
from farandole.tensorflow._plugin import init
from farandole.tensorflow.compression import Compression
from farandole.tensorflow.functions import *  # noqa: F403
from farandole.tensorflow.gradient_tape import *  # noqa: F403
from farandole.tensorflow.ops import *  # noqa: F403
from farandole.tensorflow.optimizer import DistributedOptimizer

if TYPE_CHECKING:  # Keras takes a second to import
    from farandole.keras.model import Model
    from farandole.tensorflow.sync_batch_norm import SyncBatchNormalization

_watch.libraries |= {"tensorflow", "keras"}

__all__ = [
    *_basics.__all__,
    *ops.__all__,
    *functions.__all__,
    *gradient_tape.__all__,
    "Compression",
    "DistributedOptimizer",
    "Model",
    "SyncBatchNormalization",
    "check_extension",
    "elastic",
    "functions",
    "gpu_available",
    "init",
    "mpi_ops",
    "util",
]


def __getattr__(name: str) -> Any:
    if name == "Model":
        from farandole.keras.model import Model

        return Model
    if name == "SyncBatchNormalization":
        from farandole.tensorflow.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
