"""A store of torch.distributed's that is there already, as a torchrun's."""

from __future__ import annotations

import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol

from farandole._core import Error, RendezvousError
from farandole._store.line import failed, is_silent
from farandole._store.meeting import (
    GRACE,
    Check,
    Meeting,
    Met,
    Reminder,
    Words,
    name_of,
    refusal,
    refused,
)
from farandole._store.talk import LOOK

_PAUSE = 0.01


class KeyValueStore(Protocol):
    """What we need of a store of torch.distributed's. ``get`` waits for the key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


def exchange_in(
    store: KeyValueStore, name: str, meeting: Meeting, mine: Words, check: Check
) -> Met:
    """The same as ``exchange`` in a store; ``name`` is this meeting's there.

    Raises:
        RendezvousError: ranks are missing when the store's patience ends, or ``check`` refuses.
    """
    rank = meeting.rank
    try:
        store.set(f"{name}/{rank}", json.dumps(mine))
        if rank == 0:
            table = _gather_in(store, name, meeting)
            store.set(name, json.dumps(refusal(check(table)) | {"ranks": table}))
        answer = json.loads(store.get(name))
    except (RuntimeError, OSError) as error:  # torch's DistStoreError is the former
        raise RendezvousError(
            f"rank {rank} did not meet all others in torch.distributed's store: {error}"
        ) from error
    if answer["refused"]:
        raise refused(answer)
    until = meeting.until + (GRACE if rank == 0 else 2 * GRACE)  # rank 0 says who is late
    line = InStore(store, name, name_of(mine), rank, meeting.size, until)
    return Met(answer["ranks"], line)


def _gather_in(store: KeyValueStore, name: str, meeting: Meeting) -> list[Words]:
    table: list[Words] = []
    said = "rank {} has not come to torch.distributed's store"
    with _reminding(meeting, lambda: said.format(len(table))):
        while len(table) < meeting.size:
            table.append(json.loads(store.get(f"{name}/{len(table)}")))
    return table


@contextmanager
def _reminding(meeting: Meeting, text: Callable[[], str]) -> Iterator[None]:
    """A store says nothing while it waits; a thread does."""
    done = threading.Event()

    def remind() -> None:
        reminder = Reminder(meeting)
        while not done.wait(LOOK):
            reminder.warn_in_time(text())

    threading.Thread(target=remind, daemon=True).start()
    try:
        yield
    finally:
        done.set()


def fail_in(store: KeyValueStore, name: str, mine: Words, why: Error | None) -> None:
    """Instead of meeting there: the others learn why this rank does not.

    Raises:
        RuntimeError: the store is gone.
    """
    store.set(f"{name}/{mine['rank']}", json.dumps(mine))
    if mine["rank"] == 0:
        store.set(name, json.dumps(refusal(why) | {"ranks": []}))


def torchruns(meeting: Meeting) -> KeyValueStore | None:
    """The store that torchrun keeps at MASTER_PORT; None where no torchrun does.

    Raises:
        RendezvousError: nobody keeps it there.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    distributed = importlib.import_module("torch.distributed")  # torchrun's own package
    left = timedelta(seconds=max(1.0, meeting.until - time.monotonic()))
    why = f"rank {meeting.rank} does not reach torchrun's store at {meeting.place}"
    try:
        with _reminding(meeting, lambda: why):
            store: KeyValueStore = distributed.TCPStore(
                meeting.address, meeting.port, is_master=False, timeout=left
            )
    except RuntimeError as error:
        raise RendezvousError(
            f"{why}: {error} (it is at MASTER_ADDR, on the host of rank 0)"
        ) from error
    return store


class InStore:
    """The line (line.py) in a store, where all of them look."""

    def __init__(
        self, store: KeyValueStore, name: str, mine: str, rank: int, size: int, until: float
    ):
        self._store = store
        self._name = name
        self._mine = mine
        self._rank = rank
        self._ranks = range(1, size) if rank == 0 else range(0)
        self._until = until
        self._over = False

    def look(self) -> None:
        if not self._over and self._is_set("failed"):
            self._over = True
            raise RendezvousError(self._store.get(f"{self._name}/failed").decode())

    def fail(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._set("failed", failed(self._mine, why))

    def end(self) -> None:
        missing = [f"met/{r}" for r in self._ranks] or ["met"]
        self._set(f"met/{self._rank}", "")
        while missing := [key for key in missing if not self._is_set(key)]:
            self.look()
            if time.monotonic() >= self._until:
                why = is_silent([r for r in self._ranks if f"met/{r}" in missing] or [0])
                self.fail(why)
                raise RendezvousError(why)
            time.sleep(_PAUSE)
        if self._rank == 0:
            self._set("met", "")
        self._over = True

    def _is_set(self, key: str) -> bool:
        with suppress(RuntimeError):  # the store is gone, and with it what was said there
            return self._store.check([f"{self._name}/{key}"])
        return False

    def _set(self, key: str, value: str) -> None:
        with suppress(RuntimeError):
            self._store.set(f"{self._name}/{key}", value)
