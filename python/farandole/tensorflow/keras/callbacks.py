"""``farandole.keras.callbacks`` under the name at which Horovod's TensorFlow programs import it."""

from __future__ import annotations

from farandole.keras.callbacks import *  # noqa: F403
from farandole.keras.callbacks import __all__ as __all__
