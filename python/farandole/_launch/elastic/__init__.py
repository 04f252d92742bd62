"""A job whose ranks may come and go: a row of worlds.

    supervisor.py  the launcher's loop, where a lost rank ends a world and not the job
    roster.py      the workers, and when those that seek a place form a world (a value)
    timing.py      how long workers wait for others (a value)
    slots.py       where a worker may be started, and when again after one was lost (a value)
    fleet.py       the hosts, dialed when they come and again when they were lost
    worlds.py      the environment of a world's ranks
    discovery.py   the hosts that there are now, by a script of the user's

A *worker* is a process, by a number that no other worker of the job gets; in each world that it is
in it has a rank. The workers' end is farandole/_elastic.py.
"""
