"""Starting the ranks of one host and bringing them down again.

    job.py         what is asked of the launcher
    watchdog.py    two processes that watch each other, so that nothing survives a kill -9
    supervisor.py  the loop that watches ranks, signals and output
    ranks.py       what a rank finds in its environment; starting one
    hosts.py       which hosts a job may use: this one
    output.py      whole lines of many streams on one screen
    bars.py        lines that are redrawn
    screen.py      a file that lines are printed to
    processes.py   who descends from whom; signals only to those

Only the standard library is used, and no thread: ranks are forked from here.
"""

from __future__ import annotations

from farandole._launch.hosts import slots_here
from farandole._launch.job import Copies, Job, LaunchError
from farandole._launch.launcher import launch
from farandole._launch.ranks import check_command

__all__ = ["Copies", "Job", "LaunchError", "check_command", "launch", "slots_here"]
