"""On a rank: PyTorch's part of the tables, with farandole.torch.GlobalBatch."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import data
import torch
from data import BATCH, CLASSES, EPOCHS, INPUTS, LABELS, PARTS, REMAINDERS, WIDTH, WORDS
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import farandole.torch as fd


class Stream(IterableDataset[Any]):
    def __init__(self, x: Any, y: Any) -> None:
        self._samples = list(zip(x, y, strict=True))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


KINDS: dict[str, Callable[[Any, Any, int], Any]] = {
    "map-style": lambda x, y, size: DataLoader(TensorDataset(x, y), size),
    "shuffled": lambda x, y, size: DataLoader(
        TensorDataset(x, y), size, shuffle=True, generator=seeded()
    ),
    "two workers": lambda x, y, size: DataLoader(TensorDataset(x, y), size, num_workers=2),
    "iterable": lambda x, y, size: DataLoader(Stream(x, y), size),
}


def learned(loader: Any, *, alone: bool) -> list[Any]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batches = loader if alone else fd.GlobalBatch(loader, model, optimizer)
    losses = []
    for _ in range(EPOCHS):
        for x, y in batches:
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            if not alone:
                loss = batches.scale_loss(loss)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach() if alone else fd.allreduce(loss.detach()))
    return [*(p.detach().numpy() for p in model.parameters()), torch.stack(losses).numpy()]


def equality() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {kind: {} for kind in KINDS}
    for remainder, (n, size) in REMAINDERS.items():
        x, y = torch.from_numpy(data.X[:n]), torch.from_numpy(data.Y[:n])
        for kind, make in KINDS.items():
            mine = learned(make(x, y, size), alone=False)
            right = learned(make(x, y, size), alone=True)
            same = set(fd.allgather_object(data.digest(mine)))
            found[kind][remainder] = data.apart(mine, right) if len(same) == 1 else float("inf")
    return found


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.words(words)).mean(dim=1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MLP": lambda: nn.Sequential(
        nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    ),
    "CNN": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(36, CLASSES),
    ),
    "transformer": Attention,
}  # fmt: skip


def bits() -> dict[str, str]:
    found = {}
    for name, build in MODELS.items():
        torch.manual_seed(1)
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        x = torch.from_numpy(INPUTS[name])
        if name == "CNN":
            x = x.permute(0, 3, 1, 2).contiguous()
        loader = DataLoader(TensorDataset(x, torch.from_numpy(LABELS)), BATCH)
        batches = fd.GlobalBatch(loader, model, optimizer, logical_ranks=PARTS)
        losses, parts = [], []
        for inputs, labels in batches:
            loss = batches.scale_loss(functional.cross_entropy(model(inputs), labels))
            loss.backward()
            parts.append(loss.detach())
            if batches.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(batches.sum(parts))
                parts = []
        values = [*model.state_dict().values(), *losses]
        digest = data.digest(torch.as_tensor(each).numpy() for each in values)
        assert len(set(fd.allgather_object(digest))) == 1, "ranks differ"
        found[name] = digest
    return found


def main(_: str, what: str, path: str) -> None:
    fd.init()
    found: Any = equality() if what == "equality" else bits()
    if fd.rank() == 0:
        Path(path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
