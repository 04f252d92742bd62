"""A strategy joins the other ranks as it is made: by what started this process, by TF_CONFIG, or by
a cluster resolver, which says the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from farandole import _world
from farandole._core import InvalidArgument
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
        task = {"type": resolver.task_type, "index": resolver.task_id}
        told["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
    with _environment(told):
        init()


@contextmanager
def _environment(told: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
