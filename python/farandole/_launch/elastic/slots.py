"""Where a worker may be started, and when again after one was lost there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Cooldown(NamedTuple):
    """How long a slot or a host rests after a loss: twice as long after each, up to the most."""

    first: float  # seconds
    most: float

    def after(self, losses: int) -> float:
        return float(min(self.most, self.first * 2.0 ** min(losses - 1, 60)))


class Rest:
    """How often something was lost, and until when it is not tried again."""

    def __init__(self) -> None:
        self.losses = 0  # one soon after the other
        self.until = 0.0

    def lose(self, cooldown: Cooldown, now: float) -> None:
        self.losses += 1
        self.until = now + cooldown.after(self.losses)


class _Slot(Rest):
    def __init__(self) -> None:
        super().__init__()
        self.worker: int | None = None
        self.since = 0.0  # when that was started


class Slots:
    """The slots of all hosts, in the order in which hosts were named."""

    def __init__(self, cooldown: Cooldown) -> None:
        self._cooldown = cooldown
        self._hosts: dict[str, list[_Slot]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._hosts.values()))

    def set(self, hosts: Mapping[str, int]) -> None:
        """These are the hosts now, with so many slots. Slots in which a worker lives stay, for as
        long as it does."""
        for host in list(self._hosts):
            self._resize(host, hosts.get(host, 0))
        for host, count in hosts.items():
            self._hosts.setdefault(host, [])
            self._resize(host, count)

    def _resize(self, host: str, count: int) -> None:
        slots = self._hosts[host]
        while len(slots) < count:
            slots.append(_Slot())
        free = [slot for slot in slots if slot.worker is None]
        while len(slots) > count and free:
            slots.remove(free.pop())
        if not slots:
            del self._hosts[host]

    def free(self, now: float) -> list[str]:
        """The host of each slot in which a worker may be started now."""
        return [
            host
            for host, slots in self._hosts.items()
            for slot in slots
            if slot.worker is None and slot.until <= now
        ]

    def due(self, now: float) -> float | None:
        """When the next one will have rested."""
        resting = (slot.until for slots in self._hosts.values() for slot in slots)
        return min((until for until in resting if until > now), default=None)

    def take(self, host: str, worker: int, now: float) -> None:
        """It is started there, in a slot that has rested."""
        for slot in self._hosts[host]:
            if slot.worker is None and slot.until <= now:
                slot.worker, slot.since, slot.until = worker, now, 0.0
                return
        raise AssertionError(f"no slot of {host} is free")

    def lose(self, worker: int, now: float) -> None:
        """It has failed. One that has lived for long counts as the first."""
        for slot in self._of(worker):
            if now - slot.since > self._cooldown.most:
                slot.losses = 0
            slot.lose(self._cooldown, now)
            slot.worker = None

    def leave(self, worker: int) -> None:
        """It has ended as it should."""
        for slot in self._of(worker):
            slot.worker = None

    def _of(self, worker: int) -> list[_Slot]:
        return [slot for slots in self._hosts.values() for slot in slots if slot.worker == worker]
