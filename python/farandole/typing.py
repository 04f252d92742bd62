"""The types that farandole's functions take and give, for type checkers and your own annotations.

>>> from farandole.typing import Level, ReduceOp
>>> def reduced(x: NDArray[np.float32], op: ReduceOp) -> NDArray[np.float32]: ...

The rest is here for type checkers alone. A collective has three forms, each with its keywords:
`Now` gives the result, `Later` (``async_op=True``) a handle of it, and `Either` is for what says
less: an ``async_op`` that is only known to be a bool, and what numpy has no type for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, TypeVar

__all__ = ["HandleNumber", "Level", "ReduceOp", "SumOp"]

ReduceOp = Literal["sum", "mean", "min", "max", "product"]
SumOp = Literal["sum", "mean"]
Level = Literal["canonical", "fast"]
A_co = TypeVar("A_co", covariant=True)


class HandleNumber(int, Generic[A_co]):
    """A number, to a type checker also what ``synchronize()`` gives for it. Handles are ints."""


if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, Protocol, TypedDict

    import typing_extensions
    from numpy.typing import NDArray
    from typing_extensions import Buffer, Required

    from farandole._core import Group

    A = typing_extensions.TypeVar("A", default=NDArray[Any])  # what a result is

    # ---- arrays ----

    class _Array(Protocol[A_co]):
        """numpy's scalars give arrays, arrays themselves; other libraries' arrays numpy's."""

        def __array__(self) -> A_co: ...

    class _Tensor(Protocol[A_co]):
        """Makes others of its kind."""

        def new_empty(self, size: Any, /) -> A_co: ...

    class _DLPack(Protocol):
        def __dlpack__(self) -> Any: ...

    class Rows(Protocol[A_co]):
        """Its rows are an `A`, however many. Those of numpy's arrays do not tell their shape."""

        def __array__(self) -> Any: ...
        def __getitem__(self, rows: slice, /) -> A_co: ...

    Counts = Sequence[int] | None
    Whole = _Array[A] | _Tensor[A]
    Input = _Array[Any] | _Tensor[Any] | _DLPack | Buffer | float

    # ---- keywords ----

    class Pair(TypedDict, total=False):
        name: str | None
        group: Group | None
        timeout: float | None

    class _Common(Pair, total=False):
        algorithm: str | None

    class Now(_Common, Generic[A], total=False):
        out: A | None
        async_op: Literal[False]

    class Later(_Common, Generic[A], total=False):
        out: A | None
        async_op: Required[Literal[True]]

    class Either(_Common, total=False):
        out: Any
        async_op: bool

    class _Folding(TypedDict, total=False):
        prescale: float
        postscale: float
        level: Level | None

    class FoldNow(_Folding, Now[A]): ...

    class FoldLater(_Folding, Later[A]): ...

    class FoldEither(_Folding, Either): ...

    class _Gathering(TypedDict, total=False):
        uneven: bool
        counts: Sequence[int] | None

    class GatherNow(_Gathering, Now[A]): ...

    class GatherLater(_Gathering, Later[A]): ...

    class GatherEither(_Gathering, Either): ...
