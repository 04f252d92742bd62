"""The environment of a world's ranks, and the messages to its workers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from farandole._launch.elastic.roster import Worker
from farandole._launch.ranks import Rendezvous, rank_environment


def of_worker(number: int) -> dict[str, str]:
    """The variables of a worker that has no place yet."""
    return {"FARANDOLE_WORKER": str(number)}


def traces(inherited: Mapping[str, str], world: int) -> dict[str, str]:
    """Each world's traces are its own: a rank of one is another's."""
    found = {}
    if folder := inherited.get("FARANDOLE_TRACE"):
        found["FARANDOLE_TRACE"] = str(Path(folder) / f"world-{world}")
    for name in ("FARANDOLE_TIMELINE", "HOROVOD_TIMELINE"):
        if (file := inherited.get(name)) and file != "DYNAMIC":
            path = Path(file)
            found[name] = str(path.with_name(f"{path.stem}.world-{world}{path.suffix}"))
    return found


def places(
    workers: Sequence[Worker], world: int, rendezvous: Rendezvous, inherited: Mapping[str, str],
    *, pretended: bool,
) -> Iterator[tuple[Worker, str]]:  # fmt: skip
    """The message for each rank of a world, in the order of ranks.

    Args:
        inherited: what all workers have in their environment.
        pretended: its hosts are parts of one machine.
    """
    counts = [len(list(group)) for _, group in groupby(worker.host for worker in workers)]
    meet = rendezvous.environment() | {"FARANDOLE_RESTART_COUNT": str(world)}
    del meet["FARANDOLE_RUN_ID"]  # the job's, by which its launcher is found, stays
    if pretended:
        meet["FARANDOLE_SPLIT_HOSTS"] = ",".join(map(str, counts))
    meet |= traces(inherited, world)
    for rank, worker in enumerate(workers):
        environment = rank_environment(rank, counts) | meet
        yield worker, _words(world=world, environment=environment)


def broken(world: int, why: str) -> str:
    """The world cannot form: for those of its ranks that still wait for the others."""
    return _words(world=world, broken=why)


def wanted(world: int, *, only_fewer: bool) -> str:
    """Another world shall follow this one."""
    return _words(world=world, wanted=True, only_fewer=only_fewer)


def dismissed(why: str) -> str:
    """There is no place for this worker any more: it ends, and well."""
    return _words(dismissed=why)


def _words(**content: object) -> str:
    return json.dumps(content)
