"""Names that programs import from ``horovod.common``: exceptions, queries of the build."""

from farandole.common.basics import HorovodBasics
from farandole.common.util import check_extension, get_ext_suffix

__all__ = ["HorovodBasics", "check_extension", "get_ext_suffix"]
