"""Functions on several ranks, for tests: real processes, a time limit, everybody's output."""

from __future__ import annotations

import faulthandler
import importlib
import operator
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from farandole._launch.processes import die_with_parent
from farandole._launch.ranks import describe_exit, rank_environment, shared_environment

__all__ = ["RanksFailed", "run_ranks"]

_GRACE = 5.0  # seconds that the others have once a rank has failed
_CODE = "from farandole.testing import _run_as_rank; _run_as_rank()"


class RanksFailed(AssertionError):
    """A rank raised, died, or ran out of time. Says which first, and what every rank printed.

    ``errors`` has the ranks' exceptions where they could be pickled, else None.
    """

    errors: list[BaseException | None]


class _Outcome(NamedTuple):
    """What a rank leaves in its file."""

    result: Any
    error: BaseException | None
    trace: str


def run_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
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

    Example:
        >>> from farandole.testing import run_ranks
        >>> run_ranks(2, len, "abc")
        [3, 3]
    """
    if "<" in function.__qualname__ or function.__module__ == "__main__":
        raise ValueError(f"{function.__qualname__} is not at the top of an importable module")
    shared = shared_environment(n, os.environ) | {"OMP_NUM_THREADS": "1"} | dict(env or {})
    parent = os.getpid()
    with tempfile.TemporaryDirectory(prefix="farandole-ranks-") as name:
        folder = Path(name)
        (folder / "call").write_bytes(
            pickle.dumps((sys.path, function.__module__, function.__qualname__, args, timeout))
        )
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(n):
                with (folder / f"output-{rank}").open("wb") as output:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-c", _CODE],
                            env=shared
                            | rank_environment(rank, n)
                            | {
                                "FARANDOLE_TEST_FOLDER": name,
                                # What this process imports from, the ranks do too.
                                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
                            },
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                            preexec_fn=lambda: die_with_parent(parent),
                        )
                    )
            order = _await(processes, timeout)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _results(folder, processes, order, timeout)


def _await(processes: Sequence[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Waits for all to end, or the time to pass; returns the ranks in the order of their ends."""
    order: list[int] = []
    deadline = time.monotonic() + timeout
    while len(order) < len(processes) and time.monotonic() < deadline:
        for rank, process in enumerate(processes):
            if rank not in order and process.poll() is not None:
                order.append(rank)
                if process.returncode != 0:
                    deadline = min(deadline, time.monotonic() + _GRACE)
        time.sleep(0.005)
    return order


def _results(
    folder: Path,
    processes: Sequence[subprocess.Popen[bytes]],
    order: Sequence[int],
    timeout: float,
) -> list[Any]:
    outcomes = [_read(folder / f"outcome-{rank}") for rank in range(len(processes))]
    bad = [r for r in order if processes[r].returncode != 0 or outcomes[r] is None]
    late = [r for r in range(len(processes)) if r not in order]
    if not bad and not late:
        return [outcome.result for outcome in outcomes if outcome is not None]
    parts = []
    for rank in [*bad, *late]:
        outcome = outcomes[rank]
        end = (
            f"did not end within {timeout:g} s"
            if rank in late and not bad
            else "was killed after another rank had failed"
            if rank in late
            else describe_exit(processes[rank].returncode)
        )
        parts.append(f"rank {rank} {end}\n{outcome.trace if outcome else ''}")
    for rank in range(len(processes)):
        output = (folder / f"output-{rank}").read_text(errors="replace")
        parts.append(f"--- output of rank {rank} ---\n{output}")
    failure = RanksFailed("\n".join(parts))
    failure.errors = [outcome.error if outcome else None for outcome in outcomes]
    raise failure


def _read(path: Path) -> _Outcome | None:
    if not path.exists():
        return None
    outcome: _Outcome = pickle.loads(path.read_bytes())
    return outcome


def _run_as_rank() -> None:
    """A rank's main."""
    folder = Path(os.environ["FARANDOLE_TEST_FOLDER"])
    path, module, name, args, timeout = pickle.loads((folder / "call").read_bytes())
    sys.path[:] = path
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, timeout - 2), exit=False)
    result, error, trace = None, None, ""
    try:
        function = operator.attrgetter(name)(importlib.import_module(module))
        result = function(*args)
    except BaseException as raised:
        error, trace = raised, traceback.format_exc()
    try:
        data = pickle.dumps(_Outcome(result, error, trace))
        pickle.loads(data)
    except Exception as unpicklable:
        data = pickle.dumps(
            _Outcome(None, None, trace or f"the result cannot be pickled: {unpicklable!r}")
        )
        trace = trace or "unpicklable"
    ready = folder / f"outcome-{os.environ['RANK']}"
    ready.with_suffix(".part").write_bytes(data)
    ready.with_suffix(".part").replace(ready)
    sys.exit(1 if trace else 0)
