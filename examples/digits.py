"""Trains a small convolutional network to read scikit-learn's handwritten digits.

    python examples/digits.py                                    one process
    farandole run -np 2 -- python examples/digits.py             two ranks
    torchrun --nproc-per-node 2 examples/digits.py               the same, started by torchrun

Every rank takes its part of each batch of 64, so that any number of ranks sees the same batches and
learns the same weights. The lines that farandole adds to the program of one process are marked.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import farandole as fd
import farandole.torch as hvd  # (1)

BATCH = 64  # over all ranks


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 256), nn.GELU(), nn.Linear(256, 10),
    )  # fmt: skip


def digits() -> tuple[torch.Tensor, ...]:
    """Images and labels; one fifth is held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, held_out = order[:1437], order[1437:]
    return images[train], labels[train], images[held_out], labels[held_out]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--json", type=Path, help="where rank 0 writes losses, accuracy and times")
    parser.add_argument("--alone", action="store_true", help="ranks do not share gradients")
    arguments = parser.parse_args()

    hvd.init()  # (2)
    torch.manual_seed(7 + hvd.rank())
    torch.set_num_threads(1)
    images, labels, test_images, test_labels = digits()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (3) all start with rank 0's weights
    if not arguments.alone:
        optimizer = hvd.DistributedOptimizer(  # (4) step() uses the mean of all ranks' gradients
            optimizer, named_parameters=model.named_parameters(), bucket_bytes=256 * 1024
        )

    steps = len(labels) // BATCH  # whole batches
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, arguments.epochs * steps)

    losses, seconds = [], []
    shuffle = torch.Generator().manual_seed(3)  # the same order on every rank
    for epoch in range(arguments.epochs):
        order = torch.randperm(len(labels), generator=shuffle)
        for batch in order.split(BATCH)[:steps]:
            began = time.perf_counter()
            mine = batch[hvd.rank() :: hvd.size()]  # (5) this rank's part
            optimizer.zero_grad()
            with fd.trace_span("forward"):  # spans are for FARANDOLE_TRACE, and optional
                loss = cross_entropy(model(images[mine]), labels[mine])
            with fd.trace_span("backward"):
                loss.backward()
            with fd.trace_span("optimizer"):
                optimizer.step()
                schedule.step()
            seconds.append(time.perf_counter() - began)
            losses.append(loss.detach())
        whole = hvd.allreduce(losses[-1], name="loss")  # of the whole last batch
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}/{arguments.epochs}: loss {whole:.4f}", flush=True)

    curve = hvd.allreduce(torch.stack(losses))  # the mean over ranks, so again of whole batches
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).double().mean().item()
    if hvd.rank() == 0:
        print(f"accuracy on {len(test_labels)} digits not seen in training: {accuracy:.3f}")
        if arguments.json:
            result = {"losses": curve.tolist(), "accuracy": accuracy, "seconds": seconds}
            arguments.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
