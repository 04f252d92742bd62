"""``HorovodBasics``: the basic functions as an object, for programs that make their own."""

from __future__ import annotations

from typing import Any

from farandole.common import _basics

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The names that every framework's module has, such as ``init``, ``rank`` and ``Average``.

    Examples:
        >>> from farandole.common.basics import HorovodBasics
        >>> basics = HorovodBasics(__file__, "mpi_lib")
        >>> basics.init()
        >>> basics.rank(), basics.Average
        (0, 0)
    """

    def __init__(self, pkg_path: str = "", *args: Any) -> None:
        """Takes Horovod's path of a library, and ignores it."""

    def __getattr__(self, name: str) -> Any:
        if name in _basics.__all__:
            return getattr(_basics, name)
        raise AttributeError(f"HorovodBasics has no attribute {name!r}")
