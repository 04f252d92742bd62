"""Starting the ranks of a job, on this host or on several, and bringing them down again.

    launcher.py    one job, from its description to its exit code
    dialing.py     the places of a job
    job.py         what is asked of the launcher; hosts.py: which hosts a job may use
    supervisor.py  the loop that decides
    causes.py      who failed first, who is waited for in vain, and the last lines
    place.py       what the loop watches: where ranks run, and where they meet
    here.py        ranks that are processes of this one; leftovers.py: what they leave behind
    elastic/       jobs whose ranks may come and go
    agents/        ranks of other hosts, and what runs there
    watchdog.py    two processes that watch each other, so that nothing survives a kill -9
    ranks.py       what a rank finds in its environment; starting one; binding.py: its processors
    words.py       what ranks say of themselves, and who is to blame by it
    display.py     the output of ranks, on its way to the user, and files that get it, too
    output.py      whole lines of many streams on one screen
    bars.py        lines that are redrawn
    screen.py      a file that lines are printed to
    signals.py     signals, and the harsher ones that follow; polling.py: one wait for all
    processes.py   descendants of this process; signals only to those

Only the standard library is used, and no thread: ranks are forked from here.
"""

from __future__ import annotations

from farandole._launch.agents.carried import named
from farandole._launch.binding import BINDINGS
from farandole._launch.hosts import hosts_of, is_everywhere, is_here, shared_out
from farandole._launch.job import LAUNCHERS, Copies, Elastic, Job, LaunchError, Reach, Share
from farandole._launch.launcher import launch
from farandole._launch.ranks import check_command

__all__ = [
    "BINDINGS",
    "LAUNCHERS",
    "Copies",
    "Elastic",
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
]
