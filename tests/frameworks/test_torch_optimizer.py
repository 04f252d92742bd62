"""DistributedOptimizer beyond equality: bits, memory, failures, disagreement, refusals."""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import begin_torch, make_tests, on_ranks, raises, refused
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch_work import failing, wrap

import farandole as fd
import farandole.torch as hvd
from harness import World, mappings

WIDTH = 16


def make(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def part(seed: int = 5) -> torch.Tensor:
    torch.manual_seed(seed + hvd.rank())
    return torch.randn(4, WIDTH)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def expected_mean(seed: int = 5) -> list[torch.Tensor]:
    """Computed here, from every rank's part."""
    model = make()
    sums: list[torch.Tensor] = []
    for rank in range(hvd.size()):
        model.zero_grad()
        torch.manual_seed(seed + rank)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        mine = gradients(model)
        sums = [a + b for a, b in zip(sums, mine, strict=True)] if sums else mine
    return [s / hvd.size() for s in sums]


def check_step(model: nn.Module, optimizer: Any) -> None:
    """A step on make()'s own weights works."""
    optimizer.zero_grad()
    model(part()).square().mean().backward()
    for mine, mean in zip(gradients(model), expected_mean(), strict=True):
        torch.testing.assert_close(mine, mean)


# Bits and memory.


@on_ranks(2, 3, 4)
def bits_do_not_depend_on_bucket_sizes() -> None:
    seen = []
    for bucket_bytes in (0, 4096, 1 << 20, 1 << 40):
        for first in (0, bucket_bytes):
            for overlap in (True, False):
                model = make()
                optimizer = wrap(
                    model, bucket_bytes=bucket_bytes, first_bucket_bytes=first, overlap=overlap
                )
                for step in range(2):
                    optimizer.zero_grad()
                    (model(part(step)) * 1e3).square().sum().backward()
                    seen.append((step, gradients(model)))
                    optimizer.step()
    for step, grads in seen:
        for mine, others in zip(grads, seen[step][1], strict=True):
            assert torch.equal(mine, others)


@on_ranks(2)
def steady_steps_allocate_nothing() -> None:
    model = make()
    optimizer = wrap(model, bucket_bytes=2000)

    def step() -> None:
        optimizer.zero_grad()
        model(part()).square().mean().backward()
        optimizer.step()

    for _ in range(10):
        step()
    before, lines = fd.world().counters(), [mappings()]
    for _ in range(3):
        for _ in range(100):
            step()
        lines.append(mappings())
    after = fd.world().counters()
    for what in ("arena_allocations", "arena_bytes", "streams"):
        assert after[what] == before[what], what
    # A thread's first malloc, whenever that is, maps an arena; what leaks does so every time.
    assert any(a == b for a, b in itertools.pairwise(lines)), lines


@on_ranks(2)
def gradients_are_views_of_the_buckets() -> None:
    model = make()
    optimizer = wrap(model)
    places = set()
    for _ in range(3):
        check_step(model, optimizer)
        places.add(tuple(p.grad.data_ptr() for p in model.parameters()))
    assert len(places) == 1


# Parameters that not every rank or step uses.


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.a, self.b, self.c = (nn.Linear(WIDTH, 2) for _ in range(3))


@on_ranks(2, 3)
def a_parameter_used_on_one_rank_is_reduced_on_all() -> None:
    model = Two()
    optimizer = wrap(model, bucket_bytes=0)
    for _ in range(2):
        optimizer.zero_grad()
        layer = model.a if hvd.rank() == 0 else model.b
        layer(torch.ones(1, WIDTH)).sum().backward()
        of_a = torch.full((2, WIDTH), 1 / hvd.size())
        torch.testing.assert_close(model.a.weight.grad, of_a)
        torch.testing.assert_close(model.b.weight.grad, of_a * (hvd.size() - 1))
        assert model.c.weight.grad is None
        optimizer.step()


@on_ranks(2)
def a_rank_without_any_gradient_takes_part_in_step() -> None:
    model = make()
    optimizer = wrap(model)
    for _ in range(2):
        optimizer.zero_grad()
        if hvd.rank() == 0:
            model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        both = hvd.allgather(gradients(model)[0][None])
        assert torch.equal(both[0], both[1])


@on_ranks(2)
def a_gradient_that_stays_is_kept_when_a_later_pass_does_not_touch_it() -> None:
    model = Two()
    optimizer = wrap(model)
    x = torch.full((1, WIDTH), float(hvd.rank()))
    model.a(x).sum().backward()
    model.b(x).sum().backward()
    for layer in (model.a, model.b):
        torch.testing.assert_close(layer.weight.grad, torch.full((2, WIDTH), 0.5))
    optimizer.step()


class Growing(nn.Module):
    """Has a parameter without elements at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(2, 2), nn.Parameter(torch.empty(0, 2))
        nn.init.ones_(self.layer.weight)
        nn.init.ones_(self.layer.bias)

    def grow(self) -> None:
        self.extra.data = torch.ones(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) * (1 + self.extra.sum(0))
        return out


@on_ranks(2, 3)
def a_parameter_that_was_empty_and_has_grown_is_reduced() -> None:
    model, alone = Growing(), Growing()
    optimizer = wrap(model, momentum=0.0)
    serial = torch.optim.SGD(alone.parameters(), lr=0.01)
    for step in range(5):
        for each, it in ((model, optimizer), (alone, serial)):
            if step == 2:
                each.grow()
            it.zero_grad()
            parts = range(hvd.size()) if each is alone else [hvd.rank()]
            losses = [each(torch.full((1, 2), 1.0 + r)).square().sum() for r in parts]
            torch.stack(losses).mean().mul(1e-3).backward()
            it.step()
        for p, expected in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(p, expected)


@on_ranks(2)
def one_of_a_sharded_update_that_has_grown_is_refused() -> None:
    model = Growing()
    optimizer = wrap(model, sharded_update=True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.grow()
    model(torch.ones(1, 2)).sum().backward()
    refused(optimizer.step, "of shape (3, 2) was frozen, or had no elements")


@on_ranks(2)
def parameters_that_are_frozen_by_turns_are_reduced() -> None:
    """Also one that was frozen when the optimizer was made, and whose gradients come first."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[1].weight)
    alone = copy.deepcopy(model)
    model[1].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.125), model.named_parameters()
    )
    serial = torch.optim.SGD(alone.parameters(), lr=0.125)
    for trained in ([0], [1], [0], [0, 1]):
        for each, it, x in (
            (model, optimizer, torch.full((1, 2), 1.0 + hvd.rank())),
            (alone, serial, torch.full((1, 2), 1.5)),  # the loss is linear in it
        ):
            for i, layer in enumerate(each):
                layer.requires_grad_(i in trained)
            it.zero_grad()
            each(x).sum().backward()
            it.step()
        for p, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p, expected)


@on_ranks(2)
def gradients_that_are_lazily_conjugated_are_reduced() -> None:
    for in_place in (1, 1 << 20):
        turn = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([turn], lr=1.0), [("turn", turn)], in_place_bytes=in_place
        )
        turn.conj().backward(torch.full((3,), complex(0, 1 + hvd.rank())).to(torch.complex64))
        assert torch.equal(turn.grad, torch.full((3,), -1.5j))
        optimizer.step()
        assert torch.equal(turn, torch.full((3,), 1 + 1.5j))


@on_ranks(2)
def a_parameter_that_has_been_resized_or_converted_is_reduced_as_it_is() -> None:
    """A gradient that is reduced where it lies, too."""
    for in_place in (1, 1 << 20):
        weight = nn.Parameter(torch.zeros(4, 2))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), [("weight", weight)], in_place_bytes=in_place
        )
        for now in (torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(4, 2).double()):
            weight.data = now
            optimizer.zero_grad()
            (weight * (1 + hvd.rank())).sum().backward()
            optimizer.step()
            assert torch.equal(weight, torch.full_like(now, -1.5))


@on_ranks(2, 3)
def a_first_gradient_that_one_rank_refuses_is_told_to_the_others() -> None:
    weight = nn.Parameter(torch.ones(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    refuses = hvd.rank() == 1
    kind, words = (
        (fd.InvalidArgument, "is part of a graph") if refuses else (fd.RemoteError, "on rank 1")
    )
    with raises(kind, words):
        weight.square().sum().backward(create_graph=refuses)
    weight.square().sum().backward()
    optimizer.step()
    assert torch.equal(weight, torch.full((4,), -1.0))


@on_ranks(2)
def a_model_without_trainable_parameters_steps() -> None:
    model = make().requires_grad_(False)
    optimizer = wrap(model)
    optimizer.step()
    optimizer.zero_grad()


# Failing backwards.


@on_ranks(2, 3)
def a_backward_that_raises_never_poisons_the_next() -> None:
    everyone = list(range(hvd.size()))
    for guilty in ([hvd.size() - 1], everyone, [0]):
        for zero_with_none in (True, False):
            model = make()
            optimizer = wrap(model, bucket_bytes=0)
            optimizer.zero_grad(set_to_none=zero_with_none)
            mine = hvd.rank() in guilty
            loss = model[2:](failing(model[:2](part()), mine)).square().mean()
            if mine:
                with pytest.raises(ZeroDivisionError, match="of the user"):
                    loss.backward()
            else:
                with pytest.raises(fd.RemoteError, match=r"abandoned on rank") as caught:
                    loss.backward()
                assert caught.value.rank == guilty[0]
            assert not gradients(model), "incomplete gradients could be stepped with"
            for _ in range(2):
                check_step(model, optimizer)


@on_ranks(2)
def an_error_in_an_inner_backward_is_the_outer_ones() -> None:
    model = make()
    optimizer = wrap(model)

    def inside(x: torch.Tensor) -> torch.Tensor:
        return model[2:](failing(model[1](x)))

    loss = checkpoint(inside, model[0](part()), use_reentrant=True).square().mean()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    check_step(model, optimizer)


@on_ranks(2)
def create_graph_is_refused_and_the_next_step_works() -> None:
    model = make()
    optimizer = wrap(model)
    refused(lambda: model(part()).square().mean().backward(create_graph=True), "create_graph")
    check_step(model, optimizer)


@on_ranks(2)
def a_parameter_in_two_inner_backwards_is_refused() -> None:
    model = make()
    optimizer = wrap(model)
    y = checkpoint(model, part().requires_grad_(), use_reentrant=True)
    z = checkpoint(model, y, use_reentrant=True)
    refused(z.sum().backward, "ready twice")
    check_step(model, optimizer)


# Sums, passes, steps.


@on_ranks(2, 3)
def sums_are_sums_and_not_summed_again() -> None:
    model = make()
    optimizer = wrap(model, op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        model(part()).square().mean().backward()
        for mine, mean in zip(gradients(model), expected_mean(), strict=True):
            torch.testing.assert_close(mine, mean * hvd.size())
    refused(lambda: model(part()).sum().backward(), "summed again")
    optimizer.zero_grad(set_to_none=False)
    model(part()).square().mean().backward()
    torch.testing.assert_close(gradients(model)[0], expected_mean()[0] * hvd.size())


@on_ranks(2)
def a_pass_too_many_is_refused() -> None:
    model = make()
    optimizer = wrap(model, backward_passes_per_step=2)

    def once() -> None:
        model(part()).square().mean().backward()

    once()
    once()
    for mine, mean in zip(gradients(model), expected_mean(), strict=True):
        torch.testing.assert_close(mine, 2 * mean)
    refused(once, "more than backward_passes_per_step=2")
    model.zero_grad()  # without a step, as where a scaler skips it
    once()
    once()
    for mine, mean in zip(gradients(model), expected_mean(), strict=True):
        torch.testing.assert_close(mine, 2 * mean)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    once()
    optimizer.zero_grad()
    refused(lambda: optimizer.set_backward_passes_per_step(0), "at least 1")


@on_ranks(2)
def step_reduces_an_interrupted_accumulation() -> None:
    model = make()
    optimizer = wrap(model, backward_passes_per_step=3)
    model(part()).square().mean().backward()
    optimizer.synchronize()
    for mine, mean in zip(gradients(model), expected_mean(), strict=True):
        torch.testing.assert_close(mine, mean)
    with optimizer.skip_synchronize():
        optimizer.step()


@on_ranks(2)
def a_rank_can_step_with_a_closure() -> None:
    model = make()
    optimizer = wrap(model)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(part()).square().mean()
        loss.backward()
        return loss

    assert optimizer.step(closure) > 0
    weights = hvd.allgather(model[0].weight.detach()[None].contiguous())
    assert torch.equal(weights[0], weights[1])


@on_ranks(2)
def what_a_closure_leaves_is_reduced_before_the_step() -> None:
    def check(model: nn.Module, optimizer: Any, closure: Callable[[], torch.Tensor]) -> None:
        optimizer.step(closure)
        for mine, mean in zip(gradients(model), expected_mean(), strict=True):
            torch.testing.assert_close(mine, mean)

    def backward() -> torch.Tensor:
        loss = model(part()).square().mean()
        loss.backward()
        return loss

    model = make()
    check(model, wrap(model, backward_passes_per_step=2), backward)
    model = make()
    optimizer = wrap(model)
    with optimizer.no_sync():
        backward()
    check(model, optimizer, lambda: torch.zeros(()))
    model = make()
    optimizer = wrap(model)
    optimizer.step(backward if hvd.rank() == 0 else lambda: torch.zeros(()))
    assert len(gradients(model)) == len(list(model.parameters()))
    weights = hvd.allgather(model[0].weight.detach()[None])
    assert torch.equal(weights[0], weights[1])


@on_ranks(2)
def two_optimizers_share_a_backward() -> None:
    """Each rank's gradients of the second model become ready at another time."""
    first, second = make(1), make(1)
    optimizers = [wrap(first), wrap(second)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        order = (first, second) if hvd.rank() == 0 else (second, first)
        x = part()
        for model in order:
            x = model(x)
        x.sum().backward()
        for model in (first, second):
            both = hvd.allgather(gradients(model)[0][None])
            assert torch.equal(both[0], both[1])


@on_ranks(1, 2)
def a_later_optimizer_takes_over_what_it_shares() -> None:
    def two_heads() -> list[Any]:
        encoder, *heads = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        made = []
        for head in heads:
            both = nn.Sequential(encoder, head)
            optimizer = torch.optim.SGD(both.parameters(), lr=0.0)
            made.append((both, hvd.DistributedOptimizer(optimizer)))
        return made

    pairs: list[tuple[Any, Any]] = [({}, {}), ({}, {"sharded_update": True})]
    for first, second in [*pairs, ({"sharded_update": True}, {})]:
        model = make()
        old = wrap(model, **first)
        model(part(9)).square().mean().backward()
        old.step()
        model.load_state_dict(make().state_dict())
        new = wrap(model, **second)
        new.zero_grad()
        model(part()).square().mean().backward()
        if second:
            new.step()
        else:
            check_step(model, new)
        if hvd.size() > 1 or first:
            refused(old.step, "' is in a DistributedOptimizer that was made lat")
    if hvd.size() > 1:
        (_, older), (both, newer) = two_heads()
        for call in (older.step, older.synchronize, older.no_sync):
            refused(call, "give all parameters to one DistributedOptimizer")
        x = part()
        both(x).sum().backward()
        alone = torch.autograd.grad(both(x).sum(), list(both.parameters()))
        for p, mine in zip(both.parameters(), alone, strict=True):
            torch.testing.assert_close(p.grad, hvd.allreduce(mine))
        newer.step()
    hvd.join()  # nobody answers for those that were replaced


@on_ranks(2)
def adasum_hears_no_gradients_of_an_older_optimizer() -> None:
    model = make()
    old = wrap(model)
    new = wrap(model, op=hvd.Adasum)
    model(part()).square().mean().backward()
    assert not all(torch.equal(g, hvd.allreduce(g)) for g in gradients(model))
    new.step()
    refused(old.step, "made later")


@on_ranks(2)
def a_whole_step_can_be_compiled() -> None:
    model, plain = make(), make()
    optimizer = wrap(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    x = part()

    @torch.compile(backend="aot_eager")
    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    whole = hvd.allgather(x)
    for _ in range(3):
        step()
        reference.zero_grad()
        plain(whole).square().mean().backward()
        reference.step()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@on_ranks(2)
def compiled_autograd_is_complete_after_step() -> None:
    from torch._dynamo.compiled_autograd import _enable

    model, plain = make(1), make(1)
    optimizer = wrap(model)
    reference = torch.optim.SGD(plain.parameters(), lr=0.01, momentum=0.9)
    x = part()
    whole = hvd.allgather(x)
    for _ in range(2):
        with _enable(torch.compile(backend="eager")):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        reference.zero_grad()
        plain(whole).square().mean().backward()
        reference.step()
    torch._dynamo.reset()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@on_ranks(2)
def a_scaler_skips_on_every_rank_when_one_overflows() -> None:
    model = make()
    optimizer = wrap(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = model[0].weight.detach().clone()
    x = part() * (float("inf") if hvd.rank() == 1 else 1.0)
    scaler.scale(model(x).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(before, model[0].weight)
    assert scaler.get_scale() == 4.0
    check_step(model, optimizer)


# Disagreement.


@on_ranks(2)
def different_models_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4 + hvd.rank()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(fd.Mismatch) as caught:
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert re.search(
        r"different models: parameter 0 .*'0.bias' \(4 x float32\) on rank 0; "
        r"'0.bias' \(5 x float32\) on rank 1",
        str(caught.value),
    )
    assert type(optimizer) is torch.optim.SGD
    check_step(*(lambda m: (m, wrap(m)))(make()))


@on_ranks(3)
def a_model_with_more_parameters_is_named() -> None:
    model = make(2 + (hvd.rank() == 1))
    with pytest.raises(fd.Mismatch, match=r"no parameter on ranks 0, 2|'2.bias'"):
        wrap(model)


@on_ranks(2)
def different_options_are_named() -> None:
    with pytest.raises(fd.Mismatch, match=r"bucket_bytes 100.* on rank 0; .*bucket_bytes 200"):
        wrap(make(), bucket_bytes=100 * (1 + hvd.rank()), first_bucket_bytes=0)
    with pytest.raises(fd.Mismatch, match=r"mean.* on rank 0; sum.* on rank 1"):
        wrap(make(), op=hvd.Sum if hvd.rank() else hvd.Average)


# The optimizer it still is.


@on_ranks(1, 2)
def it_is_the_optimizer_it_was() -> None:
    model = make()
    plain = torch.optim.Adam(model.parameters(), lr=0.5)
    early = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    late = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    assert isinstance(optimizer, torch.optim.Adam)
    assert type(optimizer).__name__ == "Adam"
    model(part()).square().mean().backward()
    optimizer.step()
    early.step()
    late.step()
    assert optimizer.param_groups[0]["lr"] == 0.125
    saved = optimizer.state_dict()
    other = make()
    loaded = torch.optim.Adam(other.parameters())
    loaded.load_state_dict(saved)
    again = hvd.DistributedOptimizer(loaded)
    assert again.param_groups[0]["lr"] == 0.125
    assert len(again.state_dict()["state"]) == len(saved["state"]) > 0
    again.load_state_dict(saved)
    with again.no_sync():
        other(part()).sum().backward()


@on_ranks(1, 2)
def what_is_not_supported_is_refused() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    named = list(model.named_parameters())

    def distributed(**options: Any) -> Callable[[], Any]:
        return lambda: hvd.DistributedOptimizer(optimizer, **options)

    refused(distributed(op=hvd.Max), "Average, Sum or Adasum only")
    refused(distributed(groups=-1), "at least 0")
    refused(distributed(groups="all"), "groups is a str")
    refused(distributed(groups=[named[0][1]]), "groups[0] is a Parameter, not a list")
    refused(distributed(groups=[["0.weight"]]), "groups[0] has a str in it")
    refused(distributed(groups=[[], [torch.zeros(3)]]), "groups[1] has a tensor of shape (3,)")
    first = named[0][1]
    refused(
        distributed(groups=[[first], [first]], named_parameters=named), "'0.weight' twice: in 0"
    )
    refused(distributed(process_set=[0]), "process_set")
    unknown = hvd.ProcessSet([0])
    refused(distributed(process_set=unknown), "not registered")
    refused(distributed(backward_passes_per_step=0), "at least 1")
    refused(distributed(gradient_predivide_factor=2.0, op=hvd.Sum), "Average only")
    refused(distributed(gradient_predivide_factor=math.inf), "is inf")
    refused(distributed(backward_passes_per_step=1.5), "whole number")
    refused(distributed(compression="fp16"), "compression='fp16' is not")
    refused(lambda: hvd.DistributedOptimizer(model), "a Sequential, not a torch optimizer")
    refused(distributed(bucket_bytes=-1), "at least 0")
    refused(distributed(bucket_bytes="25M"), "'25M'; a size is a whole number")
    refused(distributed(named_parameters=[p for _, p in named]), "sequence of tuples")
    refused(distributed(named_parameters=named[1:]), "does not name")
    refused(distributed(named_parameters=[*named, named[0]]), "twice: 0.weight")
    lbfgs = torch.optim.LBFGS(model.parameters())
    refused(lambda: hvd.DistributedOptimizer(lbfgs), "LBFGS")
    assert type(optimizer) is torch.optim.SGD
    wrapped = distributed()()
    refused(distributed(), "already")
    refused(lambda: copy.copy(wrapped), "state_dict")
    refused(lambda: pickle.dumps(wrapped), "state_dict")
    extra = {"params": [nn.Parameter(torch.zeros(1))]}
    refused(lambda: wrapped.add_param_group(extra), "before it is wrapped")


test_on_ranks = make_tests(__name__, "torch")


class Dies(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return grad


def step_in_another_world() -> list[str]:
    said = []
    for options in ({}, {"sharded_update": True}):
        begin_torch()
        model = make()
        optimizer = wrap(model, **options)
        check_step(model, optimizer) if not options else None
        hvd.shutdown()
        begin_torch()
        for call in (lambda m=model: m(part()).sum().backward(), optimizer.step):
            try:
                call()
            except fd.NotInitialized as error:
                said.append(str(error))
        optimizer = wrap(model)
        model.load_state_dict(make().state_dict())
        check_step(model, optimizer)
        hvd.shutdown()
    return said


def test_an_optimizer_of_a_world_that_has_ended_says_so(spawn: Callable[..., World]) -> None:
    for said in spawn(2, "torch").run(step_in_another_world):
        assert len(said) == 3  # a sharded update does not reduce in backward
        assert all("has ended" in text and "again after init()" in text for text in said)


def die_in_backward() -> None:
    begin_torch()
    model = make()
    optimizer = wrap(model, bucket_bytes=0)
    optimizer.zero_grad()
    model[2:](Dies.apply(model[:2](part()))).square().mean().backward()


def test_a_rank_that_dies_in_backward_is_named(spawn: Callable[..., World]) -> None:
    world = spawn(3, "torch")
    world.start(die_in_backward)
    for outcome in world.outcomes([0, 2]):
        assert outcome.error == "PeerLost", outcome.trace
        assert outcome.rank == 1
