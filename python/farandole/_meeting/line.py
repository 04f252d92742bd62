"""Connections to one rank, the keeper, that stay open until ranks that have met are connected.
A rank that cannot reach another one reports it there, so that nobody waits until the deadline.

The keeper is the first rank as a rule. Once all others have reported that they are connected, it
tells them so and closes: so there is a world on all ranks, or on none.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from farandole._core import AuthError, Error, RendezvousError
from farandole._meeting.connection import LOOK, POLITE, Changed, Connection
from farandole._meeting.errors import Words, about, could_not_meet, error_in, name_of, told_of
from farandole._tables import listed

Look = Callable[[], None]

_WORDS = 0.1  # seconds that words may need which were sent before what they explain


def _nothing() -> None:
    pass


class Line(Protocol):
    """One rank's end of the line. Only ``end`` blocks for long."""

    def look(self) -> None:
        """Raises the error with which another rank has failed."""

    def fail(self, why: BaseException) -> Error:
        """Reports to all that this rank has failed; reports nothing a second time."""

    def end(self, look: Look = _nothing) -> None:
        """Reports that this rank is connected to all others, and waits until all are. `look` is
        called now and then, and may raise.

        Raises:
            Error: one of them has failed with it; RendezvousError: one says nothing.
        """


@contextmanager
def told(line: Line) -> Iterator[None]:
    """Reports an exception of the body to the other ranks. If another rank has reported an error
    that may be its cause, that one is raised in its place."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Error):
            _hear_the_cause(line)
        line.fail(error)
        raise


def _hear_the_cause(line: Line) -> None:
    until = time.monotonic() + _WORDS
    while time.monotonic() < until:
        line.look()
        time.sleep(_WORDS / 10)


def ended(who: Words, why: Exception | None = None) -> Error:
    if isinstance(why, Changed):
        return about(who, AuthError, f"{why}, as if it were by {name_of(who)}")
    return about(who, RendezvousError, f"{name_of(who)} ended before it had met all others")


def is_silent(ranks: list[int]) -> RendezvousError:
    error = RendezvousError(f"{listed('rank', ranks)} did not connect to all others in time")
    error.rank = ranks[0]
    return error


class Keeper:
    """The end at the rank that has received the others."""

    def __init__(
        self, mine: Words, guests: Mapping[int, Connection], table: list[Words], until: float
    ) -> None:
        """`table`: the words of all ranks."""
        self._mine = mine
        self._guests = dict(guests)  # none, once it is over
        self._connected = set[int]()
        self._words = {words["rank"]: words for words in table}
        self._until = until

    def look(self) -> None:
        self._look(0)

    def fail(self, why: BaseException) -> Error:
        error = could_not_meet(self._mine, why)
        self._tell_all({"failed": told_of(error)})
        return error

    def end(self, look: Look = _nothing) -> None:
        while missing := self._guests.keys() - self._connected:
            self._look(LOOK)
            look()
            if time.monotonic() >= self._until:
                self._give_up(is_silent(sorted(missing)))
        self._tell_all({})

    def _look(self, seconds: float) -> None:
        for rank, words in _heard(self._guests, seconds):
            if isinstance(words, Exception):
                self._guests.pop(rank).close()
                self._give_up(ended(self._words[rank], words))
            elif why := words.get("failed"):
                self._give_up(error_in(why))
            else:
                self._connected.add(rank)

    def _give_up(self, why: Error) -> None:
        self._tell_all({"failed": told_of(why)})
        raise why

    def _tell_all(self, words: Words) -> None:
        for guest in self._guests.values():
            with suppress(OSError):
                guest.send(words)
            guest.close()
        self._guests.clear()


class Guest:
    """The end at a rank that was received."""

    def __init__(
        self, mine: Words, keeper: Connection | None, keepers: Words, until: float
    ) -> None:
        """`keeper`: None where nobody keeps a line."""
        self._mine = mine
        self._keeper = {} if keeper is None else {0: keeper}  # nobody, once it is over
        self._keepers = keepers
        self._until = until

    def look(self) -> None:
        self._look(0)

    def fail(self, why: BaseException) -> Error:
        error = could_not_meet(self._mine, why)
        self._tell({"failed": told_of(error)})
        self._close()
        return error

    def end(self, look: Look = _nothing) -> None:
        self._tell({})
        while self._keeper:
            self._look(LOOK)
            look()
            if self._keeper and time.monotonic() >= self._until:
                self._close()
                verdict = f"{name_of(self._keepers)} did not say in time that all ranks have met"
                raise about(self._keepers, RendezvousError, verdict)

    def _look(self, seconds: float) -> None:
        for _, words in _heard(self._keeper, seconds):
            self._close()
            if isinstance(words, Exception):
                raise ended(self._keepers, words)
            if why := words.get("failed"):
                raise error_in(why)

    def _tell(self, words: Words) -> None:
        for keeper in self._keeper.values():
            with suppress(OSError):  # it is gone, which is seen
                keeper.send(words)

    def _close(self) -> None:
        for keeper in self._keeper.values():
            keeper.close()
        self._keeper.clear()


def _heard(
    connections: Mapping[int, Connection], seconds: float
) -> Iterator[tuple[int, dict[str, Any] | Exception]]:
    """The words that have come on each connection, or why no more come."""
    poll = select.poll()
    numbers = {connection.fileno(): number for number, connection in connections.items()}
    for descriptor in numbers:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll(1000 * seconds):
        number = numbers[descriptor]
        try:
            yield number, _words(connections[number])
        except (OSError, ValueError) as why:
            yield number, why


def _words(connection: Connection) -> dict[str, Any]:
    heard = connection.hear(time.monotonic() + POLITE)
    if isinstance(heard, dict) and isinstance(heard.get("failed", {}), dict):
        return heard
    raise ValueError("no words of a line")
