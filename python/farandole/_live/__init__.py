"""A running job, seen from outside of it: nothing here talks to a rank.

    pages.py        the counters that ranks show (csrc/control/status_page.h), found and read
    rates.py        two looks at them, as steps a second, shares of time, and bytes a second
    slow.py         which rank the others wait for
    openmetrics.py  the counters as text for Prometheus
    health.py       whether a job moves, waits, or has failed
    server.py       both over HTTP

Only the standard library is used: the launcher looks, too.
"""
