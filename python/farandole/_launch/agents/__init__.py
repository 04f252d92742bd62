"""Ranks of other hosts: an agent on each, and the launcher's end of it.

    remote.py      the launcher's end: a place (place.py) whose ranks are an agent's
    reach.py       the command that starts an agent: ssh, ip netns exec, or nothing
    connection.py  a started agent's three streams; silence.py: when it is given up
    inlets.py      the output of its ranks, in pipes as of ranks that are here
    order.py       the job that an agent is given
    carried.py     the environment variables that go along
    frames.py      the protocol between the two; outbox.py: bytes on their way
    parcels.py     the trace files of ranks, sent to the launcher's host

    __main__.py    the agent's beginning: `python -m farandole._launch.agents`
    agent.py       its loop: executes the launcher's commands, and reports
    taps.py        the output of its ranks, no faster than the launcher shows it
    secret.py      the job's secret, in a file
    address.py     where the other hosts reach this one

Each end notices when the other is gone: the launcher ends the job, an agent its ranks.
"""
