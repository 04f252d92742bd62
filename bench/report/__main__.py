"""Everything behind docs/benchmarks.md, measured and written: python bench/report

A part measures rows, kept as JSON, and renders rows as a table between two markers of the page. So
tables can be rendered again without measuring (--render), and parts can be run alone (--only).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import all_reduce
import bars
import calls
import network
import others
import over_mpi
import paths
import steps
import training_network
from document import replace
from measuring import ROOT, Bench, Row

import frameworks
from farandole._bench.peers.finding import parse_pythons
from farandole._bench.peers.table import PeerError


class Part(NamedTuple):
    """One table of the page."""

    measure: Callable[[Bench], list[Row]]
    render: Callable[[list[Row]], str]


PARTS = {
    "all_reduce": Part(all_reduce.measure_two, all_reduce.render_two),
    "crowded": Part(all_reduce.measure_crowded, all_reduce.render_crowded),
    "calls": Part(calls.measure, calls.render),
    "halves": Part(paths.measure_halves, paths.render_halves),
    "copying": Part(paths.measure_copying, paths.render_copying),
    "scheduled": Part(paths.measure_scheduled, paths.render_scheduled),
    "others": Part(others.measure, others.render),
    "network": Part(network.measure_free, network.render_free),
    "gigabit": Part(network.measure_gigabit, network.render_gigabit),
    "levels": Part(network.measure_levels, network.render_levels),
    "over_mpi": Part(over_mpi.measure, over_mpi.render),
    "start": Part(steps.measure_start, steps.render_start),
    "waiting": Part(steps.measure_waiting, steps.render_waiting),
    "named": Part(steps.measure_named, steps.render_named),
    "training": Part(steps.measure_training, steps.render_training),
    "training_gigabit": Part(training_network.measure, training_network.render),
    "keras": Part(frameworks.measure_keras, frameworks.render_keras),
    "tensorflow": Part(frameworks.measure_tensorflow, frameworks.render_tensorflow),
    "jax": Part(frameworks.measure_jax, frameworks.render_jax),
}


def main() -> int:
    arguments = _arguments()
    os.environ["FARANDOLE_TUNING"] = "off"  # the usual choices: what is kept here is nobody else's
    bench = Bench(arguments.quick, arguments.out, arguments.peer_python)
    bench.folder.mkdir(parents=True, exist_ok=True)
    page = arguments.page.read_text()
    failed = 0
    for name in arguments.only:
        rows = _rows(bench, name, arguments.render)
        if not rows:
            failed += 1
            continue
        text = PARTS[name].render(rows)
        wrong = [row for row in rows if not row.get("verified", True)]
        if wrong:
            print(f"{name}: {len(wrong)} rows have wrong results; see {bench.folder}")
            failed += 1
        print(f"{name}:\n{text}\n")
        for line in bars.broken(text):
            print(f"bar not met, {name}: {line}", file=sys.stderr)
        page = replace(page, name, f"{_command(name)}\n\n{text}")
    if not arguments.quick or arguments.page_given:
        arguments.page.write_text(page)
    return 1 if failed else 0


def _command(name: str) -> str:
    return f"`python bench/report --only {name}`"


def _rows(bench: Bench, name: str, kept: bool) -> list[Row]:
    """Measured now, or kept from the last time; none, and a line that says why."""
    path = bench.folder / f"{name}.json"
    if kept:
        if not path.exists():
            print(f"{name}: there is no {path}; run without --render", file=sys.stderr)
            return []
        found: list[Row] = json.loads(path.read_text())
        return found
    begin = time.monotonic()
    print(f"{name} …", file=sys.stderr, flush=True)
    try:
        rows = PARTS[name].measure(bench)
    except PeerError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return []
    path.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    print(f"  {time.monotonic() - begin:.0f} s, rows in {path}", file=sys.stderr)
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/report", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--only", default=",".join(PARTS), help="parts: %(default)s")
    parser.add_argument(
        "--quick", action="store_true", help="few sizes and rounds, to try; the page stays"
    )
    parser.add_argument("--render", action="store_true", help="from the rows of the last run")
    parser.add_argument("--peer-python", default="", metavar="PEER=PYTHON,…")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="raw rows")
    parser.add_argument("--page", type=Path, help="whose tables are written (docs/benchmarks.md)")
    arguments = parser.parse_args()
    arguments.page_given = arguments.page is not None
    arguments.page = arguments.page or ROOT / "docs" / "benchmarks.md"
    arguments.only = arguments.only.split(",")
    if unknown := [name for name in arguments.only if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    try:
        text = arguments.peer_python
        arguments.peer_python = parse_pythons(text) if text else {}
    except ValueError as error:
        parser.error(f"--peer-python: {error}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
