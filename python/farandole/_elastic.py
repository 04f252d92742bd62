"""A worker of an elastic job: what it says to the launcher, and what the launcher says to it.

An elastic job is a row of *worlds*. A world ends when a rank of it is lost, or when all of its
ranks leave it because workers have come or must go. Each worker then asks the launcher for a place
in the next one (`seek`) and gets an environment: its rank, the size, where ranks meet. The other
end is _launch/elastic/supervisor.py.
"""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from farandole import _core, _json
from farandole._core import InvalidArgument, RendezvousError
from farandole._datagrams import PARTS, Ear, worker_name

_FIRST = "FARANDOLE_WORKER_PID"  # who asks for places
_LARGEST = 1 << 16  # bytes
_PAUSE = 0.1  # seconds, between two looks for signals
_MOMENT = 1.0  # seconds
_AGAIN = 5.0  # until what was asked is asked again: a launcher that stood still may have lost it


class Changes(NamedTuple):
    """The launcher's notices since the present world was formed."""

    wanted: bool = False  # another world, at the next step boundary
    only_fewer: bool = True  # nobody who lacks the state will be in it


class _Worker:
    """This process' end of the line."""

    def __init__(self) -> None:
        self.world = 0  # the number of the one in which it was given a place
        self.changes = Changes()
        self.has_state = False  # what the job has trained so far
        self._broken = ""  # why the present world cannot be
        self._pid = os.getpid()
        self._ear = Ear(worker_name(os.environ["FARANDOLE_RUN_ID"], self._pid), _LARGEST)

    @property
    def is_here(self) -> bool:
        """Whether this is no forked child."""
        return self._pid == os.getpid()

    def seek(self) -> dict[str, str]:
        """The environment of the next world. The launcher bounds the wait (--elastic-timeout), and
        takes its workers along when it ends."""
        before, asked = self.world, -math.inf
        while True:
            if time.monotonic() - asked > _AGAIN:
                asked = time.monotonic()
                _core.tell_launcher(PARTS.join(["seek", str(before), str(int(self.has_state))]))
            select.select([self._ear], [], [], _PAUSE)
            for words in self._words():
                if why := words.get("dismissed"):
                    print(f"farandole: this worker ends: {why}", file=sys.stderr)
                    raise SystemExit(0)
                if "environment" in words and words["world"] > before:
                    self.world, self.changes, self._broken = words["world"], Changes(), ""
                    return dict(words["environment"])
                self._note(words)

    def look(self) -> None:
        """While the ranks of a world meet. Raises RendezvousError where they cannot."""
        self.listen()
        if self._broken:
            raise RendezvousError(f"world {self.world} cannot be formed: {self._broken}")

    def is_broken(self) -> bool:
        """Waits a moment for the launcher's word: peers may have noticed before the launcher."""
        until = time.monotonic() + _MOMENT
        while not self._broken and time.monotonic() < until:
            select.select([self._ear], [], [], _PAUSE)
            self.listen()
        return bool(self._broken)

    def listen(self) -> None:
        for words in self._words():
            self._note(words)

    def _note(self, words: dict[str, Any]) -> None:
        if words.get("world") != self.world:
            return  # of one that has ended
        if why := words.get("broken"):
            self._broken = why
        elif "wanted" in words:
            only_fewer = self.changes.only_fewer and words["only_fewer"]
            self.changes = Changes(True, only_fewer)

    def _words(self) -> Iterator[dict[str, Any]]:
        return map(_json.read, self._ear.words())


class _State:
    worker: _Worker | None = None


_state = _State()


def is_elastic() -> bool:
    """Whether the launcher of this process forms another world when one has ended."""
    return bool(os.environ.get("FARANDOLE_WORKER"))


def changes() -> Changes:
    """The changes that this worker knows of, at once. Others may know of more, or of fewer."""
    worker = _state.worker
    if worker is None or not worker.is_here:
        return Changes()
    worker.listen()
    return worker.changes


def hold_state() -> None:
    """This process has the job's state from now on, which new ranks may be given."""
    if _state.worker is not None:
        _state.worker.has_state = True


def tell_training(how: Literal["training", "done", "failed"]) -> None:
    """Tells the launcher whether this process will want another world when the present one ends;
    and if not, whether the others will."""
    if is_elastic():
        _core.tell_launcher(how)


def world() -> int:
    """The number of the present world among those of the job, from 1; 0: none so far."""
    return 0 if _state.worker is None else _state.worker.world


def enter_next() -> None:
    """Waits for a place in the next world; the environment has it then.

    Raises:
        SystemExit: there is none for this worker.
        InvalidArgument: a process of this worker has places already.
    """
    if _state.worker is None or not _state.worker.is_here:
        _refuse_second()
        _state.worker = _Worker()
    os.environ.update(_state.worker.seek())


def look() -> None:
    """While the ranks of a world meet.

    Raises:
        RendezvousError: the launcher knows that they cannot.
    """
    if _state.worker is not None:
        _state.worker.look()


def is_broken() -> bool:
    """Whether a rank of the present world has died before all had met."""
    return _state.worker is not None and _state.worker.is_broken()


def refuse_place(**given: object) -> None:
    """Refuses a place that is given as an argument: the launcher alone assigns places.

    Raises:
        InvalidArgument: an argument of init() says it, too.
    """
    for name, value in given.items():
        if value is not None:
            raise InvalidArgument(
                f"init({name}=…) in an elastic job, whose launcher says who is who in each world\n"
                f"  advice: leave {name} out, or start the job without --min-np, --max-np and "
                "--host-discovery-script"
            )


def _refuse_second() -> None:
    """A program that a rank starts inherits its environment."""
    first = os.environ.setdefault(_FIRST, str(os.getpid()))
    if first != str(os.getpid()) and Path(f"/proc/{first}").exists():
        raise InvalidArgument(
            f"init() in pid {os.getpid()}, which worker {os.environ['FARANDOLE_WORKER']} (pid "
            f"{first}) has started: a worker of an elastic job is one process\n"
            "  advice: unset FARANDOLE_WORKER for a program that is to be on its own"
        )
