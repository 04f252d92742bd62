"""farandole.torch.Pipeline: what is wrong is named, on every rank, and nobody waits for ever."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks, raises
from torch import nn
from torch.nn.functional import mse_loss

import farandole as fd
import farandole.torch as hvd
from farandole.common import _pickles

X = torch.linspace(0, 1, 24).reshape(8, 3)
Y = X.sum(1, keepdim=True)


def layers() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1)]


@on_ranks(3)
def wrong_arguments_are_named_on_every_rank() -> None:
    make: Any = partial(hvd.Pipeline, layers())
    tied = layers()
    tied[3].weight = nn.Parameter(torch.ones(1, 4))
    tied[0].weight = tied[3].weight
    lazy = [nn.LazyLinear(3), *layers()]
    odd = nn.Sequential(*layers())
    half_meta = nn.Linear(3, 3)
    half_meta.bias = nn.Parameter(torch.empty(3, device="meta"))

    class Own(nn.Sequential):
        def forward(self, x: Any) -> Any:
            return x

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.empty(2, device="meta"))

    for call, *words in [
        (lambda: make(stages=2), "stages=2 in a world of 3 ranks"),
        (lambda: make(stages=0), "stages is 0"),
        (lambda: make(micro_batches=True), "micro_batches is True"),
        (lambda: make(schedule="zb"), "schedule is 'zb'; it is 'gpipe' or '1f1b'"),
        (lambda: make(split="size"), "split is 'size'"),
        (lambda: make(split=3), "split is 3"),
        (lambda: make(split=[2, 2]), "the numbers rise"),
        (lambda: make(split="time"), "split='time' without example"),
        (lambda: make(split="time", example=X.t()), "Linear of 16 parameters: RuntimeError"),
        (lambda: make(budget=0), "budget is 0"),
        (lambda: make(budget=79, split=[1, 3]), "of 80 bytes, and budget is 79", "smaller layers"),
        (lambda: make(budget=99, split=[1, 2]), "stage 2 of 3", "of 100 bytes", "4 stages"),
        (lambda: make(loss_fn=3), "loss_fn is 3"),
        (lambda: make(count=3), "count is 3"),
        (lambda: make(reduction="max"), "reduction is 'max'"),
        (lambda: make(count=len, reduction="sum"), "count with reduction='sum'"),
        (lambda: hvd.Pipeline(layers()[:2]), "stages=3, and the model has 2 layers"),
        (lambda: hvd.Pipeline(nn.Linear(1, 1)), "model is Linear"),  # type: ignore[arg-type]
        (lambda: hvd.Pipeline([3, 4, 5]), "layer '0' is 3"),  # type: ignore[list-item]
        (lambda: hvd.Pipeline([lambda: 3] * 3), "layer '0' makes 3, no module"),  # type: ignore[list-item,return-value]
        (lambda: hvd.Pipeline(Own(*layers())), "Own with a forward() of its own"),
        (lambda: hvd.Pipeline(lazy), "before its first forward"),
        (lambda: hvd.Pipeline([*layers(), half_meta]), "on the meta device beside others"),
        (lambda: hvd.Pipeline([Bare(), *layers()]), "has no reset_parameters()"),
        (lambda: hvd.Pipeline(tied, split=[1, 3]), "'3.weight' of stage 2 is '0.weight' of"),
        (lambda: hvd.Pipeline([*layers(), hvd.SyncBatchNorm(1)]), "over the samples of all ranks"),
        # Where one rank alone is wrong, or another.
        (lambda: make(micro_batches=hvd.rank()), "micro_batches is 0"),
        (lambda: hvd.Pipeline(odd if hvd.rank() else odd[:2]), "has 2 layers"),
    ]:  # fmt: skip
        with raises(fd.InvalidArgument, *words):
            call()
    for call, words in [
        (lambda: make(micro_batches=4 + hvd.rank()), "micro_batches=4; rank 1: micro_batches=5"),
        (lambda: make(schedule=["1f1b", "gpipe"][hvd.rank() % 2]), "rank 1: schedule='gpipe'"),
        (lambda: make(stages=3 - 2 * (hvd.rank() == 2)), "rank 2: stages=1"),
        (lambda: hvd.Pipeline(layers()[: 4 - (hvd.rank() == 1)]), "4 layers; rank 1: 3 layers"),
        (lambda: hvd.Pipeline([nn.Linear(3, 3 + hvd.rank())] * 3), "12 parameters; rank 1"),
    ]:
        with raises(fd.Mismatch, words):
            call()
    assert float(make(loss_fn=mse_loss).step(X, Y)) > 0


class Trap(nn.Module):
    """Raises when it is told to."""

    armed: tuple[str, int] = ("", -1)  # kind, micro-batch

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind, which = Trap.armed
        k, self.calls = self.calls, self.calls + 1
        if kind == "forward" and k == which:
            raise ZeroDivisionError("by design")
        if kind == "backward" and k == which:
            x.register_hook(self._raise)
        return x * 1

    def _raise(self, _: Any) -> None:
        raise ZeroDivisionError("by design")


@on_ranks(2, 4)
def a_stage_that_raises_is_named_on_every_rank() -> None:
    for schedule in ("gpipe", "1f1b"):
        for guilty in {0, hvd.size() - 1}:
            for kind in ("forward", "backward"):
                traps = [Trap(), Trap()]
                model = [nn.Linear(3, 3), traps[0], traps[1], nn.Linear(3, 1)]
                pipeline = hvd.Pipeline(
                    model, loss_fn=mse_loss, stages=2, micro_batches=3, split=[2],
                    schedule=schedule,
                )  # fmt: skip
                Trap.armed = (kind, 1) if hvd.rank() == guilty else ("", -1)
                here = hvd.rank() == guilty
                words = f"rank {guilty} (stage {guilty % 2} of 2"
                words = words if hvd.size() == 2 else f"{words}, replica {guilty // 2})"
                why = "ZeroDivisionError: by design"
                with raises(ZeroDivisionError if here else fd.RemoteError) as caught:
                    pipeline.step(X, Y)
                if not here:
                    text = str(caught.value)
                    assert f"{words}" in text, text
                    assert f"failed in the {kind} of micro-batch 1: {why}" in text, text
                assert all(p.grad is None for p in pipeline.parameters())
                Trap.armed = ("", -1)
                reference = nn.Sequential(nn.Linear(3, 3), Trap(), Trap(), nn.Linear(3, 1))
                reference.load_state_dict(pipeline.state_dict(root_rank=None))
                right = float(mse_loss(reference(X), Y).detach())
                assert float(pipeline.step(X, Y)) == pytest.approx(right, abs=1e-5)
                assert all(p.grad is not None for p in pipeline.parameters())


@on_ranks(1, 2, 4)
def a_loss_without_gradients_is_an_error() -> None:
    is_right = False

    def wrong(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return mse_loss(outputs, targets) if is_right else (outputs > targets).sum()

    stages = min(hvd.size(), 2)
    for reduction, frozen, loss_fn in (("mean", False, wrong), ("sum", True, mse_loss)):
        model: Any = nn.Sequential(*layers()).requires_grad_(not frozen)
        pipeline: Any = hvd.Pipeline(model, loss_fn=loss_fn, stages=stages, reduction=reduction)
        with raises(fd.InvalidArgument, "the loss has no gradient"):
            pipeline.step(X, Y)
        pipeline.evaluate(X, Y)
        assert all(p.grad is None for p in pipeline.parameters())
        is_right = not frozen
        if is_right:
            pipeline.step(X, Y)
            assert all(p.grad is not None for p in pipeline.parameters())


@on_ranks(1, 2, 4)
def a_part_of_the_loss_may_be_a_constant() -> None:
    """Some micro-batches, or all of a replica, give a constant; one process has a gradient."""
    wanted = "high"

    def sometimes(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        counts = (targets > Y.mean()) == (wanted == "high")
        return ((outputs - targets)[counts] ** 2).sum() if counts.any() else Y.new_zeros(())

    for micro_batches in (1, 4):
        pipeline = hvd.Pipeline(
            layers(), loss_fn=sometimes, stages=min(hvd.size(), 2), reduction="sum",
            micro_batches=micro_batches,
        )  # fmt: skip
        serial = nn.Sequential(*layers())
        mine, right = (
            torch.optim.SGD(each.parameters(), 0.01, momentum=0.9, weight_decay=0.1)
            for each in (pipeline, serial)
        )
        # The first replica has a constant, then the last.
        for wanted in ("high", "low", "high"):  # noqa: B007 - sometimes() reads it
            mine.zero_grad()
            right.zero_grad()
            loss = sometimes(serial(X), Y)
            loss.backward()
            assert float(pipeline.step(X, Y)) == pytest.approx(float(loss.detach()), rel=1e-5)
            mine.step()
            right.step()
        state = pipeline.state_dict(root_rank=None)
        for name, value in serial.state_dict().items():
            torch.testing.assert_close(state[name], value)


class Reshape(nn.Module):
    width = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, : self.width]


class Sum(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True)


class Pair(NamedTuple):
    """A structure that takes a pickle."""

    one: torch.Tensor
    other: torch.Tensor


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(x, x)


class Added(nn.Module):
    def forward(self, pair: Pair) -> torch.Tensor:
        return pair.one + pair.other


@on_ranks(2)
def an_output_that_cannot_be_sent_is_an_error_on_every_rank() -> None:
    model = [nn.Linear(3, 1), Doubled(), Added(), nn.Linear(1, 1)]
    pipeline = hvd.Pipeline(model, loss_fn=mse_loss, split=[2], micro_batches=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_pickles, "_refuses_pickles", lambda: True)
        kind = fd.RemoteError if hvd.rank() else fd.InvalidArgument
        with raises(kind, "a Pair is sent as a pickle only"):
            pipeline.step(X, Y)
    pipeline.step(X, Y)


@on_ranks(2)
def shapes_that_change_are_an_error_unless_they_may() -> None:
    for dynamic in (False, True):
        model = [nn.Linear(3, 3), Reshape(), Sum(), nn.Linear(1, 1)]
        pipeline = hvd.Pipeline(
            model, loss_fn=mse_loss, split=[2], micro_batches=2, dynamic_shapes=dynamic
        )
        Reshape.width = 2
        for n in (8, 3, 8, 1):
            pipeline.step(X[:n], Y[:n])
        Reshape.width = 3
        for n in (8, 5):  # of a size that is known, and of another
            if dynamic:
                pipeline.step(X[:n], Y[:n])
                continue
            kind = fd.RemoteError if hvd.rank() else fd.InvalidArgument
            with raises(kind, "micro-batch 0 is float32[", "3], and was float32[", "2] before"):
                pipeline.step(X[:n], Y[:n])


@on_ranks(2)
def batches_that_differ_between_ranks_are_named() -> None:
    pipeline = hvd.Pipeline(layers(), loss_fn=mse_loss, micro_batches=3)
    last = hvd.rank() == 1
    one, other = (
        (fd.InvalidArgument, fd.RemoteError) if last else (fd.RemoteError, fd.InvalidArgument)
    )
    n = 8 - hvd.rank()
    for kind, call, words in [
        (one, lambda: pipeline.step(X[:n], Y[:n]), "has 3 samples on stage 0, and 2 here"),
        (one, lambda: pipeline.step(X, None), "targets is None on the last stage"),
        (one, lambda: pipeline.evaluate(X, None), "targets is None on the last stage"),
        (other, lambda: pipeline.step(None, Y), "inputs is None on the first stage"),
        (other, lambda: pipeline.predict(None), "inputs is None on the first stage"),
        (None, lambda: pipeline.step(X, Y[:3]), "the batch has 8 inputs and 3 targets"),
        (None, lambda: pipeline.step(X[:0], Y[:0]), "the batch is empty"),
        (None, lambda: pipeline.step(3, Y), "without a first dimension"),
    ]:  # fmt: skip
        with raises(kind or fd.InvalidArgument, words):
            call()
    assert float(pipeline.step(X, Y)) > 0
    for loss_fn, words in [
        (None, "without loss_fn"),
        (lambda y, _: y, "loss_fn gives a tensor of shape (3, 1)"),
        (lambda *_: 3.0, "loss_fn gives 3.0"),
    ]:
        pipeline = hvd.Pipeline(layers(), loss_fn=loss_fn, micro_batches=3)
        with raises(one, words):
            pipeline.step(X, Y)
    words = "this stage makes an int"

    class Strange(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, 3

    pipeline = hvd.Pipeline([Strange(), Sum()], loss_fn=mse_loss)
    with raises(other, words):
        pipeline.step(X, Y)


@on_ranks(2, 3)
def ranks_that_call_other_methods_are_told() -> None:
    for guilty in range(hvd.size()):
        pipeline = hvd.Pipeline(layers(), loss_fn=mse_loss, micro_batches=3)
        fd.barrier()  # all have made it
        with raises(fd.Error, "in evaluate() number 1", "in step() number 1"):
            if hvd.rank() == guilty:
                pipeline.evaluate(X, Y)
            else:
                pipeline.step(X, Y)


class Interrupt(nn.Module):
    def forward(self, _: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


@on_ranks(2)
def an_interrupt_ends_the_step_of_all_ranks() -> None:
    pipeline = hvd.Pipeline([nn.Linear(3, 1), Interrupt()], loss_fn=mse_loss)
    with raises(KeyboardInterrupt if hvd.rank() else fd.Error, *["rank 1 aborted"][hvd.rank() :]):
        pipeline.step(X, Y)
    if hvd.rank():
        with raises(fd.InvalidArgument, "was interrupted"):
            pipeline.step(X, Y)


@on_ranks(2)
def few_samples_for_statistics_are_a_warning() -> None:
    model = [nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)]
    pipeline = hvd.Pipeline(model, loss_fn=mse_loss, micro_batches=2, split=[2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline.step(X, Y)
        pipeline.step(X, Y)
    said = [str(each.message) for each in caught if "micro-batch" in str(each.message)]
    assert len(said) == (1 if pipeline.is_first_stage else 0), said
    assert all("layer '1'" in each and "4 samples" in each for each in said)


test_on_ranks = make_tests(__name__, "torch")
