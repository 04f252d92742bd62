"""Gradients that travel as halves: half the bytes, and nearly the same result.

    farandole run -np 2 -- python examples/05_gradient_compression.py
    farandole run -np 2 -- python examples/05_gradient_compression.py --compression bf16

Parameters and gradients stay float32; what is sent and summed is compressed. A class of your own
will do as well: ``Rounded`` keeps eight bits of each number, as a float16.
"""

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

import farandole.torch as hvd

EPOCHS, BATCH = 10, 64  # BATCH is of all ranks together


class Rounded:
    """Numbers rounded to 1/128 of the tensor's largest one, which each rank knows of its own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        step = tensor.abs().max().clamp(min=1e-12) / 128 if tensor.numel() else tensor.new_ones(())
        return ((tensor / step).round() * step).to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        return tensor.to(context)


COMPRESSIONS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "bf16": hvd.Compression.bf16,
    "rounded": Rounded,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compression", choices=COMPRESSIONS, default="fp16")
    compression = COMPRESSIONS[parser.parse_args().compression]

    hvd.init()
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    train, test = slice(0, 1536), slice(1536, None)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        model.named_parameters(),
        compression=compression,
        gradient_predivide_factor=hvd.size(),  # so that sums of halves do not overflow
    )

    for epoch in range(EPOCHS):
        order = torch.randperm(1536, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            mine = batch[hvd.rank() :: hvd.size()]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images[train][mine]), labels[train][mine]).backward()
            optimizer.step()

    sent = sum(compression.compress(p.detach())[0].nbytes for p in model.parameters())
    whole = sum(p.nbytes for p in model.parameters())
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean()
    if hvd.rank() == 0:
        print(f"a step sends gradients of {whole} bytes in {sent}")
        print(f"accuracy on unseen digits: {accuracy:.3f}")


if __name__ == "__main__":
    main()
