"""Checks the types of calls on PyTorch's tensors; see arrays.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import farandole as fd
import farandole.torch as hvd
from farandole.typing import HandleNumber


def collectives(x: Tensor, xs: list[Tensor]) -> None:
    assert_type(hvd.allreduce(x, op=hvd.Sum), Tensor)
    assert_type(hvd.grouped_allreduce(xs), list[Tensor])
    assert_type(hvd.alltoall(x), Tensor)
    assert_type(hvd.alltoall(x, [1, 2]), tuple[Tensor, Tensor])
    assert_type(fd.all_gather(x), Tensor)


def handles(x: Tensor, xs: list[Tensor], number: int) -> None:
    assert_type(hvd.allreduce_async(x), HandleNumber[Tensor])
    assert_type(hvd.synchronize(hvd.allreduce_async_(x)), Tensor)
    assert_type(hvd.synchronize(hvd.grouped_allgather_async(xs)), list[Tensor])
    assert_type(hvd.synchronize(hvd.alltoall_async(x, x)), tuple[Tensor, Tensor])
    assert_type(hvd.synchronize(number), Any)
    assert_type(hvd.poll(hvd.broadcast_async(x, 0)), bool)
    numbers: list[int] = [hvd.reducescatter_async(x)]
    assert_type(numbers, list[int])


def training(sgd: torch.optim.SGD, model: torch.nn.Module) -> None:
    wrapped = hvd.DistributedOptimizer(sgd)
    with wrapped.no_sync(), wrapped.skip_synchronize():
        wrapped.synchronize()
    assert_type(wrapped.clip_grad_norm_(1.0), Tensor)
    wrapped.set_backward_passes_per_step(2)
    scheduler: torch.optim.lr_scheduler.LRScheduler = torch.optim.lr_scheduler.StepLR(wrapped, 3)
    scheduler.step()
    sgd = wrapped
    sgd = hvd.DistributedOptimizer(sgd)
    assert_type(hvd.allgather_object(3), list[int])
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_parameters(model.named_parameters(), 0)


def global_batch(loader: DataLoader[Any], sgd: torch.optim.SGD, model: torch.nn.Module) -> None:
    batches = hvd.GlobalBatch(loader, model, sgd, micro_batch_size=4, bucket_bytes=0)
    loss = torch.zeros(())
    assert_type(batches.scale_loss(loss, "sum"), Tensor)
    assert_type(batches.sum(loss), Tensor)
    assert_type(batches.sum(1), float)
    assert_type(batches.gather_for_metrics((loss, [loss])), tuple[Tensor, list[Tensor]])
    assert_type(hvd.Metrics(batches).compute(), dict[str, float])
    batches.load_state_dict(batches.state_dict())
    hvd.LearningRate(0.1, batch_size=8, decay="cosine", total_steps=3).plot("rate.svg")


def pipeline(model: torch.nn.Sequential, x: Tensor) -> None:
    made = hvd.Pipeline(model, loss_fn=torch.nn.MSELoss(), split=[1], schedule="gpipe")
    hvd.Pipeline([torch.nn.Tanh, torch.nn.Linear(2, 2)], micro_batches=4, split="layers")
    torch.optim.SGD(made.parameters(), lr=0.1)
    assert_type(made.step(x, x), Tensor)
    assert_type(made.eval().evaluate({"x": x}, x), Tensor)
    assert_type(made.clip_grad_norm_(1.0), Tensor)
    assert_type(made.report().bubble, float)
    assert_type(made.report().ranks[0].layers, tuple[int, int])
    made.load_state_dict(made.state_dict())


def refused(x: Tensor) -> None:
    hvd.Pipeline(3)  # type: ignore[arg-type]
    hvd.allreduce([x])  # type: ignore[arg-type]
    hvd.allreduce(x, op="sum")  # type: ignore[arg-type]
    hvd.synchronize(x)  # type: ignore[call-overload]
