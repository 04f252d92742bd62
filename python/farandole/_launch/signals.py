"""The signals that are passed on, and the harsher ones that follow those that end a job."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress

# A stopping signal and the harsher ones that follow it, `patience` apart.
STOPPING = {
    signal.SIGINT: (signal.SIGTERM, signal.SIGKILL),
    signal.SIGTERM: (signal.SIGKILL,),
    signal.SIGHUP: (signal.SIGTERM, signal.SIGKILL),
    signal.SIGQUIT: (signal.SIGKILL,),
}
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2)
PASSED_ON = (*STOPPING, *FORWARDED, signal.SIGTSTP, signal.SIGCONT)


_signalfd = ctypes.CDLL(None, use_errno=True).signalfd
_INFO = 128  # bytes that it gives of a signal, the number first


class BlockedSignals:
    """Signals that this thread has blocked, as a descriptor that a loop polls: from any thread, and
    without handlers. (Python's sigtimedwait() returns a signal that nobody sent where SIGSTOP has
    interrupted it and time is up.)"""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask = (ctypes.c_ulong * (1024 // bits))()  # a sigset_t
        for number in numbers:
            mask[(number - 1) // bits] |= 1 << (number - 1) % bits
        self.fd = _signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "signalfd")

    def take(self) -> Iterator[signal.Signals]:
        """The signals that came."""
        with suppress(BlockingIOError):
            while True:
                (number,) = struct.unpack_from("I", os.read(self.fd, _INFO))
                yield signal.Signals(number)


class SignalPipe:
    """Signals, and the ends of children, as bytes of a pipe that a loop polls."""

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self.fd, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (*numbers, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the wake-up descriptor carries the number

    def take(self) -> Iterator[signal.Signals]:
        """The signals that came, in their order."""
        with suppress(BlockingIOError):
            for number in os.read(self.fd, 4096):
                yield signal.Signals(number)


class Escalation:
    """The pending steps of a list of (time, signal), ever harsher; None in the end: give up."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, signal.Signals | None]] = []

    def plan(self, *steps: tuple[float, signal.Signals | None]) -> None:
        self._steps = list(steps)

    def hasten(self, *steps: tuple[float, signal.Signals | None]) -> None:
        """Takes a plan that ends no later: a further signal never gives more time."""
        if not self._steps or steps[-1][0] < self._steps[-1][0]:
            self._steps = list(steps)

    def due(self) -> float | None:
        return self._steps[0][0] if self._steps else None

    def take(self, now: float) -> Iterator[signal.Signals | None]:
        """The steps whose time has come; the plan may be changed meanwhile."""
        while self._steps and self._steps[0][0] <= now:
            yield self._steps.pop(0)[1]
