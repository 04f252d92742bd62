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


class OnConnections:
    """The end at the keeper, with a connection to each other rank, or at one of these."""

    def __init__(
        self, mine: Words, others: Mapping[int, Connection], table: list[Words], until: float,
        *, keeps: bool = False,
    ) -> None:  # fmt: skip
        """`others`: by rank; none where nobody keeps a line. `table`: their words, at least."""
        self._mine = mine
        self._others = dict(others)  # none, once it is over
        self._awaited = set(others)  # that have not reported that they are connected
        self._words = {words["rank"]: words for words in table}
        self._until = until
        self._keeps = keeps

    def look(self) -> None:
        self._look(0)

    def fail(self, why: BaseException) -> Error:
        error = could_not_meet(self._mine, why)
        self._tell({"failed": told_of(error)})
        self._close()
        return error

    def end(self, look: Look = _nothing) -> None:
        if not self._keeps:
            self._tell({})
        while self._awaited:
            self._look(LOOK)
            look()
            if self._awaited and time.monotonic() >= self._until:
                self._give_up(self._is_late())
        if self._keeps:
            self._tell({})
        self._close()

    def _look(self, seconds: float) -> None:
        for rank, words in _heard(self._others, seconds):
            if isinstance(words, Exception):
                self._others.pop(rank).close()
                self._give_up(ended(self._words[rank], words))
            elif why := words.get("failed"):
                self._give_up(error_in(why))
            else:
                self._awaited.discard(rank)

    def _is_late(self) -> Error:
        if self._keeps:
            return is_silent(sorted(self._awaited))
        keeper = self._words[min(self._awaited)]
        verdict = f"{name_of(keeper)} did not say in time that all ranks have met"
        return about(keeper, RendezvousError, verdict)

    def _give_up(self, why: Error) -> None:
        if self._keeps:
            self._tell({"failed": told_of(why)})
        self._close()
        raise why

    def _tell(self, words: Words) -> None:
        for other in self._others.values():
            with suppress(OSError):  # it is gone, which is seen
                other.send(words)

    def _close(self) -> None:
        for other in self._others.values():
            other.close()
        self._others.clear()
        self._awaited.clear()


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
