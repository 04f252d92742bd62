"""farandole.torch.GlobalBatch: the program of one process, on any number of ranks."""

from __future__ import annotations

import copy
import doctest
import importlib
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import begin_torch, make_tests, on_ranks, raises
from torch import nn
from torch.nn import functional
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import farandole as fd
import farandole.torch as hvd
from harness import World

N, BATCH, CLOSE = 34, 8, 1e-5  # the last batch has 2 samples: of three ranks one has none

_random = torch.Generator().manual_seed(5)
X, Y, W = (torch.rand(shape, generator=_random) for shape in ((N, 6), (N, 1), (N, 1)))
DATA = TensorDataset(X, Y, W)


def net(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mean_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.mse_loss(model(batch[0]), batch[1])


class Way(NamedTuple):
    """How a program trains."""

    loss: Callable[[nn.Module, Any], torch.Tensor] = mean_loss
    reduction: Any = "mean"
    momentum: float = 0.9
    clip: float | None = None
    scaled: bool = False
    epochs: int = 2
    close: float = CLOSE
    build: Callable[[int], nn.Module] = net


class Learned(NamedTuple):
    losses: list[float]  # of whole batches
    norms: list[float]
    weights: list[torch.Tensor]


def learn(loader: Any, way: Way, *, alone: bool, **options: Any) -> Learned:
    """The program, of one process or with the few lines that make it one of many."""
    model = way.build(1 if alone else 1 + hvd.rank())  # all get those of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=way.momentum)
    batches = loader if alone else hvd.GlobalBatch(loader, model, optimizer, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=way.scaled)
    learned = Learned([], [], [p.detach() for p in model.parameters()])
    for _ in range(way.epochs):
        optimizer.zero_grad()
        whole = 0.0  # so far
        for batch in batches:
            loss = way.loss(model, batch)
            if not alone:
                loss = batches.scale_loss(loss, way.reduction)
            scaler.scale(loss).backward()
            whole += loss.item()
            if not alone and not batches.sync_gradients:
                continue
            if way.clip is not None:
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), way.clip)
                learned.norms.append(float(norm))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            learned.losses.append(whole)
            whole = 0.0
    if not alone:
        over_ranks = hvd.allreduce(torch.tensor(learned.losses, dtype=torch.float64))
        learned.losses[:] = over_ranks.tolist()
    return learned


def check(make: Callable[[], Any], way: Way = Way(), **options: Any) -> Learned:  # noqa: B008
    mine = learn(make(), way, alone=False, **options)
    reference = learn(make(), way, alone=True)
    assert len(mine.losses) == len(reference.losses) > 0
    assert mine.losses == pytest.approx(reference.losses, abs=way.close)
    assert mine.norms == pytest.approx(reference.norms, abs=way.close)
    for a, b in zip(mine.weights, reference.weights, strict=True):
        assert torch.allclose(a, b, atol=way.close, rtol=0), (a, b)
    assert_same_bits(mine.weights)
    return mine


def assert_same_bits(tensors: list[torch.Tensor]) -> None:
    theirs = hvd.allgather_object([t.tolist() for t in tensors])
    assert all(each == theirs[0] for each in theirs)


def plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(DATA, **({"batch_size": BATCH} | options))


@on_ranks(1)
def examples_in_docstrings() -> None:
    for name in ("global_batch", "metrics"):
        results = doctest.testmod(importlib.import_module(f"farandole.torch.{name}"))
        assert results.failed == 0
        assert results.attempted > 0


# ---- the data ----


@on_ranks(1, 2, 3, 4)
def the_weights_and_losses_of_one_process() -> None:
    check(lambda: plain(shuffle=True, generator=seeded()))


@on_ranks(3)
def whatever_gives_the_batches() -> None:
    weights = torch.linspace(1, 2, N).tolist()
    for make in (
        plain,
        lambda: plain(drop_last=True),
        lambda: plain(batch_size=2),  # fewer samples than ranks
        lambda: plain(sampler=range(N - 1, 5, -1)),
        lambda: plain(sampler=WeightedRandomSampler(weights, 21, generator=seeded())),
        lambda: plain(sampler=RandomSampler(DATA, True, 40, generator=seeded())),
        lambda: DataLoader(DATA, batch_sampler=[[3, 1], [5], list(range(9))]),
        lambda: DataLoader(Fetched(), batch_size=BATCH),
        lambda: DataLoader(
            DATA, batch_sampler=BatchSampler(RandomSampler(DATA, generator=seeded()), 5, True)
        ),
    ):
        check(make, Way(epochs=2))


@on_ranks(2)
def workers_read_each_ranks_own_samples() -> None:
    check(
        lambda: plain(
            shuffle=True, generator=seeded(), num_workers=2, prefetch_factor=3,
            persistent_workers=True, multiprocessing_context="fork",
        )
    )  # fmt: skip
    check(lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=1))


class Fetched(Dataset[Any]):
    """Gives whole batches only."""

    def __len__(self) -> int:
        return N

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return [DATA[n] for n in numbers]


class Stream(IterableDataset[Any]):
    """Nobody knows how long it is."""

    def __init__(self, n: int = N, seed: int | None = None) -> None:
        self.n, self.seed = n, seed

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.n))
        if self.seed is not None:
            order = torch.randperm(self.n, generator=seeded(self.seed)).tolist()
        return (DATA[i] for i in order)


class Counted(Stream):
    def __len__(self) -> int:
        return self.n


@on_ranks(1, 3)
def datasets_without_numbers() -> None:
    check(lambda: DataLoader(Stream(), batch_size=BATCH))
    check(lambda: DataLoader(Counted(seed=4), batch_size=BATCH, drop_last=True))
    check(lambda: DataLoader(Stream(), batch_size=BATCH), micro_batch_size=2)
    batches = hvd.GlobalBatch(DataLoader(Stream(), batch_size=BATCH))
    with raises(TypeError):
        len(batches)
    assert len(hvd.GlobalBatch(DataLoader(Counted(), batch_size=BATCH))) == 5


def time_first(samples: list[Any]) -> torch.Tensor:
    return torch.stack([x for x, *_ in samples], dim=1)


def without_one(samples: list[Any]) -> torch.Tensor:
    return torch.stack([x for x, *_ in samples[1:]])


@on_ranks(1, 2)
def batches_whose_first_dimension_is_not_the_samples_are_refused() -> None:
    def first(data: Any, collate: Any, **options: Any) -> torch.Tensor:
        loader = DataLoader(data, batch_size=BATCH, collate_fn=collate)
        batch: torch.Tensor = next(iter(hvd.GlobalBatch(loader, **options)))
        return batch

    for options in ({}, {"micro_batch_size": 2}):
        for collate, rows in ((time_first, 6), (without_one, BATCH - 1)):
            with raises(fd.InvalidArgument, f"first dimension is {rows} of {BATCH} samples"):
                first(Stream(), collate, **options)
    assert first(DATA, time_first).shape == (6, BATCH // hvd.size())  # each rank collates its own


@on_ranks(1, 2, 3)
def a_shuffle_without_a_seed_is_the_same_everywhere() -> None:
    torch.manual_seed(hvd.rank())
    first, second, third = (seen(hvd.GlobalBatch(plain(shuffle=True), seed=s)) for s in (1, 1, 2))
    assert first == second != third
    assert sorted(first[0]) == list(range(N))
    # The order of one process with that generator: it does not depend on the number of ranks.
    assert first[0] == list(RandomSampler(DATA, generator=seeded(1)))


def numbers_of(x: torch.Tensor) -> list[int]:
    return [int((row == X).all(dim=1).nonzero()) for row in x]


def seen(batches: hvd.GlobalBatch, passes: int = 2) -> list[list[int]]:
    """The samples of passes, in the order of one process."""
    return [
        [n for x, *_ in batches for n in numbers_of(batches.gather_for_metrics(x))]
        for _ in range(passes)
    ]


# ---- the loss ----


@on_ranks(2, 3)
def losses_are_divided_by_what_one_process_divides_by() -> None:
    def sum_loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return functional.mse_loss(model(batch[0]), batch[1], reduction="sum") / 50

    def weighted(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, w = batch
        return ((model(x) - y).square() * w).sum() / w.sum()

    check(plain, Way(sum_loss, "sum"))
    check(plain, Way(weighted), count=lambda batch: batch[2].sum())
    check(plain, Way(weighted), count=lambda batch: batch[2].sum(), micro_batch_size=1)
    check(plain, Way(sum_loss, "sum"), micro_batch_size=2)


PADDING = -1


class Sentences(Dataset[Any]):
    """Some have no word that counts."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        words = torch.tensor([(i * 7 + k) % 5 for k in range(4)])
        words[(i * 3) % 9 % 5 :] = PADDING
        if i % 4 > 1:
            words[:] = PADDING
        return {"x": X[i].expand(4, 6).clone(), "words": words}


def words_in(batch: Any) -> torch.Tensor:
    return (batch["words"] != PADDING).sum()


def tagger(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


class Labelled(Dataset[Any]):
    """Sentences of 5 words, of which `ignored(n)` are no targets in sentence n."""

    def __init__(self, ignored: Callable[[int], int]) -> None:
        self._ignored = ignored

    def __len__(self) -> int:
        return 8

    def __getitem__(self, n: int) -> Any:
        labels = torch.arange(5) % 3
        labels[: self._ignored(n)] = -100
        return torch.full((5, 3), float(n)), labels


@on_ranks(2)
def a_cross_entropy_that_leaves_targets_out_is_told() -> None:
    def told(ignored: Callable[[int], int], **options: Any) -> bool:
        batches = hvd.GlobalBatch(DataLoader(Labelled(ignored), batch_size=4))
        model = nn.Linear(3, 3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for x, labels in batches:
                loss = functional.cross_entropy(model(x).flatten(0, 1), labels.flatten(), **options)
                batches.scale_loss(loss / 2)
        assert len(caught) <= 1
        return any("not that of one process" in str(each.message) for each in caught)

    assert told(lambda n: n % 3)
    assert told(lambda n: n % 3, weight=torch.tensor([1.0, 2.0, 3.0]))
    # These are exact: samples count alike, or nothing was divided.
    assert not told(lambda _: 0)
    assert not told(lambda _: 2)
    assert not told(lambda _: 2, weight=torch.tensor([1.0, 2.0, 3.0]))
    assert not told(lambda n: n % 3, reduction="sum")


@on_ranks(2, 3, 4)
def tokens_that_are_not_padding_count() -> None:
    def masked(model: nn.Module, batch: Any) -> torch.Tensor:
        logits, words = model(batch["x"]).flatten(0, 1), batch["words"].flatten()
        losses = functional.cross_entropy(logits, words.clamp(min=0), reduction="none")
        mask = words != PADDING
        return (losses * mask).sum() / mask.sum()  # 0/0 on a rank with padding alone

    def native(model: nn.Module, batch: Any) -> torch.Tensor:
        logits, words = model(batch["x"]).flatten(0, 1), batch["words"].flatten()
        return functional.cross_entropy(logits, words, ignore_index=PADDING)

    def loader() -> DataLoader[Any]:
        return DataLoader(Sentences(), batch_size=4)

    for loss in (masked, native):
        check(loader, Way(loss, build=tagger), count=words_in)
        check(loader, Way(loss, build=tagger), count=words_in, micro_batch_size=1)
    batches = hvd.GlobalBatch(loader(), count=words_in)
    if hvd.size() == 4:  # all but rank 1 have padding alone, and no optimizer that gets zeros
        loss = masked(tagger(1), next(iter(batches)))
        if hvd.rank() == 1:
            assert batches.scale_loss(loss).isfinite()
        else:
            with raises(fd.InvalidArgument, "its loss is nan", "pass the optimizer"):
                batches.scale_loss(loss)
    nothing = hvd.GlobalBatch(loader(), count=lambda _: 0)
    next(iter(nothing))
    with raises(fd.InvalidArgument, "count() is 0 on every rank"):
        nothing.scale_loss(torch.tensor(1.0))


@on_ranks(3)
def clipping_scaling_and_sharding_are_those_of_one_process() -> None:
    check(plain, Way(clip=0.05))
    check(plain, Way(clip=0.05, scaled=True))
    check(plain, Way(clip=0.05, scaled=True), micro_batch_size=1)
    check(plain, sharded_update=True)
    check(plain, sharded_update=True, micro_batch_size=2)
    check(plain, bucket_bytes=0, groups=1)

    def mixed(model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_loss(model, batch)

    check(plain, Way(mixed, close=1e-2))

    def overflowing(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = mean_loss(model, batch)
        return loss * (math.inf if bool((batch[0] == X[9]).all(dim=1).any()) else 1.0)

    model = net(1 + hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = hvd.GlobalBatch(plain(), model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for batch in batches:
        optimizer.zero_grad()
        scaler.scale(batches.scale_loss(overflowing(model, batch))).backward()
        scaler.step(optimizer)  # one batch is left out, on every rank
        scaler.update()
    assert scaler.get_scale() == 32
    assert_same_bits([p.detach() for p in model.parameters()])
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def temperature() -> torch.Tensor:
    return nn.Parameter(torch.tensor(0.3))


LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    "mean": functional.mse_loss,
    "sum": lambda out, y: (out - y).square().sum() / 12,
    "several": lambda out, y: 0.1 * functional.mse_loss(out, y) / 3 + 2 - out.abs().mean(),
    "root of each": lambda out, y: (out - y).square().sum(1).sqrt().mean(),
    "divergence": lambda out, _: -0.5 * torch.sum(1 + out - out**2 - out.exp()),
    "learned weight": lambda out, y: (
        functional.mse_loss(out, y) * torch.exp(-(t := temperature())) + t.log()
    ),
    "norm of weights": lambda out, y: (
        functional.mse_loss(out, y) + nn.Parameter(torch.ones(4, 2)).square().sum().sqrt()
    ),
    "loop over samples": lambda out, y: (
        sum((a - b).square().mean().sqrt() for a, b in zip(out, y, strict=True)) / 12
    ),
    "by a constant": lambda out, y: functional.mse_loss(out, y) / y.square().mean().sqrt(),
}
NONLINEAR: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "root": ("square root", lambda out, y: functional.mse_loss(out, y).sqrt()),
    "half": ("power", lambda out, y: 0.5 * functional.mse_loss(out, y) ** 0.5 + out.mean()),
    "logarithm": ("logarithm", lambda out, _: -out.exp().mean().log()),
    "exponential": ("exponential", lambda out, y: functional.mse_loss(out, y).exp()),
    "dice": ("ratio", lambda out, y: 1 - 2 * (out * y).sum() / (out.sum() + y.sum())),
    "product": ("product", lambda out, y: out.mean() * functional.mse_loss(out, y)),
}


@on_ranks(2)
def a_loss_that_is_not_linear_in_its_means_is_told() -> None:
    def told(loss_of: Callable[[Any, Any], Any]) -> list[str]:
        batches = hvd.GlobalBatch(DataLoader(TensorDataset(torch.rand(24, 3)), batch_size=8))
        model = nn.Linear(3, 2)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for (x,) in batches:
                batches.scale_loss(loss_of(model(x), x[:, :2]))
        return [str(each.message) for each in seen]

    for name, loss_of in LINEAR.items():
        assert told(loss_of) == [], name
    for word, loss_of in NONLINEAR.values():
        words = told(loss_of)
        assert len(words) == (hvd.rank() == 0), words
        assert all(f"the loss has a {word} of numbers" in each for each in words), words


@on_ranks(2, 3)
def micro_batches_are_one_update() -> None:
    for size in (1, 2, 3, 100):
        check(plain, micro_batch_size=size)
    model = net(1 + hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = hvd.GlobalBatch(plain(), model, optimizer, micro_batch_size=1)
    for batch in batches:
        batches.scale_loss(mean_loss(model, batch)).backward()
        with raises(fd.InvalidArgument, "in the middle of a batch"):
            batches.state_dict()
        with raises(fd.InvalidArgument, "micro_batch_size=1", "Metrics"):
            batches.gather_for_metrics(batch[0])
        with raises(fd.InvalidArgument, "more micro-batches come"):
            optimizer.step()
        break
    optimizer.zero_grad()
    check_goes_on(model, optimizer, batches)


Zero = Callable[[nn.Module, Any], None]


def _drop(model: nn.Module, _: Any) -> None:
    for p in model.parameters():
        p.grad = None


ZEROS: dict[str, Zero] = {
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer in place": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, _: model.zero_grad(),
    "model in place": lambda model, _: model.zero_grad(set_to_none=False),
    "by hand": _drop,
}


def learn_in_micro_batches(at_top: Zero, at_end: Zero, **options: Any) -> None:
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = hvd.GlobalBatch(plain(), model, optimizer, micro_batch_size=1, **options)
    for batch in batches:
        at_top(model, optimizer)
        batches.scale_loss(mean_loss(model, batch)).backward()
        if batches.sync_gradients:
            optimizer.step()
        at_end(model, optimizer)


def nothing(*_: Any) -> None:
    pass


@on_ranks(1, 2, 3)
def gradients_of_micro_batches_that_a_program_drops_are_refused() -> None:
    for zero in ZEROS.values():
        for where in ((zero, nothing), (nothing, zero)):
            with raises(fd.InvalidArgument, "zero_grad() in the middle", "batches.sync_gradients"):
                learn_in_micro_batches(*where)
    with raises(fd.InvalidArgument, "zero_grad() in the middle"):
        learn_in_micro_batches(ZEROS["model"], nothing, sharded_update=True)
    if hvd.size() > 1:
        kind, words = (
            (fd.RemoteError, "was abandoned")
            if hvd.rank() == 0
            else (fd.InvalidArgument, "zero_grad() in the middle")
        )
        with raises(kind, words):
            learn_in_micro_batches(ZEROS["model"] if hvd.rank() else nothing, nothing)


@on_ranks(1, 2)
def micro_batches_may_zero_what_is_theirs() -> None:
    def freeze(model: nn.Module, _: Any) -> None:
        model[0].zero_grad()

    learn_in_micro_batches(nothing, freeze)
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for at_once in (None, 1, 2):
        batches = hvd.GlobalBatch(plain(), model, optimizer, micro_batch_size=at_once)
        for batch in batches:
            loss = 0 * mean_loss(model, batch)  # as a hinge loss may have it
            batches.scale_loss(loss).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5)
            if batches.sync_gradients:
                optimizer.step()
                optimizer.zero_grad(set_to_none=at_once == 2)


def check_goes_on(model: nn.Module, optimizer: Any, batches: hvd.GlobalBatch) -> None:
    """A whole pass works, and leaves all ranks alike."""
    for batch in batches:
        batches.scale_loss(mean_loss(model, batch)).backward()
        if batches.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_bits([p.detach() for p in model.parameters()])


@on_ranks(2)
def a_step_on_one_rank_alone_in_the_middle_of_a_batch_ends_everywhere() -> None:
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = hvd.GlobalBatch(plain(), model, optimizer, micro_batch_size=1 if hvd.rank() else 8)
    kind = fd.InvalidArgument if hvd.rank() else fd.RemoteError
    with raises(kind, "more micro-batches come" if hvd.rank() else "rank 1"):
        for batch in batches:
            batches.scale_loss(mean_loss(model, batch)).backward()
            optimizer.step()


@on_ranks(3)
def batches_may_be_added_up_as_in_one_process() -> None:
    def learned(alone: bool) -> list[torch.Tensor]:
        model = net(1)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        batches: Any = plain() if alone else hvd.GlobalBatch(plain(), model, optimizer)
        for i, batch in enumerate(batches):
            loss = mean_loss(model, batch) / 2
            if alone:
                loss.backward()
            elif i % 2 == 0:
                with optimizer.no_sync():
                    batches.scale_loss(loss).backward()
            else:
                batches.scale_loss(loss).backward()
            if i % 2 == 1:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for a, b in zip(learned(False), learned(True), strict=True):
        assert torch.allclose(a, b, atol=CLOSE, rtol=0)


# ---- metrics ----


@on_ranks(1, 2, 3)
def each_sample_counts_once() -> None:
    model = net()
    batches = hvd.GlobalBatch(plain())
    metrics = hvd.Metrics(batches)
    outputs, losses = [], []
    with torch.no_grad():
        for x, y, _ in batches:
            output = model(x)
            metrics.update(loss=functional.mse_loss(output, y), large=(output > y).squeeze(1))
            metrics.update(number=batches.total)
            whole = batches.gather_for_metrics({"output": output, "y": [y, y > 0.5]})
            outputs.append(whole["output"])
            assert torch.equal(whole["y"][1], whole["y"][0] > 0.5)
            squares = (output - y).square().sum()
            losses.append(float(batches.sum(squares)) / batches.total)
            assert batches.sum(1) == hvd.size() if batches.total > 2 else 2
        expected = model(X)
    assert torch.allclose(torch.cat(outputs), expected, atol=1e-6)
    first = functional.mse_loss(expected[:BATCH], Y[:BATCH])
    assert losses[0] == pytest.approx(float(first), abs=1e-6)
    computed = metrics.compute()
    assert computed["loss"] == pytest.approx(float(functional.mse_loss(expected, Y)), abs=1e-6)
    assert computed["large"] == pytest.approx(float((expected > Y).double().mean()), abs=1e-12)
    assert computed["number"] == pytest.approx((32 * 8 + 2 * 2) / 34)
    assert hvd.allgather_object(computed) == [computed] * hvd.size()
    metrics.reset()
    assert metrics.compute() == {}


@on_ranks(2)
def metrics_count_what_the_loss_counts() -> None:
    batches = hvd.GlobalBatch(
        DataLoader(Sentences(), batch_size=4), count=words_in, micro_batch_size=1
    )
    metrics = hvd.Metrics(batches)
    for batch in batches:
        words = batch["words"][batch["words"] != PADDING].double()
        metrics.update(word=words.mean())  # no number, where there is none
    every = torch.cat([Sentences()[i]["words"] for i in range(N)])
    expected = every[every != PADDING].double().mean()
    assert metrics.compute()["word"] == pytest.approx(float(expected))
    with raises(fd.InvalidArgument, "word has shape (3,)", "1 samples"):
        metrics.update(word=torch.ones(3))
    other = hvd.Metrics(batches)
    other.update(**{f"of rank {hvd.rank()}": 1.0})
    with raises(fd.Mismatch, "'of rank 0'", "'of rank 1'"):
        other.compute()
    with raises(fd.InvalidArgument, "batches is 3"):
        hvd.Metrics(3)  # type: ignore[arg-type]


# ---- where a program goes on ----


def shuffled() -> DataLoader[Any]:
    return plain(shuffle=True, generator=seeded(), num_workers=0)


def train_until(path: str, stop: int) -> None:
    """Saves after so many batches of the second epoch, and dies."""
    begin_torch()
    model = net(1 + hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = hvd.GlobalBatch(shuffled(), model, optimizer)
    for epoch in range(2):
        for i, batch in enumerate(batches, 1):
            optimizer.zero_grad()
            batches.scale_loss(mean_loss(model, batch)).backward()
            optimizer.step()
            if epoch == 1 and i == stop:
                if hvd.rank() == 0:
                    state = [each.state_dict() for each in (model, optimizer, batches)]
                    torch.save(state, path)
                return


def train_on(path: str) -> list[Any]:
    """From there to the end of the third epoch."""
    begin_torch()
    model = net(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    states = torch.load(path, weights_only=True)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    batches = hvd.GlobalBatch(plain(shuffle=True, generator=seeded(99)), model, optimizer)
    batches.load_state_dict(states[2])
    again = batches.state_dict()
    assert all(again[key] == states[2][key] for key in again if key != "generators")
    for epoch in range(batches.epoch, 3):
        assert batches.epoch == epoch
        for batch in batches:
            optimizer.zero_grad()
            batches.scale_loss(mean_loss(model, batch)).backward()
            optimizer.step()
    return [p.tolist() for p in model.parameters()]


@pytest.mark.parametrize(("ranks", "then", "stop"), [(3, 2, 2), (1, 3, 5)])
def test_a_program_goes_on_in_mid_epoch_with_other_ranks(
    spawn: Callable[..., World], tmp_path: Path, ranks: int, then: int, stop: int
) -> None:
    path = str(tmp_path / "state.pt")
    spawn(ranks, "torch").run(train_until, path, stop)
    weights = spawn(then, "torch").run(train_on, path)
    reference = learn(shuffled(), Way(epochs=3), alone=True)
    for of_a_rank in weights:
        for a, b in zip(of_a_rank, reference.weights, strict=True):
            assert torch.allclose(torch.tensor(a), b, atol=CLOSE, rtol=0)


@on_ranks(2)
def a_loop_that_was_left_leaves_the_same_order_behind() -> None:
    """However far each rank had read ahead."""

    def make(**options: Any) -> hvd.GlobalBatch:
        sampler = RandomSampler(DATA, True, 80, generator=seeded())
        return hvd.GlobalBatch(plain(sampler=sampler, batch_size=5), **options)

    def left(batches: hvd.GlobalBatch) -> tuple[int, list[int]]:
        it = iter(batches)
        got = 0
        while got < 3:
            next(it)
            got += batches.sync_gradients
        it.close()
        assert batches.epoch == 0
        mine = [n for x, *_ in batches for n in numbers_of(x)]
        assert batches.epoch == 2
        return sum(hvd.allgather_object(len(mine))), mine

    one, other = left(make()), left(make(micro_batch_size=1))
    assert one == other
    assert one[0] == 80

    batches = make()
    first = iter(batches)
    next(first)
    second = iter(batches)
    next(second)
    with raises(fd.InvalidArgument, "another loop over this GlobalBatch"):
        next(first)


@on_ranks(2)
def datasets_without_numbers_go_on_too() -> None:
    def loader() -> DataLoader[Any]:
        return DataLoader(Stream(seed=6), batch_size=BATCH)

    batches = hvd.GlobalBatch(loader())
    whole = [numbers_of(batches.gather_for_metrics(x)) for x, *_ in batches]
    state: Any = None
    for i, _ in enumerate(batches):
        if i == 1:
            state = batches.state_dict()
            break
    again = hvd.GlobalBatch(loader())
    again.load_state_dict(copy.deepcopy(state))
    assert again.epoch == 1
    assert [numbers_of(again.gather_for_metrics(x)) for x, *_ in again] == whole[2:]
    assert len(seen(again, 1)[0]) == N


@on_ranks(2)
def a_state_that_does_not_fit_is_refused() -> None:
    batches = hvd.GlobalBatch(shuffled())
    state: Any = None
    for i, _ in enumerate(batches):
        if i == 2:
            state = batches.state_dict()
    for other, words in [
        (state | {"samples": 3}, "samples was 3 and is 34 here"),
        (state | {"batch_size": 9}, "batch_size was 9 and is 8 here"),
        ({"epoch": 1}, "is not what state_dict() of a GlobalBatch gives"),
    ]:
        with raises(fd.InvalidArgument, words):
            batches.load_state_dict(other)
    for other, words in [
        (state | {"generators": []}, "has 0 generators of the order, and the sampler 1"),
        (state | {"checksum": 1}, "the first 3 batches are not those"),
        (state | {"batches": 99}, "after 99 batches, and there are 5"),
    ]:
        batches.load_state_dict(other)
        with raises(fd.InvalidArgument, words):
            next(iter(batches))
    batches.load_state_dict(state | ({"batches": 2, "checksum": 0} if hvd.rank() else {}))
    with raises(fd.InvalidArgument, "not those that" if hvd.rank() else "rank 1"):
        next(iter(batches))
    batches.load_state_dict(state | {"epoch": hvd.rank()})
    with raises(fd.Mismatch, "epoch 0, after 3 batches; rank 1: epoch 1"):
        next(iter(batches))


# ---- what goes wrong ----


class _Late(IterableDataset[Any]):
    """A stream of which one rank has another sample in the third batch."""

    def __init__(self, x: torch.Tensor, odd: int) -> None:
        self.x, self.odd = x, odd

    def __iter__(self) -> Iterator[Any]:
        for i, row in enumerate(self.x):
            yield row + (self.odd if i == 17 else 0)


@on_ranks(2)
def data_that_differ_between_ranks_are_a_mismatch() -> None:
    me = hvd.rank()
    one, other, late = Stream(seed=1 + me), Stream(N - 9 * me), _Late(X, me)
    for make, *words in [
        (lambda: plain(batch_size=8 + me), "batch_size 8; rank 1: batch_size 9"),
        (lambda: DataLoader(TensorDataset(X[: N - me]), batch_size=8), "samples 34; rank 1"),
        (lambda: plain(shuffle=True, generator=seeded(me)), "samples ["),
        (lambda: plain(sampler=range(N - 2 * me)), "5 batches; rank 1: 4 batches"),
        (lambda: plain(sampler=[*range(N - 2), N - 2 + me, N - 1]), "up to batch 5", "rank 1"),
        (lambda: plain(sampler=[*range(16), 16 + me, *range(17, N)]), "up to batch 3", "rank 1"),
        (lambda: DataLoader(one, batch_size=8), "checksum"),
        (lambda: DataLoader(late, batch_size=8), "in epoch 1: batch 3 ", "rank 1"),
        (lambda: DataLoader(other, batch_size=8), "8 samples; rank 1: 1 samples"),
        (lambda: DataLoader(Stream(N - 10 * me), batch_size=8), "8 samples; rank 1: no more"),
    ]:  # fmt: skip
        with raises(fd.Mismatch, *words):
            for _ in hvd.GlobalBatch(make()):
                pass
    for _ in hvd.GlobalBatch(DataLoader(one, batch_size=8), same_batches=False):
        pass

    class Fails(Stream):
        def __iter__(self) -> Iterator[Any]:
            yield from itertools.islice(super().__iter__(), 12 - 10 * (self.n % 2))
            if me == 1:
                raise ZeroDivisionError
            yield from super().__iter__()

    for n in (N, N - 1):  # in the second batch, in the first
        with raises(ZeroDivisionError if me else fd.InvalidArgument, *[] if me else ["rank 1"]):
            for _ in hvd.GlobalBatch(DataLoader(Fails(n), batch_size=8)):
                pass


@on_ranks(2)
def a_backward_without_the_weight_is_an_error_on_every_rank() -> None:
    for options in ({}, {"micro_batch_size": 1}, {"sharded_update": True}):
        model = net(1 + hvd.rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = hvd.GlobalBatch(plain(), model, optimizer, **options)  # type: ignore[arg-type]
        with raises(fd.InvalidArgument, "batches.scale_loss(loss).backward()"):
            for batch in batches:
                mean_loss(model, batch).backward()
        optimizer.zero_grad()
        check_goes_on(model, optimizer, batches)
        # A sum of weighed losses and of what needs no weight, in any order.
        penalty = sum(p.square().sum() for p in model.parameters())
        for batch in batches:
            weighed = batches.scale_loss(mean_loss(model, batch))
            (penalty * 0 + weighed).backward(retain_graph=True)
            break
        optimizer.zero_grad()


@on_ranks(2)
def one_rank_without_the_weight_is_named_by_the_others() -> None:
    model = net(1 + hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = hvd.GlobalBatch(plain(), model, optimizer)
    with raises(fd.InvalidArgument if hvd.rank() else fd.RemoteError, *["rank 1"][hvd.rank() :]):
        for batch in batches:
            loss = mean_loss(model, batch)
            (loss if hvd.rank() else batches.scale_loss(loss)).backward()
    optimizer.zero_grad()
    check_goes_on(model, optimizer, batches)


def one_ahead(batches: Any) -> Iterator[Any]:
    """As prefetchers do that copy the next batch to a device."""
    reads = iter(batches)
    batch = next(reads)
    while batch is not None:
        following = next(reads, None)
        yield batch
        batch = following


@on_ranks(1, 3)
def a_program_that_fetches_batches_ahead_is_told() -> None:
    def trains(loader: Any, **options: Any) -> None:
        model = net(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = hvd.GlobalBatch(loader, model, optimizer, **options)
        for batch in one_ahead(batches):
            loss = mean_loss(model, batch)
            batches.scale_loss(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        batches.scale_loss(loss)  # as programs log the last one

    trains(plain(drop_last=True))  # each batch has the weight of any other
    words = "fetches each batch before it computes on the one before"
    for loader, options in [
        (plain(), {}), (plain(drop_last=True), {"count": lambda batch: batch[2].sum()}),
    ]:  # fmt: skip
        if hvd.size() == 1:
            trains(loader, **options)
            continue
        with raises(fd.InvalidArgument, words):
            trains(loader, **options)


@on_ranks(3)
def losses_may_be_added_up_over_a_pass() -> None:
    """Nothing of that is read ahead: one backward comes after the loop, or several of one batch."""
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = hvd.GlobalBatch(plain(), model, optimizer, count=lambda batch: batch[2].sum())
    sum(
        (batches.scale_loss(mean_loss(model, batch)) for batch in batches), torch.zeros(())
    ).backward()
    optimizer.step()
    one = hvd.GlobalBatch(
        DataLoader(DATA, batch_size=N), model, optimizer, count=lambda batch: batch[2].sum()
    )
    [batch] = list(one)
    for _ in range(2):
        optimizer.zero_grad()
        one.scale_loss(mean_loss(model, batch)).backward()
        optimizer.step()


@on_ranks(1, 3)
def a_sum_over_the_pass_counts_every_rank_or_is_refused() -> None:
    for loader in (plain(), plain(drop_last=True)):
        batches = hvd.GlobalBatch(loader)
        mine = 0.0
        for _ in batches:
            mine += batches.samples
        if loader.drop_last or hvd.size() == 1:
            assert batches.sum(mine) == (len(loader) * BATCH if loader.drop_last else N)
        else:
            with raises(fd.InvalidArgument, "whose last batch had 2 samples for 3 parts"):
                batches.sum(mine)


@on_ranks(1, 2)
def what_is_wrong_is_named() -> None:
    model = net(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    apart = DistributedSampler(DATA, 2, 0)
    make: Any = hvd.GlobalBatch
    for call, words in [
        (lambda: make([1, 2]), "loader is [1, 2]; it is a torch.utils.data.DataLoader"),
        (lambda: make(plain(), 3), "model is 3"),
        (lambda: make(plain(), model, 3), "optimizer is 3"),
        (lambda: make(plain(), None, optimizer), "an optimizer without its model"),
        (lambda: make(plain(), model, bucket_bytes=1), "bucket_bytes without an optimizer"),
        (lambda: make(plain(), model, optimizer, op=hvd.Sum), "takes no op"),
        (lambda: make(plain(), model, wrapped), "is a DistributedOptimizer already"),
        (lambda: make(plain(), micro_batch_size=0), "micro_batch_size is 0"),
        (lambda: make(plain(), micro_batch_size=True), "micro_batch_size is True"),
        (lambda: make(plain(), count=3), "count is 3"),
        (lambda: make(DataLoader(DATA, batch_size=None)), "not batched"),
        (lambda: make(DataLoader(Stream(), batch_size=None)), "not batched"),
        (lambda: make(plain(sampler=apart)), "DistributedSampler"),
        (lambda: make(plain()).scale_loss(torch.tensor(1.0)), "there is no batch yet"),
        (lambda: make(plain()).samples, "there is no batch yet"),
    ]:  # fmt: skip
        with raises(fd.InvalidArgument, words):
            call()
    batches = make(plain(), count=lambda _: -1)
    next(iter(batches))
    for call, words in [
        (lambda: batches.scale_loss(1.0), "loss is a float"),
        (lambda: batches.scale_loss(torch.ones(2)), "loss is a Tensor of shape (2,)"),
        (lambda: batches.scale_loss(torch.tensor(1.0), "none"), "reduction is 'none'"),
        (lambda: batches.scale_loss(torch.tensor(1.0)), "count() gives -1.0"),
        (lambda: batches.gather_for_metrics(torch.tensor(1.0)), "of shape ()"),
        (lambda: batches.sum("a"), "sum(): 'a'; it takes a number or a tensor"),
        (lambda: batches.gather_for_metrics(torch.ones(99)), "of shape (99,)"),
    ]:
        with raises(fd.InvalidArgument, words):
            call()
    first = make(plain(), model, optimizer)
    check_goes_on(model, optimizer, first)
    check_goes_on(model, optimizer, make(plain(), model, optimizer))  # another loader, later


@on_ranks(2)
def what_is_wrong_on_one_rank_is_told_to_the_others() -> None:
    me = hvd.rank()
    model = net(1)
    make: Any = hvd.GlobalBatch
    for wrong, words in [
        (lambda: make([1, 2], model), "loader is [1, 2]"),
        (lambda: make(plain(), "model"), "model is 'model'"),
        (lambda: make(plain(), model, micro_batch_size=0), "micro_batch_size is 0"),
        (lambda: make(plain(), model, op=hvd.Sum), "takes no op"),
    ]:
        told = [] if me else ["GlobalBatch() cannot begin: rank 1: InvalidArgument"]
        with raises(fd.InvalidArgument, *told, words):
            wrong() if me else make(plain(), model)
    with raises(fd.Mismatch, "rank 0: a model; rank 1: no model"):
        make(plain(), None if me else model)
    for _ in make(plain(), model):
        pass


@on_ranks(3)
def layers_that_look_at_other_samples() -> None:
    def normalized(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def synchronized(seed: int) -> nn.Module:
        return hvd.convert_sync_batchnorm(normalized(seed))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.GlobalBatch(plain(), normalized(1))
    told = [str(each.message) for each in caught if "layer '1' normalizes" in str(each.message)]
    assert len(told) == (hvd.rank() == 0)
    mine = learn(plain(), Way(build=synchronized), alone=False)  # 2 samples in the last batch
    reference = learn(plain(), Way(build=normalized), alone=True)
    assert mine.losses == pytest.approx(reference.losses, abs=CLOSE)
    kept = nn.Sequential(nn.InstanceNorm1d(6, track_running_stats=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.GlobalBatch(plain(), kept)
        hvd.GlobalBatch(plain(), kept, logical_ranks=3)
        hvd.GlobalBatch(plain(), nn.Sequential(nn.InstanceNorm1d(6)))
    words = "layer '0' keeps running statistics of each rank's own samples"
    assert sum(words in str(each.message) for each in caught) == (hvd.rank() == 0)
    model = synchronized(1)
    with raises(fd.InvalidArgument, "micro_batch_size=2: layer '1'"):
        hvd.GlobalBatch(plain(), model, micro_batch_size=2)
    model.eval()
    for _ in hvd.GlobalBatch(plain(), model):
        pass


test_on_ranks = make_tests(__name__, "torch")
