"""A store of torch.distributed's that is there already, as a torchrun's."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from farandole._core import Error, RendezvousError
from farandole._meeting.connection import LOOK
from farandole._meeting.errors import Words, could_not_meet, error_in, told_of
from farandole._meeting.line import Look, is_silent
from farandole._meeting.meeting import GRACE, Check, Meeting, Met, Reminder
from farandole._meeting.places import MasterPort
from farandole._meeting.rounds import KeyValueStore, Round, meet_in

_PAUSE = 0.01


def exchange_in(
    store: KeyValueStore, name: str, meeting: Meeting, mine: Words, check: Check
) -> Met:
    """The same as ``exchange`` in a store; ``name`` is the job's there.

    Raises:
        RendezvousError: ranks are missing at the deadline, or ``check`` refuses.
    """
    found = meet_in(store, name, meeting, mine, check)
    until = meeting.until + (GRACE if meeting.rank == 0 else 2 * GRACE)  # rank 0 says who is late
    return Met(found.table, InStore(found, mine, until))


@contextmanager
def _reminding(meeting: Meeting, text: Callable[[], str]) -> Iterator[None]:
    """A store says nothing while it waits; a thread does."""
    done = threading.Event()

    def remind() -> None:
        reminder = Reminder(meeting)
        while not done.wait(LOOK):
            reminder.warn_in_time(text)

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def torchruns(meeting: Meeting, place: MasterPort) -> KeyValueStore | None:
    """The store that torchrun keeps at MASTER_PORT; None where no torchrun does.

    Raises:
        RendezvousError: nobody keeps it there.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    distributed = importlib.import_module("torch.distributed")  # torchrun's own package
    left = timedelta(seconds=max(1.0, meeting.until - time.monotonic()))
    why = f"rank {meeting.rank} does not reach torchrun's store {place}"
    try:
        with _reminding(meeting, lambda: why):
            store: KeyValueStore = distributed.TCPStore(
                place.address, place.port, is_master=False, timeout=left
            )
    except RuntimeError as error:
        raise RendezvousError(
            f"{why}: {error} (it is at MASTER_ADDR, on the host of rank 0)"
        ) from error
    return store


class InStore:
    """The line (line.py) in a store, where all of them look."""

    def __init__(self, found: Round, mine: Words, until: float) -> None:
        self._store = found.store
        self._name = found.key
        self._mine = mine
        self._rank: int = mine["rank"]
        self._ranks = range(1, len(found.table)) if self._rank == 0 else range(0)
        self._until = until
        self._over = False

    def look(self) -> None:
        if not self._over and (why := self._find("failed")) is not None:
            self._over = True
            raise error_in(why)

    def fail(self, why: BaseException) -> Error:
        error = could_not_meet(self._mine, why)
        self._tell(error)
        return error

    def _tell(self, why: Error) -> None:
        if not self._over:
            self._over = True
            self._set("failed", told_of(why))

    def end(self, look: Look = lambda: None) -> None:
        missing = {f"met/{r}": r for r in self._ranks} or {"met": 0}
        self._set(f"met/{self._rank}", "")
        while missing := {key: r for key, r in missing.items() if self._find(key, r) is None}:
            self.look()
            look()
            if time.monotonic() >= self._until:
                why = is_silent(list(missing.values()))
                self._tell(why)
                raise why
            time.sleep(_PAUSE)
        if self._rank == 0:
            self._set("met", "")
        self._over = True

    def _find(self, key: str, rank: int | None = None) -> Any:
        with _gone():
            return self._store.find(f"{self._name}/{key}", rank)
        return None

    def _set(self, key: str, words: Any) -> None:
        with _gone():
            self._store.set(f"{self._name}/{key}", words)


@contextmanager
def _gone() -> Iterator[None]:
    """The store may be gone, and with it what was said there."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, Error):
            raise
