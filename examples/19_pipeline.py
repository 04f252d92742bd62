"""Digits with PyTorch, by a model that one rank may not hold: its layers are cut into stages.

    farandole run -np 2 -- python examples/19_pipeline.py
    farandole run -np 4 -- python examples/19_pipeline.py --stages 2
    python examples/19_pipeline.py

A rank may use 10 MiB for parameters, their gradients and what Adam keeps of them, and the model
needs 16.6: the last line is refused. The second has two replicas of two stages. The lines that a
program of one process has not are marked.
"""

import argparse
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import farandole.torch as fd  # (1)
from farandole import InvalidArgument

BATCH, WIDE, MIB = 96, 512, 1 << 20
PER_PARAMETER = 4  # itself, its gradient, Adam's two means

parser = argparse.ArgumentParser()
parser.add_argument("--stages", type=int, help="default: as many as ranks")
parser.add_argument("--micro-batches", type=int, default=8)
parser.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
parser.add_argument("--budget-mib", type=float, default=10, help="of one rank")
parser.add_argument("--epochs", type=int, default=4)
arguments = parser.parse_args()

fd.init()  # (2)
torch.set_num_threads(1)
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = order[:1437], order[1437:]

# Functions that make layers, so that no rank makes those of others.
layers = [partial(nn.Linear, 64, WIDE), nn.ReLU]
for _ in range(4):
    layers += [partial(nn.Linear, WIDE, WIDE), nn.ReLU]
layers += [partial(nn.Linear, WIDE, 10)]

try:
    model = fd.Pipeline(  # (3)
        layers,
        loss_fn=cross_entropy,
        stages=arguments.stages,
        micro_batches=arguments.micro_batches,
        schedule=arguments.schedule,
        budget=int(arguments.budget_mib * MIB / PER_PARAMETER),
    )
except InvalidArgument as error:
    raise SystemExit(f"this model does not fit {arguments.budget_mib} MiB: {error}") from None
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # of this rank's stage

shuffle = torch.Generator().manual_seed(1)  # the same batches on every rank
for epoch in range(arguments.epochs):
    losses = []
    for batch in train[torch.randperm(len(train), generator=shuffle)].split(BATCH):
        optimizer.zero_grad()
        losses.append(model.step(images[batch], labels[batch]))  # (4) forward and backward
        optimizer.step()
    if fd.rank() == 0:
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.4f}")

outputs = model.eval().predict(images[test])  # (5) on every rank
accuracy = (outputs.argmax(1) == labels[test]).double().mean()
if fd.rank() == 0:
    report = model.report()
    print(f"accuracy {accuracy:.4f}")
    print(report)
    for row in report.ranks:
        used = PER_PARAMETER * row.parameter_bytes / MIB
        print(f"rank {row.rank} uses {used:.1f} of {arguments.budget_mib:.1f} MiB")
