"""Ranks that are actors of a Ray cluster: ``farandole.ray.run(fn, num_workers=4)``. Needs ray."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import farandole as fd
from farandole._launch.agents.carried import NAMES, carried
from farandole._launch.agents.secret import VARIABLE as SECRET_FILE
from farandole._launch.agents.secret import new_secret
from farandole._launch.ranks import Rendezvous, free_port, new_run_id, rank_environment
from farandole._ranks import GRACE, Answer
from farandole._run import RanksFailed, raise_what_it_raised
from farandole.common._needs import ray

__all__ = ["RanksFailed", "run"]

_R = TypeVar("_R")


class _Home(NamedTuple):
    """Where an actor lives."""

    node: str
    address: str
    port: int  # that was free there
    pid: int
    gpus: list[str]


class _Rank:
    """An actor, which is a rank; each has a process of its own."""

    def home(self) -> _Home:
        address = ray.util.get_node_ip_address()
        gpus = [str(gpu) for gpu in ray.get_gpu_ids()]
        node = ray.get_runtime_context().get_node_id()
        return _Home(node, address, free_port(address), os.getpid(), gpus)

    def settle(self, environment: Mapping[str, str], secret: str, path: Sequence[str]) -> None:
        """Sets the environment before the function, and before any framework is imported."""
        os.environ.update(environment)
        os.environ[SECRET_FILE] = _kept_in_memory(secret)
        sys.path[:] = [*path, *(p for p in sys.path if p not in path)]

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Leaves the world at its end, as a process that ends would: nobody waits for it then."""
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            trace = traceback.format_exc()
            fd.shutdown()  # tells the others what is being handled
            return _portable(error, trace)
        fd.shutdown()
        return Answer(result)


def _portable(error: BaseException, trace: str) -> Answer:
    """The answer, without an exception that cannot be sent."""
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
    except Exception:
        return Answer(trace=trace)
    return Answer(error=error, trace=trace)


def _kept_in_memory(secret: str) -> str:
    """A file for this process alone, which ends with it."""
    descriptor = os.memfd_create("farandole-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, secret.encode())
    return f"/proc/self/fd/{descriptor}"


def run(
    fn: Callable[..., _R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    num_workers: int,
    cpus_per_worker: float = 1,
    gpus_per_worker: float = 0,
    resources_per_worker: Mapping[str, float] | None = None,
    strategy: str = "PACK",
    env: Mapping[str, str] | None = None,
    start_timeout: float = 60.0,
    timeout: float | None = None,
) -> list[_R]:
    """Calls ``fn(*args, **kwargs)`` on ``num_workers`` actors of a Ray cluster, which are ranks.

    The actors stand in one placement group and are numbered node by node. The function calls
    ``farandole.init()`` (or ``hvd.init()``) itself. Ranks of one machine use its memory, others
    TCP, with a secret that is made for this job and handed to the actors as an argument. Ray's own
    connections carry it: protect them (``RAY_USE_TLS``) where others listen.

    Uses the cluster that ``ray.init()`` has joined, or joins one as Ray does by default. What ranks
    print, Ray shows. GPUs: each rank sees those of all ranks of its node, in order of local rank.

    Args:
        fn: for every rank; Ray pickles it, its arguments and its result by cloudpickle.
        args: for the function, by position.
        kwargs: for the function, by name.
        num_workers: how many ranks.
        cpus_per_worker: what Ray reserves for each.
        gpus_per_worker: likewise.
        resources_per_worker: other resources of the cluster, by name.
        strategy: how Ray places them: ``PACK``, ``SPREAD``, ``STRICT_PACK`` or ``STRICT_SPREAD``.
        env: more environment variables of the ranks.
        start_timeout: seconds until the resources are there and all actors have started.
        timeout: seconds until all ranks are killed; default: none.

    Returns:
        What the function returned, by rank.

    Raises:
        ValueError: a number is out of range, or the strategy is unknown.
        TimeoutError: the cluster did not have the resources in time; says what was asked for.
        Exception: what the first rank to fail raised, if that can be sent; its cause is a
            ``RanksFailed`` with the rank and its traceback.
        RanksFailed: a rank died, ran out of time, or raised what cannot be sent.

    Examples:
        >>> import farandole.ray
        >>> farandole.ray.run(len, ("abc",), num_workers=2)  # doctest: +SKIP
        [3, 3]
    """
    _check(num_workers, cpus_per_worker, gpus_per_worker, strategy)
    bundle = {"CPU": cpus_per_worker, "GPU": gpus_per_worker, **(resources_per_worker or {})}
    bundle = {name: amount for name, amount in bundle.items() if amount}
    until = time.monotonic() + start_timeout
    group = ray.util.placement_group([bundle] * num_workers, strategy=strategy)
    actors: list[Any] = []
    try:
        _await_resources(group, bundle, num_workers, start_timeout)
        for place in range(num_workers):
            actors.append(_start(group, place, bundle))
        ranks, homes = _settle(actors, dict(env or {}), until)
        calls = [rank.call.remote(fn, args, dict(kwargs or {})) for rank in ranks]
        answers = _attend(calls, homes, timeout)
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)
    return [answer.result for answer in answers]


def _check(workers: int, cpus: float, gpus: float, strategy: str) -> None:
    if not isinstance(workers, int) or workers < 1:
        raise ValueError(f"num_workers is {workers!r}; it is a number of ranks, at least 1")
    if not cpus >= 0 or not gpus >= 0 or not cpus + gpus:
        raise ValueError(f"cpus_per_worker is {cpus} and gpus_per_worker {gpus}: Ray reserves none")
    known = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
    if strategy not in known:
        raise ValueError(f"strategy is {strategy!r}; there are {', '.join(known)}")


def _await_resources(group: Any, bundle: Mapping[str, float], count: int, timeout: float) -> None:
    if group.wait(timeout):
        return
    wanted = ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())
    there = ray.available_resources()
    has = ", ".join(f"{name} {there.get(name, 0):g}" for name in bundle)
    raise TimeoutError(
        f"Ray did not place {count} ranks with {wanted} each within {timeout:g} s; free in the "
        f"whole cluster: {has}"
    )


def _start(group: Any, place: int, bundle: Mapping[str, float]) -> Any:
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=place)
    actor = ray.remote(_Rank).options(
        num_cpus=bundle.get("CPU", 0),
        num_gpus=bundle.get("GPU", 0),
        resources=others,
        scheduling_strategy=where,
        max_restarts=0,
    )
    return actor.remote()


def _settle(
    actors: Sequence[Any], env: Mapping[str, str], until: float
) -> tuple[list[Any], list[_Home]]:
    """The actors and their homes by rank, node by node, each told its place."""
    asked = [actor.home.remote() for actor in actors]
    homes: list[_Home] = _got(asked, until, "say where they are")
    nodes = list(dict.fromkeys(home.node for home in homes))
    order = sorted(range(len(actors)), key=lambda place: nodes.index(homes[place].node))
    counts = [sum(home.node == node for home in homes) for node in nodes]
    first = homes[order[0]]
    met = Rendezvous(first.address, first.port, new_run_id()).environment()
    secret = new_secret()
    told = []
    for rank, place in enumerate(order):
        gpus = [gpu for p in order if homes[p].node == homes[place].node for gpu in homes[p].gpus]
        seen = {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(gpus))} if gpus else {}
        environment = {**_settings(), **met, **rank_environment(rank, counts), **seen, **env}
        told.append(actors[place].settle.remote(environment, secret, [p for p in sys.path if p]))
    _got(told, until, "take their place")
    return [actors[place] for place in order], [homes[place] for place in order]


def _settings() -> dict[str, str]:
    """This program's settings of farandole and of frameworks. Ray starts actors without its
    environment, and knows itself what to import from and how many threads an actor has."""
    skipped = (*NAMES, "PYTHON", "OMP_")
    return {n: value for n, value in carried(os.environ).items() if not n.startswith(skipped)}


def _got(asked: Sequence[Any], until: float, what: str) -> list[Any]:
    try:
        return list(ray.get(list(asked), timeout=max(0.0, until - time.monotonic())))
    except ray.exceptions.GetTimeoutError as error:
        raise TimeoutError(f"the actors of Ray did not {what} in time") from error
    except ray.exceptions.RayError as error:
        raise RanksFailed(f"an actor of Ray could not {what}: {error}") from error


def _attend(calls: Sequence[Any], homes: Sequence[_Home], timeout: float | None) -> list[Answer]:
    """Waits for all; raises for the first to fail, after a moment in which the others may end."""
    rank_of = {call: rank for rank, call in enumerate(calls)}
    answers: dict[int, Answer] = {}
    failed: list[tuple[int, Answer]] = []  # in the order of their ends
    until = None if timeout is None else time.monotonic() + timeout
    pending = list(calls)
    while pending:
        left = None if until is None else max(0.0, until - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=left)
        if not done:
            break
        rank = rank_of[done[0]]
        answers[rank] = answer = _answer_of(done[0])
        if answer.trace:
            failed.append((rank, answer))
            soon = time.monotonic() + GRACE
            until = soon if until is None else min(until, soon)
    if not failed and pending:
        raise RanksFailed(f"rank {rank_of[pending[0]]} did not end within {timeout:g} s")
    if failed:
        _raise_first(failed, homes)
    return [answers[rank] for rank in range(len(calls))]


def _answer_of(call: Any) -> Answer:
    try:
        answer: Answer = ray.get(call)
        return answer
    except ray.exceptions.RayActorError as error:  # the process is gone
        return Answer(error=error, trace=str(error))
    except ray.exceptions.RayTaskError as error:  # its result cannot be sent, or the like
        return Answer(trace=str(error))


def _raise_first(failed: Sequence[tuple[int, Answer]], homes: Sequence[_Home]) -> None:
    """A rank that died, or that raised an error of its own, brings the others' verdicts about."""
    died = [f for f in failed if isinstance(f[1].error, ray.exceptions.RayActorError)]
    own = [f for f in failed if not isinstance(f[1].error, fd.Error)]
    rank, answer = next(iter([*died, *own, *failed]))
    if died:
        who = f"rank {rank} (pid {homes[rank].pid} on {homes[rank].address})"
        told = [f"\nrank {r}:\n{a.trace}" for r, a in failed if r != rank]
        raise RanksFailed(f"{who} died{''.join(told)}") from answer.error
    raise_what_it_raised(rank, answer.error, answer.trace, "farandole.ray.run")
