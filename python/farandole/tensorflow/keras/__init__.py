"""``farandole.keras`` under the name at which Horovod's TensorFlow programs import it."""

from __future__ import annotations

from farandole.keras import *  # noqa: F403
from farandole.keras import __all__ as __all__
