"""Calls that farandole.keras refuses, and their error messages."""

from __future__ import annotations

import tempfile
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
from keras_work import assert_same_on_all_ranks, compare, hvd, keras, net, part
from rank_cases import on_ranks, raises

import farandole as fd
from wrong_arguments import problems_in


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
def optimizers_that_differ_are_named_and_the_next_ones_work() -> None:
    """Ranks may have had other optimizers before, and have counted them differently."""
    x, y = part()
    for kinds in (("SGD", "Adam"), ("SGD", "RMSprop")):
        model = net()
        kind = getattr(keras.optimizers, kinds[hvd.rank()])
        model.compile(hvd.DistributedOptimizer(kind(0.05)), "mse")
        with raises(fd.Mismatch, *(f"rank {r}: Distributed{k}" for r, k in enumerate(kinds))):
            model.train_on_batch(x[:4], y[:4])
    compare(lambda: keras.optimizers.SGD(0.05))
    if hvd.rank() == 1:
        hvd.DistributedOptimizer(keras.optimizers.SGD())
    compare(lambda: keras.optimizers.SGD(0.05))


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
    with raises(ValueError, "model is a NoneType, not a Keras 3 model"):
        hvd.elastic.KerasState(None)
    with raises(ValueError, "the model has no weights yet"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
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
