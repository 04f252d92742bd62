"""One job, from its description to its exit code."""

from __future__ import annotations

import os
from collections.abc import Sequence

from farandole._launch.here import Here
from farandole._launch.job import Job
from farandole._launch.place import Place
from farandole._launch.ranks import check_command
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
    return [Here(job.command, [job.ranks], {**os.environ, **job.environment})]
