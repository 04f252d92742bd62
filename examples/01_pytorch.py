"""Data-parallel training of a small network on handwritten digits.

    farandole run -np 2 -- python examples/01_pytorch.py

The four lines marked with (fd) are all that differs from training on one rank.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import farandole.torch as hvd

EPOCHS, BATCH = 10, 64  # BATCH is of all ranks together


def main() -> None:
    hvd.init()  # (fd)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1536), slice(1536, None)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)  # (fd)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # (fd)

    for epoch in range(EPOCHS):
        # The same shuffle on every rank; of every batch, each rank takes its own part.
        order = torch.randperm(1536, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            mine = batch[hvd.rank() :: hvd.size()]  # (fd)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[train][mine]), labels[train][mine])
            loss.backward()  # gradients are the mean over all ranks when it returns
            optimizer.step()
        mean_loss = hvd.allreduce(loss.detach(), name="loss")
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {mean_loss:.4f}")

    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    if hvd.rank() == 0:
        print(f"accuracy on unseen digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
