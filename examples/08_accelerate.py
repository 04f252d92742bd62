"""Hugging Face Accelerate over farandole: an import and one line before the Accelerator.

farandole run -np 2 -- python examples/08_accelerate.py
torchrun --nproc-per-node=2 examples/08_accelerate.py
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import farandole.torch.distributed  # noqa: F401 - makes the backend known

EPOCHS, BATCH = 10, 64  # BATCH is of all ranks together


def main() -> None:
    dist.init_process_group("farandole")  # Accelerate takes the process group that it finds
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    batch = BATCH // accelerator.num_processes
    train = DataLoader(Subset(data, range(1536)), batch_size=batch, shuffle=True)
    test = DataLoader(Subset(data, range(1536, len(data))), batch_size=batch)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

    for _ in range(EPOCHS):
        for images, labels in train:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()

    right = []
    with torch.no_grad():
        for images, labels in test:
            # Results of all ranks, without the samples repeated to fill the last batch.
            right.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
    accelerator.print(f"reduced by {dist.get_backend()}")
    accelerator.print(f"accuracy on unseen digits: {torch.cat(right).float().mean():.3f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # once the accelerator and DDP are gone
