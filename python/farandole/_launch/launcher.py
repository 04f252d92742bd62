"""One job, from its description to its exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import farandole
from farandole._launch.carried import carried
from farandole._launch.here import Here
from farandole._launch.hosts import address_of, is_here
from farandole._launch.job import Job, LaunchError, Reach
from farandole._launch.order import Order, version
from farandole._launch.place import Place
from farandole._launch.ranks import check_command, new_run_id
from farandole._launch.reach import advice_for, command_for
from farandole._launch.remote import Remote
from farandole._launch.secret import new_secret
from farandole._launch.signals import SignalPipe
from farandole._launch.supervisor import Supervisor
from farandole._launch.watchdog import guarded


def launch(job: Job) -> int:
    """Runs the job; returns its exit code. Raises LaunchError if it cannot be started."""
    if not job.hosts:
        check_command(job.command)  # elsewhere the agents do

    def supervise(lifeline: int, signals: SignalPipe) -> int:
        return Supervisor(job, _places(job), lifeline, signals).run()

    return guarded(supervise, "farandole run")


def _places(job: Job) -> Sequence[Place]:
    if not job.hosts:
        return [Here(job.command, [job.ranks], {**os.environ, **job.environment})]
    orders = _orders(job)
    reach = job.reach or Reach()
    return [
        Remote(
            order,
            command_for(order.host, reach, job.start_timeout, is_here=is_here(order.host)),
            _address(order.host, reach),
            partial(advice_for, order.host, reach),
        )
        for order in orders
    ]


def _orders(job: Job) -> Sequence[Order]:
    secret, marker = new_secret(), new_run_id()
    return [
        Order(
            version=version(),
            package=str(Path(farandole.__file__).parent),
            marker=marker,
            host=share.host,
            index=index,
            counts=[each.ranks for each in job.hosts],
            command=job.command,
            directory=_directory(),
            environment={**carried(os.environ), **job.environment},
            secret=secret,
            patience=job.patience,
        )
        for index, share in enumerate(job.hosts)
    ]


def _directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise LaunchError(
            "the working directory was deleted; start from one that is there"
        ) from None


def _address(host: str, reach: Reach) -> str:
    """Of a namespace or a pretended host, the agent knows it."""
    return address_of(host) if reach.launcher == "ssh" else ""
