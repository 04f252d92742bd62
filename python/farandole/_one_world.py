"""Refuses features that cannot go from one world of an elastic job into the next."""

from __future__ import annotations

from farandole import _elastic
from farandole._core import InvalidArgument


def refuse_in_elastic_jobs(what: str, why: str) -> None:
    """Raises InvalidArgument in an elastic job."""
    if _elastic.is_elastic():
        raise InvalidArgument(f"{what} in an elastic job: {why}")
