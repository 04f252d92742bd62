"""A rank that `starting` started: it measures, and rank 0 leaves the samples in a file; or it only
meets the other one, and says whether they reach each other's memory by address."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import farandole as fd


def _measure(file: str, seconds: str, rows: str, terminal: str) -> None:
    from farandole._tune.ranks import measure

    samples = measure(float(seconds), rows == "planners", int(terminal))
    if fd.rank() == 0:
        Path(file).write_text(json.dumps([asdict(sample) for sample in samples]))


def _meet() -> None:
    fd.init()
    print(json.dumps(fd.world().by_address))


if __name__ == "__main__":
    if sys.argv[1] == "meet":
        _meet()
    else:
        _measure(*sys.argv[2:])
