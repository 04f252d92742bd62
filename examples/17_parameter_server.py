"""Digits on a parameter server: one server, and workers that do not wait for one another.

    farandole run -np 4 -- python examples/17_parameter_server.py
    farandole run -np 4 -- python examples/17_parameter_server.py --slow 10
    farandole run -np 4 -- python examples/17_parameter_server.py --slow 10 --max-staleness 0

--max-staleness 0 is synchronous training. bench/parameter_server.py compares the two.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import farandole as fd
from farandole import parameter_server as ps

BATCH, HIDDEN, EPOCHS = 32, 64, 12
STEP = 0.004  # seconds that a step takes at least, so that "ten times slower" has a meaning


def digits() -> tuple[np.ndarray, ...]:
    """Images and labels; one fifth is held out."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images, labels = found.data[order] / 16, found.target[order]
    return images[:1437], labels[:1437], images[1437:], labels[1437:]


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        "hidden": rng.normal(size=(64, HIDDEN)) / 8,
        "hidden bias": np.zeros(HIDDEN),
        "out": rng.normal(size=(HIDDEN, 10)) / 8,
        "out bias": np.zeros(10),
    }


def forward(w: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hidden = np.maximum(x @ w["hidden"] + w["hidden bias"], 0)
    return hidden, hidden @ w["out"] + w["out bias"]


def gradients(w: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """The gradients of the mean cross entropy."""
    hidden, logits = forward(w, x)
    slope = np.exp(logits - logits.max(axis=1, keepdims=True))
    slope /= slope.sum(axis=1, keepdims=True)
    slope[np.arange(len(y)), y] -= 1
    slope /= len(y)
    back = (slope @ w["out"].T) * (hidden > 0)
    return {
        "hidden": x.T @ back,
        "hidden bias": back.sum(axis=0),
        "out": hidden.T @ slope,
        "out bias": slope.sum(axis=0),
    }


def train(worker: ps.Worker, slow: float) -> float:
    """Returns the accuracy on what was held out."""
    images, labels, held_out, right = digits()
    each = len(labels) // BATCH
    seconds = STEP * (slow if worker.index == worker.workers - 1 else 1)
    for step in worker.steps(EPOCHS * each):
        order = np.random.default_rng(step // each).permutation(len(labels))
        batch = order[step % each * BATCH : (step % each + 1) * BATCH]
        weights = worker.pull()
        began = time.perf_counter()
        pushed = gradients(weights, images[batch], labels[batch])
        time.sleep(max(0.0, seconds - (time.perf_counter() - began)))
        worker.push(pushed)
    _, logits = forward(worker.pull(), held_out)
    return float((logits.argmax(axis=1) == right).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slow", type=float, default=1, help="the last worker is so much slower")
    parser.add_argument("--max-staleness", type=int, help="0: synchronous")
    parser.add_argument("--json", type=Path, help="where the first worker writes what it found")
    arguments = parser.parse_args()

    fd.init()
    # One update of synchronous training has the gradients of all workers.
    workers = fd.size() - 1
    rate = 0.1 * (workers if arguments.max_staleness == 0 else 1)
    node = ps.join(start(), ps.SGD(rate, momentum=0.5), max_staleness=arguments.max_staleness)
    if isinstance(node, ps.Server):
        report = node.serve()
        print(
            f"{report.updates} updates; steps of each worker: {report.pushes}; "
            f"staleness {report.mean_staleness:.1f}, at most {report.max_staleness}"
        )
        return
    with node:
        began = time.perf_counter()
        accuracy = train(node, arguments.slow)
        seconds = time.perf_counter() - began
    if node.index == 0:
        print(f"accuracy {accuracy:.4f} after {seconds:.2f} s")
        if arguments.json:
            arguments.json.write_text(json.dumps({"accuracy": accuracy, "seconds": seconds}))


if __name__ == "__main__":
    main()
