"""Operations in flight, by number: what ``poll`` and ``synchronize`` find."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from farandole import _core
from farandole._core import InvalidArgument
from farandole.typing import HandleNumber

_R = TypeVar("_R")


def _number(handle: Any) -> int:
    if isinstance(handle, int) and 0 <= handle < 1 << 62:
        return handle
    raise InvalidArgument(f"{handle!r} is not a handle of an operation")


@overload
def wait(handle: HandleNumber[_R]) -> _R: ...
@overload
def wait(handle: int) -> Any: ...
@_core.quick_wait
def wait(handle: int) -> Any:
    """Waits for an asynchronous operation and returns its result (of a grouped one, a list);
    raises its error. The handle is spent afterwards.

    Raises:
        InvalidArgument: the handle is unknown, or was synchronized already.
    """
    return _core.wait_by_number(_number(handle))


def done(handle: Any) -> bool:
    return _core.done_by_number(_number(handle))
