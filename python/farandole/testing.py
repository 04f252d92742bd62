"""Functions on several ranks, for tests: real processes, a time limit, everybody's output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from farandole import _ranks
from farandole._launch.ranks import describe_exit

__all__ = ["RanksFailed", "run_ranks"]

_R = TypeVar("_R")


class RanksFailed(AssertionError):
    """A rank raised, died, or ran out of time. Says which first, and what every rank printed.

    ``errors`` has the ranks' exceptions where they could be pickled, else None.
    """

    errors: list[BaseException | None]


def run_ranks(
    n: int,
    function: Callable[..., _R],
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[_R]:
    """Calls ``function(*args)`` in n processes that are ranks 0 to n-1, and returns what they do.

    The function calls ``farandole.init()`` itself. It is found by module and name, so it stands at
    the top of an importable module; arguments and results are pickled. The environment is that of
    ``farandole run``.

    Args:
        n: how many ranks.
        function: for every rank.
        args: for the function.
        timeout: seconds until all ranks are killed, with the stacks of those still running.
        env: more environment variables.

    Raises:
        RanksFailed: a rank raised, died, or ran out of time. No rank is left behind.

    Examples:
        >>> from farandole.testing import run_ranks
        >>> run_ranks(2, len, "abc")
        [3, 3]
    """
    if "<" in function.__qualname__ or function.__module__ == "__main__":
        raise ValueError(f"{function.__qualname__} is not at the top of an importable module")
    call = _ranks.Call.of(function, *args, stacks_after=max(1.0, timeout - 2))
    output = [bytearray() for _ in range(n)]
    ends, order = _ranks.call_on_ranks(
        n,
        call,
        env={"OMP_NUM_THREADS": "1"} | dict(env or {}),
        timeout=timeout,
        listen=lambda rank, _, data: output[rank].extend(data),
    )
    if any(end.late or end.exit_code != 0 or end.answer is None for end in ends):
        raise _failure(ends, order, output, timeout)
    return [end.answer.result for end in ends if end.answer is not None]


def _failure(
    ends: Sequence[_ranks.End],
    order: Sequence[int],
    output: Sequence[bytes | bytearray],
    timeout: float,
) -> RanksFailed:
    bad = [r for r in order if ends[r].exit_code != 0 or ends[r].answer is None]
    late = [r for r, end in enumerate(ends) if end.late]
    parts = []
    for rank in [*bad, *late]:
        answer = ends[rank].answer
        how = (
            f"did not end within {timeout:g} s"
            if rank in late and not bad
            else "was killed after another rank had failed"
            if rank in late
            else describe_exit(ends[rank].exit_code)
        )
        parts.append(f"rank {rank} {how}\n{answer.trace if answer else ''}")
    for rank, text in enumerate(output):
        parts.append(f"--- output of rank {rank} ---\n{text.decode(errors='replace')}")
    failure = RanksFailed("\n".join(parts))
    failure.errors = [end.answer.error if end.answer else None for end in ends]
    return failure
