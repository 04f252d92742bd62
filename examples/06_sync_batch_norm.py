"""Batch normalization over the batches of all ranks.

    farandole run -np 2 -- python examples/06_sync_batch_norm.py
    farandole run -np 2 -- python examples/06_sync_batch_norm.py --local

With few images a rank (here 8) a rank's own statistics are noise; those of all ranks together are
what one rank with the whole batch would have. ``--local`` shows the difference: every rank then
normalizes by itself.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import farandole.torch as hvd

EPOCHS, BATCH_PER_RANK = 6, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local", action="store_true", help="each rank's own statistics")
    local = parser.parse_args().local

    hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1536), slice(1536, None)

    model: nn.Module = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 4 * 4, 10),
    )  # fmt: skip
    if not local:
        model = hvd.convert_sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    for epoch in range(EPOCHS):
        order = torch.randperm(1536, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH_PER_RANK * hvd.size()):
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[train][mine]), labels[train][mine]).backward()
            optimizer.step()

    # Running statistics are buffers, not parameters: only synchronized layers keep them equal.
    spread = max(
        float((hvd.allreduce(b, op=hvd.Max) - hvd.allreduce(b, op=hvd.Min)).abs().max())
        for b in model.buffers()
    )
    model.eval()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    if hvd.rank() == 0:
        print(f"running statistics differ between ranks by up to {spread:.3g}")
        print(f"accuracy on unseen digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
