"""Digits, as a program for Horovod is written: nothing here knows farandole.

farandole run --horovod -np 2 -- python examples/02_horovod_script.py
farandole-horovodrun -np 2 python examples/02_horovod_script.py        the same
"""

import argparse

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Digits with Horovod")
parser.add_argument("--batch-size", type=int, default=32, help="of every rank")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--base-lr", type=float, default=0.05, help="of one rank")
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
parser.add_argument("--sync-batch-norm", action="store_true")


class Net(nn.Module):
    def __init__(self, normalize: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = normalize(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(x)


def datasets() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    whole = TensorDataset(images, torch.tensor(digits.target))
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    return TensorDataset(*whole[order[:1437]]), TensorDataset(*whole[order[1437:]])


def loader_of(dataset: TensorDataset, batch_size: int) -> tuple[DataLoader, DistributedSampler]:
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(dataset, batch_size=batch_size, sampler=sampler), sampler


def metric_average(value: float, name: str) -> float:
    return hvd.allreduce(torch.tensor(value), name=name).item()


def train(model: nn.Module, optimizer: optim.Optimizer, loader: DataLoader) -> float:
    model.train()
    total = 0.0
    for images, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    return metric_average(total / len(loader), "avg_loss")


def test(model: nn.Module, loader: DataLoader, sampler: DistributedSampler) -> float:
    model.eval()
    correct = 0.0
    with torch.no_grad():
        for images, labels in loader:
            correct += (model(images).argmax(1) == labels).sum().item()
    return metric_average(correct / len(sampler), "avg_accuracy")


def main() -> None:
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    train_set, test_set = datasets()
    train_loader, train_sampler = loader_of(train_set, args.batch_size)
    test_loader, test_sampler = loader_of(test_set, 64)

    model = Net(hvd.SyncBatchNorm if args.sync_batch_norm else nn.BatchNorm2d)
    # Adasum keeps the size of a step; of averages, more ranks take larger steps.
    lr_scaler = 1 if args.use_adasum else hvd.size()
    optimizer = optim.SGD(model.parameters(), lr=args.base_lr * lr_scaler, momentum=args.momentum)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
        gradient_predivide_factor=args.gradient_predivide_factor,
    )

    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)
        loss = train(model, optimizer, train_loader)
        accuracy = test(model, test_loader, test_sampler)
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()
