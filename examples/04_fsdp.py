"""PyTorch's fully_shard over farandole: each rank holds a part of every parameter.

farandole run -np 2 -- python examples/04_fsdp.py
torchrun --nproc-per-node=2 examples/04_fsdp.py
"""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import farandole.torch.distributed

EPOCHS, BATCH = 10, 64  # BATCH is of all ranks together


def main() -> None:
    dist.init_process_group("farandole")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1536), slice(1536, None)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    mesh = init_device_mesh("cpu", (size,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    for epoch in range(EPOCHS):
        order = torch.randperm(1536, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            mine = batch[rank::size]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[train][mine]), labels[train][mine])
            loss.backward()
            optimizer.step()

    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    here = sum(p.to_local().numel() for p in model.parameters())
    if rank == 0:
        print(f"accuracy on unseen digits: {accuracy:.3f}, {here} parameters on this rank")
    assert farandole.torch.distributed.fallbacks() == {}, "all of it ran over farandole"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
