"""farandole.keras.ParameterServer: with one worker it is Keras' own fit; with more all batches are
used once, and all workers end with the same weights. Stopped and started again it goes on."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from keras_work import Late, data, keras

import farandole as fd
import grid
from farandole.parameter_server import Snapshots
from harness import World

hvd: Any = Late("farandole.keras")
BACKENDS = [
    name
    for name, package in [("tensorflow", "tensorflow"), ("torch", "torch"), ("jax", "jax")]
    if importlib.util.find_spec(package) is not None
]
if importlib.util.find_spec("keras") is None or not BACKENDS:
    pytest.skip("keras or a backend is not installed", allow_module_level=True)


def model(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((8,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
    net = keras.Sequential(layers)
    net.compile(keras.optimizers.Adam(0.02, clipnorm=1.0), "mse", metrics=["mae"])
    return net


def fits() -> Any:
    """Two fits: the optimizer's state goes on from the first to the second."""
    hvd.init()
    x, y = data()
    options: Any = {"batch_size": 12, "shuffle": False, "verbose": 0}
    net = model(seed=1 + fd.rank())
    served = hvd.ParameterServer()
    for bad, said in [
        ({"callbacks": [keras.callbacks.ReduceLROnPlateau()]}, "ReduceLROnPlateau does not work"),
        ({"steps_per_epoch": 7}, "the data are 6 batches"),
    ]:
        with pytest.raises(fd.InvalidArgument, match=said):
            served.fit(net, x, y, **options, **bad)
    first = served.fit(net, x, y, epochs=2, validation_data=(x, y), **options)
    served.fit(net, x, y, epochs=1, **options)
    weights = [np.array(w) for w in net.get_weights()]
    alone: Any = None
    if fd.rank() == 0 and fd.size() == 2:
        alone = model(seed=1)
        history = alone.fit(x, y, epochs=2, validation_data=(x, y), **options)
        alone.fit(x, y, epochs=1, **options)
        alone = ([np.array(w) for w in alone.get_weights()], history.history)
    return weights, first.history, alone, served.report


@pytest.mark.parametrize("backend", BACKENDS if grid.full() else BACKENDS[:1])
def test_one_worker_is_as_alone(spawn: Callable[..., World], backend: str) -> None:
    worker, server = spawn(2, f"keras on {backend}").run(fits)
    weights, history, (right, right_history), _ = worker
    for mine, its, alone in zip(weights, server[0], right, strict=True):
        np.testing.assert_allclose(mine, alone, rtol=1e-4, atol=1e-5)
        assert (mine == its).all()
    assert history.keys() == right_history.keys()
    for name in history:
        np.testing.assert_allclose(history[name], right_history[name], rtol=1e-3, err_msg=name)
    assert server[3].updates == 18


def test_several_workers_share_the_batches(spawn: Callable[..., World]) -> None:
    *workers, server = spawn(3, f"keras on {BACKENDS[0]}").run(fits)
    for one, other, its in zip(workers[0][0], workers[1][0], server[0], strict=True):
        assert (one == other).all()
        assert (one == its).all()
    assert server[3].updates == 18
    assert server[3].lost == []


WORDS = 3000  # of a table that is large enough


def with_tables(ties: bool) -> Any:
    """Two tables: one by an input's words as they are, one by what layers make of them."""
    keras.utils.set_random_seed(3)
    words, more = keras.Input((4,), dtype="int32"), keras.Input((2,), dtype="int32")
    table = keras.layers.Embedding(WORDS, 8, name="table")
    folded = keras.layers.Embedding(WORDS, 8, name="folded")
    parts = [table(words), table(more), folded(keras.ops.mod(words * 7, WORDS))]
    outputs = keras.layers.Dense(1)(keras.ops.mean(keras.ops.concatenate(parts, axis=1), axis=1))
    net = keras.Model([words, more], outputs)

    def loss(y: Any, out: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y - out)) + (
            keras.ops.mean(keras.ops.square(table.embeddings[0])) if ties else 0.0
        )

    net.compile(keras.optimizers.Adam(0.05), loss)
    return net


def looks_up(ties: bool) -> Any:
    """How many rows came of each table, in each step."""
    import farandole.keras._asynchronous.fitting as fitting

    hvd.init()
    rng = np.random.default_rng(4)
    # Each word once: TensorFlow's Adam takes squares of rows that come twice before it adds them.
    words = rng.permutation(WORDS)[: 48 * 6].reshape(48, 6)
    x = [words[:, :4], words[:, 4:]]
    y = rng.normal(size=(48, 1)).astype(np.float32)
    net, seen = with_tables(ties), []
    take = fitting.Steps.take_weights

    def noting(self: Any, rows: Any = None) -> None:
        seen.append({name.split("/")[0]: len(each) for name, each in (rows or {}).items()})
        take(self, rows)

    fitting.Steps.take_weights = noting  # type: ignore[method-assign]
    try:
        hvd.ParameterServer().fit(net, x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    finally:
        fitting.Steps.take_weights = take  # type: ignore[method-assign]
    if fd.rank() == 0:
        alone = with_tables(ties)
        alone.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        for mine, right in zip(net.get_weights(), alone.get_weights(), strict=True):
            np.testing.assert_allclose(np.array(mine), np.array(right), rtol=1e-4, atol=1e-5)
    batches = [slice(16 * at, 16 * at + 16) for at in range(3)]
    wanted = [
        {
            "table": len(np.union1d(x[0][batch], x[1][batch])),
            "folded": len(np.unique(x[0][batch] * 7 % WORDS)),
        }
        for batch in batches
    ]
    return seen, wanted


@pytest.mark.parametrize("backend", BACKENDS)
def test_workers_fetch_the_rows_that_a_batch_looks_up(
    spawn: Callable[..., World], backend: str
) -> None:
    world = spawn(2, f"keras on {backend}")
    (seen, wanted), _ = world.run(looks_up, False)
    assert seen == [{}, *wanted, {}, *wanted, {}, {}]  # {}: whole tables


def test_a_table_that_something_else_reads_is_fetched_whole(spawn: Callable[..., World]) -> None:
    (seen, wanted), _ = spawn(2, f"keras on {BACKENDS[0]}").run(looks_up, True)
    only = [{"folded": each["folded"]} for each in wanted]
    assert seen == [{}, wanted[0], *only[1:], {}, *only, {}, {}]


def stopped_at(batch: int, folder: str) -> Any:
    """A fit of 12 batches of a PyDataset, on two servers, that its program may end before."""
    hvd.init()
    x, y = data()

    class Batches(keras.utils.PyDataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 6

        def __getitem__(self, at: int) -> Any:
            return x[12 * at : 12 * at + 12], y[12 * at : 12 * at + 12]

    class Stops(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
        begun = 0

        def on_train_batch_begin(self, batch_of_epoch: int, logs: Any = None) -> None:
            del batch_of_epoch, logs
            self.begun += 1
            if self.begun > batch:
                raise RuntimeError("stopped")

    net, stops = model(seed=1 + fd.rank()), Stops()
    served = hvd.ParameterServer(2, snapshots=Snapshots(folder, every=5))
    with pytest.raises(fd.InvalidArgument, match="y is given beside a dataset"):
        served.fit(net, Batches(), y)
    try:
        served.fit(net, Batches(), epochs=2, callbacks=stops, verbose=0)
    except BaseException:
        fd.shutdown()
        raise
    weights = [np.array(w) for w in net.get_weights()]
    if fd.rank() == 0:
        alone = model(seed=1)
        alone.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        for mine, right in zip(weights, alone.get_weights(), strict=True):
            np.testing.assert_allclose(mine, right, rtol=1e-4, atol=1e-5)
    return stops.begun, served.report and served.report.updates


def test_a_fit_goes_on_from_the_snapshots_of_two_servers(
    spawn: Callable[..., World], tmp_path: Path
) -> None:
    world = spawn(3, f"keras on {BACKENDS[0]}")
    world.start(stopped_at, 8, str(tmp_path))
    assert [each.error for each in world.outcomes()] == ["RuntimeError", *["RemoteError"] * 2]
    assert sorted(path.name for path in tmp_path.glob("*version-8*")) == [
        f"server-{server}-of-2.version-8.npz" for server in (0, 1)
    ]
    world = spawn(3, f"keras on {BACKENDS[0]}")
    assert world.run(stopped_at, 99, str(tmp_path)) == [(4, None), (0, 12), (0, 12)]
