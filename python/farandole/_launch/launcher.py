"""One job, from its description to its exit code."""

from __future__ import annotations

import os
import sys

from farandole._launch import dialing
from farandole._launch.agents import secret
from farandole._launch.agents.parcels import Delivery
from farandole._launch.elastic.launcher import launch_elastic
from farandole._launch.job import Job
from farandole._launch.ranks import check_command, new_run_id
from farandole._launch.signals import SignalPipe
from farandole._launch.supervisor import Supervisor
from farandole._launch.watchdog import guarded


def launch(job: Job) -> int:
    """Runs the job; returns its exit code. Raises LaunchError if it cannot be started."""
    if job.elastic is not None:
        return launch_elastic(job, job.elastic)
    if not job.hosts:
        check_command(job.command)  # elsewhere the agents do
    secret_text = "" if job.insecure else secret.new_secret()
    orders = dialing.orders(job, job.hosts, secret_text, new_run_id()) if job.hosts else []

    def supervise(lifeline: int, signals: SignalPipe) -> int:
        if not orders:
            return Supervisor(job, [dialing.here(job, job.ranks)], lifeline, signals).run()
        delivery = Delivery({**os.environ, **job.environment})
        delivery.announce(job.ranks)
        places = [dialing.remote(order, job, delivery) for order in orders]
        code = Supervisor(job, places, lifeline, signals).run()
        _put_together(delivery)
        return code

    try:
        return guarded(supervise, "farandole run")
    finally:
        for order in orders:  # agents on this machine may have been killed with the launcher
            secret.remove(order.secret_name)


def _put_together(delivery: Delivery) -> None:
    from farandole._trace import TraceError

    try:
        delivery.put_together()
    except (OSError, TraceError) as error:
        print(f"farandole run: the trace is not complete: {error}", file=sys.stderr)
