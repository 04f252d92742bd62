"""Elastic jobs without a launcher: ranks ask the test for their place in every world.

On a rank `begin()` comes first; `fd.init()` then waits for what `Worlds.form` says. What the rank
would have heard from its launcher is `heard`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import farandole as fd
import harness
from farandole import _elastic, _world
from farandole._elastic import Changes

SOON = 40.0  # seconds, until a rank asks for a world: a bound, never waited for when all is well
heard = Changes()  # on this rank, in the present world
_init: Any = _world.init


def begin(elastic: bool = True) -> None:
    _elastic.is_elastic = lambda: elastic
    _elastic.changes = lambda: heard
    _world.init = _next_world


def hear(changes: Changes) -> None:
    global heard
    heard = changes


def _next_world(*_: Any, **__: Any) -> None:
    if _world.is_initialized():
        return
    harness.tell("next")
    place = harness.listen()
    if place is None:
        raise fd.RendezvousError("this world did not form")
    if place == "dismissed":
        raise SystemExit(0)
    rank, size, job = place
    hear(Changes())
    elastic, _elastic.is_elastic = _elastic.is_elastic, lambda: False  # its launcher would say who
    try:
        _init(rank=rank, size=size, job=job)
    finally:
        _elastic.is_elastic = elastic


class Worlds:
    """On the test's side: says who is in each world of some ranks."""

    def __init__(self, ranks: harness.World) -> None:
        self._ranks = ranks
        self._formed = 0

    def form(self, *ranks: int) -> None:
        """Forms the next world of these ranks, in this order, once all of them have asked."""
        self._formed += 1
        self._await(ranks)
        for place, rank in enumerate(ranks):
            self._ranks.say(rank, (place, len(ranks), f"{self._ranks.run_id} {self._formed}"))

    def _await(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            assert self._ranks.hear(rank, SOON) == "next"

    def dismiss(self, rank: int) -> None:
        """Waits until the rank asks for a world, and tells it that it is in none any more."""
        self._await([rank])
        self._ranks.say(rank, "dismissed")

    def refuse(self, ranks: Sequence[int]) -> None:
        """Tells ranks that ask for the next world that it did not form."""
        self._await(ranks)
        for rank in ranks:
            self._ranks.say(rank, None)


def die() -> None:
    os.kill(os.getpid(), 9)
