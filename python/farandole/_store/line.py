"""A line that stays while ranks connect to each other, once all have met: one that cannot reach
another says so, and nobody waits for it until the deadline.

It ends as whoever keeps it, rank 0 as a rule, has heard of all others that they are connected, and
tells them: so there is a world on all ranks, or on none.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from farandole._core import Error, RendezvousError
from farandole._store.talk import LOOK, POLITE, hear, send
from farandole._tables import listed

_WORDS = 0.1  # seconds that words may need which were sent before what they explain


class Line(Protocol):
    """Of one rank. Nothing of it blocks for long but ``end``."""

    def look(self) -> None:
        """Raises RendezvousError where another rank has failed."""

    def fail(self, why: str) -> None:
        """This rank has; a second time nothing is said."""

    def end(self) -> None:
        """This rank is connected to all others, and waits until all are.

        Raises:
            RendezvousError: one of them has failed, or says nothing.
        """


@contextmanager
def told(line: Line | None) -> Iterator[None]:
    """Whatever is raised meanwhile is told to the others, but for what follows from what one of
    them has told: that is raised in its place."""
    try:
        yield
    except BaseException as error:
        if line is not None:
            if isinstance(error, Error):
                _hear_the_cause(line)
            line.fail(error.verdict if isinstance(error, Error) else repr(error))
        raise


def _hear_the_cause(line: Line) -> None:
    until = time.monotonic() + _WORDS
    while time.monotonic() < until:
        line.look()
        time.sleep(_WORDS / 10)


def failed(who: str, why: str) -> str:
    return f"{who} could not connect to all others: {why}"


def ended(who: str) -> str:
    return f"{who} ended before it had met all others"


def is_silent(ranks: list[int]) -> str:
    return f"{listed('rank', ranks)} did not connect to all others in time"


class Keeper:
    """Of who has received the others."""

    def __init__(
        self, mine: str, guests: Mapping[int, socket.socket], names: Mapping[int, str], until: float
    ) -> None:
        """`mine`, `names`: how ranks are called."""
        self._mine = mine
        self._guests = dict(guests)  # none, once it is over
        self._connected = set[int]()
        self._names = names
        self._until = until

    def look(self) -> None:
        self._look(0)

    def fail(self, why: str) -> None:
        self._tell_all({"failed": failed(self._mine, why)})

    def end(self) -> None:
        while missing := self._guests.keys() - self._connected:
            self._look(LOOK)
            if time.monotonic() >= self._until:
                self._give_up(is_silent(sorted(missing)))
        self._tell_all({})

    def _look(self, seconds: float) -> None:
        for rank, words in _heard(self._guests, seconds):
            if words is None:
                self._guests.pop(rank).close()
                self._give_up(ended(self._names[rank]))
            elif why := words.get("failed"):
                self._give_up(failed(self._names[rank], why))
            else:
                self._connected.add(rank)

    def _give_up(self, why: str) -> None:
        self._tell_all({"failed": why})
        raise RendezvousError(why)

    def _tell_all(self, words: dict[str, Any]) -> None:
        for guest in self._guests.values():
            with suppress(OSError), guest:
                send(guest, words)
        self._guests.clear()


class Guest:
    """Of who was received."""

    def __init__(self, keeper: socket.socket | None, name: str, until: float) -> None:
        """`keeper`: None where nobody keeps a line; `name`: how it is called."""
        self._keeper = {} if keeper is None else {0: keeper}  # nobody, once it is over
        self._name = name
        self._until = until

    def look(self) -> None:
        self._look(0)

    def fail(self, why: str) -> None:
        self._tell({"failed": why})
        self._close()

    def end(self) -> None:
        self._tell({})
        while self._keeper:
            self._look(LOOK)
            if self._keeper and time.monotonic() >= self._until:
                self._close()
                raise RendezvousError(f"{self._name} did not say in time that all ranks have met")

    def _look(self, seconds: float) -> None:
        for _, words in _heard(self._keeper, seconds):
            self._close()
            if words is None:
                raise RendezvousError(ended(self._name))
            if why := words.get("failed"):
                raise RendezvousError(why)

    def _tell(self, words: dict[str, Any]) -> None:
        for keeper in self._keeper.values():
            with suppress(OSError):  # it is gone, which is seen
                send(keeper, words)

    def _close(self) -> None:
        for keeper in self._keeper.values():
            keeper.close()
        self._keeper.clear()


def _heard(
    connections: Mapping[int, socket.socket], seconds: float
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """What has come on which of them; None: it has ended."""
    poll = select.poll()
    numbers = {connection.fileno(): number for number, connection in connections.items()}
    for descriptor in numbers:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll(1000 * seconds):
        number = numbers[descriptor]
        connections[number].settimeout(POLITE)
        try:
            yield number, hear(connections[number])
        except (OSError, ValueError):
            yield number, None
