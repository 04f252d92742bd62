"""Starting the ranks of a job, on this host or on several, and bringing them down again.

    launcher.py    one job, from its description to its exit code
    job.py         what is asked of the launcher
    supervisor.py  the loop that decides: failures, signals, the verdict
    place.py       the interface of what it watches: where ranks run
    here.py        ranks that are processes of this one; leftovers.py: what they leave behind
    remote.py      ranks of another host, behind its agent; reach.py: how that is started
    agent.py       the process there; order.py, frames.py: what the two say to each other
    carried.py     which variables go along; secret.py: the job's secret
    hosts.py       which hosts a job may use
    watchdog.py    two processes that watch each other, so that nothing survives a kill -9
    ranks.py       what a rank finds in its environment; starting one
    words.py       what ranks say of themselves, and who is to blame by it
    display.py     what ranks write, on its way to the user
    output.py      whole lines of many streams on one screen
    bars.py        lines that are redrawn
    screen.py      a file that lines are printed to
    signals.py     signals, and the harsher ones that follow; polling.py: one wait for all
    processes.py   who descends from whom; signals only to those

Only the standard library is used, and no thread: ranks are forked from here.
"""

from __future__ import annotations

from farandole._launch.carried import named
from farandole._launch.hosts import hosts_of, is_everywhere, is_here, shared_out, slots_here
from farandole._launch.job import Copies, Job, LaunchError, Reach, Share
from farandole._launch.launcher import launch
from farandole._launch.ranks import check_command
from farandole._launch.reach import LAUNCHERS

__all__ = [
    "LAUNCHERS",
    "Copies",
    "Job",
    "LaunchError",
    "Reach",
    "Share",
    "check_command",
    "hosts_of",
    "is_everywhere",
    "is_here",
    "launch",
    "named",
    "shared_out",
    "slots_here",
]
