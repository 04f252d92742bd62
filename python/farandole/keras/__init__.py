"""farandole for Keras 3 on TensorFlow, PyTorch or JAX, in Horovod's words:
``import farandole.keras as hvd``."""

from __future__ import annotations

from farandole.common import _basics
from farandole.common._basics import *  # noqa: F403
from farandole.common._needs import keras as _keras  # noqa: F401 - or how to get it
from farandole.keras import _progress, callbacks, elastic, values
from farandole.keras._asynchronous.server import ParameterServer
from farandole.keras.compression import Compression
from farandole.keras.model import Model
from farandole.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from farandole.keras.pipeline import Pipeline
from farandole.keras.saving import load_model
from farandole.keras.values import *  # noqa: F403
from farandole.learning_rate import LearningRate

_progress.watch()

__all__ = [
    *_basics.__all__,
    *values.__all__,
    "Compression",
    "DistributedOptimizer",
    "LearningRate",
    "Model",
    "ParameterServer",
    "PartialDistributedOptimizer",
    "Pipeline",
    "callbacks",
    "elastic",
    "load_model",
]
