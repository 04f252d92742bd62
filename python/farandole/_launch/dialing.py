"""The places of a job: on this host, or behind an agent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from farandole._launch.agents.carried import carried
from farandole._launch.agents.order import Order, package, version
from farandole._launch.agents.parcels import Delivery
from farandole._launch.agents.reach import address_of, advice_for, command_for, launcher_for
from farandole._launch.agents.remote import Remote
from farandole._launch.here import Here
from farandole._launch.job import Job, LaunchError, Reach, Share


def here(job: Job, ranks: int) -> Here:
    return Here(job.command, [ranks], {**os.environ, **job.environment}, binding=job.binding)


def remote(order: Order, job: Job, delivery: Delivery | None) -> Remote:
    reach = job.reach or Reach()
    return Remote(
        order,
        command_for(order.host, reach, job.start_timeout),
        partial(advice_for, order.host, reach),
        address_of(order.host) if order.launcher == "here" else "",
        delivery,
    )


def orders(job: Job, shares: Sequence[Share], secret: str, marker: str) -> Sequence[Order]:
    """For the agents of these hosts. `marker`: that nobody can guess."""
    reach = job.reach or Reach()
    counts = [share.ranks for share in shares]
    directory = _directory()
    environment = {**carried(os.environ), **job.environment}
    if (
        reach.launcher == "local" and job.elastic is None
    ):  # else init() would find that all ranks share a host
        environment.setdefault("FARANDOLE_SPLIT_HOSTS", ",".join(map(str, counts)))
    return [
        Order(
            version=version(),
            package=package(),
            marker=marker,
            launcher=launcher_for(share.host, reach),
            host=share.host,
            number=number,
            counts=counts,
            command=job.command,
            directory=directory,
            environment=environment,
            secret=secret,
            patience=job.patience,
            binding=job.binding,
        )
        for number, share in enumerate(shares)
    ]


def _directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise LaunchError(
            "the working directory was deleted; start from one that is there"
        ) from None
