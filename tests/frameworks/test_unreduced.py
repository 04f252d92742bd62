"""A world in which weights were broadcast and no gradient was reduced says so at its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import farandole as fd
from harness import World

Spawn = Callable[..., World]
Program = Callable[[], object]
SAYS = "gave 2 ranks the same weights, and no gradient was reduced"


def in_worlds(programs: Sequence[Program]) -> None:
    """Each in one of its own; what it says at its end stands behind its name."""
    for program in programs:
        fd.init()
        print(f"\n= {program.__name__}", flush=True)
        with contextlib.suppress(ZeroDivisionError):
            try:
                program()
            finally:
                fd.shutdown()


def warned(spawn: Spawn, framework: str, body: Program) -> dict[str, list[str]]:
    """The functions that rank 0 says it of, by program; rank 1 says nothing."""
    world = spawn(2, framework)
    world.run(body)
    assert SAYS not in world.output(1)
    found: dict[str, list[str]] = {}
    for part in world.output(0).split("\n= ")[1:]:
        name, *lines = part.splitlines()
        rows = [line.partition("warning: ")[2].split("()")[0] for line in lines if SAYS in line]
        found[name] = rows
    return found


# ---- PyTorch ----


def by_pytorch() -> None:
    import torch

    import farandole.torch as hvd

    torch.set_num_threads(1)

    def step(wrapped: bool = True, sparse: bool = False, **options: Any) -> None:
        model = torch.nn.Embedding(4, 2, sparse=sparse)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, **options)
        model(torch.tensor([1])).sum().backward()
        optimizer.step()

    def never_wrapped() -> None:
        step(wrapped=False)

    def only_gathered() -> None:
        step(wrapped=False)
        hvd.allgather_object(hvd.rank())
        hvd.barrier()

    def wrapped() -> None:
        step()

    def sharded() -> None:
        step(sharded_update=True)

    def sparse() -> None:
        step(sparse=True)

    def by_hand() -> None:
        p = torch.ones(3)
        hvd.broadcast_parameters([p], root_rank=0)
        hvd.allreduce_async_(p)  # and does not wait for it

    def ddp() -> None:
        torch.distributed.init_process_group("farandole")
        p = torch.ones(3)
        hvd.broadcast_parameters([p], root_rank=0)
        torch.distributed.all_reduce(p)
        torch.distributed.destroy_process_group()

    def nothing() -> None:
        hvd.broadcast_object(1, root_rank=0)

    def failed() -> None:
        step(wrapped=False)
        raise ZeroDivisionError

    in_worlds(
        [never_wrapped, only_gathered, wrapped, sharded, sparse, by_hand, ddp, nothing, failed]
    )


def two_models_by_pytorch() -> None:
    import torch

    import farandole.torch as hvd

    torch.set_num_threads(1)

    def train(steps: int, *, wraps: bool = False, by_hand: bool = False, width: int = 32) -> None:
        """The second model's optimizer is wrapped, or its gradients are reduced by hand, or not."""
        models = [torch.nn.Linear(64, width) for _ in range(2)]
        optimizers: list[Any] = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
        for i, model in enumerate(models):
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            if i == 0 or wraps:
                optimizers[i] = hvd.DistributedOptimizer(optimizers[i])
        for _ in range(steps):
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
                if by_hand and model is models[1]:
                    gradients = [p.grad for p in model.parameters()]
                    hvd.grouped_allreduce_(gradients)
                optimizer.step()
            hvd.allreduce(torch.ones(1))  # a metric

    def one_of_two() -> None:
        train(3)

    def one_of_two_for_long() -> None:
        train(1001, width=4096)
        print("still training", flush=True)

    def one_step() -> None:
        train(1)

    def both() -> None:
        train(3, wraps=True)

    def the_other_by_hand() -> None:
        train(3, by_hand=True)

    def by_itself() -> None:
        """It began with weights of its own."""
        model = torch.nn.Linear(64, 32)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            train(1)
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()

    def around_another() -> None:
        """Optimizers that call others: it does not matter which of the two is wrapped."""
        model = torch.nn.Linear(64, 32)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        plain = torch.optim.SGD(model.parameters(), 0.1)
        around = Around(model.parameters(), plain)
        for inner, outer in ((plain, hvd.DistributedOptimizer(around)), (plain, around)):
            for optimizer in (inner, outer):
                optimizer.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
                optimizer.step()

    class Around(torch.optim.Optimizer):
        def __init__(self, parameters: Any, inner: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step(closure)

    in_worlds(
        [
            one_of_two, one_of_two_for_long, one_step, both, the_other_by_hand, by_itself,
            around_another,
        ]
    )  # fmt: skip


def test_pytorch_with_two_optimizers(spawn: Spawn) -> None:
    """Of which one was forgotten, so that one of two models parts."""
    pytest.importorskip("torch")
    world = spawn(2, "torch")
    world.run(two_models_by_pytorch)
    told = "ranks have not reduced its gradients"
    assert told not in world.output(1)
    parts = {part.split()[0]: part for part in world.output(0).split("\n= ")[1:]}
    assert {name: part.count(told) for name, part in parts.items() if told in part} == {
        "one_of_two": 1,
        "one_of_two_for_long": 1,
    }
    assert "after 3 steps of an optimizer" in parts["one_of_two"]
    assert "first parameter has shape (32, 64)" in parts["one_of_two"]
    said, _, rest = parts["one_of_two_for_long"].partition("still training")
    assert "after 1000 steps" in said
    assert told not in rest


def test_pytorch(spawn: Spawn) -> None:
    pytest.importorskip("torch")
    found = warned(spawn, "torch", by_pytorch)
    assert len(found) == 9
    named = ["broadcast_parameters"]
    assert {name: by for name, by in found.items() if by} == {
        "never_wrapped": named,
        "only_gathered": named,
    }


# ---- JAX ----


def by_jax() -> None:
    import jax
    import jax.numpy as jnp

    import farandole.jax as fdj

    mean = jax.jit(lambda x: fdj.allreduce(x))

    def never_wrapped() -> None:
        fdj.broadcast_parameters({"w": jnp.ones(3)})

    def wrapped() -> None:
        mean(fdj.broadcast_parameters(jnp.ones(3)))  # and does not wait for it

    in_worlds([never_wrapped, wrapped])


def test_jax(spawn: Spawn) -> None:
    pytest.importorskip("jax")
    found = warned(spawn, "jax", by_jax)
    assert found == {"never_wrapped": ["broadcast_parameters"], "wrapped": []}


# ---- TensorFlow, Keras ----


def by_tensorflow() -> None:
    import keras
    import tensorflow as tf

    import farandole.keras as hvk
    import farandole.tensorflow as hvd

    def step(tape_of: Callable[[Any], Any], sparse: bool = False) -> None:
        variable = tf.Variable([1.0, 2.0])
        hvd.broadcast_variables([variable], root_rank=0)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(variable, [1]) if sparse else variable)
        gradient = tape_of(tape).gradient(loss, variable)
        assert isinstance(gradient, tf.IndexedSlices) == sparse

    def never_wrapped() -> None:
        step(lambda tape: tape)

    def wrapped() -> None:
        step(hvd.DistributedGradientTape)

    def sparse() -> None:
        step(hvd.DistributedGradientTape, sparse=True)

    def fit(wrap: Callable[[Any], Any]) -> None:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(wrap(keras.optimizers.SGD(0.1)), "mse")
        callback = hvk.callbacks.BroadcastGlobalVariablesCallback(0)
        x = np.ones((4, 2), np.float32)
        model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[callback])

    def fit_never_wrapped() -> None:
        fit(lambda optimizer: optimizer)

    def fit_wrapped() -> None:
        fit(hvk.DistributedOptimizer)

    in_worlds([never_wrapped, wrapped, sparse, fit_never_wrapped, fit_wrapped])


def test_tensorflow_and_keras(spawn: Spawn) -> None:
    pytest.importorskip("keras")
    pytest.importorskip("tensorflow")
    found = warned(spawn, "keras on tensorflow", by_tensorflow)
    assert len(found) == 5
    named = ["broadcast_variables"]
    assert {name: by for name, by in found.items() if by} == {
        "never_wrapped": named,
        "fit_never_wrapped": named,
    }
