"""The hosts of an elastic job: dialed when they come, and again when they were lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from farandole._launch.elastic.discovery import Discovery
from farandole._launch.elastic.slots import Cooldown, Rest
from farandole._launch.place import Place
from farandole._launch.polling import earliest

Dial = Callable[[str, int], Place]  # of a host and its slots


class Fleet:
    """An elastic job's places. The supervisor gives them turns, and starts workers there."""

    def __init__(
        self, hosts: Mapping[str, int], dial: Dial, cooldown: Cooldown, start_timeout: float,
        discovery: Discovery | None,
    ) -> None:  # fmt: skip
        """`hosts`: slots by host; empty so far if a script names the hosts."""
        self.places: list[Place] = []
        self.gone: list[Place] = []  # that are used no more
        self.discovery = discovery
        self._wanted = dict(hosts)
        self._dial, self._start_timeout = dial, start_timeout
        self._cooldown = cooldown
        self._rests: dict[str, Rest] = {}
        self._told = ""  # what was last said of the script

    # -- turns --------------------------------------------------------------------------------

    def descriptors(self) -> list[tuple[int, int]]:
        return self.discovery.descriptors() if self.discovery is not None else []

    def due(self) -> float | None:
        resting = [rest.until for host, rest in self._rests.items() if self._may_dial(host)]
        return earliest([*resting, self.discovery.due() if self.discovery else None])

    def turn(self, ready: set[int], now: float) -> Iterator[str]:
        """Dials hosts that have come; yields remarks for the user."""
        if self.discovery is not None:
            found = self.discovery.turn(ready, now)
            if self.discovery.trouble != self._told:
                self._told = self.discovery.trouble
                if self._told:
                    yield self._told
            if found is not None and found != self._wanted:
                self._wanted = found
                yield f"hosts now: {', '.join(f'{h}:{n}' for h, n in found.items()) or 'none'}"
        for host, slots in self._wanted.items():
            rest = self._rests.get(host)
            if self._may_dial(host) and (rest is None or rest.until <= now):
                place = self._dial(host, slots)
                self.places.append(place)
                place.open(self._start_timeout)

    def _may_dial(self, host: str) -> bool:
        return host in self._wanted and self.place_on(host) is None

    # -- who is there -------------------------------------------------------------------------

    def place_on(self, host: str) -> Place | None:
        return next((place for place in self.places if place.host == host), None)

    def slots(self) -> dict[str, int]:
        """The slots of hosts on which workers can be started."""
        return {
            place.host: self._wanted[place.host]
            for place in self.places
            if place.started and not place.trouble and place.host in self._wanted
        }

    def lose(self, place: Place, now: float) -> None:
        """Retires a place. Its host is dialed again after a cooldown."""
        self._rests.setdefault(place.host, Rest()).lose(self._cooldown, now)
        self.retire(place)

    def retire(self, place: Place) -> None:
        """Nothing will be asked of it any more."""
        self.places.remove(place)
        self.gone.append(place)
        place.leave()

    def unwanted(self) -> list[Place]:
        """Places on hosts that are none of the job's any more."""
        return [place for place in self.places if place.host not in self._wanted]

    def close(self) -> None:
        """The end of the job: what has begun ends, too."""
        if self.discovery is not None:
            self.discovery.close()
        for place in self.gone:
            place.close(0.0)
