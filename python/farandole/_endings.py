"""How this process begins and ends, for the ranks that wait for it and for `farandole run`.

An exception that nobody caught is told at once. An exit code is known to exit() alone, which the
core asks last of all (csrc/control/farewell.h).
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType

from farandole import _core
from farandole._arguments import encodable
from farandole._core import Deadlock, Error, Group, LinkError
from farandole._datagrams import PARTS
from farandole._watch import is_library

# Errors between ranks, of which none alone is to blame.
_BETWEEN = (Deadlock, LinkError)


class _State:
    watched = False
    processes: Sequence[int] = ()  # of the world's ranks
    told: BaseException | None = None  # what the others know already


_state = _State()


def tell_meeting(ranks: Sequence[int]) -> None:
    """The launcher: this rank waits in init() for these of the ranks that were started."""
    _core.tell_launcher(PARTS.join(["meet", ",".join(map(str, ranks))]))


def know_processes(processes: Sequence[int]) -> None:
    """The process of each rank of the world: an error may know its rank alone."""
    _state.processes = processes


def tell_met() -> None:
    """It waits no longer."""
    _core.tell_launcher("met")


def tell_no_meeting(error: Error) -> None:
    """It has met nobody, and most likely ends with that."""
    said = f"farandole.{type(error).__name__}: {error.verdict}"
    _core.tell_launcher(PARTS.join(["end", "1", str(_process_in(error)), said]))


def tell_dispensable(dispensable: bool) -> None:
    """The launcher: whether others go on if this rank dies."""
    _core.tell_launcher("dispensable" if dispensable else "needed")


def watch(world: Callable[[], Group | None]) -> None:
    """From now on, for the world that there is then; once.

    A hook that was installed before is called first, and prints.
    """
    if _state.watched:
        return
    _state.watched = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            before(kind, error, trace)
        finally:
            if not sys.flags.interactive:  # else a prompt follows
                tell_exception(world(), error)

    sys.excepthook = hook


def tell_exception(group: Group | None, error: BaseException) -> None:
    """Nobody caught it: this process ends with it, and its world fails."""
    if group is None or error is _state.told or hasattr(sys, "ps1") or _core.in_child():
        return
    _state.told = error
    if not isinstance(error, SystemExit) or _exit_code(error) != 0:
        what, place = _described(error)
        _tell_launcher(group, error, what, place)
        group.report_exception(what, place)


def tell_end(group: Group) -> None:
    """The program ends without an exception: what its exit code is, it says itself."""
    if not hasattr(sys, "ps1"):
        group.show_exit_code_at_end(_blamed(group, None))


def tell_leaving(group: Group, before: int) -> None:
    """At shutdown(): within `finally`, a `with` or `except`, an exception may be the cause.

    `before` is the identity of what was being handled when the world was joined.
    """
    error = sys.exc_info()[1]
    if error is None or id(error) == before or isinstance(error, GeneratorExit):
        return
    if isinstance(error, SystemExit) and _exit_code(error) == 0:
        return
    what, place = _described(error)
    _tell_launcher(group, error, what, place)
    group.show_exception(what, f"{place}; it called shutdown() while that was handled")


def _tell_launcher(group: Group, error: BaseException, what: str, place: str) -> None:
    """Before the peers: they may end sooner than this process once they have heard of it."""
    code, told = 1, [what, place]
    if isinstance(error, SystemExit):
        code, told = _exit_code(error), [""]
    _core.tell_launcher(PARTS.join(["end", str(code), str(_blamed(group, error)), *told]))


def _described(error: BaseException) -> tuple[str, str]:
    """'ValueError: text' and 'file, line 5': the program's last line, not that of a library."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_library(frame.filename)] or frames
    place = f"{own[-1].filename}, line {own[-1].lineno}" if own else "no Python line"
    if isinstance(error, SystemExit):
        return f"exit code {_exit_code(error)}", place
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception as broken:
        text = f"(its text raised {type(broken).__name__})"
    # Names of files may hold bytes that are no text.
    return encodable(f"{name}: {text}" if text else name), encodable(place)


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _blamed(group: Group, error: BaseException | None) -> int:
    """The process that brought this one's end about; 0 when that is itself, or not known."""
    if isinstance(error, Error):
        return _process_in(error)
    try:
        group.check()
    except Error as verdict:
        return _process_in(verdict)
    return 0


def _process_in(error: Error) -> int:
    """The process that it blames; 0 when that is this one, or no single one."""
    if isinstance(error, _BETWEEN):
        return 0
    rank, found = error.rank, error.pid
    if not found and rank is not None and rank < len(_state.processes):
        found = _state.processes[rank]
    return found if found and found != os.getpid() else 0
