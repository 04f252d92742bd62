"""The cost of comparing weights: python bench/weight_checksums.py

Ranks compare checksums of all weights every k steps (FARANDOLE_CHECK_WEIGHTS). Which part of
training is that, and what is the least k at which it is at most 0.1 %? On one thread, for the
models of training_step.py with their steps, and for 161 parameters like those of ResNet-50 with the
step of a GPU. Needs torch.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import farandole as fd
from farandole._bench.statistics import median
from farandole.cli._terminal import print_table
from farandole.common._weights import period
from farandole.torch._training.weights import checksums_of
from training_step import MODELS, VARIANTS, Trainer, trainer_of

_SHARE = 1e-3
_GPU_STEP = 0.06  # seconds


def like_resnet50() -> list[Any]:
    """Parameters of the same number, and of the same bytes in all."""
    import torch

    small = [torch.randn(512) for _ in range(107)]
    return [*small, *(torch.randn(472_300) for _ in range(54))]


def seconds(call: Callable[[], object], times: int) -> float:
    def once() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return median([once() for _ in range(times + 1)][1:])


def step_seconds(trainer: Trainer) -> float:
    trainer.train(10)
    return trainer.blocks[-1] / 1e3


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--times", type=int, default=15, help="each is measured")
    parser.add_argument("--json", type=Path, help="write the numbers to this file, too")
    options = parser.parse_args()
    fd.init()
    torch.set_num_threads(1)
    measured = {}
    for name, model in MODELS.items():
        trainer = trainer_of(VARIANTS["none"], model, "sgd")
        measured[name] = [p.detach() for p in trainer.module.parameters()], step_seconds(trainer)
    measured["like ResNet-50"] = like_resnet50(), _GPU_STEP
    k = period() or math.inf
    rows: list[list[str]] = []
    numbers: list[dict[str, Any]] = []
    for name, (weights, step) in measured.items():
        megabytes = sum(w.nbytes for w in weights) / 1e6
        sums = seconds(lambda weights=weights: checksums_of(weights), options.times)  # type: ignore[misc]
        least, share = math.ceil(sums / (_SHARE * step)), sums / (k * step)
        rows.append([name, f"{megabytes:.1f}", f"{1e3 * sums:.2f}", f"{1e3 * step:.1f}", f"{least}",
                     f"{100 * share:.5f} %"])  # fmt: skip
        numbers.append({"model": name, "checksums": sums, "step": step, "share": share})
    columns = ["model", "weights, MB", "checksums, ms", "step, ms", "least k", f"at k = {k:.0f}"]
    print_table("checksums of weights", columns, rows)
    if options.json:
        options.json.write_text("".join(json.dumps(row) + "\n" for row in numbers))
    if any(row["share"] > _SHARE for row in numbers):
        raise SystemExit("checksums take more than 0.1 % of training")


if __name__ == "__main__":
    main()
