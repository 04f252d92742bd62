"""PyTorch Lightning over farandole: one import, and the strategy's backend.

farandole run -np 2 -- python examples/07_lightning.py
torchrun --nproc-per-node=2 examples/07_lightning.py
"""

import os

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farandole.torch.distributed  # noqa: F401 - makes the backend known

EPOCHS, BATCH = 10, 64  # BATCH is of all ranks together


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.body(images), labels)

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        images, labels = batch
        right = (self.body(images).argmax(1) == labels).float().mean()
        self.log("accuracy", right, sync_dist=True)  # the mean over all ranks

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    train = torch.utils.data.Subset(data, range(1536))
    test = torch.utils.data.Subset(data, range(1536, len(data)))

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=DDPStrategy(process_group_backend="farandole"),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    # Lightning gives each rank its part of both sets.
    trainer.fit(model, DataLoader(train, batch_size=BATCH // ranks, shuffle=True))
    found = trainer.validate(model, DataLoader(test, batch_size=BATCH // ranks), verbose=False)
    if trainer.is_global_zero:
        print(f"reduced by {dist.get_backend()}")
        print(f"accuracy on unseen digits: {found[0]['accuracy']:.3f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # once the trainer and DDP are gone
