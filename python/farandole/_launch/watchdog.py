"""Two processes that watch each other, so that nothing survives a kill -9.

    farandole run ──┬── launcher ──┬── rank 0 ── its children …
     (the watchdog) │  (a session  ├── rank 1        each rank in a session of its own
                    │   of its own)└── orphans of ranks

Killing a process cannot be noticed by that process, so there are two, and each adopts orphans
(PR_SET_CHILD_SUBREAPER). The watchdog is the one the user sees: it passes signals on and returns
the launcher's exit code. The launcher does the work.

* The launcher is killed: the kernel kills the ranks (PR_SET_PDEATHSIG), everything else below it
  is orphaned and becomes the watchdog's child, and the watchdog ends all that descends from it.
* The watchdog is killed: the launcher sees the end of a pipe whose other end only the watchdog
  holds, and ends all that descends from it.
* A daemon of a rank (double fork, own session) is adopted like any orphan, so it is found as well.

Both killed at one instant still takes the ranks along, though not the children of ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from farandole._launch.job import LaunchError
from farandole._launch.polling import READ, wait
from farandole._launch.processes import Process, adopt_orphans, descendants, describe, reap, send
from farandole._launch.signals import PASSED_ON, BlockedSignals, SignalPipe

_SWEEP_SECONDS = 5.0
_LOOK_SECONDS = 0.5

Body = Callable[[int, SignalPipe], int]


class WatchdogLost(BaseException):
    """Ends a loop from wherever it is; the launcher then kills all that descends from it."""


def guarded(
    body: Body, name: str, what: str = "launcher", got: set[signal.Signals] | None = None
) -> int:
    """Calls `body(lifeline, signals)` in a child that leads a session; returns its exit code.

    `lifeline` becomes readable when the watchdog is gone; `signals` has those that are passed on.
    A LaunchError is printed behind `name`; `what` the child is, for the user; `got`: takes the
    signals that were passed on.
    """
    _open_standard_streams()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would lose exit codes
    # A signal that was ignored when we were started (nohup, a shell's background job) stays so.
    passed_on = [number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*passed_on, signal.SIGCHLD])
    strangers = descendants(os.getpid())  # started by a shell that then exec'd us
    lifeline = os.pipe()
    # With strangers below us their orphans could not be told from ours: then only the launcher,
    # which starts with nobody below it, adopts.
    adopt_orphans(not strangers)
    try:
        launcher = os.fork()
        if launcher == 0:
            _be_launcher(body, name, lifeline, passed_on, mask)
        os.close(lifeline[0])
        return _watch_over(launcher, what, passed_on, strangers, set() if got is None else got)
    finally:
        with suppress(OSError):
            os.close(lifeline[1])
        adopt_orphans(False)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _be_launcher(
    body: Body,
    name: str,
    lifeline: tuple[int, int],
    signals: list[signal.Signals],
    mask: set[int],
) -> None:
    """The child's whole life; does not return."""
    code = 70  # EX_SOFTWARE
    try:
        os.setsid()  # the terminal's signals come through the watchdog, and once
        os.close(lifeline[1])
        adopt_orphans()
        take_signals = SignalPipe(signals)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        code = body(lifeline[0], take_signals)
    except LaunchError as error:
        print(f"{name}: {error}", file=sys.stderr)
        code = error.exit_code
        end_descendants([])
    except WatchdogLost:
        end_descendants([])  # nobody is left to take a word or a code
    except BaseException:
        traceback.print_exc()
        end_descendants([])
    finally:
        sys.stderr.flush()
        os._exit(code)


def _watch_over(
    launcher: int,
    what: str,
    signals: list[signal.Signals],
    strangers: list[Process],
    got: set[signal.Signals],
) -> int:
    """Passes signals to the launcher until it ends, and cleans up behind it."""
    blocked = BlockedSignals([*signals, signal.SIGCHLD])
    try:
        status = _pass_on(launcher, blocked, got)
    finally:
        os.close(blocked.fd)
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    left = end_descendants(strangers)
    name = signal.Signals(-code).name
    print(f"farandole: the {what} was killed by {name}; all ranks were ended", file=sys.stderr)
    if left:
        print(f"farandole: could not end {describe(left)}", file=sys.stderr)
    return 128 - code


def _pass_on(launcher: int, blocked: BlockedSignals, got: set[signal.Signals]) -> int:
    """Passes on signals until the launcher has ended; returns its status."""
    while True:
        # Where a program with threads has called the launcher, one of them may take its SIGCHLD.
        wait([(blocked.fd, READ)], time.monotonic() + _LOOK_SECONDS)
        for number in blocked.take():
            if number == signal.SIGCHLD:
                continue
            got.add(signal.Signals(number))
            os.kill(launcher, number)  # not reaped yet, so it is still ours
        pid, status = os.waitpid(launcher, os.WNOHANG)
        if pid == launcher:
            return status


def _open_standard_streams() -> None:
    """Closed ones become /dev/null, so that no pipe of ours takes their number."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or both processes would print what waits there


def end_descendants(strangers: list[Process]) -> list[Process]:
    """Kills all descendants of this process but `strangers`; returns those that resist."""
    before = {(process.pid, process.start) for process in strangers}
    deadline = time.monotonic() + _SWEEP_SECONDS
    while True:
        found = [p for p in descendants(os.getpid()) if (p.pid, p.start) not in before]
        reap(found)
        living = [process for process in found if not process.dead]
        if not found or time.monotonic() > deadline:
            return living
        for process in living:
            send(process, signal.SIGKILL)
        time.sleep(0.005)
