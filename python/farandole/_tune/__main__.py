"""A rank that `starting` started: it measures the host, or links to others, and rank 0 leaves the
result in a file."""

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


def _measure_links(file: str, seconds: str) -> None:
    from farandole._tune.links import measure

    link = measure(float(seconds))
    if fd.rank() == 0:
        Path(file).write_text(json.dumps(asdict(link)))


if __name__ == "__main__":
    result, kind, *words = sys.argv[1:]
    if kind == "links":
        _measure_links(result, *words)
    else:
        _measure(result, *words)
