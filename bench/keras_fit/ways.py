"""The ways to train on many ranks that are compared: a table, and what each makes of a model."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from models import BATCH, Arrays, Model, keras_sgd, plain_optimizer
from steps import Gradients, dense, own_gradients, step_of
from trainers import Elsewhere, Fit, Loop, Trainer

import farandole as fd

MPI = "mpi4py under mpirun"
PARTS = 2  # of a rank's samples in a step, where they are computed one by one


@dataclass(frozen=True)
class Way:
    """`loop`: of `fit`, or of the user's own over a GradientTape. `needs`: besides Keras. `apart`:
    of another question, measured where it is asked for."""

    name: str
    label: str
    loop: str
    make: Callable[[Model, Arrays], Trainer]
    needs: tuple[str, ...] = ()
    exchanges: bool = True
    apart: bool = False


# ---- fit ----


def _fit(optimizer: Callable[[], Any]) -> Callable[[Model, Arrays], Trainer]:
    return lambda model, data: Fit(model.build_alike(), optimizer(), data)


def _farandole() -> Any:
    import farandole.keras as hvd

    return hvd.DistributedOptimizer(plain_optimizer(), sparse_as_dense=True)


def _in_parts(model: Model, data: Arrays) -> Trainer:
    """The gradients of as many parts as a logical rank's, in micro-batches of one update."""
    import farandole.keras as hvd

    own = keras_sgd(gradient_accumulation_steps=PARTS)
    optimizer = hvd.DistributedOptimizer(own, sparse_as_dense=True)
    return Fit(model.build_alike(), optimizer, data, BATCH // PARTS, PARTS)


def _logical(model: Model, data: Arrays) -> Trainer:
    return _of_all_ranks(model, data, logical_ranks=PARTS * fd.size())


def _of_all_ranks(model: Model, _: Arrays, **options: Any) -> Trainer:
    """The same parts of the same batches, which here are those of all ranks together."""
    import farandole.keras as hvd

    count = model.steps + 1
    ranks = [model.batches(rank, count) for rank in range(fd.size())]
    x, y = (
        np.concatenate([a[i * BATCH : (i + 1) * BATCH] for i in range(count) for a in arrays])
        for arrays in zip(*ranks, strict=True)
    )
    shared = hvd.Model(model.build_alike(), sparse_as_dense=True, **options)
    return Fit(shared, plain_optimizer(), (x, y), BATCH * fd.size())


def _farandole_unordered() -> Any:
    optimizer = _farandole()
    own = type(optimizer)

    class Unordered(own):  # type: ignore[misc,valid-type]
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            with _unordered():
                return super().apply(grads, trainable_variables)

    optimizer.__class__ = Unordered
    return optimizer


def _changed(optimizer: Any, change: Callable[[list[Any]], list[Any]]) -> Any:
    """An optimizer that sees changed gradients."""
    own = type(optimizer)

    class Changed(own):  # type: ignore[misc,valid-type]
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            return super().apply(change(dense(grads)), trainable_variables)

    optimizer.__class__ = Changed
    return optimizer


def _mirrored(model: Model, _: Arrays) -> Trainer:
    """Rank 0's process has the cores of all ranks; the others wait."""
    mine = np.array([min(os.sched_getaffinity(0))])
    cores = sorted(set(fd.all_gather(mine).tolist()))
    words = ["mirrored", model.name, str(fd.size())]
    return Elsewhere(words if fd.rank() == 0 else [], cores)


# ---- gradients ----


def _waited_for(gradients: list[Any]) -> list[Any]:
    """The same, when all are there: nothing overlaps with what comes after them."""
    import tensorflow as tf

    with tf.control_dependencies(gradients):
        return [tf.identity(g) for g in gradients]


@contextlib.contextmanager
def _unordered() -> Iterator[None]:
    """In what is traced meanwhile a variable is updated as soon as its own gradient is reduced."""
    from farandole.tensorflow import _reduction

    ordered = _reduction.all_or_none
    _reduction.all_or_none = lambda gradients, first=(): gradients  # noqa: ARG005
    try:
        yield
    finally:
        _reduction.all_or_none = ordered


def _through_mpi(gradients: list[Any]) -> list[Any]:
    import tensorflow as tf
    from mpi4py import MPI as mpi

    world = mpi.COMM_WORLD

    def reduce(*arrays: Any) -> list[Any]:
        results = [np.array(array) for array in arrays]
        for result in results:
            world.Allreduce(mpi.IN_PLACE, result)
            result /= world.size
        return results

    reduced = tf.py_function(reduce, gradients, [g.dtype for g in gradients])
    for result, gradient in zip(reduced, gradients, strict=True):
        result.set_shape(gradient.shape)
    return list(reduced)


# ---- a loop of one's own ----


def _by_tape(tape: Any, loss: Any, variables: list[Any]) -> list[Any]:
    import farandole.tensorflow as hvd

    reducing = hvd.DistributedGradientTape(tape, sparse_as_dense=True)
    return list(reducing.gradient(loss, variables))


def _by_unordered_tape(tape: Any, loss: Any, variables: list[Any]) -> list[Any]:
    with _unordered():
        return _by_tape(tape, loss, variables)


def _grouped(tape: Any, loss: Any, variables: list[Any]) -> list[Any]:
    import farandole.tensorflow as hvd

    return list(hvd.grouped_allreduce(_waited_for(own_gradients(tape, loss, variables))))


def _loop(gradients: Gradients) -> Callable[[Model, Arrays], Trainer]:
    def make(model: Model, data: Arrays) -> Trainer:
        import tensorflow as tf

        net = model.build_alike()
        return Loop(net, tf.function(step_of(net, gradients)), data)

    return make


def _multi_worker(model: Model, _: Arrays) -> Trainer:
    """Every rank has a process beside it, on its core."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = np.array([probe.getsockname()[1]])
    addresses = [f"127.0.0.1:{port}" for port in fd.all_gather(port).tolist()]
    return Elsewhere(["multi_worker", model.name, str(fd.rank()), *addresses])


_TENSORFLOW = ("tensorflow",)
WAYS = [
    Way("none", "nothing exchanged", "fit", _fit(plain_optimizer), exchanges=False),
    Way("farandole", "farandole", "fit", _fit(_farandole)),
    Way(
        "unordered",
        "farandole, updates not after all gradients",
        "fit",
        _fit(_farandole_unordered),
        _TENSORFLOW,
        apart=True,
    ),
    Way("model", "`farandole.keras.Model`, the batch of all ranks", "fit", _of_all_ranks),
    Way("micro", f"farandole, {PARTS} micro-batches a step", "fit", _in_parts, apart=True),
    Way("logical", f"`logical_ranks`, {PARTS} a rank", "fit", _logical, apart=True),
    Way(
        "farandole_flat",
        "farandole, no overlap",
        "fit",
        _fit(lambda: _changed(_farandole(), _waited_for)),
        _TENSORFLOW,
    ),
    Way(
        "py_function",
        "`py_function` over mpi4py",
        "fit",
        _fit(lambda: _changed(plain_optimizer(), _through_mpi)),
        (*_TENSORFLOW, MPI),
    ),
    Way("mirrored", "MirroredStrategy, one process", "fit", _mirrored, _TENSORFLOW),
    Way("none", "nothing exchanged", "tape", _loop(own_gradients), _TENSORFLOW, exchanges=False),
    Way("farandole", "farandole", "tape", _loop(_by_tape), _TENSORFLOW),
    Way(
        "unordered",
        "farandole, updates not after all gradients",
        "tape",
        _loop(_by_unordered_tape),
        _TENSORFLOW,
        apart=True,
    ),
    Way(
        "farandole_flat",
        "farandole, grouped, no overlap",
        "tape",
        _loop(_grouped),
        _TENSORFLOW,
    ),
    Way(
        "py_function",
        "`py_function` over mpi4py",
        "tape",
        _loop(lambda *of: _through_mpi(own_gradients(*of))),
        (*_TENSORFLOW, MPI),
    ),
    Way(
        "multi_worker",
        "MultiWorkerMirroredStrategy",
        "tape",
        _multi_worker,
        _TENSORFLOW,
    ),
]
