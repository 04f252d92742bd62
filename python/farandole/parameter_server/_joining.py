"""Ranks become servers and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from farandole import _unreduced, _world
from farandole._arguments import shown
from farandole._collectives import all_gather, broadcast
from farandole._core import Error, InvalidArgument
from farandole._one_world import refuse_in_elastic_jobs
from farandole.parameter_server import _snapshots
from farandole.parameter_server._rules import Rule
from farandole.parameter_server._server import GONE, Server
from farandole.parameter_server._shards import (
    SPLIT_ABOVE,
    Shard,
    Variable,
    described,
    plan,
)
from farandole.parameter_server._snapshots import Content, Snapshots
from farandole.parameter_server._wire import HERE, Pair, number_of
from farandole.parameter_server._worker import Worker

_MEETING = 300.0  # seconds for a server and a worker to meet


class _State:
    epoch = -1
    joined = 0  # how often in this world


def join(
    variables: Mapping[str, Any],
    rule: Rule,
    *,
    servers: int = 1,
    max_staleness: int | None = None,
    snapshots: Snapshots | None = None,
    split_above: int = SPLIT_ABOVE,
) -> Server | Worker:
    """Makes the last ``servers`` ranks of the world servers, and the others workers.

    Collective: all ranks call it alike, after ``farandole.init()``. The variables start with rank
    0's values, or with those of the newest snapshot, if there is one.

    Args:
        variables: numpy arrays by name, of the same shapes and dtypes on all ranks.
        rule: what servers do with gradients: :class:`SGD`, :class:`Adagrad`, or your own
            :class:`Rule`. Workers do not use it.
        servers: how many ranks are servers.
        max_staleness: how many steps a worker may be ahead of the slowest one. None: any number.
            0: synchronous; servers apply the mean of the gradients of all workers.
        snapshots: where servers write what they have, and how often. None: never.
        split_above: variables of more bytes are split over the servers, by rows.

    Returns:
        A :class:`Server` or a :class:`Worker`.

    Raises:
        InvalidArgument: a wrong argument; ranks differ in one; or a snapshot does not fit. The
            same on all ranks, where they have to find it out together.
        NotInitialized: ``farandole.init()`` was not called.
    """
    world = _world.world()
    refuse_in_elastic_jobs("a parameter server", "its servers and workers stay the same")
    _check(world.size, servers, max_staleness, snapshots, split_above)
    listed = described(variables)
    shards = plan(listed, servers, split_above)
    _agree(listed, {
        "servers": servers, "max_staleness": max_staleness, "split_above": split_above,
        "snapshots": snapshots and (str(snapshots.folder), snapshots.every, snapshots.keep),
    })  # fmt: skip
    workers = world.size - servers
    own = world.rank - workers  # this server's number
    values = [
        broadcast(np.array(variables[each.name], order="C"), root=0, name=f"start of '{each.name}'")
        for each in listed
    ]
    mine: dict[str, np.ndarray] = {}
    if own >= 0:
        mine = {listed[s.variable].name: _rows(values, s) for s in shards if s.server == own}
    content = _restored(own, servers, mine, snapshots, workers)
    pairs = _pairs(workers)
    if own < 0:
        return Worker(world.rank, workers, pairs, listed, shards, snapshots)
    return Server(own, servers, pairs, mine, rule, max_staleness, snapshots, content)


def join_without_variables(
    rule: Rule, servers: int, options: Mapping[str, Any], advice: str
) -> Server | Worker:
    """As :func:`join`, for variables that come later: workers add them (``Worker._add``), in the
    same order. The first worker leads: if it dies, the job ends.

    Args:
        options: what else ranks have to agree on.
        advice: when a server is lost.

    Raises:
        InvalidArgument: as of :func:`join`.
    """
    world = _world.world()
    refuse_in_elastic_jobs("a parameter server", "its servers and workers stay the same")
    _check(world.size, servers, None, None, 0)
    _agree([], {"servers": servers, **options})
    workers = world.size - servers
    pairs = _pairs(workers)
    if world.rank < workers:
        return Worker(world.rank, workers, pairs, [], [], None, world.rank > 0, advice)
    return Server(world.rank - workers, servers, pairs, {}, rule, None, None, None)


def _pairs(workers: int) -> dict[int, Pair]:
    """Collective: this rank's connections, with each server or with each worker."""
    world = _world.world()
    if (epoch := _world.epoch()) != _State.epoch:
        _State.epoch, _State.joined = epoch, 0
    _State.joined += 1
    _unreduced.note_training()
    if world.rank < workers:
        pairs = {s: pair_of(s, world.rank) for s in range(workers, world.size)}
        for pair in pairs.values():
            pair.send(HERE)
        for pair in pairs.values():
            pair.receive(_MEETING)
        return pairs
    pairs = {w: pair_of(world.rank, w) for w in range(workers)}
    _let_all_begin(list(pairs.values()))
    return pairs


def _let_all_begin(pairs: Sequence[Pair]) -> None:
    """Called by a server. A worker that begins may fail, and then ranks that are still in a
    collective of the world fail, too. So none begins before all have left the last one."""
    for answers in (False, True):
        for pair in pairs:
            with suppress(*GONE):  # serve() finds it lost, too
                if answers:
                    pair.send(HERE)
                else:
                    pair.receive(_MEETING)


def pair_of(one: int, other: int) -> Pair:
    """The connection of two ranks, which both make it after they have joined the last time."""
    return Pair(one, other, _State.joined, _MEETING)


def _check(size: int, servers: int, max_staleness: Any, snapshots: Any, split_above: Any) -> None:
    if not isinstance(servers, int) or servers < 1:
        raise InvalidArgument(f"servers is {shown(servers)}; it is a number from 1")
    if servers >= size:
        raise InvalidArgument(
            f"servers={servers} in a world of {size}: no rank is left for a worker\n"
            f"  advice: farandole run -np {servers + 1} or more"
        )
    if max_staleness is not None and not (isinstance(max_staleness, int) and max_staleness >= 0):
        raise InvalidArgument(
            f"max_staleness is {shown(max_staleness)}; it is a number of steps from 0, or None"
        )
    if snapshots is not None and not isinstance(snapshots, Snapshots):
        raise InvalidArgument(f"snapshots is {shown(snapshots)}; it is a Snapshots, or None")
    if not isinstance(split_above, int) or split_above < 0:
        raise InvalidArgument(f"split_above is {shown(split_above)}; it is a number of bytes")


def _agree(listed: list[Variable], options: Mapping[str, Any]) -> None:
    """Raises InvalidArgument on all ranks if these differ between them, and names a difference."""
    items = [f"{name}={value!r}" for name, value in options.items()]
    items += [f"variable '{v.name}' ({v.dtype} of shape {v.shape})" for v in listed]
    digests = np.array([number_of(item) for item in items], np.int64)
    every = all_gather(digests, uneven=True, name="parameter server: arguments")
    counts = all_gather(np.array([len(items)]), name="parameter server: number of variables")
    ends = np.cumsum(counts)
    lists = [every[end - n : end] for end, n in zip(ends, counts, strict=True)]
    for rank, other in enumerate(lists):
        if len(other) == len(lists[0]) and (other == lists[0]).all():
            continue
        shorter = min(len(other), len(lists[0]))
        differing = np.flatnonzero(other[:shorter] != lists[0][:shorter])
        at = int(differing[0]) if len(differing) else shorter
        here = items[at] if at < len(items) else "no more variables"
        raise InvalidArgument(
            f"parameter_server.join: ranks 0 and {rank} differ in "
            f"{'an option' if at < len(options) else 'the variables'}; on rank "
            f"{_world.rank()} it is {here}"
        )


def _rows(values: list[np.ndarray], shard: Shard) -> np.ndarray:
    value = values[shard.variable]
    return np.array(value[shard.begin : shard.end] if value.shape else value)


def _restored(
    own: int,
    servers: int,
    mine: Mapping[str, np.ndarray],
    snapshots: Snapshots | None,
    workers: int,
) -> Content | None:
    """The snapshot that a server goes on from. If one server cannot, none does."""
    if snapshots is None:
        return None
    content, trouble = None, None
    if own >= 0:
        try:
            content = _newest(own, servers, mine, snapshots)
        except Error as error:
            trouble = error
    said = -2 if trouble is not None else -1 if content is None else content.version
    every = all_gather(np.array([said]), name="parameter server: snapshots")[workers:]
    if trouble is not None:
        raise trouble
    for server, version in enumerate(every):
        if version == -2:
            raise InvalidArgument(
                f"server {server} (rank {workers + server}) cannot go on from its snapshot in "
                f"{snapshots.folder}; its own error says why"
            )
        if (version == -1) != (every[0] == -1):
            without = server if version == -1 else 0
            raise InvalidArgument(
                f"server {without} finds no snapshot in {snapshots.folder}, and others do\n"
                "  advice: a folder that all servers see, or an empty one"
            )
    return content


def _newest(
    own: int, servers: int, mine: Mapping[str, np.ndarray], snapshots: Snapshots
) -> Content | None:
    snapshots.check_servers(servers)
    versions = snapshots.found(own, servers)
    if not versions:
        return None
    path = snapshots.path(own, servers, versions[0])
    content = _snapshots.read(path)
    _snapshots.check_fits(path, content, mine)
    return content
