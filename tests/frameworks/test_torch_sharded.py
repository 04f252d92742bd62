"""DistributedOptimizer(sharded_update=True): every rank updates 1/n, and everybody has it all."""

from __future__ import annotations

import collections
import copy
import io
import math
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from rank_cases import begin_torch, make_tests, on_ranks, refused
from torch import nn

import farandole as fd
import farandole.torch as hvd
from core_testing import testing
from farandole import _core
from farandole._tune import kept
from farandole.torch._training.watched import Watched
from harness import World

STEPS = 20
Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "decay": lambda p: torch.optim.SGD(p, lr=0.001, weight_decay=0.01, maximize=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.002, weight_decay=0.01, eps=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.002, weight_decay=0.1, eps=1e-3),
    "near": lambda p: torch.optim.Adam(p, lr=0.002, betas=(0.3, 0.9), eps=1e-3),
}


def make(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Odd sizes, a channels-last weight, and more than one bucket of 2 KiB."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(45, 37), nn.Tanh(), nn.Linear(37, 1)
    )
    return model.to(dtype).to(memory_format=torch.channels_last)


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, 3, 5, 5, generator=seed).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(x) - 1).square().mean()
    return loss


def sharded(model: nn.Module, kind: str = "adam", **options: Any) -> Any:
    options.setdefault("bucket_bytes", 2048)
    optimizer = OPTIMIZERS[kind](model.parameters())
    return hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), sharded_update=True, **options
    )


def train(model: nn.Module, optimizer: Any, steps: range, dtype: torch.dtype) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, batch(step, hvd.rank(), dtype)).backward()
        optimizer.step()


def train_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, dtype: torch.dtype
) -> None:
    """On the joined batch: what all ranks together do."""
    for step in steps:
        optimizer.zero_grad()
        joined = torch.cat([batch(step, rank, dtype) for rank in range(hvd.size())])
        loss_of(model, joined).backward()
        optimizer.step()


def check_close(model: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> None:
    for mine, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=tolerance, atol=tolerance)


def check_same_everywhere(model: nn.Module) -> None:
    mine = torch.cat([p.detach().contiguous().flatten() for p in model.parameters()]).numpy()
    assert np.array_equal(fd.all_reduce(mine, "min"), fd.all_reduce(mine, "max"))


# An update is computed from a window's sums, for any table of measured costs.


def train_five() -> bytes:
    begin_torch()
    model = make()
    train(model, sharded(model), range(5), torch.float32)
    return b"".join(p.detach().contiguous().numpy().tobytes() for p in model.parameters())


def test_no_table_takes_an_update_off_the_window(
    spawn: Callable[..., World], tmp_path: Path
) -> None:
    slow = {**_core.tuning.numbers(), "mapped_start": 1.0, "mapped_byte": 1.0}
    file = tmp_path / "windows are slow"
    kept.write(str(file), kept.Kept(kept.kind(), "now", 2, 0.0, 1, {}, slow))
    bits = set()
    for setting in ("off", str(file)):
        world = spawn(2, "torch", env={"FARANDOLE_TUNING": setting, "FARANDOLE_LOG": "debug"})
        bits |= set(world.run(train_five))
        updates = [line for line in world.output(0).splitlines() if "'bucket " in line]
        assert len(updates) > 5
        assert all(line.endswith("went by mapped") for line in updates), updates
    assert len(bits) == 1


# The same as torch, and the same bits as an update of everything everywhere.


@on_ranks(1, 2, 3, 5, 8)
def twenty_steps_are_torchs() -> None:
    for kind in OPTIMIZERS:
        for dtype in (torch.float32, torch.float64):
            model, alone = make(dtype), make(dtype)
            train(model, sharded(model, kind), range(STEPS), dtype)
            train_alone(alone, OPTIMIZERS[kind](alone.parameters()), range(STEPS), dtype)
            # An update rounds elsewhere than PyTorch's, and gradients of later steps differ by
            # more or less, depending on which of its kernels the processor has.
            check_close(model, alone, 1e-9 if dtype == torch.float64 else 5e-6)
            check_same_everywhere(model)


SETTINGS: dict[str, dict[str, Any]] = {
    "sgd": {"rate": 0.05},
    "momentum": {"rate": 0.05, "momentum": 0.9, "dampening": 0.1},
    "adamw": {"rate": 0.002, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-3,
              "decoupled": True},
}  # fmt: skip


@on_ranks(1, 2, 3, 4, 8)
def bits_are_those_of_a_whole_update() -> None:
    """All-reduce the gradients, then update every element with the same kernel."""
    rule = {"sgd": "sgd", "momentum": "sgd", "adamw": "adam"}
    slots = {"sgd": 0, "momentum": 1, "adamw": 2}
    for kind, given in SETTINGS.items():
        for dtype in ("float32", "float64"):
            for count in (1, 7, 1000, 40_001):
                random = np.random.default_rng(count)
                start = random.standard_normal(count).astype(dtype)
                p = nn.Parameter(torch.from_numpy(start.copy()))
                optimizer: Any = hvd.DistributedOptimizer(
                    OPTIMIZERS[kind]([p]), sharded_update=True
                )
                value, state = start, [np.zeros(count, dtype) for _ in range(slots[kind])]
                for step in range(1, 4):
                    shape = (hvd.size(), count)
                    # heavy-tailed, so that another order of additions gives other bits
                    leaves = (random.standard_normal(shape) ** 9).astype(dtype)
                    mine = leaves[hvd.rank()]
                    optimizer.zero_grad()
                    (p * torch.from_numpy(mine)).sum().backward()
                    optimizer.step()
                    mean = fd.all_reduce(mine, "mean")
                    parts = testing.update(
                        rule[kind], dtype, value, mean, state, _core.HyperParameters(**given), step,
                        isa=_core.instruction_sets()[-1],
                    )  # fmt: skip
                    value, *state = (np.frombuffer(part, dtype) for part in parts)
                    assert value.tobytes() == p.detach().numpy().tobytes(), (kind, count, step)


@on_ranks(2, 3)
def sum_and_predivide_are_as_in_the_plain_path() -> None:
    for options in ({"op": hvd.Sum}, {"gradient_predivide_factor": 3.0}):
        models = [make(), make()]
        wrapped: list[Any] = [
            hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.01), sharded_update=yes, **options
            )
            for model, yes in zip(models, (True, False), strict=True)
        ]
        for model, optimizer in zip(models, wrapped, strict=True):
            train(model, optimizer, range(5), torch.float32)
        check_close(*models)


# Between backward and step.


@on_ranks(1, 2, 3)
def nothing_changes_before_step() -> None:
    model = make()
    optimizer = sharded(model)
    before = copy.deepcopy(model)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(0, hvd.rank())).backward()
    check_close(model, before, 0)
    alone = copy.deepcopy(before)
    loss_of(alone, batch(0, hvd.rank())).backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad)  # this rank's own


@on_ranks(2, 3)
def gradients_add_up_over_passes() -> None:
    for passes in (1, 2):
        model, alone = make(), make()
        optimizer = sharded(model, backward_passes_per_step=passes)
        plain = OPTIMIZERS["adam"](alone.parameters())
        for step in range(3):
            optimizer.zero_grad()
            plain.zero_grad()
            for micro in range(2):
                number = 10 * step + micro
                loss_of(model, batch(number, hvd.rank())).backward()
                train_batch = torch.cat([batch(number, r) for r in range(hvd.size())])
                loss_of(alone, train_batch).backward()
            optimizer.step()
            plain.step()
        check_close(model, alone)
        if passes == 2:
            for _ in range(2):
                loss_of(model, batch(0, 0)).backward()
            refused(loss_of(model, batch(0, 0)).backward, "more than backward_passes_per_step=2")
            assert all(p.grad is None for p in model.parameters())
            train(model, optimizer, range(1), torch.float32)


@on_ranks(1, 2, 3)
def schedulers_groups_and_closures_work() -> None:
    def build(model: nn.Module) -> tuple[Any, Any]:
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": parameters[:3], "lr": 0.01, "weight_decay": 0.1},
                {"params": parameters[3:], "betas": (0.5, 0.9)},
            ],
            lr=0.002,
            eps=1e-3,
        )
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    model, alone = make(), make()
    optimizer, schedule = build(model)
    optimizer = hvd.DistributedOptimizer(optimizer, sharded_update=True, bucket_bytes=2048)
    plain, plain_schedule = build(alone)
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    for step in range(6):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, batch(step, hvd.rank()))
            loss.backward()
            return loss

        assert float(optimizer.step(closure)) >= 0
        train_alone(alone, plain, range(step, step + 1), torch.float32)
        schedule.step()
        plain_schedule.step()
    check_close(model, alone)
    assert len(seen) == 6


@on_ranks(1, 2, 3)
def clipping_is_torchs() -> None:
    for norm_type in (2.0, math.inf):
        model, alone = make(), make()
        optimizer, plain = sharded(model), OPTIMIZERS["adam"](alone.parameters())
        for step in range(4):
            optimizer.zero_grad()
            plain.zero_grad()
            loss_of(model, batch(step, hvd.rank())).backward()
            joined = torch.cat([batch(step, rank) for rank in range(hvd.size())])
            loss_of(alone, joined).backward()
            most = 0.05 if step % 2 else 50.0
            norm = optimizer.clip_grad_norm_(most, norm_type)
            expected = nn.utils.clip_grad_norm_(alone.parameters(), most, norm_type)
            torch.testing.assert_close(norm, expected)
            optimizer.step()
            plain.step()
        check_close(model, alone)
    refused(lambda: optimizer.clip_grad_norm_(1.0, 3.0), "norm_type is 3.0")
    optimizer.zero_grad()
    loss_of(model, batch(0, 0) * math.nan).backward()
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)


@on_ranks(1, 2)
def a_scaler_is_refused_unless_it_does_nothing() -> None:
    """By all ranks, also where one alone would leave out the step, and where it has unscaled."""
    model = make()
    optimizer = sharded(model, "sgd")
    before = copy.deepcopy(model)
    for unscales in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        loss = loss_of(model, batch(0, hvd.rank()))
        scaler.scale(loss * (math.inf if hvd.rank() == 1 else 1)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        refused(lambda: scaler.step(optimizer), "GradScaler with sharded_update=True")  # noqa: B023
        optimizer.zero_grad()
    check_close(model, before, 0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    plain, alone = copy.deepcopy(before), OPTIMIZERS["sgd"]
    other = alone(plain.parameters())
    scaler.scale(loss_of(model, batch(0, 0))).backward()
    scaler.step(optimizer)
    loss_of(plain, batch(0, 0)).backward()
    other.step()
    check_close(model, plain)


@on_ranks(2, 3)
def gradients_changed_by_hand_are_refused() -> None:
    model = make()
    optimizer = sharded(model)
    before = copy.deepcopy(model)
    loss_of(model, batch(0, hvd.rank())).backward()
    if hvd.rank() == 1:
        refused(
            lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9), "this rank's own gradients"
        )
    else:
        with pytest.raises(fd.RemoteError, match="abandoned on rank 1"):
            optimizer.step()
    check_close(model, before, 0)
    train(model, optimizer, range(2), torch.float32)
    check_same_everywhere(model)
    nn.utils.clip_grad_norm_(model.parameters(), math.inf)  # after a step: for a log
    refused(optimizer.synchronize, "clip_grad_norm_")


def check_copies(gradient: torch.Tensor) -> None:
    """They are plain tensors, as if nothing watched the gradient."""
    copies = [copy.copy(gradient), copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient))]
    for copied in [*copies, gradient + 0]:
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, gradient)
        assert repr(copied) == repr(gradient)


Change = Callable[[torch.Tensor, nn.Parameter], object]
OVERWRITES: dict[str, Change] = {
    "in place": lambda g, _: g.clamp_(-0.01, 0.01),
    "p.grad.data": lambda g, _: g.data.clamp_(-0.01, 0.01),
    "a view of it": lambda g, _: g.data[:1].mul_(0),
    "p.grad.numpy()": lambda g, _: g.numpy().fill(0),
    "by numpy": lambda g, _: np.asarray(g).fill(0),
    "p.grad.detach()": lambda g, _: g.detach().numpy().fill(0),
    "p.grad.view().data": lambda g, _: g.view(g.shape).data.mul_(0),
    "a function's view": lambda g, _: torch.transpose(g, 0, 1).data.mul_(0),
    "rows": lambda g, _: [row.data.mul_(0) for row in g.unbind()],
    "its memory": lambda g, _: g.untyped_storage().fill_(0),
    "p.grad = ...": lambda g, p: setattr(p, "grad", g * 2),
    "p.grad.data = ...": lambda g, _: setattr(g, "data", g.data * 2),
}
READS: dict[str, Change] = {
    "p.grad.data": lambda g, _: g.data.norm(),
    "p.grad.numpy()": lambda g, _: g.numpy().sum(),
    "copies": lambda g, _: check_copies(g),
    "moved": lambda g, _: g.share_memory_(),
    "assigned": lambda g, p: setattr(p, "grad", g),
}


@on_ranks(2, 3)
def gradients_overwritten_after_backward_are_refused_whatever_the_way() -> None:
    for passes in (1, 2):
        for change in OVERWRITES.values():
            model = make()
            optimizer = sharded(model, backward_passes_per_step=passes)
            for _ in range(passes):
                loss_of(model, batch(0, hvd.rank())).backward()
            p = next(model.parameters())
            assert p.grad is not None
            change(p.grad, p)
            refused(optimizer.step, "changed after backward")


@on_ranks(2)
def gradients_are_read_for_checksums_only_where_a_program_could_write_uncounted() -> None:
    for options in ({}, {"sharded_update": True}):
        model = make()
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), **options)
        for step in range(3):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, batch(step, hvd.rank())).backward()
            optimizer.step()
            watched = [p.grad for p in model.parameters()]
            assert all(isinstance(grad, Watched) and grad._before is None for grad in watched)


@on_ranks(2)
def gradients_that_are_only_read_are_stepped_with() -> None:
    """In two steps, of which the second finds gradients that were read before."""
    model, alone = make(), make()
    optimizer, plain = sharded(model, "momentum"), OPTIMIZERS["momentum"](alone.parameters())
    for step, reading in enumerate([*READS.values(), *READS.values()]):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, batch(step, hvd.rank())).backward()
        for p in model.parameters():
            assert p.grad is not None
            reading(p.grad, p)
        optimizer.step()
        train_alone(alone, plain, range(step, step + 1), torch.float32)
    check_close(model, alone)


@on_ranks(2, 3)
def zeroing_in_place_steps_with_zeros() -> None:
    model, alone = make(), make()
    optimizer, plain = sharded(model, "momentum"), OPTIMIZERS["momentum"](alone.parameters())
    train(model, optimizer, range(2), torch.float32)
    train_alone(alone, plain, range(2), torch.float32)
    for o in (optimizer, plain):
        o.zero_grad(set_to_none=False)
        o.step()
    check_close(model, alone)


# Parameters that are not used.


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.common, self.even, self.odd, self.idle = (nn.Linear(7, 7) for _ in range(4))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        out: torch.Tensor = (self.odd if branch % 2 else self.even)(self.common(x).tanh())
        return out


@on_ranks(2, 3)
def parameters_used_nowhere_are_skipped() -> None:
    """And those used on some ranks get the mean with zeros."""
    x = torch.ones(3, 7)
    model, alone = Branches(), Branches()
    optimizer, plain = sharded(model), OPTIMIZERS["adam"](alone.parameters())
    for step in range(6):
        # Now one branch on all ranks, now different ones.
        branches = [step if step % 3 else step + rank for rank in range(hvd.size())]
        optimizer.zero_grad()
        model(x, branches[hvd.rank()]).square().sum().backward()
        optimizer.step()
        plain.zero_grad()
        total = sum(alone(x, b).square().sum() for b in branches)
        (total / hvd.size()).backward()  # type: ignore[union-attr]
        plain.step()
    check_close(model, alone)
    states, expected = (o.state_dict()["state"] for o in (optimizer, plain))
    steps = {i: int(state["step"]) for i, state in expected.items()}
    assert {i: int(state["step"]) for i, state in states.items()} == steps
    assert max(steps.values()) > min(steps.values())


# State.


def tensors_in(state: Any) -> list[Any]:
    return [each for of_one in state.values() for each in of_one.values() if torch.is_tensor(each)]


def check_states(mine: dict[str, Any], plain: dict[str, Any]) -> None:
    assert mine["state"].keys() == plain["state"].keys()
    for i, state in mine["state"].items():
        assert list(state) == list(plain["state"][i])
        for name, value in state.items():
            other = plain["state"][i][name]
            torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
            assert value.shape == other.shape


@on_ranks(1, 2, 3)
def state_goes_to_the_plain_optimizer_and_back() -> None:
    for kind in ("sgd", "momentum", "adamw"):
        model, alone = make(), make()
        optimizer, plain = sharded(model, kind), OPTIMIZERS[kind](alone.parameters())
        train(model, optimizer, range(3), torch.float32)
        train_alone(alone, plain, range(3), torch.float32)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        saved = torch.load(io.BytesIO(file.getvalue()))
        check_states(saved, plain.state_dict())
        assert saved["param_groups"] == plain.state_dict()["param_groups"]
        assert not tensors_in(optimizer.state)  # no rank keeps the whole of it

        # On from the file: here, as a plain optimizer, and sharded again.
        again, other = copy.deepcopy(model), copy.deepcopy(model)
        resumed = sharded(again, kind)
        resumed.load_state_dict(saved)
        unsharded = OPTIMIZERS[kind](other.parameters())
        unsharded.load_state_dict(saved)
        train(model, optimizer, range(3, 6), torch.float32)
        train(again, resumed, range(3, 6), torch.float32)
        train_alone(other, unsharded, range(3, 6), torch.float32)
        check_close(again, model, 0)
        check_close(other, model)

        # An optimizer that has state already.
        third = make()
        begun = OPTIMIZERS[kind](third.parameters())
        train_alone(third, begun, range(3), torch.float32)
        wrapped: Any = hvd.DistributedOptimizer(begun, sharded_update=True)
        train(third, wrapped, range(3, 6), torch.float32)
        check_close(third, model)


@on_ranks(1, 2, 3, 8)
def a_rank_holds_its_part_of_the_state() -> None:
    for kind, numbers in (("sgd", 0), ("momentum", 1), ("adamw", 2)):
        model = nn.Linear(1000, 333)
        optimizer = sharded(model, kind, bucket_bytes=1 << 30, first_bucket_bytes=1 << 30)
        update = optimizer._shards.update
        whole = sum(bucket[1] for bucket in update.buckets) * 4 * numbers
        assert abs(update.state_bytes - whole / hvd.size()) <= 4 * numbers
        total = fd.all_reduce(np.array([update.state_bytes]))
        assert int(total[0]) == whole
        assert not tensors_in(optimizer.state)


# Programs change state and param_groups in the midst of training.

Change = Callable[[Any, list[Any]], None]


def _put_back(optimizer: Any, parameters: list[Any]) -> None:
    optimizer.param_groups[0]["params"].append(parameters[3])


def _swap_rates(optimizer: Any, _: Any) -> None:
    first, second = optimizer.param_groups
    first["params"], second["params"] = second["params"], first["params"]


def _empty_each(optimizer: Any, parameters: list[Any]) -> None:
    for p in parameters:
        optimizer.state[p] = {}


def _empty_in_place(optimizer: Any, parameters: list[Any]) -> None:
    optimizer.state[parameters[0]].clear()


def _replace_state(optimizer: Any, _: Any) -> None:
    optimizer.state = collections.defaultdict(dict)


def _take_out_and_put_back(optimizer: Any, parameters: list[Any]) -> None:
    state = dict(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update({p: state[p] for p in parameters[1:]})


CHANGES: dict[str, Change] = {
    "delete a group": lambda o, _: o.param_groups.__delitem__(0),
    "reverse groups": lambda o, _: o.param_groups.reverse(),
    "swap what groups have": _swap_rates,
    "cut a group": lambda o, ps: o.param_groups[0].update(params=ps[1:3]),
    "remove one": lambda o, _: o.param_groups[1]["params"].pop(0),
    "put it back elsewhere": _put_back,
}
RESETS: dict[str, Change] = {
    "clear the state": lambda o, _: o.state.clear(),
    "replace the state": _replace_state,
    "empty each state": _empty_each,
    "empty one in place": _empty_in_place,
    "pop a state": lambda o, ps: o.state.pop(ps[1]),
    "delete a state": lambda o, ps: o.state.__delitem__(ps[4]),
    "keep all but one": _take_out_and_put_back,
}
ROUNDS = [
    ["delete a group"],
    ["reverse groups", "clear the state"],
    ["swap what groups have", "pop a state"],
    ["cut a group", "delete a state"],
    ["remove one", "put it back elsewhere", "empty each state"],
    ["replace the state", "replace the state", "empty one in place"],
    ["keep all but one", "clear the state"],
]


def two_groups(model: nn.Module, kind: str) -> Any:
    optimizer: Any = OPTIMIZERS[kind](list(model.parameters())[:3])
    optimizer.add_param_group({"params": list(model.parameters())[3:], "lr": 0.03})
    return optimizer


@on_ranks(1, 2, 3)
def groups_and_states_that_a_program_changes_are_those_of_one_process() -> None:
    for kind in ("decay", "momentum", "adamw"):
        for changes in ROUNDS:
            model, alone = make(), make()
            optimizer = hvd.DistributedOptimizer(
                two_groups(model, kind), sharded_update=True, bucket_bytes=2048
            )
            plain = two_groups(alone, kind)
            train(model, optimizer, range(3), torch.float32)
            train_alone(alone, plain, range(3), torch.float32)
            for at, change in enumerate(changes, 3):
                call = CHANGES.get(change) or RESETS[change]
                if kind != "decay" or change in CHANGES:  # it has no state
                    call(optimizer, list(model.parameters()))
                    call(plain, list(alone.parameters()))
                for each in (model, alone):  # the optimizer does not know all of them any more
                    each.zero_grad()
                train(model, optimizer, range(2 * at, 2 * at + 2), torch.float32)
                train_alone(alone, plain, range(2 * at, 2 * at + 2), torch.float32)
            check_close(model, alone, 1e-5)
            check_same_everywhere(model)


@on_ranks(2)
def a_reset_state_is_saved_as_one_of_no_steps() -> None:
    model = make()
    optimizer = sharded(model)
    train(model, optimizer, range(2), torch.float32)
    optimizer.state.pop(next(model.parameters()))
    assert sorted(optimizer.state_dict()["state"]) == [1, 2, 3, 4, 5]
    assert sorted(optimizer.state_dict()["state"]) == [1, 2, 3, 4, 5]
    train(model, optimizer, range(2, 3), torch.float32)
    steps = [float(each["step"]) for _, each in sorted(optimizer.state_dict()["state"].items())]
    assert steps == [1, 3, 3, 3, 3, 3]


@on_ranks(2, 3)
def groups_and_states_that_ranks_change_differently_are_named() -> None:
    model = make()
    optimizer = sharded(model)
    train(model, optimizer, range(1), torch.float32)
    before = copy.deepcopy(model)
    whole = list(optimizer.param_groups[0]["params"])
    if hvd.rank() == 1:
        del optimizer.param_groups[0]["params"][4]
    line = (
        r"parameter group of 'group 0, parameter 4'|parameter group of '5.weight'.*none on rank 1"
    )
    with pytest.raises(fd.Mismatch, match=line):
        train(model, optimizer, range(1, 2), torch.float32)
    check_close(model, before, 0)
    optimizer.param_groups[0]["params"] = whole
    train(model, optimizer, range(1, 2), torch.float32)
    if hvd.rank() == 0:
        optimizer.state.clear()
    with pytest.raises(fd.Mismatch, match="steps of"):
        optimizer.state_dict()
    with pytest.raises(fd.Mismatch, match="optimizer state"):
        train(model, optimizer, range(2, 3), torch.float32)
    optimizer.state.clear()
    train(model, optimizer, range(2, 3), torch.float32)
    check_same_everywhere(model)


@on_ranks(1, 2)
def what_groups_and_states_cannot_be_is_refused() -> None:
    model = make()
    optimizer = sharded(model)
    train(model, optimizer, range(2), torch.float32)
    p = next(model.parameters())
    saved = copy.copy(optimizer.state)
    for wrong in ({"exp_avg": torch.zeros_like(p)}, dict(optimizer.state[p], step=1)):
        optimizer.state[p] = wrong
        refused(optimizer.step, "optimizer.state of parameter '0.weight' was written by hand")
        refused(optimizer.state_dict, "optimizer.load_state_dict()")
    optimizer.state = saved
    optimizer.param_groups.append(dict(optimizer.param_groups[0], params=[p]))
    refused(optimizer.step, "parameter '0.weight' is in two param_groups, 0 and 1")
    update = optimizer._shards.update
    update.drain()
    settings = [_core.HyperParameters(rate=1.0)]
    refused(lambda: update.begin("update", bytes(6), settings, [0, 0, 1, 0, 0, 0]), "group 1 of 1")
    refused(lambda: update.begin("update", bytes(6), settings, [0]), "a number for each parameter")


@on_ranks(2)
def a_gradient_of_a_parameter_in_no_group_is_left_alone() -> None:
    model = make()
    frozen = next(model.parameters()).requires_grad_(False)
    optimizer = sharded(model)
    train(model, optimizer, range(1), torch.float32)
    optimizer.param_groups[0]["params"] = list(model.parameters())[2:]
    before = [p.detach().clone() for p in model.parameters()]
    frozen.requires_grad_(True)
    loss_of(model, batch(1, hvd.rank())).backward()
    optimizer.step()
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True, True, True]


@on_ranks(2)
def state_dict_on_one_rank_is_a_mismatch() -> None:
    model = make()
    optimizer = sharded(model)
    train(model, optimizer, range(2), torch.float32)  # the third compares no weights
    with pytest.raises(fd.Mismatch, match=r"all_reduce|dtype|count"):
        optimizer.state_dict() if hvd.rank() == 0 else optimizer.step()


# Disagreement.


@on_ranks(2, 3)
def settings_that_differ_are_named() -> None:
    model = make()
    optimizer = sharded(model)
    train(model, optimizer, range(1), torch.float32)
    before = copy.deepcopy(model)
    optimizer.param_groups[0]["lr"] = 0.002 if hvd.rank() == 0 else 0.5
    with pytest.raises(fd.Mismatch, match=r"group 0.*lr 0\.5.* on rank") as caught:
        train(model, optimizer, range(1, 2), torch.float32)
    assert caught.value.field == "settings of parameter group 0"
    check_close(model, before, 0)
    optimizer.param_groups[0]["lr"] = 0.002
    with pytest.raises(fd.Mismatch, match=r"task .*norm on rank.*step|task .*step on rank.*norm"):
        optimizer.clip_grad_norm_(1.0) if hvd.rank() == 0 else optimizer.step()
    train(model, optimizer, range(1, 2), torch.float32)
    check_same_everywhere(model)


@on_ranks(2)
def sharding_on_one_rank_alone_is_named() -> None:
    model = make()
    with pytest.raises(fd.Mismatch, match="sharded update by adam"):
        hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](model.parameters()), sharded_update=hvd.rank() == 0
        )


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, __: torch.Tensor) -> torch.Tensor:
        raise ValueError("broken on purpose")


@on_ranks(2, 3)
def a_backward_that_raises_is_told_to_the_others() -> None:
    model = make()
    optimizer = sharded(model)
    before = copy.deepcopy(model)
    x = batch(0, hvd.rank())
    if hvd.rank() == 1:
        y = Breaks.apply(model[:3](x))
        with pytest.raises(ValueError, match="broken on purpose"):
            model[3:](y).sum().backward()
        assert all(p.grad is None for p in model.parameters())
    else:
        loss_of(model, x).backward()
        with pytest.raises(fd.RemoteError, match="abandoned on rank 1"):
            optimizer.step()
    check_close(model, before, 0)
    train(model, optimizer, range(2), torch.float32)
    check_same_everywhere(model)


# Refusals.


@on_ranks(2)
def what_cannot_be_sharded_is_refused() -> None:
    def wrap(make_it: Callable[[Any], Any], model: nn.Module, **options: Any) -> Callable[[], Any]:
        optimizer = make_it(model.parameters())
        return lambda: hvd.DistributedOptimizer(optimizer, sharded_update=True, **options)

    class MyAdam(torch.optim.Adam):
        pass

    known = "updates by SGD, Adam, AdamW"
    refused(wrap(lambda p: torch.optim.RMSprop(p), make()), f"RMSprop; it {known}")
    refused(wrap(MyAdam, make()), f"MyAdam; it {known}")
    patched: Any = OPTIMIZERS["sgd"](make().parameters())
    patched.step = lambda: None
    refused(lambda: hvd.DistributedOptimizer(patched, sharded_update=True), "step was replaced")
    patched.step = types.MethodType(lambda _: None, patched)
    torch.optim.lr_scheduler.ConstantLR(patched)
    refused(lambda: hvd.DistributedOptimizer(patched, sharded_update=True), "step was replaced")
    refused(wrap(lambda p: torch.optim.Adam(p, amsgrad=True), make()), "amsgrad=True")
    half = make(torch.bfloat16)
    refused(wrap(OPTIMIZERS["adam"], half), "bfloat16; a sharded update takes float32 and float64")
    refused(wrap(OPTIMIZERS["adam"], make(), compression=hvd.Compression.fp16), "compression")
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight.data = tied[0].weight.data
    refused(wrap(OPTIMIZERS["sgd"], tied), "share memory")

    model = make()
    optimizer = sharded(model)
    refused(lambda: optimizer.add_param_group({"params": []}), "not supported")
    refused(lambda: copy.copy(optimizer), "copied")
    refused(lambda: sharded(model) and hvd.DistributedOptimizer(optimizer), "already")
    refused(lambda: hvd.broadcast_optimizer_state(optimizer, 0), "part of the state")


@on_ranks(2)
def sparse_gradients_are_refused_unless_dense_is_asked_for() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    optimizer = sharded(table, "sgd")
    refused(table(torch.tensor([1, 2])).sum().backward, "sparse")
    optimizer.step()
    with torch.no_grad():
        table.weight.zero_()
    optimizer = sharded(table, "sgd", sparse_as_dense=True)
    table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert table.weight[1, 0].item() == pytest.approx(-0.05)
    assert table.weight[0, 0].item() == 0


@on_ranks(2)
def a_parameter_that_was_converted_is_refused() -> None:
    model = make()
    optimizer = sharded(model)
    loss_of(model, batch(0, 0)).backward()
    parameter = next(model.parameters())
    home = parameter.data
    parameter.data = home.double()
    refused(optimizer.step, "'0.weight' was converted, reshaped or moved to or on a device")
    parameter.data = home


@on_ranks(2)
def a_parameter_thawed_later_is_refused() -> None:
    model = make()
    model[0].weight.requires_grad_(False)
    optimizer = sharded(model)
    train(model, optimizer, range(1), torch.float32)
    model[0].weight.requires_grad_(True)
    loss_of(model, batch(0, 0)).backward()
    refused(optimizer.step, "was frozen")


test_on_ranks = make_tests(__name__, "torch")
