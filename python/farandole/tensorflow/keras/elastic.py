"""``farandole.keras.elastic`` under the name at which Horovod's TensorFlow programs import it."""

from __future__ import annotations

from farandole.keras.elastic import *  # noqa: F403
from farandole.keras.elastic import __all__ as __all__
