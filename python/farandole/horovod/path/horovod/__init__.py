"""farandole under Horovod's name (see `farandole.horovod`)."""

from farandole.horovod import VERSION as __version__
from farandole.horovod import install
from farandole.horovod.runner import run

__all__ = ["__version__", "run"]

install()
