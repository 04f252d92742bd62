"""A function on several ranks: real processes of ours, what they are told, what they answer.

Shared by `farandole.run` and `farandole.testing.run_ranks`. Every rank is a new interpreter in a
session of its own; it gets its call through one pipe and answers through another, so nothing is
ever unpickled that another process could have written.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from farandole._launch.ranks import (
    Rendezvous,
    Started,
    rank_environment,
    shared_environment,
    start_rank,
)

_CODE = "from farandole._ranks import live; live({}, {})"
GRACE = 5.0  # seconds that the others have once a rank has failed
_READ_SIZE = 1 << 16
_LAST_READS = 32  # of a pipe whose rank is dead: more than it holds (64 KiB, 1 MiB at most)

# Takes a rank's output: its number, whether it is of its stderr, and the bytes.
Listener = Callable[[int, bool, bytes], None]


class Call(NamedTuple):
    """A rank's task: everything to import from, and the pickled function and arguments."""

    path: list[str]
    main: dict[str, Any] | None  # how the caller's __main__ is found, as multiprocessing says it
    function: bytes  # pickled (function, args, kwargs)
    by_value: bool  # the answer may hold functions and classes of any place: see dumps()
    stacks_after: float | None  # seconds until stacks are printed

    @staticmethod
    def of(function: Callable[..., Any], *args: Any, stacks_after: float | None = None) -> Call:
        """Of a function that pickle finds by its module and name."""
        packed = pickle.dumps((function, args, {}))
        return Call(list(sys.path), None, packed, False, stacks_after)


class Answer(NamedTuple):
    """A rank's last message, before it ends."""

    result: Any = None
    error: BaseException | None = None  # None also when it could not be pickled
    trace: str = ""  # of the exception; "" when there was none
    when: float = 0.0  # time.monotonic(), which all processes of a machine share


class End(NamedTuple):
    """How one rank ended."""

    answer: Answer | None  # None: it died, or was killed, before it could say anything
    exit_code: int  # negative: minus the signal
    late: bool  # it was still running when its time was over


class _Rank:
    def __init__(self, number: int, started: Started, answer_pipe: int, call_pipe: int) -> None:
        self.number = number
        self.process, self.out, self.err = started
        self.kill = started.kill
        self.ended = os.pidfd_open(self.process.pid)
        self.answer_pipe, self.call_pipe = answer_pipe, call_pipe
        self.unsent = memoryview(b"")
        self.answer = bytearray()
        self.late = False

    def close(self) -> None:
        for descriptor in (self.ended, self.out, self.err, self.answer_pipe, self.call_pipe):
            if descriptor >= 0:
                os.close(descriptor)


def call_on_ranks(
    n: int,
    call: Call,
    *,
    env: Mapping[str, str],
    timeout: float | None,
    listen: Listener,
) -> tuple[list[End], list[int]]:
    """Runs the call on ranks 0 to n-1 and waits for all; no process is left behind.

    Args:
        env: more environment variables.
        timeout: seconds until all ranks are killed; once one has failed, `GRACE` at most.
        listen: is handed what ranks write, as it comes.

    Returns:
        How each ended, and the ranks in the order of their ends.

    Raises:
        LaunchError: a rank could not be started.
    """
    told = pickle.dumps(call)
    shared = {
        **shared_environment(n, {**os.environ, **env}),
        **Rendezvous.on_this_host().environment(),
        **env,
        # The ranks import from the same places as this process.
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    ranks: list[_Rank] = []
    try:
        for number in range(n):
            ranks.append(_start(number, n, shared))
            ranks[-1].unsent = memoryview(told)
        order = _attend(ranks, timeout, listen)
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.process.wait()
            for _ in range(_LAST_READS):
                _hear(rank, listen)
            rank.close()
    return [_end_of(rank) for rank in ranks], order


def _start(number: int, n: int, shared: Mapping[str, str]) -> _Rank:
    its_call, call = os.pipe()
    answer, its_answer = os.pipe()
    try:
        started = start_rank(
            f"rank {number}",
            [sys.executable, "-c", _CODE.format(its_call, its_answer)],
            {**shared, **rank_environment(number, [n])},
            pass_fds=(its_call, its_answer),
        )
    except BaseException:
        os.close(call)
        os.close(answer)
        raise
    finally:
        os.close(its_call)
        os.close(its_answer)
    for descriptor in (started.out, started.err, answer, call):
        os.set_blocking(descriptor, False)
    return _Rank(number, started, answer, call)


def _attend(ranks: Sequence[_Rank], timeout: float | None, listen: Listener) -> list[int]:
    """Waits for all to end, or the time to pass; returns the ranks in the order of their ends."""
    order: list[int] = []
    deadline = None if timeout is None else time.monotonic() + timeout
    while len(order) < len(ranks):
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        poll = select.poll()
        for rank in ranks:
            for descriptor in (rank.out, rank.err, rank.answer_pipe):
                if descriptor >= 0:
                    poll.register(descriptor, select.POLLIN)
            if rank.call_pipe >= 0:
                poll.register(rank.call_pipe, select.POLLOUT)
            if rank.number not in order:
                poll.register(rank.ended, select.POLLIN)
        poll.poll(None if left is None else int(left * 1000) + 1)
        for rank in ranks:
            _tell(rank)
            _hear(rank, listen)
            if rank.number not in order and rank.process.poll() is not None:
                order.append(rank.number)
                if rank.process.returncode != 0:
                    soon = time.monotonic() + GRACE
                    deadline = soon if deadline is None else min(deadline, soon)
    for rank in ranks:
        rank.late = rank.number not in order
    return order


def _tell(rank: _Rank) -> None:
    """Sends as much of the call as the pipe takes."""
    if rank.call_pipe < 0:
        return
    try:
        while rank.unsent:
            rank.unsent = rank.unsent[os.write(rank.call_pipe, rank.unsent[:_READ_SIZE]) :]
    except BlockingIOError:
        return
    except BrokenPipeError:
        pass  # it has died
    os.close(rank.call_pipe)
    rank.call_pipe = -1


def _hear(rank: _Rank, listen: Listener) -> None:
    """Reads once from each pipe of the rank."""
    for name in ("out", "err", "answer_pipe"):
        descriptor = getattr(rank, name)
        if descriptor < 0:
            continue
        try:
            data = os.read(descriptor, _READ_SIZE)
        except BlockingIOError:
            continue
        if not data:
            os.close(descriptor)
            setattr(rank, name, -1)
        elif name == "answer_pipe":
            rank.answer += data
        else:
            listen(rank.number, name == "err", data)


def _end_of(rank: _Rank) -> End:
    answer: Answer | None = None
    with suppress(EOFError, pickle.UnpicklingError):  # it was killed before or while it answered
        answer = Answer(*pickle.loads(rank.answer))
    return End(answer, rank.process.returncode, rank.late)


# ---- inside a rank ----


def live(call_pipe: int, answer_pipe: int) -> None:
    """A rank's main: takes its call, makes it, answers, and ends with 1 when it has failed."""
    os.set_inheritable(call_pipe, False)
    os.set_inheritable(answer_pipe, False)
    with os.fdopen(call_pipe, "rb") as pipe:
        call = Call(*pickle.loads(pipe.read()))
    sys.path[:] = call.path
    faulthandler.enable()
    if call.stacks_after is not None:
        faulthandler.dump_traceback_later(call.stacks_after, exit=False)
    result, error, trace = None, None, ""
    try:
        if call.main is not None:
            from multiprocessing import spawn

            spawn.prepare(call.main)
        function, args, kwargs = pickle.loads(call.function)
        result = function(*args, **kwargs)
    except BaseException as raised:
        error, trace = raised, traceback.format_exc()
    data, trace = _packed(result, error, trace, dumps if call.by_value else pickle.dumps)
    with os.fdopen(answer_pipe, "wb") as pipe:
        pipe.write(data)
    if error is not None:
        sys.last_value = error  # so that the others are told what it was when this rank leaves
    sys.exit(1 if trace else 0)


def _packed(
    result: Any, error: BaseException | None, trace: str, pack: Callable[[Any], bytes]
) -> tuple[bytes, str]:
    """The pickled answer; without the error, or the result, if that cannot be pickled."""
    when = time.monotonic()
    try:
        data = pack(tuple(Answer(result, error, trace, when)))
        pickle.loads(data)
        return data, trace
    except Exception as unpicklable:
        why = trace or f"the result cannot be pickled: {unpicklable!r}"
        return pickle.dumps(tuple(Answer(None, None, why, when))), why


def dumps(value: Any) -> bytes:
    """By cloudpickle where it is installed, which takes functions and classes of any place."""
    try:
        import cloudpickle
    except ImportError:
        return pickle.dumps(value)
    data: bytes = cloudpickle.dumps(value)
    return data
