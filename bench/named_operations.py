"""Operations by name, a training step's worth at once, against torch.distributed's gloo.

    farandole run -np 2 -- python bench/named_operations.py [--steps 30] [--json FILE]

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
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import farandole.torch as hvd

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    store = Path(tempfile.gettempdir()) / f"named-{hvd.broadcast_object(os.getpid())}"
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=hvd.rank(), world_size=hvd.size()
    )
    report = {}
    for load, counts in LOADS.items():
        rows = {}
        for label, times in measure(counts, arguments.steps).items():
            ordered = sorted(times)
            rows[label] = {
                "median_ms": 1e3 * statistics.median(ordered),
                "min_ms": 1e3 * ordered[0],
                "p90_ms": 1e3 * ordered[int(0.9 * (len(ordered) - 1))],
            }
        report[load] = rows
        if hvd.rank() == 0:
            ours, theirs = (row["median_ms"] for row in rows.values())
            print(f"{load} ({len(counts)} tensors, {sum(counts) * 4 / 1e6:.1f} MB)")
            for label, row in rows.items():
                print(f"  {label:18}" + "".join(f" {k} {v:9.3f}" for k, v in row.items()))
            print(f"  gloo takes {theirs / ours:.1f} times as long", flush=True)
    if arguments.json and hvd.rank() == 0:
        arguments.json.write_text(json.dumps(report, indent=1))
    dist.destroy_process_group()
    store.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
