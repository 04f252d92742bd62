"""A program for DistributedDataParallel that runs over farandole: one import, and one word changed.

    farandole run -np 2 -- python examples/03_ddp.py
    torchrun --nproc-per-node=2 examples/03_ddp.py

With ``--hook`` DDP keeps its gloo group, and farandole reduces its buckets.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import farandole.torch.distributed

EPOCHS, BATCH = 10, 64  # BATCH is of all ranks together


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hook", action="store_true", help="keep gloo; reduce by farandole")
    by_hook = parser.parse_args().hook

    dist.init_process_group("gloo" if by_hook else "farandole")  # was: "gloo"
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1536), slice(1536, None)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ddp = DistributedDataParallel(model)
    if by_hook:
        ddp.register_comm_hook(None, farandole.torch.ddp_comm_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.2, momentum=0.9)

    dataset = TensorDataset(images[train], labels[train])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH // dist.get_world_size(), sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()

    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    dist.all_reduce(accuracy, dist.ReduceOp.MIN)  # the ranks have the same model
    if dist.get_rank() == 0:
        print(f"accuracy on unseen digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
    # Now that DDP is gone: as the last owner of a gloo group it can wait for ever at its end.
    dist.destroy_process_group()
