"""One elastic job, from its description to its exit code."""

from __future__ import annotations

from itertools import count

from farandole._launch import dialing
from farandole._launch.agents import secret
from farandole._launch.elastic.discovery import Discovery
from farandole._launch.elastic.fleet import Fleet
from farandole._launch.elastic.slots import Cooldown
from farandole._launch.elastic.supervisor import ElasticSupervisor
from farandole._launch.job import Elastic, Job, Share
from farandole._launch.place import Place
from farandole._launch.ranks import check_command, new_run_id
from farandole._launch.signals import SignalPipe
from farandole._launch.watchdog import guarded


def launch_elastic(job: Job, terms: Elastic) -> int:
    """Runs the job; returns its exit code. Raises LaunchError if it cannot be started."""
    secret_text, marker = "" if job.insecure else secret.new_secret(), new_run_id()
    dialed = count()

    def dial(host: str, slots: int) -> Place:
        if not host:
            return dialing.here(job, slots)
        share, own = Share(host, slots), f"{marker}-{next(dialed)}"
        return dialing.remote(dialing.orders(job, [share], secret_text, own)[0], job, None)

    def supervise(lifeline: int, signals: SignalPipe) -> int:
        hosts = {share.host: share.ranks for share in job.hosts}
        discovery = None
        if terms.discovery:
            discovery = Discovery(terms.discovery, terms.slots, terms.timeout)
        elif not hosts:
            hosts = {"": terms.most}
        fleet = Fleet(hosts, dial, Cooldown(*terms.cooldown), job.start_timeout, discovery)
        return ElasticSupervisor(job, terms, fleet, lifeline, signals).run()

    if not job.hosts and not terms.discovery:
        check_command(job.command)
    try:
        return guarded(supervise, "farandole run")
    finally:
        secret.remove_all(marker)  # agents on this machine may have been killed with the launcher
