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
