"""The launcher that started this process, and the variables by which that is known."""

from __future__ import annotations

import os
from typing import Any

from farandole import _core, _mpi, _place
from farandole._launchers import PlaceError

_NOBODY = "nobody: a program started like this is a world of one"


def _split() -> str:
    parts = os.environ.get("FARANDOLE_SPLIT_HOSTS")
    return f"as FARANDOLE_SPLIT_HOSTS={parts} divides the ranks" if parts else "as ranks find them"


def describe() -> dict[str, Any]:
    """Plain values; `trouble` alone where the environment contradicts itself."""
    if _mpi.is_forced():
        try:
            return _mpi.describe()
        except _core.Error as error:
            return {"trouble": error.verdict}
    try:
        found = _place.find(os.environ)
        if found.launcher is None:
            return {"started by": _NOBODY}
        if found.rank is None or found.size is None:
            return {"trouble": _place.half_said(found)}
    except PlaceError as error:
        return {"trouble": str(error)}
    known_by = _place.used(found.launcher, os.environ)
    others = [row.name for row in _place.seen(os.environ) if row != found.launcher]
    return {
        "started by": found.launcher.name,
        "rank": found.rank,
        "size": found.size,
        "local rank": found.local_rank,
        "local size": found.local_size,
        "hosts": _split(),
        "job": _place.job_id(found.launcher, os.environ),
        "known by": [f"{name}={text}" for name, text in known_by.items()],
        "also seen": others,
    }
