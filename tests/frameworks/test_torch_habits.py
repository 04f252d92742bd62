"""Common uses of an optimizer: two models, schedulers, loaders, samplers, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import begin_torch, make_tests, on_ranks
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torch_work import failing

import farandole as fd
import farandole.torch as hvd
from wrong_arguments import problems_in

WIDTH = 8


def prepare() -> None:
    begin_torch()
    warnings.simplefilter("error")  # of schedulers that are stepped in a wrong order, for one


def mlp(seed: int = 3, out: int = 4) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, out))


def batch(step: int) -> torch.Tensor:
    return torch.randn(2 * hvd.size(), WIDTH, generator=torch.Generator().manual_seed(step))


def mine(whole: torch.Tensor) -> torch.Tensor:
    return whole[hvd.rank() :: hvd.size()]


def same_as(model: nn.Module, whole: nn.Module) -> None:
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def wrap(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


# -- several models and optimizers ---------------------------------------------------------------


def play(distributed: bool) -> tuple[nn.Module, nn.Module]:
    """A generator and a discriminator take turns; each turn's backward reaches both."""
    generator, discriminator = mlp(1, WIDTH), mlp(2, 1)
    optimizers: list[Any] = [
        torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-3) for m in (generator, discriminator)
    ]
    if distributed:
        optimizers = [hvd.DistributedOptimizer(o) for o in optimizers]
    of_generator, of_discriminator = optimizers
    for step in range(4):
        real, noise = batch(2 * step), batch(2 * step + 1)
        if distributed:
            real, noise = mine(real), mine(noise)
        fake = generator(noise)
        of_discriminator.zero_grad()
        nn.functional.softplus(-discriminator(real)).mean().backward()
        nn.functional.softplus(discriminator(fake.detach())).mean().backward()
        of_discriminator.step()
        of_generator.zero_grad()
        nn.functional.softplus(-discriminator(fake)).mean().backward()
        of_generator.step()
    return generator, discriminator


@on_ranks(2, 3)
def a_gan_trains_as_on_one_rank() -> None:
    for model, whole in zip(play(True), play(False), strict=True):
        same_as(model, whole)


@on_ranks(2)
def several_optimizers_may_share_a_model() -> None:
    model, whole = mlp(), mlp()

    def optimizers_of(net: nn.Sequential) -> list[Any]:
        return [
            torch.optim.SGD(net[0].parameters(), lr=0.1),
            torch.optim.AdamW(net[2].parameters(), lr=0.01, eps=1e-3),
        ]

    apart = [hvd.DistributedOptimizer(o) for o in optimizers_of(model)]
    reference = optimizers_of(whole)
    for step in range(4):
        x = batch(step)
        for net, optimizers, part in ((model, apart, mine(x)), (whole, reference, x)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            net(part).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    same_as(model, whole)


# -- learning rates --------------------------------------------------------------------------------

SCHEDULERS: dict[str, Any] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=6),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[2],
    ),
}


@on_ranks(1, 2)
def learning_rate_schedulers_go_on_working() -> None:
    """Made before the optimizer is wrapped, or after; warnings of a wrong order are errors here."""
    for name, make in SCHEDULERS.items():
        for before in (True, False):
            model, whole = mlp(), mlp()
            plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = make(plain) if before else None
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
            scheduler = scheduler or make(optimizer)
            reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
            its = make(reference)
            for step in range(5):
                x = batch(step)
                losses = []
                for net, o, part in ((model, optimizer, mine(x)), (whole, reference, x)):
                    o.zero_grad()
                    loss = net(part).square().mean()
                    loss.backward()
                    o.step()
                    losses.append(loss.detach())
                metric = (hvd.allreduce(losses[0]), losses[1]) if "Plateau" in name else ()
                for which, s in enumerate((scheduler, its)):
                    s.step(*(round(float(m), 4) for m in metric[which : which + 1]))
                assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"], name
            same_as(model, whole)


@on_ranks(2)
def forgetting_to_step_is_warned_of_as_on_one_rank() -> None:
    optimizer = wrap(mlp())
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="before `optimizer"):
        scheduler.step()


# -- steps of a program ----------------------------------------------------------------------------


def call_in_a_function(optimizer: Any, run: Callable[[], None]) -> None:
    own = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        run()
        return own(*args, **kwargs)

    optimizer.step = step


def call_as_a_method(optimizer: Any, run: Callable[[], None]) -> None:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        run()
        return type(self).step(self, *args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)


def call_under_a_scheduler(optimizer: Any, run: Callable[[], None]) -> None:
    call_as_a_method(optimizer, run)
    lr_scheduler.ConstantLR(optimizer, 1.0)


def update_by_hand(optimizer: Any, run: Callable[[], None]) -> None:
    """It has arguments of its own, and calls no step."""

    def step(_: Any, decay: float = 1.0) -> None:
        run()
        for p in optimizer.param_groups[0]["params"]:
            p.data = decay * (p.data - 0.1 * p.grad)

    optimizer.step = functools.partial(step, None)


STEPS = [call_in_a_function, call_as_a_method, call_under_a_scheduler, update_by_hand]


@on_ranks(1, 2)
def a_step_that_a_program_put_on_the_optimizer_runs_inside_of_ours() -> None:
    for replace in STEPS:
        for options in ({}, {"op": hvd.Adasum}, {"backward_passes_per_step": 2}):
            model, calls = mlp(), []
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
            replace(plain, lambda calls=calls: calls.append(1))
            optimizer: Any = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
            if replace is call_as_a_method:  # schedulers take no other
                lr_scheduler.ConstantLR(optimizer, 1.0)
            for step in range(3):  # where there are two passes to a step, each window is cut
                optimizer.zero_grad()
                model(mine(batch(step))).square().mean().backward()
                if replace is update_by_hand and "backward_passes_per_step" in options:
                    refused = pytest.raises(fd.InvalidArgument, match="not reduced")
                    with refused if hvd.size() > 1 else contextlib.nullcontext():
                        optimizer.step(0.9)
                    break
                optimizer.step(*([0.9] if replace is update_by_hand else []))
            else:
                assert len(calls) == 3, (replace, options)
                for p in model.parameters():
                    rows = hvd.allgather(p.detach()[None])
                    assert torch.equal(rows, p.detach().expand_as(rows)), (replace, options)


@on_ranks(2)
def a_step_that_a_program_put_on_the_optimizer_updates_when_it_wants() -> None:
    """It takes the model, and goes on to the optimizer's in each second call."""
    model = mlp()
    plain: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    update, calls = plain.step, []

    def step(given: torch.nn.Module) -> None:
        assert given is model
        calls.append(1)
        if len(calls) % 2 == 0:
            update()
            plain.zero_grad()

    plain.step = step
    optimizer: Any = hvd.DistributedOptimizer(
        plain, model.named_parameters(), backward_passes_per_step=2, op=hvd.Sum
    )
    serial = mlp()
    alone = torch.optim.SGD(serial.parameters(), lr=0.1)
    for number in range(4):
        model(mine(batch(number))).square().sum().backward()
        optimizer.step(model)
        serial(batch(number)).square().sum().backward()
        if number % 2:
            alone.step()
            alone.zero_grad()
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(p, q)
    held = copy.deepcopy({"step": optimizer.step})
    assert copy.copy(held["step"]) is held["step"]


class Closure:
    """A closure that is an object, and leaves a cut window of two passes."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.calls = model, 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        loss = self.model(mine(batch(self.calls))).square().mean()
        loss.backward()
        return loss


@on_ranks(2)
def a_scheduler_that_came_first_changes_no_step() -> None:
    found = []
    for scheduled in (False, True):
        model = mlp()
        plain: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        if scheduled:
            lr_scheduler.ConstantLR(plain, 1.0)
        optimizer: Any = hvd.DistributedOptimizer(
            plain, model.named_parameters(), backward_passes_per_step=2
        )
        norms: list[float] = []
        optimizer.register_step_pre_hook(
            lambda *_, model=model, norms=norms: norms.append(
                float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
            )
        )
        closure = Closure(model)
        for _ in range(3):
            optimizer.zero_grad()
            optimizer.step(closure)
        optimizer.zero_grad()
        model(mine(batch(9))).square().mean().backward()
        optimizer.step()
        found.append([*norms, *(p.detach().sum().item() for p in model.parameters())])
        for p in model.parameters():
            rows = hvd.allgather(p.detach()[None])
            assert torch.equal(rows, p.detach().expand_as(rows)), scheduled
    assert found[0] == found[1]


@on_ranks(1, 2)
def step_hooks_run_once_also_after_state_was_loaded() -> None:
    for options in ({}, {"op": hvd.Adasum}, {"sharded_update": True}):
        optimizer, calls = wrap(mlp(), **options), []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("after"))
        for _ in range(2):
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        assert calls == ["before", "after"] * 2, options


# -- data ----------------------------------------------------------------------------------------


class Numbers(Dataset[int]):
    """Tells a collective of each item when it is `sending`."""

    def __init__(self, count: int, sending: bool = False) -> None:
        self.count, self.sending = count, sending

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> int:
        if self.sending:
            hvd.allreduce(torch.ones(1))
        return i


def train_on(loader: DataLoader[int]) -> list[int]:
    """A step for each batch; the numbers that this rank saw."""
    model = nn.Linear(1, 1)
    hvd.broadcast_parameters(model.state_dict(), 0)
    optimizer = wrap(model)
    seen: list[int] = []
    for numbers in loader:
        optimizer.zero_grad()
        model(numbers[:, None].float()).mean().backward()
        optimizer.step()
        seen += numbers.tolist()
    weights = hvd.allgather(model.weight.detach())
    assert torch.equal(weights, weights[:1].expand_as(weights))
    return seen


@on_ranks(2, 3)
def a_distributed_sampler_gives_every_rank_as_many_batches() -> None:
    data = Numbers(7)  # no number of ranks divides it
    for drop_last in (False, True):
        sampler: DistributedSampler[int] = DistributedSampler(
            data, num_replicas=hvd.size(), rank=hvd.rank(), drop_last=drop_last
        )
        orders = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            seen = train_on(DataLoader(data, batch_size=2, sampler=sampler))
            everyones = [set(part) for part in hvd.allgather_object(seen)]
            assert len(everyones) == hvd.size()
            union = set().union(*everyones)
            assert (len(union) == 7) is not drop_last
            orders.append(seen)
        assert orders[0] != orders[1]


def use_workers(context: str) -> None:
    """Loaders' workers bring batches while ranks train; one that calls a collective is told why it
    cannot, and the rank goes on."""
    how: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": context, "timeout": 90}
    seen = train_on(DataLoader(Numbers(6), batch_size=2, persistent_workers=True, **how))
    assert seen == list(range(6))
    with pytest.raises(Exception, match=r"ForkedEngine|NotInitialized|has not been init|pid") as no:
        list(DataLoader(Numbers(1, sending=True), **how))
    assert "worker process 0" in str(no.value)
    total = hvd.allreduce(torch.ones(1), op=hvd.Sum)
    assert total.item() == hvd.size()
    assert not list(Path("/dev/shm").glob("*farandole*"))


@on_ranks(2)
def forked_workers_do_not_inherit_the_engine() -> None:
    use_workers("fork")


@on_ranks(2)
def spawned_workers_know_no_engine() -> None:
    use_workers("spawn")


# -- checkpoints ----------------------------------------------------------------------------------


def steps(model: nn.Module, optimizer: Any, which: range, whole: bool = False) -> None:
    for step in which:
        optimizer.zero_grad()
        model(batch(step) if whole else mine(batch(step))).square().mean().backward()
        optimizer.step()


@on_ranks(2, 3)
def training_resumes_from_what_rank_0_has_saved() -> None:
    """The model, the optimizer's state and the scheduler's go from rank 0 to all."""
    model = mlp()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3))
    scheduler = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    steps(model, optimizer, range(2))
    scheduler.step()
    scheduler.step()
    file = io.BytesIO()
    if hvd.rank() == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
             "scheduler": scheduler.state_dict()},
            file,
        )  # fmt: skip

    fresh = mlp(seed=hvd.rank())  # each rank begins anew, with weights of its own
    plain = torch.optim.Adam(fresh.parameters(), lr=1.0, eps=1e-3)
    saved: Any = None
    if hvd.rank() == 0:
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        fresh.load_state_dict(saved["model"])
        plain.load_state_dict(saved["optimizer"])
    hvd.broadcast_parameters(fresh.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(plain, root_rank=0)
    of_scheduler = hvd.broadcast_object(saved["scheduler"] if saved else None, root_rank=0)
    resumed = hvd.DistributedOptimizer(plain, fresh.named_parameters())
    its_scheduler = lr_scheduler.StepLR(resumed, 2, gamma=0.5)
    its_scheduler.load_state_dict(of_scheduler)
    assert resumed.param_groups[0]["lr"] == 0.005

    steps(model, optimizer, range(2, 4))
    steps(fresh, resumed, range(2, 4))
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(p, q), "the same bits as without the interruption"


@on_ranks(2)
def a_checkpoint_loads_into_a_wrapped_optimizer() -> None:
    """As where every rank reads the file."""
    model, other = mlp(), mlp()
    optimizer, again = wrap(model), wrap(other)
    steps(model, optimizer, range(2))
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as from a file
    steps(model, optimizer, range(2, 4))
    steps(other, again, range(2, 4))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# -- mixed precision ------------------------------------------------------------------------------


@on_ranks(2)
def autocast_to_bfloat16_trains_as_on_one_rank() -> None:
    model, whole = mlp(), mlp()
    optimizer = wrap(model)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        x = batch(step)
        for net, o, part in ((model, optimizer, mine(x)), (whole, reference, x)):
            o.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = net(part)
            assert out.dtype == torch.bfloat16
            out.float().square().mean().backward()
            o.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert p.dtype == torch.float32
        torch.testing.assert_close(p, q, rtol=0.05, atol=0.01)


@on_ranks(2)
def a_scaler_skips_for_two_optimizers_when_one_rank_overflows() -> None:
    """Both of a backward's optimizers, on all ranks, in the step that overflows and in no other."""
    model = mlp()
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD(part.parameters(), lr=0.1))
        for part in (model[0], model[2])
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
    for step in range(4):
        before = [p.detach().clone() for p in model.parameters()]
        bad = step == 1 and hvd.rank() == 1
        loss = model(mine(batch(step))).square().mean() * (float("inf") if bad else 1.0)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert same == [step == 1] * 4
        assert scaler.get_scale() == (16.0 if step < 1 else 8.0)


# -- nothing in silence ----------------------------------------------------------------------------


def the_wrapped(kind: str, model: nn.Module) -> Any:
    options = {"plain": {}, "sharded": {"sharded_update": True}, "adasum": {"op": hvd.Adasum}}
    return wrap(model, **options[kind])


def trained(model: nn.Module, optimizer: Any, of: Any, *, passes: int = 1) -> nn.Module:
    for step in range(2):
        optimizer.zero_grad()
        for i in range(passes):
            model(of(batch(7 * step + i))).square().mean().backward()
        optimizer.step()
    return model


@contextmanager
def compiled_autograd() -> Iterator[None]:
    """It captures the graph, and runs that as it is; a compiler takes seconds."""
    from torch._dynamo.compiled_autograd import _enable

    with warnings.catch_warnings(), _enable(lambda graph: graph):
        warnings.simplefilter("ignore")  # Dynamo looks at everything
        yield


@on_ranks(2)
def compiled_functions_take_gradients_that_stand() -> None:
    """For a log, after the step; they are of a class of their own until something is compiled."""
    from farandole.torch._training import watched

    for options in ({}, {"sharded_update": True}):
        watched._state.compiles = False
        norm = torch.compile(lambda rows: sum(row.norm() ** 2 for row in rows), backend="aot_eager")
        model = nn.Linear(3, 2)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **options
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
            gradients = [p.grad for p in model.parameters()]
            right = sum(float(g.norm()) ** 2 for g in gradients)
            assert float(norm(gradients)) == pytest.approx(right)
        assert watched._state.compiles
    watched._state.compiles = False


@on_ranks(2)
def training_under_compiled_autograd_is_the_same() -> None:
    """It calls hooks, and drops the callbacks that they queue for the end of backward."""
    for kind, passes in [("plain", 1), ("plain", 2), ("sharded", 1)]:
        model, whole = mlp(), mlp()
        optimizer = the_wrapped(kind, model)
        if passes > 1:
            optimizer.set_backward_passes_per_step(passes)
        with compiled_autograd():
            trained(model, optimizer, mine, passes=passes)
        reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
        same_as(model, trained(whole, reference, lambda x: x, passes=passes))


@on_ranks(2)
def what_compiled_autograd_left_unreduced_is_clipped_and_not_changed_by_hand() -> None:
    model, whole = mlp(), mlp()
    optimizer = wrap(model)
    reference = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    before = copy.deepcopy(model)

    def backward(on: nn.Module, x: torch.Tensor) -> None:
        on.zero_grad()
        on(x).square().mean().backward()

    with compiled_autograd():
        for uncounted in (False, True):
            backward(model, mine(batch(0)))
            if hvd.rank() == 0:
                for p in model.parameters():
                    (p.grad.data if uncounted else p.grad).clamp_(max=1e-3)
                why = r"call\s+optimizer.synchronize\(\) after"
                with pytest.raises(fd.InvalidArgument, match=why):
                    optimizer.step()
            else:
                with pytest.raises(fd.RemoteError, match="abandoned on rank 0"):
                    optimizer.step()
            same_as(model, before)
        backward(model, mine(batch(0)))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    backward(whole, batch(0))
    nn.utils.clip_grad_norm_(whole.parameters(), 1e-3)
    reference.step()
    same_as(model, whole)


@on_ranks(2)
def a_step_after_a_backward_that_failed_is_refused() -> None:
    model = mlp()
    optimizer = wrap(model, bucket_bytes=0)
    hidden = failing(model[0](mine(batch(0))), hvd.rank() == 1)
    with pytest.raises(ZeroDivisionError if hvd.rank() == 1 else fd.RemoteError):
        model[2](hidden).square().mean().backward()
    for _ in range(2):
        with pytest.raises(fd.InvalidArgument, match=r"(?s)backward\(\) failed, .*zero_grad"):
            optimizer.step()
    trained(model, optimizer, mine)
    optimizer.step()  # of reduced gradients that stand


@on_ranks(2)
def gradients_that_no_hook_saw_are_reduced_by_step() -> None:
    for kind in "plain", "sharded":
        model = mlp()
        optimizer = the_wrapped(kind, model)
        for p in model.parameters():
            p.grad = torch.full_like(p, float(hvd.rank()))
        before = copy.deepcopy(model)
        optimizer.step()
        for p, old in zip(model.parameters(), before.parameters(), strict=True):
            torch.testing.assert_close(p, old - 0.1 * 0.5)


@on_ranks(2, 3)
def gradients_set_beside_those_of_a_backward_are_reduced_by_step() -> None:
    """Backward reaches these parameters on no rank; `step()` or `synchronize()` comes first."""
    options: list[dict[str, Any]] = [
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Sum},
    ]
    for option in options:
        for asks in False, True:
            model = mlp()
            hvd.broadcast_parameters(model.state_dict(), 0)
            optimizer = wrap(model, **option)
            for _ in range(2):
                optimizer.zero_grad()
                model[0](mine(batch(0))).sum().backward()
                reduced = [p.grad.clone() for p in model[0].parameters()]
                for p in model[2].parameters():
                    p.grad = torch.full_like(p, float(hvd.rank()))
                with optimizer.skip_synchronize() if asks else contextlib.nullcontext():
                    if asks:
                        optimizer.synchronize()
                    optimizer.step()
                total = hvd.size() * (hvd.size() - 1) / 2
                for p in model[2].parameters():
                    mean = total / (1 if "op" in option else hvd.size())
                    torch.testing.assert_close(p.grad, torch.full_like(p, mean))
                for p, grad in zip(model[0].parameters(), reduced, strict=True):
                    assert torch.equal(p.grad, grad)  # once


@on_ranks(2)
def a_sparse_gradient_set_beside_those_of_a_backward_is_refused() -> None:
    model = mlp()
    optimizer = wrap(model)
    model[0](mine(batch(0))).sum().backward()
    model[2].weight.grad = torch.zeros_like(model[2].weight).to_sparse()
    with pytest.raises(fd.InvalidArgument, match=r"2\.weight' is sparse"):
        optimizer.step()


@on_ranks(2)
def training_a_model_that_the_optimizer_does_not_have_is_refused() -> None:
    for kind in "plain", "sharded", "adasum":
        model = mlp()
        optimizer = the_wrapped(kind, model)
        model = copy.deepcopy(model)  # as is, too, with load_state_dict(assign=True)
        with pytest.raises(fd.InvalidArgument, match=r"never had a gradient \('0.weight' and the"):
            trained(model, optimizer, mine)


@on_ranks(2)
def steps_without_a_backward_stay_what_they_are() -> None:
    for kind in "plain", "sharded", "adasum":
        model, other = mlp(), mlp(seed=4)
        optimizer = the_wrapped(kind, model)
        of_other = torch.optim.SGD(other.parameters(), lr=0.1)  # it has the gradients, not nobody
        before = copy.deepcopy(model)
        for _ in range(3):
            optimizer.step()
            optimizer.zero_grad()
            other(mine(batch(0))).sum().backward()
        same_as(model, before)
        del of_other


# -- copies ----------------------------------------------------------------------------------------


@on_ranks(2)
def a_copy_of_a_model_is_a_plain_one() -> None:
    for kind in "plain", "sharded", "adasum":
        model = mlp()
        optimizer = the_wrapped(kind, model)
        for step in range(2):
            optimizer.zero_grad()
            model(mine(batch(step))).square().mean().backward()
            ema = torch.optim.swa_utils.AveragedModel(model)
            if hvd.rank() == 0:  # nobody else knows of it
                for p, q in zip(model.parameters(), ema.parameters(), strict=True):
                    p, q = p.detach(), q.detach()
                    assert p.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
                before = [p.grad.clone() for p in model.parameters()]
                alone = torch.optim.SGD(ema.parameters(), lr=0.1)
                ema(batch(9)).sum().backward()
                alone.step()
                assert all(map(torch.equal, before, (p.grad for p in model.parameters())))
            optimizer.step()


@on_ranks(2)
def a_copy_of_a_model_that_holds_its_optimizer_has_the_plain_one() -> None:
    for kind in "plain", "adasum":
        model: Any = mlp()
        model.optimizer = the_wrapped(kind, model)
        trained(model, model.optimizer, mine)
        if hvd.rank() == 0:  # nobody else knows of it
            again, reference = copy.deepcopy(model), mlp()
            assert type(again.optimizer) is torch.optim.SGD
            reference.load_state_dict(model.state_dict())
            plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
            plain.load_state_dict(copy.deepcopy(model.optimizer.state_dict()))
            trained(again, again.optimizer, mine)
            same_as(again, trained(reference, plain, mine))
        trained(model, model.optimizer, mine)
    with pytest.raises(fd.InvalidArgument, match="copy the model without it"):
        copy.deepcopy(the_wrapped("sharded", mlp()))


@on_ranks(2)
def an_optimizer_knows_its_parameters_names_by_horovods_word() -> None:
    for kind in "plain", "sharded", "adasum":
        model = mlp()
        names = the_wrapped(kind, model)._parameter_names
        assert names == {p: n for n, p in model.named_parameters()}


@on_ranks(2)
def what_cannot_be_distributed_says_so() -> None:
    lbfgs = torch.optim.LBFGS(mlp().parameters())
    with pytest.raises(fd.InvalidArgument, match="LBFGS is not supported: its line search"):
        hvd.DistributedOptimizer(lbfgs)
    assert os.environ["RANK"] == str(hvd.rank())


@on_ranks(2)
def a_wrong_argument_is_an_error_of_ours() -> None:
    model = mlp()

    def settle(name: str, result: Any) -> None:
        if "_async" in name:
            result() if name.startswith("sparse") else hvd.synchronize(result)

    right = {
        "tensor": lambda: torch.ones(2), "tensors": lambda: [torch.ones(2)], "name": "a name",
        "obj": 1, "params": model.state_dict(), "module": model, "process_set": lambda: [0],
        "optimizer": lambda: torch.optim.SGD(mlp().parameters(), lr=0.1), "ranks_or_comm": [0],
        "ext_name": "horovod.torch", "num_features": 3,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `average` is deprecated
        problems = problems_in(
            hvd, right, apart=["init", "shutdown", "start_timeline", "stop_timeline"],
            also={"check_extension": (ImportError,)}, settle=settle,
        )  # fmt: skip
    assert problems == [], "\n".join(problems)
    barrier_and_the_next_call_work()


def barrier_and_the_next_call_work() -> None:
    hvd.barrier()
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2


test_on_ranks = make_tests(__name__, "torch", prepare=prepare)
