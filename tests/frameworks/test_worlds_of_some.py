"""Frameworks keep no state of a world for the next one. Some ranks form that by ``init(ranks=…)``
after another rank has died, and have joined more worlds than others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import farandole as fd
from harness import World, listen, tell

Spawn = Callable[..., World]


def worlds_of(rank: int) -> Iterator[list[int] | None]:
    """One after the other, as seen by this rank: of all, which ends as rank 3 dies; of two that are
    left; of all that are left."""
    yield None
    for ranks in ([0, 1], [0, 1, 2]):
        if rank in ranks:
            yield ranks


def end_of_a_world(ranks: list[int] | None) -> None:
    """The first one by a death."""
    if ranks is None:
        tell("trained")
        if fd.rank() == 3:
            listen()
        with pytest.raises(fd.PeerLost):
            fd.barrier()
    fd.shutdown()


def run(spawn: Spawn, framework: str, body: Callable[[], Any]) -> None:
    ranks = spawn(4, framework)
    ranks.start(body)
    ranks.hear_all()
    ranks.signal(3, signal.SIGKILL)
    for end in ranks.outcomes([0, 1, 2]):
        assert end.error is None, end.trace


# ---- PyTorch ----


def by_pytorch() -> None:
    import torch

    import farandole.torch as hvd

    torch.set_num_threads(1)
    former = None
    for ranks in worlds_of(int(os.environ["RANK"])):
        hvd.init(ranks=ranks)
        if former is not None:  # says so, and not what its world has died of
            with pytest.raises(fd.NotInitialized, match="this is another one"):
                former[0](torch.ones(1, 1)).sum().backward()
            with pytest.raises(fd.NotInitialized, match="this is another one"):
                former[1].step()
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 1.0))
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        before = model.weight.item()
        (model(torch.ones(1, 1)) * hvd.rank()).sum().backward()
        optimizer.step()
        assert before - model.weight.item() == pytest.approx((hvd.size() - 1) / 2)
        assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item() == hvd.size()
        if ranks is not None:
            some = hvd.add_process_set([0] if hvd.size() == 2 else [0, 2])
            assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
            if some.included():
                total = hvd.allreduce(torch.tensor(1.0), op=hvd.Sum, process_set=some)
                assert total.item() == len(some.ranks)
            hvd.join()
        former = model, optimizer
        end_of_a_world(ranks)


def test_pytorch(spawn: Spawn) -> None:
    pytest.importorskip("torch")
    run(spawn, "torch", by_pytorch)


# ---- JAX ----


def by_jax() -> None:
    import jax
    import jax.numpy as jnp

    import farandole.jax as fdj

    mean = jax.jit(lambda x: fdj.allreduce(x))
    gradient = jax.jit(jax.grad(lambda x: fdj.allreduce(x, "sum")))
    for ranks in worlds_of(int(os.environ["RANK"])):
        fdj.init(ranks=ranks)
        x = jnp.float32(fdj.rank())
        assert float(mean(x)) == (fdj.size() - 1) / 2
        assert float(gradient(x)) == fdj.size()
        end_of_a_world(ranks)


def test_jax(spawn: Spawn) -> None:
    pytest.importorskip("jax")
    run(spawn, "jax", by_jax)


# ---- TensorFlow ----


def by_tensorflow() -> None:
    import tensorflow as tf

    import farandole.tensorflow as hvd

    variable = tf.Variable(0.0)

    def gradient() -> Any:
        with tf.GradientTape() as tape:
            loss = variable * tf.cast(hvd.rank(), tf.float32)
        return hvd.DistributedGradientTape(tape).gradient(loss, variable)

    for ranks in worlds_of(int(os.environ["RANK"])):
        hvd.init(ranks=ranks)
        if ranks is not None:  # weights are compared in the first two steps of each world
            variable.assign(fd.rank())
            gradient()
            variable.assign_add(1.0)
            with pytest.raises(fd.Mismatch, match=r"variable|weights"):
                gradient()
        hvd.broadcast_variables([variable], root_rank=0)
        assert float(gradient()) == (hvd.size() - 1) / 2
        hvd.join()  # after which they are not compared, in this world
        end_of_a_world(ranks)


def test_tensorflow(spawn: Spawn) -> None:
    pytest.importorskip("tensorflow")
    run(spawn, "tensorflow", by_tensorflow)


def by_a_strategy() -> list[Any]:
    """A ParameterServerStrategy in each of two worlds of three ranks."""
    import tensorflow as tf

    import farandole.strategy as strategies

    found = []
    for ranks in (None, [1, 2, 0]):
        fd.init(ranks=ranks)
        try:
            strategy = strategies.ParameterServerStrategy()
        except SystemExit:
            found.append(0.0)
        else:
            with strategy.scope():
                variable = tf.Variable(0.0)
            coordinator = strategies.ClusterCoordinator(strategy)
            for _ in range(3):
                coordinator.schedule(lambda v=variable: v.assign_add(1.0))
            coordinator.join()
            found.append(float(variable))
        fd.shutdown()
    return found


def test_a_strategy(spawn: Spawn) -> None:
    pytest.importorskip("tensorflow")
    assert spawn(3, "tensorflow").run(by_a_strategy) == [[3, 0], [3, 3], [0, 3]]
