"""PyTorch's own pipelines (torch.distributed.pipelining) over farandole's messages."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from c10d_work import ours_alone, prepare
from rank_cases import make_tests, on_ranks
from torch import nn
from torch.distributed import pipelining
from torch.nn.functional import mse_loss

MICRO_BATCHES = 4


@on_ranks(2)
def pytorchs_schedules_give_the_gradients_of_one_process() -> None:
    seed = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 6, generator=seed), torch.randn(8, 1, generator=seed)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
    reference = copy.deepcopy(model)
    right = mse_loss(reference(x), y)
    right.backward()
    stage = dist.get_rank()
    begin, end = [(0, 2), (2, 5)][stage]
    for kind in (pipelining.ScheduleGPipe, pipelining.Schedule1F1B):
        part = copy.deepcopy(model[begin:end])
        place = pipelining.PipelineStage(part, stage, 2, torch.device("cpu"))
        schedule = kind(place, MICRO_BATCHES, loss_fn=mse_loss)
        losses: list[torch.Tensor] = []
        if stage == 0:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
            mean = torch.stack(losses).mean().item()
            assert mean == pytest.approx(right.item(), abs=1e-6)
        theirs = reference[begin:end].parameters()
        for mine, other in zip(part.parameters(), theirs, strict=True):
            torch.testing.assert_close(mine.grad, other.grad)
    ours_alone()


test_on_ranks = make_tests(__name__, "torch", prepare=prepare)
