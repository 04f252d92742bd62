"""Operations in flight as torch.distributed holds them, and the futures of those that ask.

Note [Who completes a future]
A future must complete although nobody waits for its work. Within a backward pass the thread that
runs it does that at the pass' end, where it would wait anyway: it drives the engine itself, and no
other thread takes its core or Python's lock from it meanwhile. DistributedDataParallel ends its
backward right after that, so it finds its futures complete; and an error is raised from there, to
the caller of backward(). Everywhere else, and for programs that wait inside of a backward pass, a
thread of ours does it. The engine's own thread never takes Python's lock.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Work as _TorchWork

from farandole._core import InvalidArgument, Source
from farandole.torch import _devices
from farandole.torch._entries import entry

_NO_TIMEOUT = timedelta(0)
_LOOK = 0.01  # seconds between two looks at works that a backward pass is expected to complete
_TURN = 0.002  # for which one of several works is waited for

_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward


class Deferred:
    """The handle of an operation within a coalescing block, which begins when the block ends."""

    def __init__(self, *, may_wait: bool) -> None:
        self._may_wait = may_wait

    def wait(self, timeout: float | None) -> None:  # noqa: ARG002
        """Does nothing for a synchronous call, for which PyTorch waits at once: the block waits.
        Any other caller would read a result that is not there yet, and gets an error."""
        if not self._may_wait:
            raise InvalidArgument(
                "a work of a coalescing block was waited for within the block: the operations of a "
                "block begin together, at its end"
            )

    def done(self) -> bool:
        return False


class Work(_TorchWork):
    """One operation, or several that were coalesced. Any thread may call."""

    def __init__(
        self,
        handle: Any,  # with wait(seconds) and done(), or None for one that is complete
        result: Any,
        finish: Callable[[], None] | None = None,
        source: int = -1,
    ) -> None:
        super().__init__()
        self._handle = handle
        self._over: Any = None  # the handle, once it has ended well
        self._result = result
        self._finish = finish
        self._source = source
        self._error: BaseException | None = None
        self._future: Any = None
        self._told = False  # the future is complete
        self._lock = threading.Lock()

    def begin(self, handle: Any) -> None:
        """Takes the handle of the deferred operation, which has begun."""
        self._handle = handle

    @entry()
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        handle = self._handle
        if isinstance(handle, Deferred):
            handle.wait(None)
        elif handle is not None:
            try:
                ended = handle.wait(timeout.total_seconds() or None)
            except TimeoutError:
                raise
            except BaseException as error:
                self._end(error)
                raise
            if isinstance(ended, Source):
                self._source = ended.rank
            self._end(None)
        elif self._over is not None:
            self._over.wait(None)  # of tensors on devices: this thread's stream comes after, too
        if self._error is not None:
            raise self._error
        return True

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._handle is None:
                return
            if error is None and self._finish is not None:
                self._finish()
            if error is None and _on_device(self._result):
                self._over = self._handle
            self._error, self._handle, self._finish = error, None, None
        self._complete_future()

    def _complete_future(self) -> None:
        with self._lock:
            future = None if self._told else self._future
            self._told = self._told or future is not None
        if future is None:
            return
        if self._error is not None:
            future.set_exception(self._error)
        else:
            future.set_result(self._result)

    @entry()
    def is_completed(self) -> bool:
        handle = self._handle
        if handle is not None and handle.done():
            with contextlib.suppress(Exception):  # kept, and raised by wait()
                self.wait()
        return self._handle is None

    @entry()
    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    @entry()
    def exception(self) -> BaseException | None:
        return self._error

    @entry()
    def result(self) -> Any:
        return self._result

    @entry()
    def synchronize(self) -> None:
        self.wait()

    @entry()
    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    @entry()
    def get_future(self) -> Any:
        if self._future is None:
            self._future = _devices.future_of(tensors_in(self._result))
            if self._handle is None:
                if self._over is not None:
                    self._over.wait(None)
                self._complete_future()
            elif _in_graph(self._result):
                self.wait()  # it is part of the graph already, and events are, too, in this thread
            else:
                completions.add(self)
        return self._future


def tensors_in(result: Any) -> list[torch.Tensor]:
    """Results are tensors, and lists of results."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for part in result for tensor in tensors_in(part)]
    return []


def _on_device(result: Any) -> bool:
    return any(_devices.device_of(tensor) is not None for tensor in tensors_in(result))


def _in_graph(result: Any) -> bool:
    devices = map(_devices.device_of, tensors_in(result))
    return any(device is not None and _devices.is_captured(device) for device in devices)


class _All:
    """Several works as one handle."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout: float | None) -> None:
        for work in self._works:
            work.wait(timedelta(seconds=timeout or 0))

    def done(self) -> bool:
        return all(work.is_completed() for work in self._works)


def together(works: list[Work], result: Any) -> Work:
    return Work(_All(works), result)


class _Completions:
    """See Note [Who completes a future]."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._of_backward: dict[int, list[Work]] = {}  # by graph task
        self._loose: list[Work] = []
        self._thread: threading.Thread | None = None
        self._stopping = False

    def add(self, work: Work) -> None:
        graph = _graph_task()
        with self._changed:
            if graph < 0:
                self._loose.append(work)
            elif graph in self._of_backward:
                self._of_backward[graph].append(work)
            else:
                self._of_backward[graph] = [work]
                end = partial(self._end_of_backward, graph)
                torch.autograd.Variable._execution_engine.queue_callback(end)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="futures", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _end_of_backward(self, graph: int) -> None:
        with self._changed:
            works = self._of_backward.pop(graph, [])
        errors = []
        for work in works:
            try:
                work.wait()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _run(self) -> None:
        while self._look():
            pass

    def _look(self) -> bool:
        """Waits for works and looks at them once; keeps no reference to them. False at the end."""
        with self._changed:
            while not (self._of_backward or self._loose or self._stopping):
                self._changed.wait()
            if self._stopping:
                return False
            if not self._loose:
                self._changed.wait(_LOOK)
            expected = [work for works in self._of_backward.values() for work in works]
            loose = list(self._loose)
        completed = [work for work in expected + loose if work.is_completed()]
        if loose and not completed:
            # Waiting drives the engine. Of several, none may keep the others from completing.
            first = loose[0]
            with contextlib.suppress(Exception):
                first.wait(timedelta(seconds=_LOOK if len(loose) == 1 else _TURN))
            completed = [first] if first.is_completed() else []
        self._forget(completed)
        return True

    def _forget(self, completed: list[Work]) -> None:
        gone = set(map(id, completed))
        with self._changed:
            left = [work for work in self._loose if id(work) not in gone]
            # The next to be waited for is another one.
            self._loose = left[1:] + left[:1]
            for graph, works in list(self._of_backward.items()):
                if all(id(work) in gone or work.is_completed() for work in works):
                    del self._of_backward[graph]

    def stop(self) -> None:
        """Ends the thread before the interpreter ends: later, a thread that returns from native
        code is killed in the middle of it."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(5)


completions = _Completions()
atexit.register(completions.stop)
