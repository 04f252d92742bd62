"""A strategy joins the other ranks as it is made: by what started this process, by TF_CONFIG, or by
a cluster resolver, which says the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole._one_world import refuse_in_elastic_jobs
from farandole.common.util import env
from farandole.tensorflow import init


def join(resolver: Any = None, timeout: float | None = None) -> None:
    """Joins the ranks of the job, unless this process has already.

    Args:
        resolver: a tf.distribute.cluster_resolver.ClusterResolver.
        timeout: seconds that an operation may wait for other ranks before it fails.

    Raises:
        InvalidArgument: the options come too late.
        RendezvousError: ranks are missing, or disagree about who there is.
    """
    refuse_in_elastic_jobs(
        "a strategy of tf.distribute",
        "its replicas stay the same\n"
        "  advice: DistributedGradientTape or DistributedOptimizer, in hvd.elastic.run",
    )
    if _world.is_initialized():
        if timeout:
            raise InvalidArgument(
                f"timeout_seconds={timeout:g}: the ranks have met already, with "
                "FARANDOLE_TIMEOUT\n  advice: make the strategy before init(), or set "
                f"FARANDOLE_TIMEOUT={timeout:g}"
            )
        return
    told = {}
    if timeout:
        told["FARANDOLE_TIMEOUT"] = f"{timeout:g}"
    cluster = {} if resolver is None else resolver.cluster_spec().as_dict()
    if cluster:
        told["TF_CONFIG"] = _config(cluster, resolver.task_type, resolver.task_id)
    with env(**told):
        init()


def _config(cluster: Mapping[str, Any], role: str, number: int) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": number}})


_ROLES = ("chief", "worker", "ps")  # in the order of ranks


def join_with_servers(resolver: Any, servers: Any) -> int:
    """The same of a cluster with the tasks `ps`, which come last; returns how many they are.

    Args:
        servers: how many are wanted; None: those of the cluster, or 1.

    Raises:
        InvalidArgument: the cluster lacks a role, or does not fit.
        RendezvousError: ranks are missing, or disagree about who there is.
    """
    refuse_in_elastic_jobs("a ParameterServerStrategy", "its servers and workers stay the same")
    if resolver is None:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    cluster = resolver.cluster_spec().as_dict()
    if not cluster:
        join()
        return 1 if servers is None else servers
    tasks = {role: list(cluster.get(role, [])) for role in _ROLES}
    missing = [role for role in _ROLES if not tasks[role]]
    if missing:
        raise InvalidArgument(
            f"the cluster has no {' and no '.join(missing)}; it has {', '.join(cluster)}\n"
            "  advice: a task 'chief', which runs the program's steps; 'worker' and 'ps'"
        )
    role, number = resolver.task_type, resolver.task_id or 0
    if role not in _ROLES or len(tasks["chief"]) > 1:
        raise InvalidArgument(
            f"this is the task '{role}' number {number} of a cluster with {len(tasks['chief'])} "
            "chiefs; one chief, workers and servers make the strategy together\n"
            "  advice: an evaluator is a program of its own, which reads checkpoints"
        )
    if servers not in (None, len(tasks["ps"])):
        raise InvalidArgument(f"servers is {shown(servers)}; the cluster has {len(tasks['ps'])} ps")
    ranks = [address for each in _ROLES for address in tasks[each]]
    rank = number + sum(len(tasks[each]) for each in _ROLES[: _ROLES.index(role)])
    if not _world.is_initialized():
        with env(TF_CONFIG=_config({"worker": ranks}, "worker", rank)):
            init()
    if (_world.rank(), _world.size()) != (rank, len(ranks)):
        raise InvalidArgument(
            f"task '{role}' number {number} is rank {rank} of the cluster's {len(ranks)} tasks, "
            f"and the launcher made it rank {_world.rank()} of {_world.size()}\n"
            "  advice: say it once: by TF_CONFIG or a cluster resolver, or by a launcher"
        )
    return len(tasks["ps"])
