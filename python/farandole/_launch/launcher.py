"""One job, from its description to its exit code."""

from __future__ import annotations

import os
import sys
import time
from itertools import count
from signal import Signals

from farandole._launch import dialing
from farandole._launch.agents import secret
from farandole._launch.agents.parcels import Delivery
from farandole._launch.elastic.discovery import Discovery
from farandole._launch.elastic.fleet import Fleet
from farandole._launch.elastic.slots import Cooldown
from farandole._launch.elastic.supervisor import ElasticSupervisor
from farandole._launch.job import Elastic, Job, Share
from farandole._launch.place import Place
from farandole._launch.ranks import check_command, new_run_id
from farandole._launch.signals import STOPPING, SignalPipe
from farandole._launch.supervisor import Supervisor
from farandole._launch.watchdog import guarded

# Exit codes after which another try would end alike, or that a stopping signal leaves.
_FINAL = {0, 2, 126, 127, *(128 + number for number in STOPPING)}


def launch(job: Job) -> int:
    """Runs the job, after a failure again; returns its exit code. Raises LaunchError if it cannot
    be started."""
    for restart in count():
        got = set[Signals]()
        code = _launch_once(_as_restart(job, restart), got)
        is_final = code in _FINAL or bool(got & STOPPING.keys()) or restart == job.restarts
        if is_final or (job.ends_at is not None and time.monotonic() >= job.ends_at):
            return code
        print(
            f"farandole: the job ended with exit code {code}; restart {restart + 1} of "
            f"{job.restarts}",
            file=sys.stderr,
            flush=True,
        )
    raise AssertionError


def _as_restart(job: Job, restart: int) -> Job:
    environment = {**job.environment, "FARANDOLE_RESTART_COUNT": str(restart)}
    copies = job.copies
    if copies is not None and restart:
        copies = copies._replace(directory=copies.directory / f"restart-{restart}")
    return job._replace(environment=environment, copies=copies)


def _launch_once(job: Job, got: set[Signals]) -> int:
    """`got`: takes the signals that came meanwhile."""
    terms = job.elastic
    is_here = not job.hosts and (terms is None or not terms.discovery)
    if is_here:
        check_command(job.command)  # elsewhere the agents do
    secret_text, marker = "" if job.insecure else secret.new_secret(), new_run_id()
    is_fixed = terms is None and not is_here
    orders = dialing.orders(job, job.hosts, secret_text, marker) if is_fixed else []

    def supervise(lifeline: int, signals: SignalPipe) -> int:
        if terms is not None:
            fleet = _fleet(job, terms, secret_text, marker)
            return ElasticSupervisor(job, terms, fleet, lifeline, signals).run()
        if is_here:
            return Supervisor(job, [dialing.here(job, job.ranks)], lifeline, signals).run()
        delivery = Delivery({**os.environ, **job.environment})
        delivery.announce(job.ranks)
        places = [dialing.remote(order, job, delivery) for order in orders]
        code = Supervisor(job, places, lifeline, signals).run()
        _put_together(delivery)
        return code

    try:
        return guarded(supervise, "farandole run", got=got)
    finally:
        if not is_here:  # agents on this machine may have been killed with the launcher
            secret.remove_all(marker)


def _fleet(job: Job, terms: Elastic, secret_text: str, marker: str) -> Fleet:
    dialed = count()

    def dial(host: str, slots: int) -> Place:
        if not host:
            return dialing.here(job, slots)
        share, own = Share(host, slots), f"{marker}-{next(dialed)}"
        return dialing.remote(dialing.orders(job, [share], secret_text, own)[0], job, None)

    hosts = {share.host: share.ranks for share in job.hosts}
    discovery = None
    if terms.discovery:
        discovery = Discovery(terms.discovery, terms.slots, terms.timeout)
    elif not hosts:
        hosts = {"": terms.most}
    return Fleet(hosts, dial, Cooldown(*terms.cooldown), job.start_timeout, discovery)


def _put_together(delivery: Delivery) -> None:
    from farandole._trace import TraceError

    try:
        delivery.put_together()
    except (OSError, TraceError) as error:
        print(f"farandole run: the trace is not complete: {error}", file=sys.stderr)
