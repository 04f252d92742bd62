"""farandole.torch.GlobalBatch(logical_ranks=G): the same bits for any number of ranks."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import begin_torch, make_tests, on_ranks, raises
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import farandole as fd
import farandole.torch as hvd
from farandole.data._logical import fold
from harness import World

Spawn = Callable[..., World]
PARTS, N, BATCH = 4, 34, 8  # a last batch of 2, which leaves parts without samples
PADDING = -100

_random = torch.Generator().manual_seed(5)
X, Y = torch.rand((N, 6), generator=_random), torch.rand((N, 1), generator=_random)
IMAGES = torch.rand((N, 1, 6, 6), generator=_random)
LABELS = torch.randint(0, 3, (N,), generator=_random)
WORDS = torch.randint(0, 11, (N, 5), generator=_random)
TAGS = torch.where(torch.rand((N, 5), generator=_random) < 0.4, PADDING, WORDS)
TAGS[8:14] = PADDING  # of the second batch, all but the last part


def loader(*tensors: torch.Tensor, **options: Any) -> DataLoader[Any]:
    shuffle = torch.Generator().manual_seed(3)
    settings: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "generator": shuffle}
    return DataLoader(TensorDataset(*tensors), **(settings | options))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1)
    )


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(),
        nn.Linear(64, 3),
    )  # fmt: skip


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 8), layer, nn.Linear(8, 11))


class Twice(nn.Module):
    """A layer in two reentrant checkpoints: its gradient comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.inner, x.tanh().requires_grad_(), use_reentrant=True)
        return self.last(x)


class Sometimes(nn.Module):
    """Layers that some parts of a batch use, and others do not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 1) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x[0, 0] if len(x) else 0.0
        return self.layers[0](x) if first < 0.5 else self.layers[1](x) * self.layers[2](x)


def digest(tree: Any) -> str:
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, dict):
            for key in value:
                found.update(str(key).encode())
                add(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        elif isinstance(value, torch.Tensor):
            found.update(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(value).encode())

    add(tree)
    return found.hexdigest()


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def learn(
    data: DataLoader[Any], model: nn.Module, optimizer: Any, loss_of: Loss, **options: Any
) -> dict[str, str]:
    """Digests of all that there is after every batch, and at the end."""
    batches = hvd.GlobalBatch(data, model, optimizer, logical_ranks=PARTS, **options)
    seen, of_batches = hvd.Metrics(batches), []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for _ in range(2):
        optimizer.zero_grad()
        losses = []
        for x, y in batches:
            output = model(x)
            loss = loss_of(output, y)
            scaled = batches.scale_loss(loss)
            scaler.scale(scaled).backward()
            seen.update(loss=loss, first=output.detach().flatten(1)[:, 0])
            losses.append(scaled.detach())
            if not batches.sync_gradients:
                continue
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            of_batches.append((norm, torch.stack(losses).isfinite().all()))
            if "micro_batch_size" not in options:
                of_batches.append((batches.sum(losses), batches.sum([1.0] * len(losses))))
            losses = []
    return {
        "weights and buffers": digest(model.state_dict()),
        "optimizer": digest(optimizer.state_dict()["state"]),
        "batches": digest(of_batches),
        "metrics": repr(seen.compute()),
        "state": digest(batches.state_dict()),
        "random numbers of the program": digest(torch.rand(3)),
    }


def words_in(batch: Any) -> torch.Tensor:
    return (batch[1] != PADDING).sum()


def tagged(output: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), tags.flatten())


def train() -> dict[str, str]:
    begin_torch()
    results = {}

    def add(name: str, build: Callable[[], nn.Module], kind: Any, data: Any, **how: Any) -> None:
        torch.manual_seed(1)
        model = build()
        torch.manual_seed(7)
        optimizer = kind(model.parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = learn(data, model, optimizer, **how)
        results.update({f"{name}: {what}": value for what, value in found.items()})

    def sgd(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    def adam(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.01)

    mse, entropy = functional.mse_loss, functional.cross_entropy
    add("mlp", mlp, adam, loader(X, Y, drop_last=True), loss_of=mse)
    add("short batch", plain, sgd, loader(X, Y), loss_of=mse, bucket_bytes=0)
    add("micro-batches", plain, sgd, loader(X, Y), loss_of=mse, micro_batch_size=1)
    add("twice", Twice, sgd, loader(X, Y), loss_of=mse)
    add("sometimes", Sometimes, adam, loader(X, Y), loss_of=mse)
    add("cnn", cnn, sgd, loader(IMAGES, LABELS), loss_of=entropy)
    words = loader(WORDS, TAGS, shuffle=False)
    add("transformer", transformer, adam, words, loss_of=tagged, count=words_in)
    add("iterable", plain, sgd, DataLoader(Stream(), batch_size=BATCH), loss_of=mse)
    workers = loader(X, Y, num_workers=1, multiprocessing_context="fork")
    add("workers", plain, sgd, workers, loss_of=mse)
    return results


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(X, Y, strict=True))


@pytest.mark.timeout(250)
def test_the_bits_do_not_depend_on_the_number_of_ranks(spawn: Spawn) -> None:
    right: dict[str, str] = {}
    for size in (1, 2, 3, 4):
        for rank, result in enumerate(spawn(size, "torch").run(train)):
            right = right or result
            different = [what for what in right if result[what] != right[what]]
            assert not different, f"rank {rank} of {size}"
    assert len(set(right.values())) > len(right) // 2
    assert right["short batch: weights and buffers"] == right["workers: weights and buffers"]


# ---- going on ----


def train_from_to(path: str, begin: int, end: int) -> str:
    """Batches of a program of two epochs, of 4 each, with a state before and after."""
    begin_torch()
    torch.manual_seed(1 + begin)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = loader(X, Y, drop_last=True)
    if begin:
        states = torch.load(path, weights_only=True)
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
    batches = hvd.GlobalBatch(data, model, optimizer, logical_ranks=PARTS)
    if begin:
        batches.load_state_dict(states[2])
    done = begin
    while batches.epoch < 2:
        for x, y in batches:
            batches.scale_loss(functional.mse_loss(model(x), y)).backward()
            if not batches.sync_gradients:
                continue
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == end:
                if hvd.rank() == 0:
                    parts = (model, optimizer, batches)
                    torch.save([each.state_dict() for each in parts], path)
                return digest([model.state_dict(), optimizer.state_dict()["state"]])
    raise AssertionError(done)


def test_a_program_goes_on_with_other_ranks_to_the_same_bits(spawn: Spawn, tmp_path: Path) -> None:
    path = str(tmp_path / "state.pt")
    [right] = spawn(1, "torch").run(train_from_to, path, 0, 7)
    spawn(3, "torch").run(train_from_to, path, 0, 2)
    spawn(1, "torch").run(train_from_to, path, 2, 5)
    assert set(spawn(2, "torch").run(train_from_to, path, 5, 7)) == {right}


# ---- against programs of one process ----


@on_ranks(1, 3)
def gradients_fold_as_they_are_written_down() -> None:
    """In a program of one process that knows the tree, and that adds up two batches."""
    torch.manual_seed(2)
    model, alone = plain(), plain()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = hvd.GlobalBatch(loader(X, Y, shuffle=False), model, optimizer, logical_ranks=PARTS)
    count = 0
    for x, y in batches:
        batches.scale_loss(functional.mse_loss(model(x), y)).backward()
        count += batches.sync_gradients
        if count == 2:
            break
    whole = []
    for begin in (0, BATCH):
        parts = []
        for i in range(begin, begin + BATCH, 2):
            loss = functional.mse_loss(alone(X[i : i + 2]), Y[i : i + 2]) * (2 / BATCH)
            parts.append(torch.autograd.grad(loss, list(alone.parameters())))
        whole.append([fold(list(each), torch.add) for each in zip(*parts, strict=True)])
    for p, first, second in zip(model.parameters(), *whole, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, first + second)


@on_ranks(1, 2)
def the_last_part_sends_its_gradients_while_backward_goes_on() -> None:
    """From the second batch on, and if no gradients stand as a batch begins."""
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = hvd.GlobalBatch(loader(X, Y), model, optimizer, logical_ranks=PARTS)
    exchange: Any = optimizer._exchange  # type: ignore[attr-defined]
    sends: list[bool] = []
    first: Any = model[0].weight
    first.register_hook(lambda _: sends.append(exchange is not None and exchange.reducing))
    for batch in range(4):
        for x, y in batches:
            batches.scale_loss(functional.mse_loss(model(x), y)).backward()
            if batches.sync_gradients:
                optimizer.step()
                optimizer.zero_grad(set_to_none=batch != 1)
                break
    others = [False] * (PARTS // hvd.size() - 1)
    several = hvd.size() > 1
    assert sends == [each for last in (False, several, False, several) for each in [*others, last]]


@on_ranks(2)
def weights_and_metrics_are_those_of_one_process_up_to_rounding() -> None:
    torch.manual_seed(1)
    model, alone = plain(), plain()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = hvd.GlobalBatch(loader(X, Y), model, optimizer, logical_ranks=PARTS)
    seen = hvd.Metrics(batches)
    for x, y in batches:
        loss = functional.mse_loss(model(x), y)
        batches.scale_loss(loss).backward()
        seen.update(loss=loss)
        if batches.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    total = 0.0
    for x, y in loader(X, Y):
        reference.zero_grad()
        loss = functional.mse_loss(alone(x), y)
        loss.backward()
        reference.step()
        total += float(loss) * len(x)
    for a, b in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=0)
    assert seen.compute()["loss"] == pytest.approx(total / N, abs=1e-5)


@on_ranks(3)
def outputs_of_all_parts_come_in_the_order_of_the_data() -> None:
    batches = hvd.GlobalBatch(loader(X, Y, shuffle=False), logical_ranks=PARTS)
    mine: list[Any] = []
    seen = []
    for x, y in batches:
        mine.append({"x": x, "y": [y]})
        if batches.sync_gradients:
            whole: Any = batches.gather_for_metrics(mine)
            assert len(whole["x"]) == batches.total
            seen.append((whole["x"], whole["y"][0]))
            mine = []
        elif batches.total == BATCH:
            with raises(fd.InvalidArgument, "of which more parts come"):
                batches.gather_for_metrics(mine)
    assert torch.equal(torch.cat([x for x, _ in seen]), X)
    assert torch.equal(torch.cat([y for _, y in seen]), Y)
    with raises(fd.InvalidArgument, "takes a list", f"this rank has {1 + (hvd.rank() == 2)}"):
        batches.sum(3.0)


@on_ranks(1, 2)
def buffers_are_the_mean_of_the_parts() -> None:
    """Where nothing draws, of a layer by itself; also when no backward comes."""
    layer = nn.BatchNorm1d(6)
    rows = loader(X, shuffle=False, drop_last=True)
    for x in hvd.GlobalBatch(rows, layer, logical_ranks=2):
        layer(x[0])
    mean = torch.zeros(6)
    for begin in range(0, 32, BATCH):
        halves = X[begin : begin + 4].mean(0), X[begin + 4 : begin + 8].mean(0)
        mean = 0.9 * mean + 0.1 * (halves[0] + halves[1]) / 2
    assert torch.allclose(layer.running_mean, mean, atol=1e-6)  # type: ignore[arg-type]
    assert int(layer.num_batches_tracked) == 4  # type: ignore[arg-type]
    assert len(set(hvd.allgather_object(digest(layer.state_dict())))) == 1
    before = digest(layer.state_dict())
    for x in hvd.GlobalBatch(rows, layer, logical_ranks=2):
        layer(x[0])
        break  # in the middle of a batch, or after a part on each rank
    assert digest(layer.state_dict()) == before


class Counts(nn.Module):
    """Buffers of halves, which cannot hold what many samples add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("large", torch.zeros(1, dtype=torch.float16))
        self.register_buffer("least", torch.full((1,), float("inf"), dtype=torch.bfloat16))

    def forward(self, _: torch.Tensor) -> None:
        self.large.fill_(30000)  # type: ignore[operator]


@on_ranks(1, 2)
def means_of_halves_are_finite() -> None:
    layer = Counts()
    for x in hvd.GlobalBatch(loader(X, drop_last=True), layer, logical_ranks=2):
        layer(x[0])
    assert layer.large.tolist() == [30000]
    assert layer.least.tolist() == [float("inf")]


@on_ranks(3)
def every_part_of_every_batch_draws_other_numbers() -> None:
    batches = hvd.GlobalBatch(loader(X), logical_ranks=PARTS)
    drawn = {
        (batches.epoch, batches.part, float(torch.rand(()))) for _ in range(2) for _ in batches
    }
    everywhere = set().union(*hvd.allgather_object(drawn))
    assert len({number for *_, number in everywhere}) == len(everywhere) == 2 * 5 * PARTS
    assert hvd.allgather_object(len(drawn)) == [10, 10, 20]


test_on_ranks = make_tests(__name__, "torch")
