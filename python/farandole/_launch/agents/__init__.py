"""Ranks of other hosts: an agent on each, and the launcher's end of it.

    remote.py      the launcher's end: a place (place.py) whose ranks are an agent's
    reach.py       the command that starts an agent: ssh, ip netns exec, or nothing
    connection.py  a started agent's three streams; silence.py: when it is given up
    inlets.py      what its ranks write, into pipes as of ranks that are here
    order.py       the job that an agent is given
    carried.py     which variables go along
    frames.py      what the two say to each other; outbox.py: on its way
    parcels.py     what ranks left of a trace, sent to the launcher's host

    __main__.py    the agent's beginning: `python -m farandole._launch.agents`
    agent.py       its loop: does what the launcher says, and tells
    taps.py        what its ranks write, no faster than the launcher shows it
    secret.py      the job's secret, in a file
    address.py     where the other hosts reach this one

Each end notices when the other is gone: the launcher ends the job, an agent its ranks.
"""
