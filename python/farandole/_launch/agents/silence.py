"""When an agent is asked whether it is still there, and when either end gives the other up."""

from __future__ import annotations

from enum import Enum

_ASK_EVERY = 1.0
# Seconds that an agent may be silent. At its end it may merge a trace, and not answer meanwhile.
SILENCE, SILENCE_AT_END = 5.0, 60.0
# Seconds that the launcher may be silent: if its host vanishes, its connection does not end.
SILENCE_OF_LAUNCHER = 60.0
# A process that itself did not run for this long does not count the other end's silence.
_OWN_PAUSE = 2.0


class Next(Enum):
    NOTHING = 0
    ASK = 1
    GIVE_UP = 2


class Silence:
    """All times are of time.monotonic()."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._heard = 0.0
        self._asked: float | None = None
        self._looked = 0.0

    def hear(self, now: float) -> None:
        self._heard = now

    def due(self) -> float:
        return 0.0 if self._asked is None else self._asked + _ASK_EVERY

    def look(self, now: float) -> Next:
        """The next action. To be called in every turn, once the other end can be heard."""
        if self._asked is None or now - self._looked > _OWN_PAUSE:
            self._heard = now  # we did not listen
        self._looked = now
        if now - self._heard > self.limit:
            return Next.GIVE_UP
        if now < self.due():
            return Next.NOTHING
        self._asked = now
        return Next.ASK
