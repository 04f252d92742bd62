"""fit() on ranks equals fit() in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras_work as work
import numpy as np
from keras_work import hvd, keras
from rank_cases import on_ranks


@on_ranks(2)
def sgd_equals_one_process() -> None:
    work.compare(lambda: keras.optimizers.SGD(0.05))


@on_ranks(2)
def momentum_equals_one_process() -> None:
    work.compare(lambda: keras.optimizers.SGD(0.02, momentum=0.9, nesterov=True))


@on_ranks(2)
def adam_equals_one_process() -> None:
    work.compare(lambda: keras.optimizers.Adam(0.01), tolerance=1e-5)


@on_ranks(2)
def clipping_by_the_global_norm_equals_one_process() -> None:
    work.compare(lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.05))


@on_ranks(2)
def accumulation_equals_one_process() -> None:
    work.compare(lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2))


@on_ranks(2)
def passes_are_summed_or_averaged_as_told() -> None:
    def passes(average: bool) -> Callable[[Any], Any]:
        return lambda optimizer: hvd.DistributedOptimizer(
            optimizer, backward_passes_per_step=2, average_aggregated_gradients=average
        )

    def twice(rate: float) -> Callable[[], Any]:
        return lambda: keras.optimizers.SGD(rate, gradient_accumulation_steps=2)

    work.compare(lambda: keras.optimizers.SGD(0.05), wrap=passes(True), reference=twice(0.05))
    work.compare(lambda: keras.optimizers.SGD(0.025), wrap=passes(False), reference=twice(0.05))


@on_ranks(2)
def a_state_keeps_what_each_rank_has_added_up() -> None:
    """In a window that is open when ranks are given rank 0's state."""
    states = [hvd.elastic.KerasState]
    if work.backend() == "tensorflow":
        from farandole.tensorflow.elastic import TensorFlowKerasState

        states.append(TensorFlowKerasState)
    x, y = work.part()
    models = []
    for state_of in (None, *states):
        models.append(work.net())
        optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
        models[-1].compile(hvd.DistributedOptimizer(optimizer), "mse")
        for rows in (slice(0, 4), slice(4, 8)):
            models[-1].train_on_batch(x[rows], y[rows])
            if state_of is not None:
                state_of(models[-1]).sync()
        work.assert_same_on_all_ranks(models[-1])
        work.assert_equal(models[-1], models[0], 1e-6)


@on_ranks(2)
def programs_of_jax_reduce_in_the_updating_pass_alone() -> None:
    if work.backend() != "jax":
        return  # the others compute nothing of an update in other passes
    from farandole.jax._order import token

    x, y = work.part()
    alone = work.net()
    alone.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=4), "mse")
    if hvd.rank() == 0:
        alone.fit(*work.data(), batch_size=work.BATCH, shuffle=False, verbose=0)
    for eagerly in (False, True):
        model = work.net()
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.05, gradient_accumulation_steps=4), num_groups=1
        )
        model.compile(optimizer, "mse", run_eagerly=eagerly)
        before = int(token()[...][0])  # it counts calls
        model.fit(x, y, batch_size=work.BATCH // 2, shuffle=False, verbose=0)
        updates = 8 // 4
        compared = 0 if eagerly else updates  # weights, by a program, in its first two steps
        assert int(token()[...][0]) - before == updates + compared
        work.assert_equal(model, alone, 1e-6)


@on_ranks(2)
def running_eagerly_equals_one_process() -> None:
    work.compare(lambda: keras.optimizers.SGD(0.05), run_eagerly=True)


@on_ranks(2)
def asking_for_xla_equals_one_process() -> None:
    work.compare(lambda: keras.optimizers.SGD(0.05), jit_compile=True)


@on_ranks(2)
def asking_for_xla_without_our_callbacks_works() -> None:
    """On TensorFlow the model goes without XLA; one whose optimizer is not ours keeps it."""
    x, y = work.part()
    for steps in ("fit", "train_on_batch"):
        model = work.net()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse", jit_compile=True)
        assert model.jit_compile == (work.backend() == "jax")
        if steps == "fit":
            work.fit_part(model)
        else:
            model.train_on_batch(x[:4], y[:4])
        work.assert_same_on_all_ranks(model)
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=True)
    assert model.jit_compile is True


@on_ranks(2)
def an_object_compresses_as_a_class_does() -> None:
    class Twice:
        def compress(self, tensor: Any) -> Any:
            return tensor * 2, 2

        def decompress(self, tensor: Any, factor: Any) -> Any:
            return tensor / factor

    work.compare(
        lambda: keras.optimizers.SGD(0.05),
        wrap=lambda optimizer: hvd.DistributedOptimizer(optimizer, compression=Twice()),
    )


@on_ranks(2)
def sums_divided_before_and_compressed_gradients_equal_one_process() -> None:
    work.compare(
        lambda: keras.optimizers.SGD(0.05),
        wrap=lambda o: hvd.DistributedOptimizer(o, gradient_predivide_factor=2.0),
    )
    work.compare(
        lambda: keras.optimizers.SGD(0.025),
        wrap=lambda o: hvd.DistributedOptimizer(o, op=hvd.Sum),
        reference=lambda: keras.optimizers.SGD(0.05),
    )
    work.compare(
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
        work.compare(lambda: keras.optimizers.SGD(0.05), tolerance=2e-3, scale=0.1)

        def scaled() -> Any:
            return keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(0.05), initial_scale=8.0
            )

        work.compare(scaled, tolerance=2e-3)
    finally:
        keras.config.set_dtype_policy(before)


@on_ranks(2)
def an_infinite_gradient_on_one_rank_skips_the_step_on_all() -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = work.net()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
        x, y = work.part()
        model.train_on_batch(x[:4] * 1e-3, y[:4])
        start, scale = work.values(model), float(model.optimizer.dynamic_scale)
        y[0] = 1e30 if hvd.rank() == 1 else y[0]
        model.train_on_batch(x[:4], y[:4])
        for a, b in zip(start, work.values(model), strict=True):
            assert np.array_equal(a, b)
        assert float(model.optimizer.dynamic_scale) == scale / 2
        model.train_on_batch(x[4:8], y[4:8])
        work.assert_same_on_all_ranks(model)
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
        if work.backend() == "tensorflow":
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
        for as_dense in (False, True) if work.backend() == "tensorflow" else (False,):
            model = build()
            model.compile(hvd.DistributedOptimizer(make(), sparse_as_dense=as_dense), "mse")
            for _ in range(5):
                model.train_on_batch(words[mine], target[mine])
            work.assert_equal(model, alone, tolerance)


@on_ranks(1)
def one_rank_alone_trains_as_without_us() -> None:
    work.compare(lambda: keras.optimizers.SGD(0.05), tolerance=0.0)
    work.compare(
        lambda: keras.optimizers.SGD(0.025),
        wrap=lambda o: hvd.DistributedOptimizer(o, backward_passes_per_step=2),
        reference=lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    )
