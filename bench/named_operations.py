"""Operations by name, a training step's worth at once, against torch.distributed's gloo.

    python bench/named_operations.py [-np 2] [--steps 24] [--json FILE]

Two loads: 1000 tensors of 1 KiB, and the 171 gradients of a network like ResNet-50 (94 MB), all
float32, summed in place. Ours submits all by name (`allreduce_async_`) and waits for all; gloo
reduces tensor by tensor. Blocks of both alternate, every result of the last step is checked, and
rank 0 prints the median, the least and the 90th percentile of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import farandole.torch as hvd
from farandole import _launch

BLOCKS = 4


def resnet_like() -> list[int]:
    """Elements of the gradients of a bottleneck network of 3, 4, 6 and 3 blocks, without its head,
    and of a dozen small ones."""
    shapes = [64 * 3 * 49, 64, 64]
    before = 64
    for width, blocks in [(64, 3), (128, 4), (256, 6), (512, 3)]:
        for block in range(blocks):
            for count in (before * width, width * width * 9, width * width * 4):
                out = width * 4 if count == width * width * 4 else width
                shapes += [count, out, out]
            if block == 0:
                shapes += [before * width * 4, width * 4, width * 4]
            before = width * 4
    return [*shapes, *[1000] * 12]


LOADS = {"1000 x 1 KiB": [256] * 1000, "171 like ResNet-50, 94 MB": resnet_like()}


def by_name(tensors: list[torch.Tensor], names: list[str]) -> None:
    handles = [
        hvd.allreduce_async_(t, name=n, op=hvd.Sum) for t, n in zip(tensors, names, strict=True)
    ]
    for handle in handles:
        hvd.synchronize(handle)


def one_by_one(tensors: list[torch.Tensor], _: list[str]) -> None:
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in works:
        work.wait()


def steps(
    way: Callable[..., None], tensors: list[torch.Tensor], names: list[str], n: int
) -> list[float]:
    times = []
    for _ in range(n):
        for t in tensors:
            t.fill_(1.0)
        hvd.barrier()
        begin = time.perf_counter()
        way(tensors, names)
        times.append(time.perf_counter() - begin)
    for t in tensors:
        assert (t == hvd.size()).all(), "a wrong sum"
    return times


def measure(counts: list[int], n: int) -> dict[str, list[float]]:
    tensors = [torch.ones(c) for c in counts]
    names = [f"gradient {len(counts)}.{i}" for i in range(len(counts))]
    ways = {"farandole by name": by_name, "gloo one by one": one_by_one}
    for way in ways.values():
        steps(way, tensors, names, 3)
    times: dict[str, list[float]] = {label: [] for label in ways}
    for _ in range(BLOCKS):
        for label, way in ways.items():
            times[label] += steps(way, tensors, names, max(1, n // BLOCKS))
    return times


def _row(load: str, counts: list[int], label: str, times: list[float]) -> dict[str, object]:
    ordered = sorted(1e3 * t for t in times)
    return {
        "benchmark": "named_operations",
        "load": load,
        "tensors": len(counts),
        "bytes": 4 * sum(counts),
        "ranks": hvd.size(),
        "way": label,
        "p50_ms": statistics.median(ordered),
        "min_ms": ordered[0],
        "p90_ms": ordered[int(0.9 * (len(ordered) - 1))],
    }


def _show(rows: list[dict[str, Any]]) -> None:
    ours, theirs = rows
    print(f"{ours['load']} ({ours['tensors']} tensors, {ours['bytes'] / 1e6:.1f} MB)")
    for row in rows:
        numbers = "".join(f" {key} {row[key]:9.3f}" for key in ("p50_ms", "min_ms", "p90_ms"))
        print(f"  {row['way']:18}{numbers}")
    print(f"  gloo takes {theirs['p50_ms'] / ours['p50_ms']:.1f} times as long", flush=True)


def _rank(arguments: argparse.Namespace) -> int:
    """The program of every rank; rank 0 shows the results."""
    torch.set_num_threads(1)
    hvd.init()
    store = Path(tempfile.gettempdir()) / f"named-{hvd.broadcast_object(os.getpid())}"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=hvd.rank(), world_size=hvd.size()
    )
    rows = []
    for load, counts in LOADS.items():
        measured = measure(counts, arguments.steps)
        found = [_row(load, counts, label, times) for label, times in measured.items()]
        if hvd.rank() == 0:
            _show(found)
        rows += found
    if arguments.json and hvd.rank() == 0:
        arguments.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    dist.destroy_process_group()
    store.unlink(missing_ok=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-np", type=int, default=2, dest="ranks", help="ranks (2)")
    parser.add_argument("--steps", type=int, default=24, help="of each way and load (24)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return _rank(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, *sys.argv]
    return _launch.launch(_launch.Job(command=command, ranks=arguments.ranks, prefix=False))


if __name__ == "__main__":
    sys.exit(main())
