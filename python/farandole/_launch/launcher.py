"""One job, from its description to its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from farandole._launch.agents import secret
from farandole._launch.agents.carried import carried
from farandole._launch.agents.order import Order, package, version
from farandole._launch.agents.parcels import Delivery
from farandole._launch.agents.reach import address_of, advice_for, command_for, launcher_for
from farandole._launch.agents.remote import Remote
from farandole._launch.here import Here
from farandole._launch.job import Job, LaunchError, Reach
from farandole._launch.ranks import check_command, new_run_id
from farandole._launch.signals import SignalPipe
from farandole._launch.supervisor import Supervisor
from farandole._launch.watchdog import guarded


def launch(job: Job) -> int:
    """Runs the job; returns its exit code. Raises LaunchError if it cannot be started."""
    if not job.hosts:
        check_command(job.command)  # elsewhere the agents do
    orders = _orders(job) if job.hosts else []

    def supervise(lifeline: int, signals: SignalPipe) -> int:
        if not orders:
            return Supervisor(job, [_here(job)], lifeline, signals).run()
        delivery = Delivery({**os.environ, **job.environment})
        delivery.announce(job.ranks)
        places = [_remote(order, job, delivery) for order in orders]
        code = Supervisor(job, places, lifeline, signals).run()
        _put_together(delivery)
        return code

    try:
        return guarded(supervise, "farandole run")
    finally:
        for order in orders:  # agents on this machine may have been killed with the launcher
            secret.remove(order.secret_name)


def _here(job: Job) -> Here:
    return Here(job.command, [job.ranks], {**os.environ, **job.environment})


def _put_together(delivery: Delivery) -> None:
    from farandole._trace import TraceError

    try:
        delivery.put_together()
    except (OSError, TraceError) as error:
        print(f"farandole run: the trace is not complete: {error}", file=sys.stderr)


def _remote(order: Order, job: Job, delivery: Delivery) -> Remote:
    reach = job.reach or Reach()
    return Remote(
        order,
        command_for(order.host, reach, job.start_timeout),
        partial(advice_for, order.host, reach),
        address_of(order.host),
        delivery,
    )


def _orders(job: Job) -> Sequence[Order]:
    reach = job.reach or Reach()
    secret_text, marker = "" if job.insecure else secret.new_secret(), new_run_id()
    counts = [share.ranks for share in job.hosts]
    directory = _directory()
    environment = {**carried(os.environ), **job.environment}
    if reach.launcher == "local":  # else init() would find that all ranks share a host
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
            secret=secret_text,
            patience=job.patience,
        )
        for number, share in enumerate(job.hosts)
    ]


def _directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise LaunchError(
            "the working directory was deleted; start from one that is there"
        ) from None
