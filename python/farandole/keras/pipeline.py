"""A Keras model cut into stages, one on each rank of a pipeline, with micro-batches in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np

from farandole import _world
from farandole._arguments import takes
from farandole._core import Error, InvalidArgument
from farandole._one_world import refuse_in_elastic_jobs
from farandole.common._objects import allgather_object
from farandole.data import DEFAULT_SEED
from farandole.data._same import compares_after
from farandole.keras._calls import (
    Evaluate,
    Fit,
    TrainOnBatch,
    check_class_weight,
    check_steps,
    is_due,
)
from farandole.keras._global.agreement import agreed
from farandole.keras._global.arrays import weights_of
from farandole.keras._global.how import How, Source
from farandole.keras._global.leading import WHOLE, Reading
from farandole.keras._global.sources import source_of
from farandole.keras._pipeline import optimizer_state
from farandole.keras._pipeline.cutting import Graph, bounds_of
from farandole.keras._pipeline.fitting import (
    callbacks_of,
    sources_of,
    warn_of_few_samples,
)
from farandole.keras._pipeline.making import Made
from farandole.keras._pipeline.results import weights_of_all
from farandole.keras._pipeline.stepping import Stepping
from farandole.keras._pipeline.work import count_of
from farandole.pipeline._places import (
    Place,
    check_count,
    check_root,
    groups_of,
    place_of,
    prepared,
)
from farandole.pipeline._report import Reported
from farandole.pipeline._schedules import schedule_of


class Pipeline(Reported):
    """A Keras model whose layers are cut into stages, one on each rank, with micro-batches in
    flight.

    ``fit``, ``evaluate`` and ``predict`` give what they give in one process: weights, losses and
    metrics, the same on every rank, up to rounding. Ranks are stages times replicas: rank r has
    stage ``r % stages`` of replica ``r // stages``; replicas share each batch. All ranks call the
    same methods in the same order, with the same data.

    Args:
        model: a sequential or functional Keras 3 model that is built: then a rank keeps the layers
            of its stage, and the others until the program drops the model. Or a function that makes
            one: then only the weights of the stage are ever given values, the same as in one
            process if ``keras.utils.set_random_seed`` is called before.
        stages: default: as many as there are ranks; a divisor of that.
        micro_batches: that a batch is cut into; default: four for each stage.
        schedule: "1f1b": at most as many micro-batches in flight as there are stages from this one
            on; "gpipe": all of them.
        split: where stages begin. "parameters": the largest stage has as few as can be; "layers":
            so with layers; or a list of the first layer of each stage but the first, by name or by
            number in the order in which they are computed.
        seed: of the order of arrays.

    Raises:
        InvalidArgument: an argument is wrong, on this rank or on another; on every rank.
        Mismatch: the ranks' arguments or models differ; on every rank.

    Examples:
        >>> import farandole.keras as fd, keras, numpy as np
        >>> fd.init()
        >>> layers = keras.layers
        >>> net = keras.Sequential([keras.Input((2,)), layers.Dense(4), layers.Dense(1)])
        >>> model = fd.Pipeline(net, micro_batches=2)
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((64, 2)), np.ones(64), batch_size=32, verbose=0)
    """

    def __init__(
        self,
        model: Any,
        *,
        stages: int | None = None,
        micro_batches: int | None = None,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
        split: Literal["parameters", "layers"] | Sequence[int | str] = "parameters",
        seed: int = DEFAULT_SEED,
    ) -> None:
        made = Made(None)

        refuse_in_elastic_jobs(
            "Pipeline", "a rank that is lost takes the layers of its stage with it"
        )

        def prepare() -> tuple[Place, int, Graph, list[int]]:
            nonlocal made
            place = place_of(stages)
            m = 4 * place.stages if micro_batches is None else micro_batches
            check_count("micro_batches", m)
            schedule_of(schedule)
            made = Made(model)
            graph = Graph(made.model)
            bounds = bounds_of(split, graph, place.stages)
            graph.refuse_shared(bounds)
            return place, m, graph, bounds

        try:
            place, m, graph, bounds = prepared(
                prepare,
                lambda row: [
                    f"stages={row[0].stages}", f"micro_batches={row[1]}",
                    f"schedule={schedule!r}".lower(), f"seed={seed}",
                    f"stages that begin at {row[3]}",
                    *(f"a weight {list(w.shape)} {w.dtype}" for w in row[2].model.weights),
                ],
            )  # fmt: skip
            made.give_values(graph.variables(bounds, place.stage))
        finally:
            made.forget()
        self._place, self._micro_batches, self._seed = place, m, seed
        self._schedule = str(schedule).lower()
        self._module = graph.stage(bounds, place.stage)
        number_of = {id(w): i for i, w in enumerate(graph.model.weights)}
        self._places = [number_of[id(w)] for w in self._module.weights]
        self._count = len(number_of)
        self._outputs = keras.tree.map_structure(lambda _: 0, graph.model._outputs_struct)
        groups = groups_of(place)
        self._group = groups.everyone
        self._steps = Stepping(self._module, place, groups, m, self._schedule)
        nbytes = int(sum(np.prod(w.shape) * _itemsize(w) for w in self._module.weights))
        self._begin_to_report(self._steps.times, bounds, nbytes)
        self._passes = 0  # over training data

    # ---- this rank's stage ----

    @property
    def module(self) -> Any:
        """This rank's layers, as a Keras model."""
        return self._module

    @property
    def optimizer(self) -> Any:
        """That of this rank's stage; None before ``compile``."""
        return getattr(self._module, "optimizer", None)

    # ---- compile ----

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
    ) -> None:
        """As Keras' ``compile``, on every rank. The optimizer is that of this rank's stage.

        Raises:
            InvalidArgument: a loss whose reduction is not 'sum_over_batch_size', 'mean' or 'sum'; a
                ``LossScaleOptimizer`` or a ``DistributedOptimizer``.
        """
        self._steps.compile(
            optimizer,
            loss,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            loss_weights=loss_weights,
            run_eagerly=run_eagerly,
        )

    # ---- fit, evaluate, predict ----

    @takes(Fit)
    def fit(self, given: Fit) -> Any:
        """As Keras' ``fit``; batches are those of all replicas together, and logs those of one
        process, on every rank and for every batch. Callbacks see this rank's stage as their model.

        Args:
            x: arrays (dicts, tuples, lists of them), a ``tf.data.Dataset``, a ``PyDataset``, a
                generator, a ``DataLoader`` or a ``farandole.data.FromRank0``; the same on every
                rank.
            shuffle: of arrays: the same order on every rank, and for any number of ranks.

        Raises:
            InvalidArgument: not compiled, or an argument is wrong; on every rank.
            Mismatch: the ranks' data or arguments differ; on every rank.
            RemoteError: another rank's stage has raised; says which, and what.
        """

        def prepare() -> tuple[list[Source], list[str]]:
            self._steps.results("fit()")
            given.check()
            how = How(
                "fit()", self._seed, given.batch_size, given.steps_per_epoch, given.shuffle,
                given.class_weight, max(self._passes, given.initial_epoch), WHOLE,
            )  # fmt: skip
            held_out = given.validation_batch_size, given.validation_steps
            found = sources_of(
                (given.x, given.y, given.sample_weight), how, given.validation_split,
                given.validation_data, held_out,
            )  # fmt: skip
            return found, [f"epochs {given.epochs}, initial_epoch {given.initial_epoch}"]

        sources, _ = agreed("fit()", prepare, False)
        results = self._steps.results("fit()")
        self._steps.sample = sources[0].sample
        if (whole := sources[0].batch) is not None and self.replica == 0:
            warn_of_few_samples(self._module, whole // (self.replicas * self._micro_batches))
        length = given.steps_per_epoch or getattr(sources[0].data, "num_batches", None)
        listed = callbacks_of(
            given.callbacks, self._module, epochs=given.epochs, steps=length, verbose=given.verbose
        )
        training = Reading(sources[0], given.steps_per_epoch)
        checking = Reading(sources[1], given.validation_steps) if len(sources) > 1 else None
        self._module.stop_training = False
        batches = 0
        listed.on_train_begin()
        for epoch in range(given.initial_epoch, given.epochs):
            results.reset()
            listed.on_epoch_begin(epoch)
            logs: dict[str, float] = {}
            for number, batch in enumerate(training.epoch()):
                listed.on_train_batch_begin(number)
                batches += 1
                if compares_after(batches):
                    sources[0].read.compare("fit()")
                self._steps.train(batch)
                logs = results.compute()
                listed.on_train_batch_end(number, logs)
                if self._module.stop_training:
                    break
            if checking is not None and is_due(epoch, given.validation_freq):
                found = self._evaluated(checking)
                logs = logs | {f"val_{name}": value for name, value in found.items()}
            for source in sources:
                source.read.compare("fit()")
            listed.on_epoch_end(epoch, logs)
            self._passes = max(self._passes + 1, epoch + 1)
            told = allgather_object(bool(self._module.stop_training), "stop_training")
            if any(told):
                break
        listed.on_train_end(logs if given.epochs > given.initial_epoch else None)
        return self._module.history

    def _evaluated(self, reading: Reading) -> dict[str, float]:
        results = self._steps.results("evaluate()")
        results.reset()
        for batch in reading.epoch():
            self._steps.test(batch)
        return results.compute()

    @takes(Evaluate)
    def evaluate(self, given: Evaluate) -> Any:
        """As Keras' ``evaluate``; every rank gets the result. Data and errors as in ``fit``.
        ``verbose`` shows the result on rank 0; callbacks are not called."""
        x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict = given
        if callbacks:
            raise InvalidArgument("evaluate(): callbacks are for fit() in a Pipeline")

        def prepare() -> tuple[list[Source], list[str]]:
            self._steps.results("evaluate()")
            check_steps("evaluate()", batch_size=batch_size, steps=steps)
            how = How("evaluate()", self._seed, batch_size, steps, block=WHOLE)
            return [source_of((x, y, sample_weight), how)], [f"steps {steps}"]

        sources, _ = agreed("evaluate()", prepare, False)
        self._steps.sample = sources[0].sample
        logs = self._evaluated(Reading(sources[0], steps))
        sources[0].read.compare("evaluate()")
        if verbose not in (0, "auto") and _world.rank() == 0:
            print(", ".join(f"{name}: {value:.4f}" for name, value in logs.items()))
        if return_dict:
            return dict(sorted(logs.items()))  # as Keras' evaluate, and no other method
        return self._steps.results("evaluate()").listed(logs)

    def predict(
        self, x: Any, batch_size: int | None = None, verbose: Any = "auto", steps: int | None = None
    ) -> Any:
        """As Keras' ``predict``; every rank gets all outputs, in the order of the data. Data and
        errors as in ``fit``. Nothing is shown, whatever ``verbose`` says."""
        del verbose

        def prepare() -> tuple[list[Source], list[str]]:
            check_steps("predict()", batch_size=batch_size, steps=steps)
            how = How("predict()", self._seed, batch_size, steps, block=WHOLE)
            return [source_of((x, None, None), how)], [f"steps {steps}"]

        sources, _ = agreed("predict()", prepare, False)
        found = [self._steps.predict(batch) for batch in Reading(sources[0], steps).epoch()]
        columns = [np.concatenate(column) for column in zip(*found, strict=True)]
        return keras.tree.pack_sequence_as(self._outputs, columns)

    @takes(TrainOnBatch)
    def train_on_batch(self, given: TrainOnBatch) -> Any:
        """As Keras' ``train_on_batch``, of a batch of all replicas together, which each rank
        passes."""
        x, y, sample_weight, class_weight, return_dict = given
        how = How("train_on_batch()", self._seed)
        check_class_weight(how.what, class_weight)
        weights = weights_of(y, sample_weight, class_weight, how)
        return self._on_batch(how.what, self._steps.train, (x, y, weights), return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """As Keras' ``test_on_batch``, of a batch of all replicas together."""
        return self._on_batch(
            "test_on_batch()", self._steps.test, (x, y, sample_weight), return_dict
        )

    def _on_batch(self, what: str, run: Any, batch: tuple[Any, ...], return_dict: bool) -> Any:
        results = self._steps.results(what)
        n = count_of(batch)
        source = source_of(batch, How(what, self._seed, batch_size=n, block=WHOLE))
        self._steps.sample = source.sample
        results.reset()
        run(next(Reading(source, None).epoch()))
        logs = results.compute()
        if return_dict:
            return logs
        return results.listed(logs)

    # ---- weights ----

    def get_weights(self, *, root_rank: int | None = 0) -> list[Any]:
        """The whole model's weights, as ``get_weights`` of the Keras model gives them. Collective.

        Args:
            root_rank: the rank that gets them, others get an empty list; None: all.
        """
        check_root(root_rank)
        return weights_of_all(
            self._module.weights, self._places, self._group, self._place, root_rank
        )

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Takes this rank's part of the whole model's weights, as of the Keras model, or of
        ``get_weights`` of any number of stages. Call it on every rank.

        Raises:
            InvalidArgument: there are more or fewer, or one has another shape.
        """
        if len(weights) != self._count:
            raise InvalidArgument(
                f"set_weights(): {len(weights)} weights, and the model has {self._count}"
            )
        try:
            self._module.set_weights([weights[i] for i in self._places])
        except ValueError as error:
            if isinstance(error, Error):
                raise
            raise InvalidArgument(f"set_weights(): {error}") from error

    def get_optimizer_state(self, *, root_rank: int | None = 0) -> dict[str, Any]:
        """The state of the optimizers of all stages, as ``save_own_variables`` of one process'
        optimizer gives it: arrays by "0", "1" and so on, in the order of its ``variables``.
        ``load_own_variables`` of such an optimizer takes it. Collective.

        Args:
            root_rank: as of ``get_weights``.

        Raises:
            InvalidArgument: not compiled; or the optimizer's variables do not say which variable of
                the model they belong to; on every rank.
            Mismatch: the ranks' optimizers differ; on every rank.
        """
        check_root(root_rank)
        return optimizer_state.gathered_state(
            self.optimizer, self._built(), self._group, self._place, root_rank
        )

    def set_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """Takes this rank's part of an optimizer's state, as of one process, or of
        ``get_optimizer_state`` of any number of stages. Collective: every rank passes the whole.

        Raises:
            InvalidArgument: it is of other variables; or as of ``get_optimizer_state``.
            Mismatch: likewise.
        """
        optimizer_state.load(self.optimizer, self._built(), state, self._place)

    def _built(self) -> list[int]:
        """The optimizer has its variables then. Returns the numbers, in the whole model, of those
        that it trains."""
        trained = self._module.trainable_variables
        optimizer = self.optimizer
        if optimizer is None or not trained:
            return []
        if not optimizer.built:
            optimizer.build(trained)
        number_of = dict(zip(map(id, self._module.weights), self._places, strict=True))
        return [number_of[id(v)] for v in optimizer._trainable_variables]

    def __repr__(self) -> str:
        names = [layer.name for layer in self._module.layers]
        return (
            f"Pipeline({self._place}, layers {', '.join(names)}, "
            f"{self._micro_batches} micro-batches, {self._schedule})"
        )


def _itemsize(weight: Any) -> int:
    return int(np.dtype(keras.backend.standardize_dtype(weight.dtype)).itemsize)
