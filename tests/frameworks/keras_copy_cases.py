"""Models and optimizers in files, and copies of them."""

from __future__ import annotations

import copy
import json
import pickle
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import keras_work as work
import numpy as np
from keras_work import hvd, keras
from rank_cases import on_ranks, raises

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
    model = work.net()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    without_path = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    with raises(ValueError, "pass filepath"):
        work.fit_part(model, [without_path])
    without_path.filepath = str(folder / f"rank{hvd.rank()}.keras")
    weights = hvd.callbacks.BestModelCheckpoint(
        monitor="loss", save_weights_only=True, filepath=str(folder / "best.weights.h5")
    )
    work.fit_part(model, [hvd.callbacks.MetricAverageCallback(), without_path, weights])
    hvd.allreduce(0.0, "saved")
    assert sorted(p.name for p in folder.iterdir()) == ["best.weights.h5", "rank0.keras"]


@on_ranks(2)
def a_saved_model_names_the_plain_optimizer_and_resumes() -> None:
    folder = common_folder()

    def sgd() -> Any:
        return keras.optimizers.SGD(0.02, momentum=0.9)

    alone, model = work.net(), work.net()
    alone.compile(sgd(), "mse")
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    assert isinstance(model.optimizer, keras.optimizers.SGD)
    copied = model.optimizer.from_config(model.optimizer.get_config())
    assert type(copied) is type(alone.optimizer)
    work.fit(alone, *work.data(), work.BATCH)
    work.fit_part(model)
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
    work.fit(alone, *work.data(), work.BATCH)
    work.fit_part(loaded)
    assert int(loaded.optimizer.iterations) == 48
    work.assert_equal(loaded, alone, 1e-5)


@on_ranks(2)
def exported_models_have_no_operations_of_ours() -> None:
    """Others, a server among them, load them without farandole."""
    if work.backend() != "tensorflow":
        return  # the other backends export through packages of their own
    import tensorflow as tf

    model = work.net()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)), "mse")
    work.fit_part(model)
    with tempfile.TemporaryDirectory() as name:
        exported, saved = Path(name, "exported"), Path(name, "saved")
        model.export(exported, verbose=False)
        tf.saved_model.save(model, saved)
        for path in (exported, saved):
            assert b"Farandole" not in (path / "saved_model.pb").read_bytes()
        loaded = tf.saved_model.load(exported)
    x, _ = work.part()
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
        optimizer.apply([work.gradient_of(3)], [variable])
        assert np.allclose(keras.ops.convert_to_numpy(variable), -3.0)
    inside = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    for scaling in copies_of(keras.optimizers.LossScaleOptimizer(inside)):
        with raises(ValueError, "already"):
            hvd.DistributedOptimizer(scaling)
    hvd.DistributedOptimizer(copy.deepcopy(keras.optimizers.SGD(1.0)))  # a plain one's is plain


@on_ranks(1)
def a_model_is_unpickled_where_there_is_no_world() -> None:
    """As farandole.run does with what a function returns; to train, it needs one."""
    model = work.net()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    x, y = work.part()
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
    work.assert_equal(copied, model, 0.0)


@on_ranks(2)
def copies_of_a_model_train_together() -> None:
    x, y = work.part()
    model = work.net()
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
        for a, b in zip(work.values(model), work.values(copied), strict=True):
            assert np.array_equal(a, b)


@on_ranks(2)
def optimizers_of_a_process_set_are_copied_and_not_pickled() -> None:
    if work.backend() == "jax":
        return  # there are none
    alone = hvd.add_process_set([1])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=alone)
    with raises(ValueError, "cannot be pickled", "ProcessSet([1]"):
        pickle.dumps(optimizer)
    variable = keras.Variable(np.zeros(3, "float32"), name="v")
    copy.deepcopy(optimizer).apply([work.gradient_of(3)], [variable])
    assert np.allclose(keras.ops.convert_to_numpy(variable), -1.0 - hvd.rank())
