"""Synchronous and asynchronous training on a parameter server, where one of three workers is ten
times slower: accuracy on digits, and time.

    python bench/parameter_server.py [--rounds 5] [--slow 10]

Each round runs examples/17_parameter_server.py once either way, in turns, so that what else the
machine does hits both. Times are those of the first worker, from its first step to the end of the
last one; starting is not in them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

EXAMPLE = Path(__file__).parent.parent / "examples" / "17_parameter_server.py"
WAYS = {"synchronous": ["--max-staleness", "0"], "asynchronous": []}


def measure(slow: float, options: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [
            sys.executable, "-m", "farandole", "run", "-np", "4", "--",
            sys.executable, str(EXAMPLE), "--slow", str(slow), "--json", str(found), *options,
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
        return dict(json.loads(found.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow", type=float, default=10)
    arguments = parser.parse_args()

    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way, options in WAYS.items():
            found[way].append(measure(arguments.slow, options))
            last = found[way][-1]
            print(
                f"{way:>12}: {last['seconds']:6.2f} s, accuracy {last['accuracy']:.4f}", flush=True
            )
    seconds = {way: median(run["seconds"] for run in runs) for way, runs in found.items()}
    accuracy = {way: median(run["accuracy"] for run in runs) for way, runs in found.items()}
    ratio = seconds["asynchronous"] / seconds["synchronous"]
    print(
        f"medians of {arguments.rounds}: {seconds['synchronous']:.2f} s synchronous, "
        f"{seconds['asynchronous']:.2f} s asynchronous: ratio {ratio:.2f}; accuracy "
        f"{accuracy['synchronous']:.4f} and {accuracy['asynchronous']:.4f}, "
        f"difference {accuracy['asynchronous'] - accuracy['synchronous']:+.4f}"
    )


if __name__ == "__main__":
    main()
