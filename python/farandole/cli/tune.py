"""Measures this host in seconds, so that paths and planners are chosen by what they take here."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from farandole.cli import CommandError

if TYPE_CHECKING:
    from farandole._tune.fit import Fit, Sample

EPILOG = """\
examples:
  farandole tune
  farandole tune -np 4 --output tuning.json    then: export FARANDOLE_TUNING=tuning.json
  farandole info --why 4M                      what would be chosen now, and why

Run it while the host does nothing else. The table is kept for hosts of this kind (processor, cores,
memory, version of farandole) and used by every job that starts afterwards; results keep their bits.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-np",
        "--num-proc",
        metavar="N",
        dest="ranks",
        help="measure with this many ranks (the usable cores, from 2 to 8)",
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="write here, not into the cache"
    )
    parser.add_argument("--dry-run", action="store_true", help="measure and show, write nothing")


def handle(arguments: argparse.Namespace) -> int:
    from farandole import _tuning
    from farandole._tune.fit import fit

    ranks = _ranks(arguments.ranks)
    try:
        path = arguments.output or _tuning.cache_path()
    except _tuning.NotBelieved as error:
        raise CommandError(f"{error}; say --output FILE") from None
    samples = _measure(ranks)
    result = fit(samples)
    _show(result, samples)
    if arguments.dry_run:
        return 0
    measured = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    try:
        _tuning.write(path, result.seconds, measured=measured, ranks=ranks, fit=result.medians())
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}", 1) from error
    except _tuning.NotBelieved as error:
        raise CommandError(f"nothing is written: {error}", 1) from error
    print(f"written: {path}")
    return 0


def _ranks(text: str | None) -> int:
    if os.environ.get("RANK"):
        raise CommandError("it starts ranks of its own; run it outside of a job")
    if text is None:
        return min(max(len(os.sched_getaffinity(0)), 2), 8)
    ranks = int(text) if text.isdecimal() else 0
    if not 2 <= ranks <= 64:
        raise CommandError(f"-np takes a number from 2 to 64, not '{text}'")
    return ranks


def _measure(ranks: int) -> list[Sample]:
    """Starts ranks; rank 0 leaves the samples in a file."""
    from farandole import _launch
    from farandole._tune.fit import Sample

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or the launcher explains its own choice
    for name in ("FARANDOLE_ALGORITHM", "FARANDOLE_TRACE"):
        os.environ.pop(name, None)
    os.environ["FARANDOLE_TUNING"] = "off"
    with tempfile.TemporaryDirectory(prefix="farandole-tune-") as directory:
        file = Path(directory, "samples.json")
        command = [sys.executable, "-m", "farandole._tune", str(file)]
        try:
            code = _launch.launch(_launch.Job(command=command, ranks=ranks, prefix=False))
        except _launch.LaunchError as error:
            raise CommandError(str(error), error.exit_code) from error
        if code != 0 or not file.exists():
            raise CommandError("the ranks ended without a result", code or 1)
        return [Sample(**row) for row in json.loads(file.read_text())]


def _show(result: Fit, samples: list[Sample]) -> None:
    from farandole import _core
    from farandole.cli._terminal import print_table

    defaults = _core.tuning.numbers()
    rows = [
        (name, _nanoseconds(result.seconds[name]), _nanoseconds(defaults[name]), doc)
        for name, doc in _core.tuning.fields()
    ]
    print_table("measured", ("number", "ns", "default", "what"), rows)
    rows = [
        (
            family,
            str(len(errors)),
            f"{100 * result.medians()[family]:.0f} %",
            f"{100 * max(errors):.0f} %",
        )
        for family, errors in result.errors.items()
    ]
    title = f"predicted against {len(samples)} measured times, {samples[0].ranks} ranks"
    print_table(title, ("family", "times", "median error", "worst"), rows)


def _nanoseconds(seconds: float) -> str:
    return f"{1e9 * seconds:.3g}" if seconds < 1e-6 else f"{1e9 * seconds:.0f}"
