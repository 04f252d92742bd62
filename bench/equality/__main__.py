"""Is training on ranks that of one process? python bench/equality

Two tables for docs/determinism.md. The first: how far weights and losses are from those of one
process, for every framework, kind of data, batches that divide and that do not, on 1 to 4 ranks.
The second: whether bits depend on the number of ranks, with logical_ranks=4.

Needs torch, tensorflow, jax and keras; what is missing is left out and said.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RANKS = (1, 2, 3, 4)
CLOSE = 1e-5
NAMES = {
    "keras-tensorflow": "Keras on TensorFlow",
    "keras-torch": "Keras on PyTorch",
    "keras-jax": "Keras on JAX",
    "strategy": "MirroredStrategy",
    "torch": "PyTorch",
}


def missing(name: str) -> list[str]:
    needed = ["torch"] if name == "torch" else ["keras", name.removeprefix("keras-")]
    needed = ["tensorflow" if each == "strategy" else each for each in needed]
    return [each for each in needed if importlib.util.find_spec(each) is None]


def run(name: str, what: str, ranks: int) -> dict[str, Any]:
    """The results that rank 0 has found."""
    backend = name.removeprefix("keras-") if name.startswith("keras-") else "tensorflow"
    quiet = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        program = "on_torch.py" if name == "torch" else "on_keras.py"
        command = [
            sys.executable, "-m", "farandole", "run", "-np", str(ranks), "--",
            sys.executable, str(HERE / program), name, what, str(found),
        ]  # fmt: skip
        done = subprocess.run(command, env=os.environ | quiet, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} on {ranks} ranks: {done.stdout}\n{done.stderr}")
        return dict(json.loads(found.read_text()))


def equality(names: list[str]) -> bool:
    """One row for each kind of data; a cell has 1, 2, 3 and 4 ranks."""
    right = True
    header: list[str] = []
    for name in names:
        by_ranks = [run(name, "equality", ranks) for ranks in RANKS]
        for kind, cells in by_ranks[0].items():
            if not header:
                header = ["", "data", *cells]
                print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
            row = [[each[kind][cell] for each in by_ranks] for cell in cells]
            right &= all(apart <= CLOSE for apart_of in row for apart in apart_of)
            said = [" ".join(f"{apart:.0e}" if apart else "0" for apart in each) for each in row]
            print(f"| {NAMES[name]} | {kind} | {' | '.join(said)} |", flush=True)
    return right


def bits(names: list[str]) -> bool:
    """One row for each model; a cell is the beginning of a digest of weights and losses."""
    right = True
    heads = [f"{ranks} rank{'s' * (ranks > 1)}" for ranks in RANKS]
    print(f"| | model | {' | '.join(heads)} |")
    print("|---|---|" + "---|" * len(RANKS))
    for name in (each for each in names if each != "strategy"):
        by_ranks = [run(name, "bits", ranks) for ranks in RANKS]
        for model in by_ranks[0]:
            digests = [each[model][:8] for each in by_ranks]
            right &= len(set(digests)) == 1
            print(f"| {NAMES[name]} | {model} | {' | '.join(digests)} |", flush=True)
    return right


def main() -> None:
    parser = argparse.ArgumentParser(description="is training on ranks that of one process?")
    parser.add_argument("--only", choices=NAMES, nargs="+", default=list(NAMES))
    parser.add_argument("--table", choices=["equality", "bits"], nargs="+")
    arguments = parser.parse_args()
    names = []
    for name in arguments.only:
        if lacking := missing(name):
            print(f"{NAMES[name]} is left out: {', '.join(lacking)} not installed")
        else:
            names.append(name)
    tables = {"equality": equality, "bits": bits}
    results = [tables[each](names) for each in arguments.table or tables]
    if not all(results):
        raise SystemExit("the tables have cells that are not as promised")


if __name__ == "__main__":
    main()
