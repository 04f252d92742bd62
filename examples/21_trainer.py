"""Hugging Face's Trainer over farandole: an import and one line before TrainingArguments.

farandole run -np 2 -- python examples/21_trainer.py
torchrun --nproc-per-node=2 examples/21_trainer.py
"""

import tempfile

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import ResNetConfig, ResNetForImageClassification, Trainer, TrainingArguments

import farandole.torch.distributed  # noqa: F401 - makes the backend known

EPOCHS, BATCH = 5, 64  # BATCH is of all ranks together


class Digits(Dataset):
    """Pictures of 8 x 8 pixels, as the model takes them."""

    def __init__(self, numbers: range) -> None:
        digits = load_digits()
        self.images = torch.tensor(digits.images[numbers], dtype=torch.float32)[:, None] / 8 - 1
        self.labels = torch.tensor(digits.target[numbers])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.images[i], "labels": self.labels[i]}


def accuracy(found: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
    logits, labels = found
    return {"accuracy": float((logits.argmax(1) == labels).mean())}


def main(folder: str) -> None:
    dist.init_process_group("farandole")  # Trainer takes the process group that it finds
    options = TrainingArguments(
        folder, use_cpu=True, num_train_epochs=EPOCHS, learning_rate=5e-3,
        per_device_train_batch_size=BATCH // dist.get_world_size(),
        ddp_find_unused_parameters=False, save_strategy="no", report_to="none", disable_tqdm=True,
    )  # fmt: skip
    model = ResNetForImageClassification(
        ResNetConfig(
            num_channels=1, num_labels=10, embedding_size=16, hidden_sizes=[32, 64],
            depths=[1, 1], layer_type="basic",
        )
    )  # fmt: skip
    trainer = Trainer(
        model,
        options,
        train_dataset=Digits(range(1536)),
        eval_dataset=Digits(range(1536, 1797)),
        compute_metrics=accuracy,
    )
    trainer.train()
    result = trainer.evaluate()
    if dist.get_rank() == 0:
        print(f"reduced by {dist.get_backend()}")
        print(f"accuracy on unseen digits: {result['eval_accuracy']:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        main(scratch)
    dist.destroy_process_group()
