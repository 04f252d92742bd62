"""Starts the ranks that measure a host, or the links between hosts; and two that only meet and tell
whether they reach each other's memory by address."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from farandole import _ranks
from farandole._tune.fit import Link, Sample

if TYPE_CHECKING:
    from farandole._launch import Job, Reach, Share

_MEETING_SECONDS = 10.0


def measure(ranks: int, seconds: float, *, planners: bool, terminal: int = 0) -> list[Sample]:
    """Starts ranks; rank 0 shows how far they are, and leaves the samples in a file.

    Farandole's variables in the environment are about other jobs, so they are removed.

    Raises:
        LaunchError: they could not be started, or ended without a result.
    """
    from farandole import _launch

    rows = "planners" if planners else "paths"
    words = ["measure", str(seconds), rows, str(terminal)]
    found = _result_of(words, lambda command: _launch.Job(command, ranks, prefix=False))
    return [Sample(**row) for row in found]


def measure_links(hosts: Sequence[Share], reach: Reach, seconds: float) -> Link:
    """Like measure(), for the links between hosts, with one rank on each.

    Raises:
        LaunchError: they could not be started, or ended without a result.
    """
    from farandole import _launch

    iface = os.environ.get("FARANDOLE_IFACE")  # whose link it is to be
    environment = {} if iface is None else {"FARANDOLE_IFACE": iface}
    found = _result_of(
        ["links", str(seconds)],
        lambda command: _launch.Job(
            command, len(hosts), environment=environment, hosts=hosts, reach=reach
        ),
    )
    return Link(**found)


def _result_of(words: Sequence[str], job: Callable[[list[str]], Job]) -> Any:
    from farandole._launch import LaunchError
    from farandole._launch.results import result_of

    for name in [n for n in os.environ if n.startswith("FARANDOLE_")]:
        del os.environ[name]
    os.environ["FARANDOLE_TUNING"] = "off"
    code, found = result_of("farandole._tune", words, job)
    if code != 0:
        raise LaunchError("the ranks ended without a result", code)
    return found


def ask_by_address() -> tuple[bool, str]:
    """(whether two ranks, here and now, reach each other's memory by address, else why not)."""
    quiet = {
        "OMP_NUM_THREADS": "1", "FARANDOLE_TUNING": "off", "FARANDOLE_LOG": "error",
        "FARANDOLE_TRACE": "",
    }  # fmt: skip
    call = _ranks.Call.of(_meet)
    ends, _ = _ranks.call_on_ranks(
        2, call, env=quiet, timeout=_MEETING_SECONDS, listen=lambda *_: None
    )
    answer = ends[0].answer
    if answer is None or answer.trace:
        return False, "two ranks that were to try it did not meet"
    reached, why_not = answer.result
    return bool(reached), str(why_not)


def _meet() -> tuple[bool, str]:
    import farandole as fd

    fd.init()
    return fd.world().by_address
