"""``farandole.run``: a function on ranks, from a script or a notebook."""

from __future__ import annotations

import multiprocessing.spawn
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from farandole import _ranks
from farandole._arguments import shown, type_of
from farandole._core import InvalidArgument
from farandole._launch.job import LaunchError
from farandole._launch.ranks import describe_exit

__all__ = ["RanksFailed", "run"]

_R = TypeVar("_R")
_NEEDS_CLOUDPICKLE = "; install cloudpickle, or move the function to the top of a module"


class RanksFailed(RuntimeError):
    """A rank of `farandole.run` failed. Says which was first, and how."""


def run(
    fn: Callable[..., _R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 2,
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
) -> list[_R]:
    """Calls ``fn(*args, **kwargs)`` in ``np`` new processes, ranks 0 to np-1 of a job on this host.

    The function calls ``farandole.init()`` (or ``hvd.init()``) itself. What ranks print appears
    here, with the rank in front of every line, in a notebook as well.

    Functions, arguments and results are pickled: by cloudpickle where that is installed, which
    takes any function; by pickle otherwise, and then the function stands at the top of a module or
    of a script whose own run is behind ``if __name__ == "__main__":``.

    Args:
        fn: for every rank.
        args: for the function, by position.
        kwargs: for the function, by name.
        np: how many ranks.
        timeout: seconds until all ranks are killed; default: none.
        env: more environment variables.

    Returns:
        What the function returned, by rank.

    Raises:
        InvalidArgument: ``fn`` cannot be called, ``np`` is below 1, ``args`` is no tuple or list,
            or the function or its arguments cannot be pickled.
        Exception: what the first rank to fail raised, if that can be pickled; its cause is a
            ``RanksFailed`` with the rank and its traceback.
        RanksFailed: a rank could not be started, died, ran out of time, or raised what cannot be
            pickled.

    Examples:
        >>> import farandole
        >>> farandole.run(len, ("abc",), np=2)
        [3, 3]
    """
    if not callable(fn):
        raise InvalidArgument(f"run(fn): fn is {type_of(fn)}, which cannot be called")
    if not isinstance(np, int) or isinstance(np, bool) or np < 1:
        raise InvalidArgument(f"np is {np!r}; it is a number of ranks, at least 1")
    # A string would be taken for its letters.
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise InvalidArgument(
            f"run(args): args is {shown(args)}; it is a tuple of fn's arguments, as (x,)"
        )
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidArgument(f"run(kwargs): kwargs is {shown(kwargs)}; it is a dict, by name")
    try:
        packed = _ranks.dumps((fn, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise InvalidArgument(
            f"{getattr(fn, '__qualname__', fn)!r} or its arguments cannot be pickled ({error})"
            + ("" if _has_cloudpickle() else _NEEDS_CLOUDPICKLE)
        ) from error
    call = _ranks.Call(list(sys.path), _main_module(fn), packed, True, None)
    screen = _Screen(np)
    try:
        ends, order = _ranks.call_on_ranks(
            np, call, env=dict(env or {}), timeout=timeout, listen=screen.put
        )
    except LaunchError as error:
        raise RanksFailed(str(error)) from error
    screen.finish()
    _raise_first_failure(ends, order, timeout)
    return [end.answer.result for end in ends if end.answer is not None]


def _has_cloudpickle() -> bool:
    try:
        import cloudpickle  # noqa: F401
    except ImportError:
        return False
    return True


def _main_module(fn: Callable[..., Any]) -> dict[str, Any] | None:
    """How ranks find the caller's script, where pickle needs it for the function."""
    if getattr(fn, "__module__", None) != "__main__":
        return None
    if _has_cloudpickle():  # it sends such a function itself
        return None
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) is None:
        raise InvalidArgument(
            f"{fn.__qualname__} was typed in and stands in no file; install cloudpickle, or move "
            "it to a module"
        )
    found = multiprocessing.spawn.get_preparation_data("rank")
    found.pop("authkey", None)  # a secret of multiprocessing's, which ranks do not need
    return found


def _raise_first_failure(
    ends: Sequence[_ranks.End], order: Sequence[int], timeout: float | None
) -> None:
    answers = {r: end.answer for r, end in enumerate(ends) if end.answer is not None}
    raised = [r for r, answer in answers.items() if answer.trace]
    died = [r for r in order if ends[r].exit_code != 0 or r not in answers]
    died = [r for r in died if r not in raised]
    late = [r for r, end in enumerate(ends) if end.late and r not in raised]
    if not (raised or died or late):
        return
    # A rank that died brings the others' errors about.
    if died or not raised:
        if died:
            why = f"rank {died[0]} {describe_exit(ends[died[0]].exit_code)}"
        else:
            why = f"rank {late[0]} did not end within {timeout:g} s"
        told = [f"\nrank {r}:\n{answers[r].trace}" for r in raised]
        raise RanksFailed(why + "".join(told))
    first = min(raised, key=lambda r: answers[r].when)
    raise_what_it_raised(first, answers[first].error, answers[first].trace, "farandole.run")


def raise_what_it_raised(
    rank: int, error: BaseException | None, trace: str, caller: str
) -> NoReturn:
    """A rank's own exception, where it could be sent, because of a ``RanksFailed`` that says whose
    it is."""
    cause = RanksFailed(f"rank {rank} raised\n{trace}")
    if error is None:
        raise cause
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"raised by rank {rank} of {caller}")
    raise error from cause


class _Screen:
    """Whole lines of all ranks, each with its rank, on this process' own streams."""

    def __init__(self, ranks: int) -> None:
        self._parts = {(r, err): b"" for r in range(ranks) for err in (False, True)}

    def put(self, rank: int, err: bool, data: bytes) -> None:
        whole, newline, rest = (self._parts[rank, err] + data).rpartition(b"\n")
        self._parts[rank, err] = rest
        if newline:
            self._show(rank, err, whole)

    def finish(self) -> None:
        for (rank, err), rest in self._parts.items():
            if rest:
                self._show(rank, err, rest)

    def _show(self, rank: int, err: bool, lines: bytes) -> None:
        text = lines.decode(errors="replace")
        for line in text.split("\n"):
            print(f"[{rank}] {line}", file=sys.stderr if err else sys.stdout, flush=True)
