"""Elastic training with PyTorch: models, optimizers and batches go from one world into the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import refused
from torch import nn

import elastic_worlds
import farandole as fd
import farandole.torch as hvd
from elastic_worlds import Changes, Worlds
from harness import World

STEPS = 8
GROW = Changes(wanted=True, only_fewer=False)
Spawn = Callable[..., World]


def begin(elastic: bool = True) -> int:
    torch.set_num_threads(1)
    elastic_worlds.begin(elastic)
    hvd.init()
    return hvd.rank()


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def sample(step: int) -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3) * (step + 1) / 16


def bits(model: nn.Module) -> list[list[float]]:
    return [p.detach().reshape(-1).tolist() for p in model.parameters()]


def one_step(model: nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    model(sample(step)).square().mean().backward()
    optimizer.step()


# ---- a DistributedOptimizer ----


def serial(adam: bool, frozen: bool = False) -> list[list[float]]:
    model = model_of(0)
    optimizer, scheduler = made(model, adam)
    model[0].weight.requires_grad_(not frozen)
    for step in range(STEPS):
        one_step(model, optimizer, step)
        scheduler.step()
    return bits(model)


def made(model: nn.Module, adam: bool) -> Any:
    if adam:
        optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.05)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def trained(
    who: int, dies: dict[int, int], hears: dict[int, int], adam: bool, options: dict[str, Any],
    in_backward: bool, frozen: bool,
) -> Any:  # fmt: skip
    """`who`: this process; `dies` and `hears`: of which, in which step; `frozen`: a weight is, once
    the optimizer has been wrapped."""
    begin()
    model = model_of(who)  # rank 0's counts
    optimizer, scheduler = made(model, adam)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    model[0].weight.requires_grad_(not frozen)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, step=0)
    sizes, kept = [], []

    @hvd.elastic.run
    def train(state: Any) -> None:
        try:
            if hvd.size() == 1:
                assert all(p.grad is None for p in model.parameters())
            for state.step in range(state.step, STEPS):  # noqa: B020 - Horovod's way
                if dies.get(who) == state.step and in_backward:
                    model[0].weight.register_hook(lambda _: elastic_worlds.die())
                elif dies.get(who) == state.step:
                    elastic_worlds.die()
                if hears.get(who) == state.step:
                    elastic_worlds.hear(GROW)
                one_step(model, optimizer, state.step)
                scheduler.step()
                sizes.append(hvd.size())
                state.step += 1
                state.commit()
        except fd.PeerLost as error:
            kept.append(error)  # as a debugger does, with all frames below it
            raise

    train(state)
    return bits(model), sizes


def start(ranks: World, **arguments: Any) -> None:
    how: dict[str, Any] = {"dies": {}, "hears": {}, "adam": False, "options": {}}
    how |= {"in_backward": False, "frozen": False} | arguments
    for who in range(len(ranks)):
        ranks.start(trained, who, *how.values(), ranks=[who])


@pytest.mark.parametrize("adam", [False, True])
def test_a_training_goes_on_where_a_rank_is_lost(spawn: Spawn, adam: bool) -> None:
    ranks = spawn(2, "torch")
    start(ranks, dies={0: 3}, adam=adam, in_backward=adam, options={"bucket_bytes": 16})
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(1)
    weights, sizes = ranks.outcome(1).value
    assert weights == serial(adam)
    assert sizes == [2] * 3 + [1] * 5


@pytest.mark.parametrize(
    ("adam", "op"), [(False, hvd.Average), (True, hvd.Average), (0, hvd.Adasum)]
)
def test_new_ranks_take_part_with_the_same_state(spawn: Spawn, adam: bool, op: int) -> None:
    """Their optimizers have none, and are made while the others wait in sync."""
    ranks = spawn(4, "torch")
    start(ranks, hears={1: 2}, adam=adam, options={"op": op})
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(0, 1, 2, 3)
    ends = [outcome.value for outcome in ranks.outcomes()]
    assert [weights for weights, _ in ends] == [serial(adam)] * 4
    assert ends[0][1] == [2] * 3 + [4] * 5


def test_weights_may_be_frozen_between_worlds(spawn: Spawn) -> None:
    ranks = spawn(2, "torch")
    start(ranks, dies={0: 3}, frozen=True)
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(1)
    assert ranks.outcome(1).value[0] == serial(False, frozen=True)


def test_a_lost_rank_is_replaced(spawn: Spawn) -> None:
    """Alone in between, and with half of the ranks in the end."""
    ranks = spawn(4, "torch")
    start(ranks, dies={0: 1, 2: 5}, hears={1: 3})
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(1)
    worlds.form(1, 2)
    worlds.form(1, 3)
    for who in (1, 3):
        assert ranks.outcome(who).value[0] == serial(False)


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum, "compression": hvd.Compression.none},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"op": hvd.Adasum},
    ],
    ids=str,
)
def test_options_are_those_of_the_present_world(spawn: Spawn, options: dict[str, Any]) -> None:
    """As a job that never had another number of ranks goes on from there."""
    ranks = spawn(4, "torch")
    start(ranks, dies={3: 0, 2: 0}, options=options)
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2, 3)
    worlds.form(0, 1)
    small = spawn(2, "torch")
    start(small, options=options)
    Worlds(small).form(0, 1)
    expected = small.outcomes()
    for who in (0, 1):
        end = ranks.outcome(who)
        assert end.error is None, end.trace
        assert end.value[0] == expected[who].value[0]


def test_ranks_with_other_optimizers_are_told(spawn: Spawn) -> None:
    ranks = spawn(2, "torch")
    ranks.start(with_optimizers, 1, ranks=[0])
    ranks.start(with_optimizers, 2, ranks=[1])
    Worlds(ranks).form(0, 1)
    for end in ranks.outcomes():
        assert end.error == "Mismatch"
        assert (
            "what elastic.run goes on with, number 1: rank 0: nothing; rank 1: an opt" in end.text
        )


def with_optimizers(how_many: int) -> None:
    begin()
    models = [model_of(0) for _ in range(how_many)]
    optimizers = [hvd.DistributedOptimizer(made(model, False)[0]) for model in models]
    hvd.elastic.run(id)(hvd.elastic.TorchState())
    del optimizers


# ---- what an elastic job refuses ----


def refusing() -> None:
    begin()
    model = model_of(0)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    for options, words in [
        ({"sharded_update": True}, "takes its part of the state with it"),
        ({"process_set": hvd.ProcessSet([0])}, "not registered"),
    ]:
        refused(lambda o=options: hvd.DistributedOptimizer(plain, **o), words)
    refused(lambda: hvd.Pipeline(model), "Pipeline in an elastic job")
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    outside(model, optimizer)
    adasum = hvd.DistributedOptimizer(made(model_of(1), False)[0], op=hvd.Adasum)
    refused(adasum.step, "outside of elastic.run")

    @hvd.elastic.run
    def train(_: Any) -> None:
        one_step(model, optimizer, 0)
        if hvd.size() > 1:
            some = hvd.add_process_set([0])
            plain = torch.optim.SGD(model_of(1).parameters(), lr=0.1)
            for made_here in (plain, adasum):
                refused(
                    lambda o=made_here: hvd.DistributedOptimizer(o, process_set=some),  # type: ignore[misc]
                    "in an elastic job" if made_here is plain else "already",
                )
            hvd.remove_process_set(some)

    train(hvd.elastic.TorchState(model, optimizer))
    one_step(model, optimizer, 1)  # the world is still there
    train(hvd.elastic.TorchState(model, optimizer))


def outside(model: nn.Module, optimizer: Any) -> None:
    refused(
        lambda: model(sample(0)).sum().backward(), "backward() of '2.", "outside of elastic.run"
    )
    refused(optimizer.step, "step() with a DistributedOptimizer outside of elastic.run")
    refused(optimizer.synchronize, "outside of elastic.run")


@pytest.mark.parametrize("size", [1, 2])
def test_nobody_trains_outside_of_worlds(spawn: Spawn, size: int) -> None:
    ranks = spawn(size, "torch")
    ranks.start(refusing)
    Worlds(ranks).form(*range(size))
    for end in ranks.outcomes():
        assert end.error is None, end.trace


def left_between_worlds() -> list[str]:
    begin()
    model = model_of(0)
    optimizer = hvd.DistributedOptimizer(made(model, False)[0])
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    said = []

    def callback() -> None:
        assert all(p.grad is None for p in model.parameters())
        try:
            model(sample(0)).sum().backward()
        except fd.InvalidArgument as error:
            said.append(str(error))

    state.register_reset_callbacks([callback])

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 4:
            one_step(model, optimizer, state.step)
            if hvd.rank() == 1 and state.step == 2:
                elastic_worlds.die()
            state.step += 1
            state.commit()  # fails, and the gradients of this step stand

    train(state)
    return said


def test_nobody_trains_between_worlds(spawn: Spawn) -> None:
    ranks = spawn(2, "torch")
    ranks.start(left_between_worlds)
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(0)
    (said,) = ranks.outcome(0).value
    assert "outside of elastic.run" in said


# ---- an ElasticSampler ----


def sampled(who: int, dies: dict[int, int], hears: dict[int, int]) -> list[list[int]]:
    """Two epochs of 53 samples in batches of 2; what this rank has trained on, of what was kept."""
    begin()
    sampler = hvd.elastic.ElasticSampler(range(53))
    loader = torch.utils.data.DataLoader(range(53), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    state = hvd.elastic.TorchState(sampler=sampler, epoch=0, seen=[[], []], steps=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < 2:
            for i, batch in enumerate(loader):
                if dies.get(who) == state.steps:
                    elastic_worlds.die()
                if hears.get(who) == state.steps:
                    elastic_worlds.hear(GROW)
                every = hvd.allgather(batch)  # what all ranks have trained on
                state.seen[state.epoch] += every.tolist()
                state.steps += 1
                sampler.record_batch(i, 2)
                if state.steps % 2 == 0:
                    state.commit()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    train(state)
    return state.seen  # type: ignore[no-any-return]


def check_epochs(seen: list[list[int]], most_twice: int) -> None:
    for epoch in seen:
        assert set(epoch) == set(range(53)), "a sample is lost"
        assert len(epoch) - 53 <= most_twice, "samples come twice"
    assert seen[0][:10] != seen[1][:10]


def test_samples_are_dealt_to_the_ranks_that_there_are(spawn: Spawn) -> None:
    """From 3 ranks to 2, and to 4; what was trained after a commit comes again."""
    ranks = spawn(5, "torch")
    for who in range(5):
        ranks.start(sampled, who, {2: 3}, {0: 5}, ranks=[who])
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    worlds.form(0, 1)
    worlds.form(0, 1, 3, 4)
    ends = [ranks.outcome(who) for who in (0, 1, 3, 4)]
    assert all(end.error is None for end in ends), ranks.report()
    assert all(end.value == ends[0].value for end in ends)
    check_epochs(ends[0].value, most_twice=3)  # that fill up the last batches of four ranks


def test_a_rank_that_is_new_first_learns_what_was_processed(spawn: Spawn) -> None:
    ranks = spawn(2, "torch")
    for who in range(2):
        ranks.start(sampled, who, {}, {0: 8}, ranks=[who])
    worlds = Worlds(ranks)
    worlds.form(0)
    worlds.form(0, 1)
    ends = ranks.outcomes()
    assert ends[0].value == ends[1].value
    check_epochs(ends[0].value, most_twice=1)


def recorded_alone() -> tuple[int, list[int], list[int]]:
    begin()
    sampler = hvd.elastic.ElasticSampler(range(10), shuffle=False)
    state = hvd.elastic.TorchState(sampler=sampler)
    elastic_worlds.hear(Changes(wanted=True, only_fewer=True))
    rounds = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        rounds.append(hvd.size())
        if len(rounds) == 1:
            sampler.record_indices([2 * hvd.rank(), 2 * hvd.rank() + 1])
            elastic_worlds.hear(Changes(wanted=True, only_fewer=True))
            state.commit()

    train(state)
    return len(sampler), list(sampler), sorted(sampler.processed_indices)


def test_what_ranks_record_by_themselves_is_known_to_all(spawn: Spawn) -> None:
    """Also where ranks only leave, and share nothing else."""
    ranks = spawn(3, "torch")
    ranks.start(recorded_alone)
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    worlds.form(0, 1)
    ends = [ranks.outcome(0).value, ranks.outcome(1).value]
    assert ends == [(3, [4, 6, 8], [0, 1, 2, 3]), (3, [5, 7, 9], [0, 1, 2, 3])]
    worlds.dismiss(2)


# ---- a GlobalBatch ----


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.25), nn.Linear(8, 1))


def whole(who: int, dies: dict[int, int], hears: dict[int, int], elastic: bool) -> Any:
    """Two epochs, in four logical ranks: losses and weights."""
    begin(elastic)
    model = dropping()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 3, generator=generator)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
    batches = hvd.GlobalBatch(loader, model, optimizer, logical_ranks=4)
    state = hvd.elastic.TorchState(model, optimizer, batches=batches, losses=[])
    kept: list[Any] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while batches.epoch < 2:
            parts = []
            kept[:] = [iter(batches)]  # the loop of a world that has ended lives on until here
            for inputs, targets in kept[0]:
                step = len(state.losses)
                if dies.get(who) == step and parts:  # in the middle of a batch
                    elastic_worlds.die()
                loss = nn.functional.mse_loss(model(inputs), targets)
                batches.scale_loss(loss).backward()
                parts.append(loss.detach() * batches.samples)
                if not batches.sync_gradients:
                    continue
                if dies.get(who) == step:
                    elastic_worlds.die()
                optimizer.step()
                optimizer.zero_grad()
                state.losses.append(float(batches.sum(parts) / batches.total))
                parts = []
                if hears.get(who) == step:
                    elastic_worlds.hear(GROW)
                if step % 2 == 1:
                    state.commit()
            state.commit()

    train(state)
    return state.losses, bits(model), [b.tolist() for b in model.buffers()]


@pytest.fixture(scope="module")
def unbroken(nurseries: Callable[[str], Any]) -> Any:
    with World(1, nurseries("torch")) as ranks:
        ranks.start(whole, 0, {}, {}, False)
        Worlds(ranks).form(0)
        return ranks.outcome(0).value


@pytest.mark.parametrize(("lost", "step"), [(1, 1), (2, 4), (1, 5), (2, 6)])
def test_the_losses_of_a_job_that_loses_a_rank_have_the_same_bits(
    spawn: Spawn, unbroken: Any, lost: int, step: int
) -> None:
    """Rank 2 has two parts of every batch, and is lost between them."""
    ranks = spawn(3, "torch")
    for who in range(3):
        ranks.start(whole, who, {lost: step}, {}, True, ranks=[who])
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    left = sorted({0, 1, 2} - {lost})
    worlds.form(*left)
    for who in left:
        end = ranks.outcome(who)
        assert end.error is None, end.trace
        assert end.value == unbroken


def test_they_have_the_same_bits_where_ranks_come(spawn: Spawn, unbroken: Any) -> None:
    ranks = spawn(4, "torch")
    for who in range(4):
        ranks.start(whole, who, {0: 8}, {0: 3}, True, ranks=[who])
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(0, 1, 2, 3)
    worlds.form(1, 2, 3)
    for who in (1, 2, 3):
        end = ranks.outcome(who)
        assert end.error is None, end.trace
        assert end.value == unbroken


def counted() -> list[dict[str, float]]:
    """Means over the samples of a pass; what was added up in another world is refused."""
    begin()
    loader = torch.utils.data.DataLoader(torch.arange(12.0), batch_size=4)  # type: ignore[arg-type]
    batches = hvd.GlobalBatch(loader)
    metrics = hvd.Metrics(batches)
    state = hvd.elastic.TorchState(batches=batches)
    found = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        if hvd.size() == 1:
            refused(metrics.compute, "the ranks have changed since")
            metrics.reset()
        for x in batches:
            metrics.update(mean=x.mean())
            state.commit()
            if hvd.rank() == 1:
                elastic_worlds.die()
        found.append(metrics.compute())

    train(state)
    refused(lambda: hvd.elastic.TorchState(metrics=metrics), "metrics of the state is")
    return found


def test_metrics_are_of_one_world(spawn: Spawn) -> None:
    ranks = spawn(2, "torch")
    ranks.start(counted)
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(0)
    end = ranks.outcome(0)
    assert end.error is None, end.trace
    (found,) = end.value
    assert found["mean"] in (7.5, 9.5), "of the last two batches, or of the last"


def normalized(who: int) -> Any:
    """A SyncBatchNorm over all ranks, which have different samples."""
    begin()
    torch.manual_seed(0)
    model: Any = hvd.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    state = hvd.elastic.TorchState(model, optimizer, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 4:
            if (who, state.step) == (2, 2):
                elastic_worlds.die()
            optimizer.zero_grad()
            x = sample(state.step).chunk(2)[hvd.rank()] if hvd.size() == 2 else sample(state.step)
            model(x).square().mean().backward()
            optimizer.step()
            state.step += 1
            state.commit()

    train(state)
    return bits(model), [b.tolist() for b in model.buffers()]


def test_synchronized_layers_normalize_over_the_present_world(spawn: Spawn) -> None:
    ranks = spawn(3, "torch")
    for who in range(3):
        ranks.start(normalized, who, ranks=[who])
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    worlds.form(0, 1)
    ends = [ranks.outcome(0), ranks.outcome(1)]
    assert ends[0].error is None, ends[0].trace
    assert ends[0].value == ends[1].value
    assert ends[0].value[1][2] == 4  # batches


def batches_elsewhere() -> None:
    begin()
    loader = torch.utils.data.DataLoader(range(4), batch_size=2)  # type: ignore[arg-type]
    batches = hvd.GlobalBatch(loader)
    refused(lambda: next(iter(batches)), "TorchState(model, optimizer, batches=batches)")
    state = hvd.elastic.TorchState(batches=batches)
    refused(lambda: next(iter(batches)), "outside of elastic.run")

    @hvd.elastic.run
    def train(state: Any) -> int:
        return len(list(state.batches)) + len(list(hvd.GlobalBatch(loader)))

    assert train(state) == 4
    assert len(list(batches)) == 2, "the world is still there"


def test_global_batches_are_part_of_the_state(spawn: Spawn) -> None:
    ranks = spawn(2, "torch")
    ranks.start(batches_elsewhere)
    Worlds(ranks).form(0, 1)
    for end in ranks.outcomes():
        assert end.error is None, end.trace


# ---- states, on one rank ----


@pytest.fixture
def alone(world_of_one: None) -> None:
    del world_of_one


@pytest.mark.usefixtures("alone")
def test_a_commit_is_whole_where_the_next_one_fails() -> None:
    model = model_of(0)
    optimizer, scheduler = made(model, True)
    state = hvd.elastic.TorchState(model, optimizer, scheduler=scheduler, extra=[1])
    for step in range(3):  # both buffers are in use
        one_step(model, optimizer, step)
        scheduler.step()
        state.commit()
    kept = bits(model), str(optimizer.state_dict()), scheduler.state_dict()
    one_step(model, optimizer, 3)
    scheduler.step()
    state.extra = [2, (number for number in ())]
    with pytest.raises(fd.InvalidArgument, match="extra of the state is a list"):
        state.commit()
    for _ in range(2):
        state.restore()
        assert (bits(model), str(optimizer.state_dict()), scheduler.state_dict()) == kept
        assert state.extra == [1]
        one_step(model, optimizer, 4)  # changes nothing that is kept
        scheduler.step()


@pytest.mark.usefixtures("alone")
def test_commits_use_the_memory_of_those_before() -> None:
    model = nn.Linear(4, 4)
    state = hvd.elastic.TorchState(model)
    commit: Any = state._handlers["model"]._commit  # type: ignore[attr-defined]
    state.commit()
    seen = set()
    for _ in range(4):
        state.commit()
        seen.add(commit._last["weight"].data_ptr())
    assert len(seen) == 2


@pytest.mark.usefixtures("alone")
def test_a_state_may_be_given_another_model() -> None:
    first, second = model_of(0), model_of(1)
    state = hvd.elastic.TorchState(first, other=None)
    state.model, state.other = second, first
    kept = bits(first), bits(second)
    for model in (first, second):
        nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    state.restore()
    assert bits(second) == kept[1]
    assert bits(first) == kept[0]


@pytest.mark.usefixtures("alone")
def test_own_types_have_own_handlers() -> None:
    class Counter:
        count = 0

    class CounterHandler(hvd.elastic.StateHandler):
        def save(self) -> None:
            self.saved = self.value.count

        def restore(self) -> None:
            self.value.count = self.saved

        def sync(self) -> None:
            self.value.count = hvd.broadcast_object(self.value.count)
            self.save()

    before = hvd.elastic.get_handler_registry()
    hvd.elastic.set_handler_registry([*before, (Counter, CounterHandler)])
    try:
        state = hvd.elastic.TorchState(counter=Counter())
        state.save()
        state.counter.count = 3
        state.restore()
        assert state.counter.count == 0
        state.counter.count = 4
        state.sync()
        state.restore()
        assert state.counter.count == 4
    finally:
        hvd.elastic.set_handler_registry(before)
    with pytest.raises(fd.InvalidArgument, match="no pair of a type and a StateHandler"):
        hvd.elastic.set_handler_registry([int])  # type: ignore[list-item]


@pytest.mark.usefixtures("alone")
def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(fd.InvalidArgument, match="model is a str; it is a Module"):
        hvd.elastic.TorchState("model")  # type: ignore[arg-type]
    with pytest.raises(fd.InvalidArgument, match="a dataset with a length"):
        hvd.elastic.ElasticSampler(iter([]))
    with pytest.raises(fd.InvalidArgument, match="is no function"):
        hvd.elastic.run(3)  # type: ignore[arg-type]
