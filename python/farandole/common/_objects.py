"""Objects of one rank for all, as bytes, by name: whatever the framework.

The ranks of a job are processes of one user, which is checked when they meet, and run the same
program.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from farandole import _core, _world
from farandole._arguments import explained, is_text, shown, type_of
from farandole._core import InvalidArgument, LinkError, Mismatch
from farandole.common._pickles import SEAL, packed, seal, unsealed
from farandole.common._process_set import ProcessSet, global_process_set, number_of

_T = TypeVar("_T")
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_RANDOM = 16  # bytes


def _label(name: str | None) -> str:
    if name is not None and not is_text(name):
        raise InvalidArgument(f"name is {shown(name)}; it is text, of characters that UTF-8 has")
    return name or "object"


class _Exchange:
    """The heads that ranks exchange before their objects: whether each has one, its size in bytes,
    and a random number, which shows that an object was made for this exchange.

    Args:
        what: its name in errors.
        objects: this rank's, if it has one.
    """

    def __init__(self, what: str, label: str, number: int, objects: Sequence[Any]) -> None:
        self._what = what
        self._packed, is_one = b"", True
        for obj in objects:
            self._packed, is_one = _packed(obj)
        size = len(self._packed) + SEAL if objects else 0
        random = np.frombuffer(secrets.token_bytes(_RANDOM), np.int64)
        mine = np.array([_world.rank(), size, is_one, *random])
        heads = gathered(mine, f"{label}.size", number).reshape(-1, len(mine))
        if mine.tolist() not in heads.tolist():
            raise LinkError(f"{what}: rank {_world.rank()} does not get what it has sent itself")
        self._fresh = heads.tobytes()
        self.heads = [(rank, size, bool(is_one)) for rank, size, is_one, *_ in heads.tolist()]

    def sent(self) -> _Bytes:
        """This rank's object."""
        data = seal(self._packed, self._what, self._fresh) if self._packed else b""
        return np.frombuffer(bytearray(data), np.uint8)

    def object_in(self, data: bytes, rank: int, is_one: bool) -> Any:
        obj = unsealed(data, self._what, self._fresh)
        if not is_one:
            raise InvalidArgument(f"{self._what} on rank {rank}: {obj}")
        return obj


def _packed(obj: Any) -> tuple[bytes, bool]:
    """Its bytes and True; or, as others wait for some, those of why there are none, and False."""
    try:
        return packed(obj), True
    except InvalidArgument as error:
        return packed(str(error)), False
    except Exception as error:
        why = f"{type_of(obj)} cannot be pickled: {type(error).__name__}: {error}"
        return packed(why), False


def run_named(
    kind: str,
    name: str | None,
    source: np.ndarray[Any, Any],
    target: np.ndarray[Any, Any] | None,
    **options: Any,
) -> Any:
    """An operation by name (docs/named.md) on one array, from its begin to its end."""

    def buffer(array: np.ndarray[Any, Any]) -> _core.Buffer:
        return _core.Buffer(array.ctypes.data, array.size, array.dtype.name, array)

    row = (buffer(source), None if target is None else buffer(target), source.shape)
    return _core.wait_by_number(_core.names_of(_world.world()).submit(kind, name, [row], **options))


def _broadcast(array: Any, root_rank: int, name: str, number: int) -> None:
    run_named("broadcast", name, array, array, set=number, root=root_rank)


def gathered(array: np.ndarray[Any, Any], name: str | None, number: int) -> np.ndarray[Any, Any]:
    """The rows of all ranks of a set that have not joined, in rank order; ranks may have
    differently many."""

    def finish(made: Any, _: Any) -> Any:
        memory, _, shape = made[0]
        if 0 in shape:
            return np.empty(shape, array.dtype)
        return np.frombuffer(memory, array.dtype, math.prod(shape)).reshape(shape)

    rows: np.ndarray[Any, Any] = run_named(
        "all_gather", name, array, None, set=number, finish=finish
    )
    return rows


@explained
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank of the set. Plain values, numpy's arrays and tensors
    of the host are sent as such, and all else is pickled, by cloudpickle where that is installed.
    Roots are ranks of the world.

    Raises:
        InvalidArgument: it cannot be pickled, or FARANDOLE_PICKLE=off; on every rank of the set.
    """
    number, label = number_of(process_set), _label(name)
    root = _world.rank() == root_rank
    exchange = _Exchange(f"broadcast_object '{label}'", label, number, [obj] if root else [])
    sizes = {rank: (size, is_one) for rank, size, is_one in exchange.heads}
    size, is_one = sizes.get(root_rank, (0, True))
    data = exchange.sent() if root else np.empty(size, np.uint8)
    _broadcast(data, root_rank, f"{label}.data", number)
    if root and is_one:
        return obj
    return exchange.object_in(data.tobytes(), root_rank, is_one)


@explained
def allgather_object(
    obj: _T, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[_T]:
    """The objects of all ranks of the set, in rank order; they are sent as by
    ``broadcast_object``. A rank that has joined has none.

    Raises:
        InvalidArgument: one cannot be sent; on every rank of the set, naming the first.
    """
    number, label = number_of(process_set), _label(name)
    exchange = _Exchange(f"allgather_object '{label}'", label, number, [obj])
    whole = gathered(exchange.sent(), f"{label}.data", number).tobytes()
    ends = np.cumsum([size for _, size, _ in exchange.heads]).tolist()
    return [
        exchange.object_in(whole[end - size : end], rank, is_one)
        for end, (rank, size, is_one) in zip(ends, exchange.heads, strict=True)
    ]


BUILD_ALIKE = "build the same model on every rank"


def agree(
    what: str,
    rows: Sequence[str],
    process_set: ProcessSet = global_process_set,
    advice: str = BUILD_ALIKE,
) -> None:
    """Compares the rows of all ranks of the set that have not joined.

    Raises:
        Mismatch: they differ; on every rank, naming the first row that does.
    """
    compare(what, dict(allgather_object((_world.rank(), rows), what, process_set)), advice)


def agree_prepared(
    what: str, label: str, rows: Sequence[str], error: Exception | None, advice: str, beside: _T
) -> list[_T]:
    """The same of what ranks prepare before they begin something, where one may have failed.

    Args:
        what: the thing that begins.
        label: of the rows.
        error: why this rank could not prepare.
        beside: another value, which ranks exchange.

    Returns:
        `beside` of all ranks.

    Raises:
        InvalidArgument: another rank could not prepare; says which, and why. On that rank, its own
            error.
        Mismatch: the rows differ; on every rank.
    """
    theirs = allgather_object((told(error), rows, beside), what)
    if error is not None:
        raise error
    for rank, (why, _, _) in enumerate(theirs):
        if why is not None:
            raise InvalidArgument(f"{what} cannot begin: rank {rank}: {why}")
    compare(label, {r: words for r, (_, words, _) in enumerate(theirs)}, advice)
    return [each for _, _, each in theirs]


def attempt(call: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    """The result of a call, or the error that it raised, which other ranks are to be told."""
    try:
        return call(), None
    except Exception as error:
        return None, error


def told(error: Exception | None) -> str | None:
    """The error as text for other ranks."""
    return None if error is None else f"{type(error).__name__}: {error}"


def made_by_all(label: str, make: Callable[[], _T], failed: Callable[[int, str], str]) -> list[_T]:
    """Collective: what all ranks make, in rank order.

    Args:
        failed: says that a rank could not, from the rank and why.

    Raises:
        InvalidArgument: another rank could not. On that rank, its own error.
    """
    mine, error = attempt(make)
    theirs = allgather_object((told(error), mine), label)
    if error is not None:
        raise error
    for rank, (why, _) in enumerate(theirs):
        if why is not None:
            raise InvalidArgument(failed(rank, why))
    return [cast("_T", each) for _, each in theirs]


def made_by_first(label: str, make: Callable[[], _T], failed: str) -> _T:
    """Collective: what rank 0 makes, on all ranks.

    Args:
        failed: says that it could not, before why.

    Raises:
        InvalidArgument: it could not; on the other ranks. On rank 0, its own error.
    """
    mine, error = attempt(make) if _world.rank() == 0 else (None, None)
    made, why = broadcast_object((mine, told(error)), 0, label)
    if error is not None:
        raise error
    if why is not None:
        raise InvalidArgument(f"{failed}: {why}")
    return cast("_T", made)


def compare(what: str, by_rank: Mapping[int, Sequence[str]], advice: str = BUILD_ALIKE) -> None:
    """The same of rows that are gathered already, by rank."""
    for i in range(max(map(len, by_rank.values()))):
        values = {r: theirs[i] if i < len(theirs) else "nothing" for r, theirs in by_rank.items()}
        if len(set(values.values())) > 1:
            given = "; ".join(f"rank {r}: {value}" for r, value in values.items())
            raise Mismatch(f"ranks disagree on {what}, number {i}: {given}\n  advice: {advice}")
