"""Other ways to train than fit(), and what an optimizer does with single gradients."""

from __future__ import annotations

from typing import Any

import keras_work as work
import numpy as np
import pytest
from keras_work import hvd, keras
from rank_cases import on_ranks, raises


@on_ranks(2)
def train_on_batch_equals_one_process() -> None:
    alone, model = work.net(), work.net()
    alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse", metrics=["mae"]
    )
    x, y = work.data()
    mine_x, mine_y = work.part()
    share = work.BATCH // hvd.size()
    for step in range(24):
        at = step * work.BATCH % 64
        if hvd.rank() == 0:
            alone.train_on_batch(x[at : at + work.BATCH], y[at : at + work.BATCH])
        at = step * share % len(mine_x)
        model.train_on_batch(mine_x[at : at + share], mine_y[at : at + share])
    work.assert_equal(model, alone, 1e-6)


@on_ranks(2)
def a_step_of_one_s_own_equals_one_process() -> None:
    """Gradients that the user scales between backward and apply."""

    def step_torch(self: Any, batch: Any) -> Any:
        x, y = batch
        self.zero_grad()
        loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        loss.backward()
        weights = self.trainable_weights
        self.optimizer.apply([0.5 * v.value.grad for v in weights], weights)
        return {"loss": loss}

    def step_tensorflow(self: Any, batch: Any) -> Any:
        import tensorflow as tf

        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        weights = self.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply_gradients(
            [(0.5 * g, v) for g, v in zip(gradients, weights, strict=True)]
        )
        return {"loss": loss}

    def step_jax(self: Any, state: Any, batch: Any) -> Any:
        import jax

        weights, others, slots, metrics = state
        x, y = batch

        def loss_of(weights: Any) -> Any:
            prediction, _ = self.stateless_call(weights, others, x, training=True)
            return ((prediction - y) ** 2).mean()

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        halves = [0.5 * g for g in gradients]
        weights, slots = self.optimizer.stateless_apply(slots, halves, weights)
        return {"loss": loss}, (weights, others, slots, metrics)

    step = {"torch": step_torch, "tensorflow": step_tensorflow, "jax": step_jax}[work.backend()]

    class Own(keras.Sequential):  # type: ignore[misc]
        train_step = step

    alone, model = work.net(Own), work.net(Own)
    alone.compile(keras.optimizers.SGD(0.05), "mse")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    if hvd.rank() == 0:
        work.fit(alone, *work.data(), work.BATCH)
    work.fit_part(model)
    work.assert_equal(model, alone, 1e-6)


@on_ranks(2)
def gradients_from_elsewhere_are_reduced_by_apply() -> None:
    variable = keras.Variable(np.zeros(3, "float32"), name="v")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for step in range(1, 4):
        gradient = keras.ops.convert_to_tensor(np.full(3, hvd.rank() + 1.0, "float32"))
        optimizer.apply([gradient], [variable])
        assert np.allclose(keras.ops.convert_to_numpy(variable), -1.5 * step)


@on_ranks(2)
def gradients_beside_those_of_a_backward_are_reduced_by_apply() -> None:
    """On PyTorch, where autograd brings that of the first variable and is not asked for the other;
    elsewhere all gradients are the program's."""
    first = keras.Variable(np.zeros(2, "float32"), name="first")
    second = keras.Variable(np.zeros(3, "float32"), name="second")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for step in range(1, 4):
        mine = [
            keras.ops.convert_to_tensor(np.full(v.shape, 2.0 * hvd.rank(), "float32"))
            for v in (first, second)
        ]
        if work.backend() == "torch":
            first.value.grad = second.value.grad = None
            (first.value * mine[0]).sum().backward()
            mine[0] = first.value.grad
        optimizer.apply(mine, [first, second])
        for variable in first, second:
            assert np.allclose(keras.ops.convert_to_numpy(variable), -1.0 * step)


@on_ranks(2)
def two_optimizers_take_turns() -> None:
    first = keras.Variable(np.zeros(2, "float32"), name="first")
    second = keras.Variable(np.zeros(3, "float32"), name="second")
    of_first = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    of_second = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for step in range(1, 4):
        for optimizer, variable in ((of_first, first), (of_second, second)):
            gradient = np.full(variable.shape, 2.0 * hvd.rank(), "float32")
            optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
            assert np.allclose(keras.ops.convert_to_numpy(variable), -1.0 * step)


@on_ranks(2)
def local_variables_keep_their_own_gradients() -> None:
    model = work.net()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=model.layers[1]
    )
    optimizer.build(model.trainable_variables)
    start = work.values(model)
    gradients = [
        keras.ops.convert_to_tensor(np.full(v.shape, hvd.rank() + 1.0, "float32"))
        for v in model.trainable_variables
    ]
    optimizer.apply(gradients, model.trainable_variables)
    own = (hvd.rank() + 1.0) / hvd.size()
    moves = [a - b for a, b in zip(start, work.values(model), strict=True)]
    for i, expected in enumerate([1.5, 1.5, own, own, 1.5, 1.5]):
        assert np.allclose(moves[i], expected, atol=1e-6), i
    with raises(ValueError, "after the first step"):
        optimizer.register_local_var(model.trainable_variables[0])


@on_ranks(2)
def local_embeddings_keep_their_own_gradients() -> None:
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(4, 3, embeddings_initializer="ones"),
            keras.layers.Flatten(),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]
    )
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=model.layers[0]
    )
    model.compile(optimizer, "mse")
    words = np.full((4, 1), hvd.rank(), "int32")
    model.fit(words, np.zeros((4, 1), "float32"), batch_size=4, verbose=0)
    table, kernel = model.get_weights()[:2]
    moves = np.abs(table - 1).sum(1)
    assert moves[hvd.rank()] > 0.1, moves
    assert moves[1 - hvd.rank()] == 0, moves
    assert len({k.tobytes() for k in hvd.allgather(kernel.reshape(1, -1), "kernel")}) == 1


@on_ranks(2)
def a_gradient_that_one_rank_lacks_is_named_on_every_rank() -> None:
    a, b, c = (keras.Variable(np.zeros(2, "float32"), name=name) for name in "abc")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    one = work.gradient_of(2)
    on_rank_0 = one if hvd.rank() == 0 else None
    with raises(hvd.HorovodInternalError, "rank 0: 'b [1]' dense; rank 1: 'b [1]' without"):
        optimizer.apply([one, on_rank_0, None], [a, b, c])
    assert all(not keras.ops.convert_to_numpy(v).any() for v in (a, b, c))
    for _ in range(2):  # one that no rank has stays None
        optimizer.apply([one, one, None], [a, b, c])
    found = [float(keras.ops.convert_to_numpy(v)[0]) for v in (a, b, c)]
    assert found == [-3.0, -3.0, 0.0]


@on_ranks(2)
def a_gradient_that_one_rank_loses_later_is_named_on_every_rank() -> None:
    if work.backend() == "torch":
        return  # counts as zero there, as in farandole.torch: backward may take other ways
    a, b = (keras.Variable(np.zeros(2, "float32"), name=name) for name in "ab")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    one = work.gradient_of(2)
    optimizer.apply([one, one], [a, b])

    def lose_one() -> None:
        optimizer.apply([one, one if hvd.rank() == 0 else None], [a, b])
        keras.ops.convert_to_numpy(a)  # JAX raises where a result is waited for

    with pytest.raises(Exception, match="ranks disagree"):  # the backend's class
        lose_one()
    if work.backend() == "jax":
        from farandole import jax as fdj

        fdj.recover()


@on_ranks(2)
def groups_do_not_change_what_comes_out() -> None:
    def alone() -> Any:
        return keras.optimizers.SGD(0.05)

    work.compare(alone, wrap=lambda optimizer: hvd.DistributedOptimizer(optimizer, num_groups=2))
    work.compare(alone, wrap=lambda optimizer: hvd.DistributedOptimizer(optimizer, groups=3))
    model = work.net()
    v = model.trainable_variables
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), groups=[[v[0], v[3]], [v[5]]], num_groups=0
    )
    start = work.values(model)
    for _ in range(2):
        optimizer.apply([work.gradient_of(*each.shape) for each in v], v)
    for before, after in zip(start, work.values(model), strict=True):
        assert np.allclose(before - after, 3.0, atol=1e-5)


@on_ranks(2)
def groups_that_differ_or_are_wrong_are_named() -> None:
    def sgd(groups: Any) -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=groups)

    for groups, word in ((-1, "groups is -1"), ("ab", "groups is a str"), ([3], "not a list")):
        with raises(ValueError, word):
            sgd(groups)
    a, b = (keras.Variable(np.zeros(2, "float32"), name=name) for name in "ab")
    one = work.gradient_of(2)
    with raises(ValueError, "groups name 'a' twice: in 0 and 1"):
        sgd([[a], [b, a]]).apply([one, one], [a, b])
    other = keras.Variable(np.zeros(2, "float32"), name="other")
    with raises(ValueError, "groups[0] has 'other', which is none"):
        sgd([[other]]).apply([one, one], [a, b])
    with raises(hvd.HorovodInternalError, "groups [[0, 1]]", "groups [[0], [1]]"):
        sgd([[a, b]] if hvd.rank() == 0 else [[a], [b]]).apply([one, one], [a, b])


@on_ranks(3)
def a_process_set_reduces_and_others_step_by_themselves() -> None:
    ends = hvd.add_process_set([0, 2])
    for option in ({}, {"num_groups": 1}, {"gradient_predivide_factor": 2.0}):
        variables = [keras.Variable(np.zeros(n, "float32"), name=f"v{n}") for n in (1, 5)]
        if hvd.rank() == 1:
            variables = variables[:1]  # what it has is its own affair
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), process_set=ends, name=str(option), **option
        )
        for _ in range(2):
            optimizer.apply([work.gradient_of(*v.shape) for v in variables], variables)
        for variable in variables:
            assert np.allclose(keras.ops.convert_to_numpy(variable), -4.0), option
    a = keras.Variable(np.zeros(2 + hvd.rank(), "float32"), name="a")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=ends)
    if hvd.rank() != 1:
        with raises(hvd.HorovodInternalError, "rank 0: 'a [0]' [2]", "rank 2: 'a [0]' [4]"):
            optimizer.apply([work.gradient_of(*a.shape)], [a])
