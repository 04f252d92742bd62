"""`ParameterServer`: a Keras model that workers train without waiting for one another."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from farandole import _world
from farandole._arguments import shown, takes
from farandole._core import InvalidArgument
from farandole._one_world import refuse_in_elastic_jobs
from farandole.keras._asynchronous import dealing
from farandole.keras._asynchronous.fitting import Steps, Validation, train
from farandole.keras._asynchronous.rule import KerasRule, check_optimizer
from farandole.keras._calls import Fit
from farandole.keras._global.callbacks import listed, listening
from farandole.keras._global.sources import held_out
from farandole.parameter_server import Report, Server, Snapshots, Worker, join

_WHOLE = 1 << 62  # bytes: no variable is split, as optimizers look at whole ones
_REFUSED = {
    "BackupAndRestore": "snapshots= of the parameter server",
    "LearningRateScheduler": "a schedule of keras.optimizers.schedules, which counts updates",
    "ReduceLROnPlateau": "a schedule of keras.optimizers.schedules, which counts updates",
    "SwapEMAWeights": "the weights as they are",
}


class ParameterServer:
    """Trains a Keras model asynchronously, on any backend: docs/parameter-server.md.

    Every rank makes one for a model, and calls :meth:`fit` with the same arguments. The last
    ``servers`` ranks of the world have the variables, and apply the optimizer that the model was
    compiled with to each gradient as it comes; the others train.

    Args:
        servers: how many ranks are servers. Variables are placed whole, by size.
        max_staleness: how many steps a worker may be ahead of the slowest one. None: any number.
            0: synchronous; servers apply the mean of the gradients of all workers.
        snapshots: a ``farandole.parameter_server.Snapshots``: what servers write, and go on from.

    Attributes:
        is_server: whether this rank is one.
        report: on a server, after a fit: a ``farandole.parameter_server.Report``; else None.

    Raises:
        InvalidArgument: a wrong argument, or too few ranks.
        NotInitialized: ``init()`` was not called.
    """

    def __init__(
        self,
        servers: int = 1,
        *,
        max_staleness: int | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        size = _world.size()
        refuse_in_elastic_jobs("ParameterServer", "its servers and workers stay the same")
        if not isinstance(servers, int) or not 1 <= servers < size:
            raise InvalidArgument(
                f"servers is {shown(servers)}; it is from 1 to {size - 1} in a world of {size}"
            )
        self.is_server = _world.rank() >= size - servers
        self.report: Report | None = None
        self._servers, self._bound, self._snapshots = servers, max_staleness, snapshots
        self._node: Server | Worker | None = None
        self._model: Any = None
        self._variables: dict[str, Any] = {}
        self._rule = KerasRule({})
        self._fits = 0

    @takes(Fit)
    def fit(self, model: Any, given: Fit) -> Any:
        """As ``keras.Model.fit``. A step is one batch on one worker, and one update.

        All ranks give all data. The batches of all epochs are dealt out: each goes to one worker,
        and a faster one gets more of them. A dataset that can only be read in order is each
        worker's own, and needs ``steps_per_epoch``, which counts the steps of all workers.

        Losses, metrics and validation are each worker's own, over the batches that it had. At the
        end all workers have the same weights. Servers return when all workers have ended the fit;
        of the model they then have the variables that they serve, and the optimizer's state.

        Args:
            model: compiled; the same one each time.

        Returns:
            Keras' ``History``; of a server it is empty.

        Raises:
            InvalidArgument: an argument that is not possible here.
            ServerLost: a server is gone; names its last snapshot.
        """
        check_optimizer(model.optimizer, self._servers)
        if getattr(model, "steps_per_execution", 1) != 1:
            raise InvalidArgument("fit: steps_per_execution is 1 on a parameter server")
        arrays: tuple[Any, Any, Any] = (given.x, given.y, given.sample_weight)
        validation: Any = given.validation_data
        if given.validation_split:
            if validation is not None:
                raise InvalidArgument("fit: validation_split and validation_data are both given")
            arrays, validation = held_out(arrays, given.validation_split)
        source = dealing.source_of(*arrays, given.batch_size, given.shuffle, self._fits)
        each = _steps_of(source, given.steps_per_epoch)
        _refuse_some(called := listed(given.callbacks))
        self._begin(model, source)
        if isinstance(self._node, Server):
            history = self._serve(self._node, model)
        else:
            assert self._node is not None
            verbose = given.verbose if self._node.index == 0 else 0
            callbacks = listening(called, model, epochs=given.epochs, steps=None, verbose=verbose)
            self._train(self._node, model, source, callbacks, given, each, validation)
            history = model.history
        self._fits += 1
        return history

    def _begin(self, model: Any, source: dealing.Source) -> None:
        """All ranks together, the first time."""
        if self._model is not None:
            if model is not self._model:
                raise InvalidArgument(
                    f"model '{model.name}': this ParameterServer has '{self._model.name}' already\n"
                    "  advice: make another one for another model"
                )
            return
        if not model.built:
            model(keras.tree.map_structure(lambda each: each[:1], source.batch(0, 0)[0]))
        self._variables = _named(model.trainable_variables)
        if not self._variables:
            raise InvalidArgument(f"model '{model.name}' has no variables to train")
        self._rule = KerasRule(self._variables)
        values = {n: np.array(keras.ops.convert_to_numpy(v)) for n, v in self._variables.items()}
        self._node = join(
            values, self._rule, servers=self._servers, max_staleness=self._bound,
            snapshots=self._snapshots, split_above=_WHOLE,
        )  # fmt: skip
        self._model = model

    def _serve(self, server: Server, model: Any) -> Any:
        for name, value in server.variables.items():
            if self._fits == 0:
                self._variables[name].assign(value)
            else:  # the program may have changed it since
                value[...] = keras.ops.convert_to_numpy(self._variables[name])
        self._rule.use(model.optimizer, list(server.variables))
        self.report = server.serve()
        history = keras.callbacks.History()
        history.set_model(model)
        history.on_train_begin()
        return history

    def _train(
        self, worker: Worker, model: Any, source: dealing.Source, callbacks: Any, given: Fit,
        each: int, held_out: Any,
    ) -> None:  # fmt: skip
        epochs = range(given.initial_epoch, given.epochs)
        validation = Validation(
            held_out, given.validation_batch_size, given.validation_steps, given.validation_freq
        )
        steps = Steps(model, self._variables, worker)
        own = vars(model)
        own["train_function"] = None  # it holds the optimizer
        model.stop_training = False
        try:
            steps.take_weights()
            callbacks.on_train_begin()
            train(
                steps, worker, model, source, callbacks, epochs, each, validation,
                given.class_weight,
            )  # fmt: skip
            steps.take_weights()
            callbacks.on_train_end()
        finally:
            own["train_function"] = None
        worker.pause()


def _named(variables: list[Any]) -> dict[str, Any]:
    """By paths; of equal ones the later have a number."""
    named: dict[str, Any] = {}
    for variable in variables:
        name, count = variable.path, 1
        while name in named:
            count += 1
            name = f"{variable.path} ({count})"
        named[name] = variable
    return named


def _steps_of(source: dealing.Source, asked: int | None) -> int:
    if asked is None:
        if source.steps is None:
            raise InvalidArgument(
                "fit: the dataset can only be read in order; steps_per_epoch says how many "
                "batches all workers take together in an epoch"
            )
        return source.steps
    if not isinstance(asked, int) or asked < 1:
        raise InvalidArgument(f"fit: steps_per_epoch is {shown(asked)}; it is at least 1")
    if source.steps is not None and asked > source.steps:
        raise InvalidArgument(
            f"fit: steps_per_epoch is {asked}, and the data are {source.steps} batches"
        )
    return asked


def _refuse_some(callbacks: list[Any]) -> None:
    """Raises InvalidArgument for what does not work here."""
    for each in callbacks:
        name = type(each).__name__
        if name in _REFUSED and isinstance(each, getattr(keras.callbacks, name, ())):
            raise InvalidArgument(
                f"fit: {name} does not work where the optimizer is on servers\n"
                f"  advice: {_REFUSED[name]}"
            )
