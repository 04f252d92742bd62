"""What farandole.keras does on every backend: test_keras_{torch,tensorflow,jax}.py run these.

Ranks take parts of every batch; the reference is one process with the whole batch: rank 0, to which
the others are equal in every bit. Keras is imported on ranks alone, whose nursery has chosen the
backend.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import json
import pickle
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rank_cases import make_tests, on_ranks

import farandole as fd
from wrong_arguments import problems_in

BATCH = 8  # of all ranks together
EPOCHS = 3  # of 8 batches


def prepare() -> None:
    global hvd, keras
    import keras

    import farandole.keras as hvd

    hvd.init()
    if backend() == "torch":
        import torch

        torch.set_num_threads(1)


def backend() -> str:
    return str(keras.backend.backend())


# ---- the work ----


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("float32")
    return x, (x[:, :1] * 2 - x[:, 1:2]).astype("float32")


def part() -> tuple[np.ndarray, np.ndarray]:
    """This rank's share of every batch."""
    x, y = data()
    share = BATCH // hvd.size()
    begin = hvd.rank() * share
    mine = np.concatenate([np.arange(b + begin, b + begin + share) for b in range(0, 64, BATCH)])
    return x[mine], y[mine]


def net(cls: Any = None, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((8,)),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(16, activation="tanh"),
        keras.layers.Dense(1),
    ]
    return (cls or keras.Sequential)(layers, **options)


def values(model: Any) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(w)) for w in model.weights]


def fit(model: Any, x: np.ndarray, y: np.ndarray, batch: int, callbacks: Any = ()) -> Any:
    return model.fit(
        x, y, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks)
    )


def fit_part(model: Any, callbacks: Any = ()) -> Any:
    return fit(model, *part(), BATCH // hvd.size(), callbacks)


def assert_same_on_all_ranks(model: Any) -> None:
    for i, mine in enumerate(values(model)):
        for theirs in hvd.allgather(mine[None], f"weights {i}"):
            assert np.array_equal(mine, theirs), f"weight {i} differs between ranks"


def assert_equal(model: Any, reference: Any, tolerance: float) -> None:
    """`reference`: a model that rank 0 has trained, or its values."""
    assert_same_on_all_ranks(model)
    if hvd.rank() == 0:
        right = reference if isinstance(reference, list) else values(reference)
        worst = max(np.abs(a - b).max() for a, b in zip(values(model), right, strict=True))
        assert worst <= tolerance, f"differs from one process by {worst}"


_trained: dict[str, tuple[list[np.ndarray], list[float]]] = {}


def trained_alone(optimizer: Any, scale: float) -> tuple[list[np.ndarray], list[float]]:
    """Values and losses of rank 0, once for all cases."""
    policy = keras.config.dtype_policy().name
    key = f"{type(optimizer).__name__} {optimizer.get_config()} {scale} {policy}"
    if key not in _trained:
        alone, losses = net(), []
        if hvd.rank() == 0:
            alone.compile(optimizer, "mse")
            x, y = data()
            losses = fit(alone, x, y * scale, BATCH).history["loss"]
        _trained[key] = values(alone), losses
    return _trained[key]


def compare(
    make: Callable[[], Any],
    *,
    tolerance: float = 1e-6,
    wrap: Callable[[Any], Any] | None = None,
    reference: Callable[[], Any] | None = None,
    scale: float = 1.0,
    **options: Any,
) -> None:
    """24 steps of fit: ranks that begin apart, against one process."""
    right, right_losses = trained_alone((reference or make)(), scale)
    model = net()
    if hvd.rank() != 0:
        for variable in model.trainable_variables:
            variable.assign(variable + 1.0)
    model.compile((wrap or hvd.DistributedOptimizer)(make()), "mse", **options)
    x, y = part()
    history = fit(
        model,
        x,
        y * scale,
        BATCH // hvd.size(),
        [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
    )
    assert_equal(model, right, tolerance)
    losses = history.history["loss"]
    assert hvd.rank() != 0 or losses == approx(right_losses, 1e-3)
    assert losses == list(hvd.allgather(np.array([losses]), "losses")[0])


def approx(expected: Any, relative: float) -> Any:
    return pytest.approx(expected, rel=relative)


@contextlib.contextmanager
def raises(error: type[BaseException], *words: str) -> Iterator[None]:
    with pytest.raises(error) as caught:
        yield
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in {caught.value}"


# ---- fit equals one process ----


@on_ranks(2)
def sgd_equals_one_process() -> None:
    compare(lambda: keras.optimizers.SGD(0.05))


@on_ranks(2)
def momentum_equals_one_process() -> None:
    compare(lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True))


@on_ranks(2)
def adam_equals_one_process() -> None:
    compare(lambda: keras.optimizers.Adam(0.01), tolerance=1e-5)


@on_ranks(2)
def clipping_by_the_global_norm_equals_one_process() -> None:
    compare(lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.05))


@on_ranks(2)
def accumulation_equals_one_process() -> None:
    compare(lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2))


@on_ranks(2)
def passes_are_summed_or_averaged_as_told() -> None:
    def passes(average: bool) -> Callable[[Any], Any]:
        return lambda optimizer: hvd.DistributedOptimizer(
            optimizer, backward_passes_per_step=2, average_aggregated_gradients=average
        )

    def twice(rate: float) -> Callable[[], Any]:
        return lambda: keras.optimizers.SGD(rate, gradient_accumulation_steps=2)

    compare(lambda: keras.optimizers.SGD(0.05), wrap=passes(True), reference=twice(0.05))
    compare(lambda: keras.optimizers.SGD(0.025), wrap=passes(False), reference=twice(0.05))


@on_ranks(2)
def programs_of_jax_reduce_in_the_updating_pass_alone() -> None:
    if backend() != "jax":
        return  # the others compute nothing of an update in other passes
    from farandole.jax._order import token

    x, y = part()
    alone = net()
    alone.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=4), "mse")
    if hvd.rank() == 0:
        alone.fit(*data(), batch_size=BATCH, shuffle=False, verbose=0)
    for eagerly in (False, True):
        model = net()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05, gradient_accumulation_steps=4), num_groups=1
        )
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        before = int(token()[...][0])  # it counts calls
        model.fit(x, y, batch_size=BATCH // 2, shuffle=False, verbose=0)
        compared = not eagerly  # by a program, in the first step
        assert int(token()[...][0]) - before == 8 // 4 + compared
        assert_equal(model, alone, 1e-6)


@on_ranks(2)
def running_eagerly_equals_one_process() -> None:
    compare(lambda: keras.optimizers.SGD(0.05), run_eagerly=True)


@on_ranks(2)
def asking_for_xla_equals_one_process() -> None:
    compare(lambda: keras.optimizers.SGD(0.05), jit_compile=True)


@on_ranks(2)
def asking_for_xla_without_our_callbacks_works() -> None:
    """On TensorFlow the model goes without XLA; one whose optimizer is not ours keeps it."""
    x, y = part()
    for steps in ("fit", "train_on_batch"):
        model = net()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", jit_compile=True)
        assert model.jit_compile == (backend() == "jax")
        if steps == "fit":
            fit_part(model)
        else:
            model.train_on_batch(x[:4], y[:4])
        assert_same_on_all_ranks(model)
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=True)
    assert model.jit_compile is True


@on_ranks(2)
def an_object_compresses_as_a_class_does() -> None:
    class Twice:
        def compress(self, tensor: Any) -> Any:
            return tensor * 2, 2

        def decompress(self, tensor: Any, factor: Any) -> Any:
            return tensor / factor

    compare(
        lambda: keras.optimizers.SGD(0.05),
        wrap=lambda optimizer: hvd.DistributedOptimizer(optimizer, compression=Twice()),
    )


@on_ranks(2)
def sums_divided_before_and_compressed_gradients_equal_one_process() -> None:
    compare(
        lambda: keras.optimizers.SGD(0.05),
        wrap=lambda o: hvd.DistributedOptimizer(o, gradient_predivide_factor=2.0),
    )
    compare(
        lambda: keras.optimizers.SGD(0.025),
        wrap=lambda o: hvd.DistributedOptimizer(o, op=hvd.Sum),
        reference=lambda: keras.optimizers.SGD(0.05),
    )
    compare(
        lambda: keras.optimizers.SGD(0.05),
        wrap=lambda o: hvd.DistributedOptimizer(o, compression=hvd.Compression.fp16),
        tolerance=2e-3,
    )


@on_ranks(2)
def loss_scaling_equals_one_process() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        # compile() scales the loss by itself, around ours. Small targets: with large ones gradients
        # overflow, in a whole batch not when they do in a half.
        compare(lambda: keras.optimizers.SGD(0.05), tolerance=2e-3, scale=0.1)

        def scaled() -> Any:
            return keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.05), initial_scale=8.0
            )

        compare(scaled, tolerance=2e-3)
    finally:
        keras.config.set_dtype_policy(before)


@on_ranks(2)
def an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = net()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        x, y = part()
        model.train_on_batch(x[:4] * 1e-3, y[:4])
        start, scale = values(model), float(model.optimizer.dynamic_scale)
        y[0] = 1e30 if hvd.rank() == 1 else y[0]
        model.train_on_batch(x[:4], y[:4])
        for a, b in zip(start, values(model), strict=True):
            assert np.array_equal(a, b)
        assert float(model.optimizer.dynamic_scale) == scale / 2
        model.train_on_batch(x[4:8], y[4:8])
        assert_same_on_all_ranks(model)
    finally:
        keras.config.set_dtype_policy(before)


@on_ranks(1, 2)
def embeddings_equal_one_process() -> None:
    """On TensorFlow their gradients are slices, of rows that ranks share and rows that they do not.
    Keras by itself squares the rows of one word apart, so that one process gets dense ones."""
    words = np.random.default_rng(3).integers(0, 20, (64, 3)).astype("int32")
    target = words[:, :1].astype("float32") / 10
    share = len(words) // hvd.size()
    mine = slice(hvd.rank() * share, (hvd.rank() + 1) * share)

    def build() -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,), dtype="int32"), *layers])

    def of_dense(make: Callable[[], Any]) -> Any:
        optimizer = make()
        if backend() == "tensorflow":
            import tensorflow as tf

            own = optimizer.apply
            optimizer.apply = lambda gradients, variables=None: own(
                [tf.convert_to_tensor(g) for g in gradients], variables
            )
        return optimizer

    for make, tolerance in (
        (lambda: keras.optimizers.SGD(0.5), 1e-6),
        (lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.05), 1e-6),
        (lambda: keras.optimizers.Adam(0.01), 1e-5),
    ):
        alone = build()
        alone.compile(of_dense(make), "mse")
        for _ in range(5 if hvd.rank() == 0 else 0):
            alone.train_on_batch(words, target)
        for as_dense in (False, True) if backend() == "tensorflow" else (False,):
            model = build()
            model.compile(hvd.DistributedOptimizer(make(), sparse_as_dense=as_dense), "mse")
            for _ in range(5):
                model.train_on_batch(words[mine], target[mine])
            assert_equal(model, alone, tolerance)


# ---- other ways to train ----


@on_ranks(2)
def train_on_batch_equals_one_process() -> None:
    alone, model = net(), net()
    alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    model.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse", metrics=["mae"]
    )
    x, y = data()
    mine_x, mine_y = part()
    share = BATCH // hvd.size()
    for step in range(24):
        at = step * BATCH % 64
        if hvd.rank() == 0:
            alone.train_on_batch(x[at : at + BATCH], y[at : at + BATCH])
        at = step * share % len(mine_x)
        model.train_on_batch(mine_x[at : at + share], mine_y[at : at + share])
    assert_equal(model, alone, 1e-6)


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

    step = {"torch": step_torch, "tensorflow": step_tensorflow, "jax": step_jax}[backend()]

    class Own(keras.Sequential):  # type: ignore[misc]
        train_step = step

    alone, model = net(Own), net(Own)
    alone.compile(keras.optimizers.SGD(0.05), "mse")
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    if hvd.rank() == 0:
        fit(alone, *data(), BATCH)
    fit_part(model)
    assert_equal(model, alone, 1e-6)


@on_ranks(2)
def gradients_from_elsewhere_are_reduced_by_apply() -> None:
    variable = keras.Variable(np.zeros(3, "float32"), name="v")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for step in range(1, 4):
        gradient = keras.ops.convert_to_tensor(np.full(3, hvd.rank() + 1.0, "float32"))
        optimizer.apply([gradient], [variable])
        assert np.allclose(keras.ops.convert_to_numpy(variable), -1.5 * step)


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
    model = net()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=model.layers[1]
    )
    optimizer.build(model.trainable_variables)
    start = values(model)
    gradients = [
        keras.ops.convert_to_tensor(np.full(v.shape, hvd.rank() + 1.0, "float32"))
        for v in model.trainable_variables
    ]
    optimizer.apply(gradients, model.trainable_variables)
    own = (hvd.rank() + 1.0) / hvd.size()
    moves = [a - b for a, b in zip(start, values(model), strict=True)]
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


def gradient_of(*shape: int) -> Any:
    return keras.ops.convert_to_tensor(np.full(shape, hvd.rank() + 1.0, "float32"))


@on_ranks(2)
def a_gradient_that_one_rank_lacks_is_named_on_every_rank() -> None:
    a, b, c = (keras.Variable(np.zeros(2, "float32"), name=name) for name in "abc")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    one = gradient_of(2)
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
    if backend() == "torch":
        return  # counts as zero there, as in farandole.torch: backward may take other ways
    a, b = (keras.Variable(np.zeros(2, "float32"), name=name) for name in "ab")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    one = gradient_of(2)
    optimizer.apply([one, one], [a, b])

    def lose_one() -> None:
        optimizer.apply([one, one if hvd.rank() == 0 else None], [a, b])
        keras.ops.convert_to_numpy(a)  # JAX raises where a result is waited for

    with pytest.raises(Exception, match="ranks disagree"):  # the backend's class
        lose_one()
    if backend() == "jax":
        from farandole import jax as fdj

        fdj.recover()


@on_ranks(2)
def groups_do_not_change_what_comes_out() -> None:
    def alone() -> Any:
        return keras.optimizers.SGD(0.05)

    compare(alone, wrap=lambda optimizer: hvd.DistributedOptimizer(optimizer, num_groups=2))
    compare(alone, wrap=lambda optimizer: hvd.DistributedOptimizer(optimizer, groups=3))
    model = net()
    v = model.trainable_variables
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), groups=[[v[0], v[3]], [v[5]]], num_groups=0
    )
    start = values(model)
    for _ in range(2):
        optimizer.apply([gradient_of(*each.shape) for each in v], v)
    for before, after in zip(start, values(model), strict=True):
        assert np.allclose(before - after, 3.0, atol=1e-5)


@on_ranks(2)
def groups_that_differ_or_are_wrong_are_named() -> None:
    def sgd(groups: Any) -> Any:
        return hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), groups=groups)

    for groups, word in ((-1, "groups is -1"), ("ab", "groups is a str"), ([3], "not a list")):
        with raises(ValueError, word):
            sgd(groups)
    a, b = (keras.Variable(np.zeros(2, "float32"), name=name) for name in "ab")
    one = gradient_of(2)
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
            optimizer.apply([gradient_of(*v.shape) for v in variables], variables)
        for variable in variables:
            assert np.allclose(keras.ops.convert_to_numpy(variable), -4.0), option
    a = keras.Variable(np.zeros(2 + hvd.rank(), "float32"), name="a")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=ends)
    if hvd.rank() != 1:
        with raises(hvd.HorovodInternalError, "rank 0: 'a [0]' [2]", "rank 2: 'a [0]' [4]"):
            optimizer.apply([gradient_of(*a.shape)], [a])


# ---- what is refused ----


@on_ranks(2)
def models_that_differ_are_named_on_every_rank() -> None:
    keras.utils.set_random_seed(1)
    width = 16 + hvd.rank()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(width)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), name="odd"), "mse")
    x, _ = part()
    with raises(hvd.HorovodInternalError, "dense/kernel [2]", "[4, 16]", "[4, 17]"):
        model.train_on_batch(x[:4], np.zeros((4, width), "float32"))
    with raises(hvd.HorovodInternalError, "dense/kernel [2]", "[4, 16]", "[4, 17]"):
        hvd.broadcast_variables(model.weights, 0)
    compare(lambda: keras.optimizers.SGD(0.05))  # the next model works


@on_ranks(2)
def options_that_differ_are_named_on_every_rank() -> None:
    model = net()
    op = hvd.Sum if hvd.rank() else hvd.Average
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), op=op), "mse")
    x, y = part()
    with raises(hvd.HorovodInternalError, "mean", "sum"):
        model.train_on_batch(x[:4], y[:4])


@on_ranks(2)
def bad_arguments_are_refused() -> None:
    def sgd(**options: Any) -> Any:
        return keras.optimizers.SGD(0.05, **options)

    for word, call in {
        "not a Keras 3 optimizer": lambda: hvd.DistributedOptimizer("sgd"),
        "Average or Sum": lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum),
        "Average only": lambda: hvd.DistributedOptimizer(
            sgd(), op=hvd.Sum, gradient_predivide_factor=2.0
        ),
        "backward_passes_per_step is 0": lambda: hvd.DistributedOptimizer(
            sgd(), backward_passes_per_step=0
        ),
        "give one of them": lambda: hvd.DistributedOptimizer(
            sgd(gradient_accumulation_steps=3), backward_passes_per_step=2
        ),
        "compression is 'fp16'; it is": lambda: hvd.DistributedOptimizer(sgd(), compression="fp16"),
        "already": lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(sgd())),
        "no layer": lambda: hvd.PartialDistributedOptimizer(sgd(), local_layers=[3]),
        "no variables yet": lambda: hvd.PartialDistributedOptimizer(
            sgd(), local_layers=keras.layers.Dense(3)
        ),
        "legacy": lambda: hvd.load_model("nowhere.keras", legacy_opts=True),
    }.items():
        with raises(ValueError, word):
            call()
    with raises(RuntimeError, "BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)
    with raises(NotImplementedError, "hvd.elastic.KerasState"):
        hvd.elastic.KerasState(None)
    with raises(ValueError, "state is a NoneType, which has no commit()"):
        hvd.callbacks.CommitStateCallback(None)


@on_ranks(1)
def a_wrong_argument_is_an_error_of_ours() -> None:
    right = {
        "value": np.ones(2), "variables": lambda: [keras.Variable(np.ones(2))], "multiplier": 0.1,
        "optimizer": lambda: keras.optimizers.SGD(0.1), "process_set": lambda: [0],
        "ranks_or_comm": [0], "initial_lr": 0.1, "state": SimpleNamespace(epoch=0, commit=len),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `average` is deprecated
        model = net()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.save(path := f"{folder}/model.keras")
        for module in (hvd, hvd.callbacks, hvd.elastic):
            problems = problems_in(
                module, right | {"filepath": path},
                apart=["init", "shutdown", "start_timeline", "stop_timeline"],
                also={
                    "broadcast_global_variables": (RuntimeError,), "run": (NotImplementedError,),
                    "KerasState": (NotImplementedError,),
                },
            )  # fmt: skip
            assert problems == [], "\n".join(problems)
        for call, pattern in {
            lambda: hvd.broadcast(
                1.0, root_rank="x"
            ): "broadcast(): root_rank is 'x'; it is a whole",
            lambda: hvd.load_model(path, op="x"): "DistributedOptimizer(): op is 'x'",
            lambda: hvd.load_model(f"{folder}/none.keras"): "load_model(): filepath is ",
            lambda: hvd.allreduce([[1.0], [2.0, 3.0]]): "allreduce(): value is [[1.0], [2.0, 3.0]]",
            lambda: hvd.callbacks.LearningRateWarmupCallback(
                "0.1"
            ): "LearningRateWarmupCallback(): initial_lr is '0.1'; it is a number",
        }.items():
            with raises(fd.InvalidArgument, pattern):
                call()
    assert hvd.allreduce(1.0) == 1.0


@on_ranks(2)
def a_wrong_root_is_refused_before_variables_are_compared() -> None:
    model = net()
    if hvd.rank() == 0:  # nobody else knows of it
        for root in "x", None, 0.5:
            with raises(fd.InvalidArgument, "broadcast_variables(): root_rank is"):
                hvd.broadcast_variables(model.weights, root)
    hvd.broadcast_variables(iter(model.weights), 1)
    assert_same_on_all_ranks(model)


@on_ranks(1)
def numbers_that_horovods_examples_pass_are_right() -> None:
    """Epochs from the command line are floats there."""
    hvd.callbacks.LearningRateWarmupCallback(np.array(0.1), 5.0, True, 12.5, True)
    hvd.callbacks.LearningRateScheduleCallback(np.float32(0.1), 1, 5.0, 30)
    hvd.callbacks.MetricAverageCallback(None)
    hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1), None, None, None, gradient_predivide_factor=2
    )


# ---- files ----


def common_folder() -> Path:
    """On all ranks the same."""
    name = tempfile.mkdtemp() if hvd.rank() == 0 else ""
    letters = np.zeros(200, "uint8")
    letters[: len(name)] = np.frombuffer(name.encode(), "uint8")
    return Path(hvd.broadcast(letters, 0, "folder").tobytes().decode().strip("\0"))


@on_ranks(2)
def rank_0_alone_saves_the_best_model() -> None:
    folder = common_folder()
    model = net()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    without_path = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with raises(ValueError, "pass filepath"):
        fit_part(model, [without_path])
    without_path.filepath = str(folder / f"rank{hvd.rank()}.keras")
    weights = hvd.callbacks.BestModelCheckpoint(
        monitor="loss", save_weights_only=True, filepath=str(folder / "best.weights.h5")
    )
    fit_part(model, [hvd.callbacks.MetricAverageCallback(), without_path, weights])
    hvd.allreduce(0.0, "saved")
    assert sorted(p.name for p in folder.iterdir()) == ["best.weights.h5", "rank0.keras"]


@on_ranks(2)
def a_saved_model_names_the_plain_optimizer_and_resumes() -> None:
    folder = common_folder()

    def sgd() -> Any:
        return keras.optimizers.SGD(0.02, momentum=0.9)

    alone, model = net(), net()
    alone.compile(sgd(), "mse")
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    assert isinstance(model.optimizer, keras.optimizers.SGD)
    copied = model.optimizer.from_config(model.optimizer.get_config())
    assert type(copied) is type(alone.optimizer)
    fit(alone, *data(), BATCH)
    fit_part(model)
    saved, plain_path = folder / "saved.keras", folder / f"plain{hvd.rank()}.keras"
    if hvd.rank() == 0:
        model.save(saved)
    hvd.allreduce(0.0, "saved")
    alone.save(plain_path)

    def entry(path: Path) -> Any:
        config = json.loads(zipfile.ZipFile(path).read("config.json"))
        return {
            k: v
            for k, v in config["compile_config"]["optimizer"].items()
            if k in ("module", "class_name", "registered_name")
        }

    assert entry(saved) == entry(plain_path)
    plain = keras.models.load_model(saved)
    assert type(plain.optimizer) is type(alone.optimizer)

    loaded = hvd.load_model(saved)
    assert int(loaded.optimizer.iterations) == 24
    with raises(ValueError, "already"):
        hvd.DistributedOptimizer(loaded.optimizer)
    fit(alone, *data(), BATCH)
    fit_part(loaded)
    assert int(loaded.optimizer.iterations) == 48
    assert_equal(loaded, alone, 1e-5)


@on_ranks(2)
def exported_models_have_no_operations_of_ours() -> None:
    """Others, a server among them, load them without farandole."""
    if backend() != "tensorflow":
        return  # the other backends export through packages of their own
    import tensorflow as tf

    model = net()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
    fit_part(model)
    with tempfile.TemporaryDirectory() as name:
        exported, saved = Path(name, "exported"), Path(name, "saved")
        model.export(exported, verbose=False)
        tf.saved_model.save(model, saved)
        for path in (exported, saved):
            assert b"Farandole" not in (path / "saved_model.pb").read_bytes()
        loaded = tf.saved_model.load(exported)
    x, _ = part()
    assert np.allclose(loaded.serve(x), model.predict(x, verbose=0), atol=1e-6)


# ---- copies ----


def copies_of(thing: Any) -> list[Any]:
    return [copy.deepcopy(thing), copy.copy(thing), pickle.loads(pickle.dumps(thing))]


@on_ranks(2)
def copies_of_an_optimizer_reduce_too() -> None:
    original = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    if hvd.rank() == 0:
        copy.deepcopy(original)  # one that nobody uses is nobody's business
    for optimizer in [*copies_of(original), *copies_of(copy.deepcopy(original))]:
        variable = keras.Variable(np.zeros(3, "float32"), name="v")
        optimizer.apply([gradient_of(3)], [variable])
        assert np.allclose(keras.ops.convert_to_numpy(variable), -3.0)
    inside = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for scaling in copies_of(keras.optimizers.LossScaleOptimizer(inside)):
        with raises(ValueError, "already"):
            hvd.DistributedOptimizer(scaling)
    hvd.DistributedOptimizer(copy.deepcopy(keras.optimizers.SGD(1.0)))  # a plain one's is plain


@on_ranks(1)
def a_model_is_unpickled_where_there_is_no_world() -> None:
    """As farandole.run does with what a function returns; to train, it needs one."""
    model = net()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    x, y = part()
    hvd.shutdown()
    try:
        copied = pickle.loads(pickle.dumps(model))
        assert np.array_equal(copied.predict(x, verbose=0), model.predict(x, verbose=0))
        with raises(hvd.HorovodInternalError, "not been initialized"):
            copied.train_on_batch(x, y)
    finally:
        hvd.init()
    copied.train_on_batch(x, y)
    model.train_on_batch(x, y)
    assert_equal(copied, model, 0.0)


@on_ranks(2)
def copies_of_a_model_train_together() -> None:
    x, y = part()
    model = net()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9),
        local_layers=model.layers[1],
        compression=hvd.Compression.fp16,
        groups=[[model.trainable_variables[0], model.trainable_variables[5]]],
    )
    with raises(ValueError, "before it is built"):
        copy.deepcopy(optimizer)
    model.compile(optimizer, "mse")
    model.train_on_batch(x[:4], y[:4])
    copies = copies_of(model)
    model.train_on_batch(x[4:8], y[4:8])
    for copied in copies:
        assert int(copied.optimizer.iterations) == 1
        copied.train_on_batch(x[4:8], y[4:8])
        for a, b in zip(values(model), values(copied), strict=True):
            assert np.array_equal(a, b)


@on_ranks(2)
def optimizers_of_a_process_set_are_copied_and_not_pickled() -> None:
    if backend() == "jax":
        return  # there are none
    alone = hvd.add_process_set([1])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=alone)
    with raises(ValueError, "cannot be pickled", "ProcessSet([1]"):
        pickle.dumps(optimizer)
    variable = keras.Variable(np.zeros(3, "float32"), name="v")
    copy.deepcopy(optimizer).apply([gradient_of(3)], [variable])
    assert np.allclose(keras.ops.convert_to_numpy(variable), -1.0 - hvd.rank())


# ---- callbacks and values ----


@on_ranks(2)
def warmup_reaches_the_rate_and_scales_velocities() -> None:
    rates, velocities = [], []

    class Watch(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            optimizer = self.model.optimizer
            rates.append(float(optimizer.learning_rate))
            velocities.append(float(keras.ops.convert_to_numpy(optimizer.momentums[0]).sum()))

    model = net()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.08, momentum=0.5)), "mse")
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.08, warmup_epochs=2)
    builds = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    history = fit_part(model, [builds, Watch(), warmup])
    assert rates[1] == approx(0.04 * (1 + 1 / 16), 1e-5)
    assert rates[-1] == approx(0.08, 1e-5)
    assert np.all(np.diff(rates[1:17]) > 0)
    assert history.history["lr"] == approx([0.06, 0.08, 0.08], 1e-5)

    model.optimizer.momentums[0].assign(np.ones((8, 16), "float32"))
    model.optimizer.learning_rate = 0.08
    x, y = part()
    schedule = hvd.callbacks.LearningRateScheduleCallback(0.08, lambda _: 0.25)
    velocities.clear()
    model.fit(x[:4], y[:4], batch_size=4, verbose=0, callbacks=[schedule, Watch()])
    assert velocities == approx([32.0], 1e-5)
    powers = hvd.callbacks.LearningRateScheduleCallback(0.08, 0.5, start_epoch=1)
    assert [0.08 * powers.multiplier(e) for e in (1, 2, 3)] == [0.08, 0.04, 0.02]


@on_ranks(2)
def a_model_that_is_built_by_its_first_batch_is_broadcast_after_it() -> None:
    for batches in (8, 1):
        keras.utils.set_random_seed(hvd.rank())
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.5)), "mse")
        x, y = part()
        model.fit(
            x[: 4 * batches],
            y[: 4 * batches],
            batch_size=4,
            verbose=0,
            callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)],
        )
        assert_same_on_all_ranks(model)


@on_ranks(2)
def a_model_that_is_built_on_one_rank_alone_equals_one_process() -> None:
    """On TensorFlow the other one builds it in its first step, which it traces twice."""

    def unbuilt() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])

    def sgd() -> Any:
        return keras.optimizers.SGD(0.05, momentum=0.5)

    alone = unbuilt()
    alone.compile(sgd(), "mse")
    if hvd.rank() == 0:
        fit(alone, *data(), BATCH)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    for with_optimizer, callbacks in itertools.product((False, True), ([], [broadcast])):
        model, optimizer = unbuilt(), hvd.DistributedOptimizer(sgd())
        if hvd.rank() == 1:
            model.build((None, 8))
            if with_optimizer:
                optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse")
        fit_part(model, callbacks)
        assert_equal(model, alone, 1e-6)


@on_ranks(2)
def a_rank_that_made_other_layers_before_has_the_same_names() -> None:
    """Also those of what the optimizer keeps beside each of them."""
    if hvd.rank() == 1:
        keras.layers.Dense(3)
        keras.layers.Dense(3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), "mse")
    fit_part(model, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    hvd.broadcast_variables(model.optimizer.variables, 0)


@on_ranks(2)
def metrics_are_averaged_and_must_be_alike() -> None:
    average = hvd.callbacks.MetricAverageCallback()
    logs = {"loss": 1.0 + hvd.rank(), "accuracy": 0.5 * hvd.rank()}
    average.on_epoch_end(0, logs)
    assert logs == {"loss": 1.5, "accuracy": 0.25}
    with raises(hvd.HorovodInternalError, "extra"):
        average.on_epoch_end(0, {"extra": 1.0} if hvd.rank() else {"loss": 1.0})


@on_ranks(2)
def a_state_is_committed_and_says_where_training_is() -> None:
    class State:
        epoch, batch = 2, 0

        def __init__(self) -> None:
            self.commits: list[tuple[int, int]] = []
            self.weights: list[Any] = []

        def commit(self) -> None:
            self.commits.append((self.epoch, self.batch))
            self.weights.append(values(model)[0])

    model, state = net(), State()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    update = [hvd.callbacks.UpdateBatchStateCallback(state)]
    update.append(hvd.callbacks.UpdateEpochStateCallback(state))
    fit_part(model, [*update, hvd.callbacks.CommitStateCallback(state, batches_per_commit=3)])
    # Epochs have 8 batches, and the count goes on over their ends.
    first = [(2, 2), (2, 5), (3, 0)]
    second = [(3, 0), (3, 3), (3, 6), (4, 0)]
    third = [(4, 1), (4, 4), (4, 7), (5, 0)]
    assert state.commits == first + second + third
    moved = [not np.array_equal(a, b) for a, b in itertools.pairwise(state.weights)]
    assert moved == [True] * 9 + [False]  # nothing between the last batch and the end
    assert np.array_equal(state.weights[-1], values(model)[0])

    for batches, expected in ((1, 27), (0, 3), (24, 4)):
        state.commits.clear()
        commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=batches)
        commit.batches_remaining = 5  # of an earlier fit
        fit_part(model, [commit])
        assert len(state.commits) == expected


@on_ranks(2)
def values_travel() -> None:
    rank = hvd.rank()
    assert hvd.allreduce(rank + 1.0) == 1.5
    assert hvd.allreduce(np.arange(3) + rank, op=hvd.Sum).tolist() == [1, 3, 5]
    assert hvd.allreduce(np.float32(rank), op=hvd.Max) == 1.0
    half = hvd.allreduce(np.full(2, rank + 0.5, "float32"), compression=hvd.Compression.fp16)
    assert half.dtype == np.float32
    assert half.tolist() == [1.0, 1.0]
    tensor = keras.ops.convert_to_tensor(np.full((1 + rank, 2), rank, "float32"))
    assert hvd.allgather(tensor).tolist() == [[0, 0], [1, 1], [1, 1]]
    assert hvd.allgather(np.empty((0, 2), "float32")).shape == (0, 2)
    assert hvd.broadcast(np.array([rank, 7]), 1).tolist() == [1, 7]
    assert hvd.reducescatter(np.arange(3.0) + rank, op=hvd.Sum).tolist() == [[1, 3], [5]][rank]
    with raises(hvd.HorovodInternalError, "x"):
        hvd.allreduce(np.zeros(1 + rank), "x")
    with raises(ValueError, "complex"):
        hvd.allreduce(np.zeros(1, "complex64"))
    assert hvd.allreduce(np.zeros(0)).shape == (0,)


# ---- one rank ----


@on_ranks(1)
def one_rank_alone_trains_as_without_us() -> None:
    compare(lambda: keras.optimizers.SGD(0.05), tolerance=0.0)
    compare(
        lambda: keras.optimizers.SGD(0.025),
        wrap=lambda o: hvd.DistributedOptimizer(o, backward_passes_per_step=2),
        reference=lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    )


# ---- pytest's side ----


def make_backend_tests(backend: str, without: Sequence[str] = ()) -> Any:
    """The tests of one backend, `without` some cases; Keras stays unimported in pytest's own
    process."""
    for name in ("keras", backend, f"farandole.{backend}"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
    return make_tests(__name__, f"keras on {backend}", without=without)
