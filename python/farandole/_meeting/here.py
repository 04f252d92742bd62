"""The ranks of a host: each gets the memory that all of them map, and every rank's doorbell and
process descriptor, which shows its death. The first rank makes the memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from farandole import _core
from farandole._core import Error, RendezvousError
from farandole._meeting import JobsName, Meeting, exchange
from farandole._meeting.connection import close_all
from farandole._meeting.errors import Words, could_not_meet, told_of
from farandole._meeting.members import objection


class Here(NamedTuple):
    """The result of meet_here()."""

    memory: _core.HostMemory
    table: list[Words]  # of the ranks of this host
    descriptors: dict[int, tuple[int, int]]  # by rank: its doorbell and its process; the caller's

    def peers(self, table: Sequence[Words], hosts: Sequence[str]) -> list[_core.Peer]:
        """All ranks of the world, as the core takes them, once. `table`: each rank's words;
        `hosts`: each rank's host, by the name that all use."""
        cpus = {words["rank"]: words["cpus"] for words in self.table}
        return [
            _core.Peer(
                rank, host, words["pid"], bytes.fromhex(words.get("addresses", "")),
                cpus.get(rank, []), *self.descriptors.get(rank, (-1, -1)),
            )
            for rank, (words, host) in enumerate(zip(table, hosts, strict=True))
        ]  # fmt: skip


def meet_here(meeting: Meeting, job: str, size: int, mine: Words, secret: bytes | None) -> Here:
    """`size`: of the world; `secret`: the job's, if it has one.

    Raises:
        RendezvousError: ranks are missing at the deadline, or do not agree about their world.
        VersionMismatch: they are of two versions.
        ResourceError: one of them, which it names, cannot have what it needs.
    """
    mine = mine | {"cpus": sorted(os.sched_getaffinity(0))}
    try:
        own = _own_descriptors()
    except Error as error:
        own, mine = [], mine | {"failed": told_of(could_not_meet(mine, error))}
    made: list[_core.HostMemory] = []
    kept: list[int] = []

    def share(of_each: list[list[int]]) -> list[int]:
        if wrong := [r for r, its in zip(meeting.ranks, of_each, strict=True) if len(its) != 2]:
            raise RendezvousError(f"rank {wrong[0]} gave no doorbell and no process")
        made.append(_core.HostMemory.make(size, secret))
        kept.extend(descriptor for its in of_each for descriptor in its)
        return [made[0].fileno(), *kept]

    try:
        met = exchange(meeting, JobsName(job), mine, objection, own, share)
    except BaseException:
        close_all(kept or own)
        raise
    if not made:  # copies have come back
        close_all(own)
    try:
        memory = made[0] if made else _core.HostMemory.of(met.descriptors[0])
        met.line.end(meeting.look)
    except BaseException as error:
        close_all(met.descriptors[1:])
        named = met.line.fail(error)
        if isinstance(error, Error) and error.rank is None:  # nobody has been named yet
            raise named from error
        raise
    pairs = zip(met.descriptors[1::2], met.descriptors[2::2], strict=True)
    return Here(memory, met.table, dict(zip(meeting.ranks, pairs, strict=True)))


def _own_descriptors() -> list[int]:
    doorbell = _core.make_doorbell()
    try:
        return [doorbell, _core.own_process()]
    except Error:
        os.close(doorbell)
        raise
