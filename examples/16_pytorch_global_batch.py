"""Digits with PyTorch, written for one process: the batch is that of all ranks together.

farandole run -np 2 -- python examples/16_pytorch_global_batch.py

The lines that a program of one process has not are marked. Any number of ranks prints the same
numbers, up to rounding; with --state FILE a program that was stopped goes on where it was, also on
another number of them.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import farandole.torch as fd  # (1)

BATCH, EPOCHS = 64, 6  # BATCH is of all ranks together

parser = argparse.ArgumentParser()
parser.add_argument("--state", type=Path, help="where rank 0 saves, and all go on from")
parser.add_argument("--stop-after", type=int, default=-1, help="batches; -1: at the end")
arguments = parser.parse_args()

fd.init()  # (2)
torch.manual_seed(0)
torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
everything = TensorDataset(images, torch.tensor(digits.target))
train, test = torch.utils.data.random_split(
    everything, [1500, 297], generator=torch.Generator().manual_seed(0)
)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(16 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
shuffle = torch.Generator().manual_seed(1)
loader = DataLoader(train, batch_size=BATCH, shuffle=True, generator=shuffle, num_workers=1)

batches = fd.GlobalBatch(loader, model, optimizer)  # (3) iterates like the loader
test_batches = fd.GlobalBatch(DataLoader(test, batch_size=BATCH))
parts = {"model": model, "optimizer": optimizer, "batches": batches}
if arguments.state and arguments.state.exists():
    for name, state in torch.load(arguments.state, weights_only=True).items():
        parts[name].load_state_dict(state)


def save() -> None:
    if arguments.state and fd.rank() == 0:
        torch.save({name: each.state_dict() for name, each in parts.items()}, arguments.state)


def evaluate() -> dict[str, float]:
    seen = fd.Metrics(test_batches)
    with torch.no_grad():
        for x, y in test_batches:
            outputs = model(x)
            seen.update(loss=cross_entropy(outputs, y), accuracy=outputs.argmax(1) == y)
    return seen.compute()  # of all samples, each of which counts once


def learn(stop_after: int) -> bool:
    """Whether it came to the end."""
    for epoch in range(batches.epoch, EPOCHS):
        seen = fd.Metrics(batches)
        for x, y in batches:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            batches.scale_loss(loss).backward()  # (4)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of the whole batch's gradients
            optimizer.step()
            seen.update(loss=loss.detach())
            stop_after -= 1
            if stop_after == 0:
                return False
        mean = seen.compute()["loss"]
        if fd.rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}")
    return True


ended = learn(arguments.stop_after)
save()
if ended:
    results = evaluate()
    if fd.rank() == 0:
        print(f"test loss {results['loss']:.4f}, accuracy {results['accuracy']:.4f}")
