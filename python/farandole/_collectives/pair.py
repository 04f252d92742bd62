"""Between two ranks: send and receive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from farandole._arguments import explained, passes_on
from farandole._collectives.arrays import borrowable, input_array
from farandole._core import Handle
from farandole._world import Group, world

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from farandole.typing import A, Input, Pair

__all__ = ["recv", "send"]


def _between(
    kind: str,
    array: Any,
    peer: int,
    tag: int,
    result: Any,
    /,
    *,
    name: str | None = None,
    async_op: bool = False,
    group: Group | None = None,
    timeout: float | None = None,
) -> Any:
    g = group if group is not None else world()
    if async_op:
        return g.start_between(kind, array, peer, tag, result, name, timeout)
    g.run_between(kind, array, peer, tag, name, timeout)
    return result


@overload
def send(
    x: Input, to: int, tag: int = ..., *, async_op: Literal[False] = ..., **options: Unpack[Pair]
) -> None: ...
@overload
def send(
    x: Input, to: int, tag: int = ..., *, async_op: Literal[True], **options: Unpack[Pair]
) -> Handle[None]: ...
@overload
def send(
    x: Input, to: int, tag: int = ..., *, async_op: bool, **options: Unpack[Pair]
) -> Handle[None] | None: ...
@explained
@passes_on(_between)
def send(x: Any, to: int, tag: int = 0, **options: Any) -> Any:
    """Sends an array to one rank, which receives it by :func:`recv` with the same tag.

    Messages of one sender, receiver and tag meet in program order; those of different tags, and
    collectives, do not wait for them. ``send`` returns when the receiver has the data: two ranks
    that send to each other use ``async_op``.

    Args:
        x: a contiguous array, as in :func:`all_reduce`.
        to: the receiver, a rank of ``group``; not this one.
        tag: at least 0. A rank keeps a channel open for each of up to 256 combinations of
            direction, rank and tag in a group: use tags again.
        name: compared between the two, and part of errors and traces.
        async_op: return a ``Handle`` at once; leave ``x`` alone until ``Handle.wait()``.
        group: default: all ranks.
        timeout: seconds until it fails, 0: never; default ``FARANDOLE_TIMEOUT``.

    Raises:
        InvalidArgument: bad input on this rank; nothing was sent.
        Mismatch: the receiver expects another dtype or number of elements; the group lives on.
        ResourceError: too many combinations.
        PeerLost, EarlyExit, Stalled, RemoteError: the group has failed.

    Examples:
        >>> if fd.size() > 1 and fd.rank() == 0:
        ...     fd.send(np.arange(3), to=1)
        >>> if fd.rank() == 1:
        ...     fd.recv(np.empty(3, int), source=0)
    """
    return _between("send", borrowable(input_array(x)), to, tag, None, **options)


@overload
def recv(
    out: A, source: int, tag: int = ..., *, async_op: Literal[False] = ..., **options: Unpack[Pair]
) -> A: ...
@overload
def recv(
    out: A, source: int, tag: int = ..., *, async_op: Literal[True], **options: Unpack[Pair]
) -> Handle[A]: ...
@overload
def recv(
    out: A, source: int, tag: int = ..., *, async_op: bool, **options: Unpack[Pair]
) -> Handle[A] | A: ...
@explained
@passes_on(_between)
def recv(out: Any, source: int, tag: int = 0, **options: Any) -> Any:
    """Receives what ``source`` sends by :func:`send` with the same tag, into ``out``.

    ``out`` has the dtype and the number of elements of what is sent. Returns ``out``, or with
    ``async_op`` a ``Handle`` whose ``wait()`` does. Arguments and errors as in :func:`send`.

    Examples:
        >>> try:
        ...     fd.recv(np.empty(3), source=fd.rank())
        ... except fd.InvalidArgument as error:
        ...     print(error.verdict)
        recv from rank 0, which is this one
    """
    return _between("recv", borrowable(out), source, tag, out, **options)
