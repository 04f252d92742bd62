"""Looks what the threads of this rank are doing, for the warnings and verdicts of all ranks.

A thread of its own sleeps until some rank has waited for long (csrc/control/wait_watch.h). Then it
looks where the program's threads are, and whether any of them will do something by itself. Two
kinds of threads will not:

* those that wait for an operation without a deadline, which the core knows;
* those that sleep until another thread of this process wakes them, which the kernel knows: a
  private futex without a timeout. Examples are a thread that waits for TensorFlow or XLA, one in
  `join()`, and an idle worker of a pool.

Any other thread may go on and begin what other ranks wait for. So nobody is called blocked while
there is one; but daemons (progress bars and the like) only get more time. So do native threads that
wait for something outside, such as a file or a socket: a thread that sleeps may wait for them.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from farandole import _core

# Functions that say what a program is doing, in its user's words, from the frames of its main
# thread, the innermost first. They return "" if they do not know.
steps: list[Callable[[Sequence[FrameType]], str]] = []

# Packages that a program calls, and whose lines are not its own; each framework's side adds its.
libraries: set[str] = set()

_OURS = str(Path(__file__).parent)
_STANDARD = sysconfig.get_path("stdlib")
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())  # the call's number
_PRIVATE = 128
_CLOCK = 256  # of a timeout
_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
_BUSY = 0.1  # of one core: then native threads are at work
_LITTLE = 20_000_000  # nanoseconds
_LONGEST_PATH = 100


class Watch:
    """The watch of one world, from init() to shutdown()."""

    def __init__(self, world: _core.Group) -> None:
        self._post = _core.Watchpost(world)
        self._still: object = None
        self._since = self._looked = self._cpu = 0  # nanoseconds
        self._thread = threading.Thread(target=self._run, name="farandole-watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._post.end()
        self._thread.join(1.0)

    def _run(self) -> None:
        while self._post.wait():
            try:
                self._look()
            except Exception as error:  # a look that fails is shown, too
                when = time.monotonic_ns()
                self._post.show(False, False, when, when, f"an unknown place ({error!r})", "")

    def _look(self) -> None:
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        waits = _core.blocked_threads()
        still, blocked, daemons = _stillness(frames, waits)
        when, cpu = time.monotonic_ns(), time.process_time_ns()
        busy = cpu - self._cpu > _BUSY * (when - self._looked) + _LITTLE
        if not blocked or busy or still != self._still:
            self._since, self._still = when, still
        self._looked, self._cpu = when, cpu
        main = threading.main_thread().ident
        shown = main if main in waits else next((t for t in waits if t in frames), main)
        place = _place(_inner_first(frames.get(shown or 0)))
        story = _inner_first(frames.get(main or 0))
        step = next(filter(None, (describe(story) for describe in steps)), "")
        self._post.show(blocked, daemons, when, self._since, place, step)


def _stillness(frames: dict[int, FrameType], waits: dict[int, int]) -> tuple[object, bool, bool]:
    """(what changes when a thread moves, whether no thread will by itself, but for daemons)."""
    threads = {t.ident: t for t in threading.enumerate()}
    still: dict[int, object] = {}
    blocked, daemons = True, False
    for ident in frames:
        thread = threads.get(ident)
        if ident in waits:
            still[ident] = waits[ident]
        elif sleep := _endless_sleep(_number_of(thread)):
            still[ident] = sleep
        elif thread is not None and thread.daemon:
            daemons = True
        else:
            blocked = False
    return still, blocked, daemons or _waits_outside({_number_of(t) for t in threads.values()})


def _number_of(thread: threading.Thread | None) -> int | None:
    """The kernel's number. A forked child's main thread still has its parent's in Python."""
    if thread is threading.main_thread():
        return os.getpid()
    return None if thread is None else thread.native_id


def _endless_sleep(thread: int | None) -> tuple[str, ...] | None:
    """Where a thread sleeps that only another one of this process can wake, and how often it has
    slept; None for any other thread, and where the kernel does not say."""
    folder = Path("/proc/self/task") / str(thread)
    try:
        words = (folder / "syscall").read_text().split()
        status = (folder / "status").read_text()
    except OSError:
        return None
    if len(words) < 5 or words[0] != _FUTEX or words[4] != "0x0":
        return None
    how = int(words[2], 16)
    if not how & _PRIVATE or how & ~(_PRIVATE | _CLOCK) not in _WAITS:
        return None
    switches = [line for line in status.splitlines() if "ctxt_switches" in line]
    return (words[1], *switches)


def _waits_outside(known: set[int | None]) -> bool:
    """Whether a native thread of the process, not of farandole, waits for something outside."""
    for folder in Path("/proc/self/task").iterdir():
        if int(folder.name) in known:
            continue
        with contextlib.suppress(OSError):  # it may just have ended
            call = (folder / "syscall").read_text().partition(" ")[0].strip()
            ours = (folder / "comm").read_text().startswith("farandole")
            if not ours and call not in (_FUTEX, "running"):
                return True
    return False


def _inner_first(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _place(frames: Sequence[FrameType]) -> str:
    """The line of the program, not of the libraries it calls."""
    if not frames:
        return ""
    own = (f for f in frames if not is_library(f.f_code.co_filename))
    frame = next(own, frames[0])
    name = frame.f_code.co_filename
    with contextlib.suppress(ValueError, OSError):
        name = str(Path(name).relative_to(Path.cwd()))
    return f"{name[-_LONGEST_PATH:]}, line {frame.f_lineno}, in {frame.f_code.co_name}"


def is_library(file: str) -> bool:
    """Whether a file is no line of the program: farandole's, Python's, or one of `libraries`."""
    if "-packages/" in file and not file.startswith(_OURS):
        return any(f"-packages/{name}/" in file for name in libraries)
    return file.startswith((_OURS, _STANDARD, "<frozen"))
