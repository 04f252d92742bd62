"""Model: the program of one process, its batch, its results, on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras

from farandole import _world
from farandole._arguments import checked, shown, takes
from farandole._core import InvalidArgument
from farandole._one_world import refuse_in_elastic_jobs
from farandole.data import DEFAULT_SEED
from farandole.data._policy import Policy, check_policy
from farandole.keras._calls import Evaluate, Fit, TrainOnBatch, check_class_weight, check_steps
from farandole.keras._global.agreement import Prepared
from farandole.keras._global.arrays import weights_of
from farandole.keras._global.callbacks import (
    AgreeInFit,
    listed,
    looking_at_batches,
    of_this_rank,
    restores,
    rows_of,
    writing_once,
)
from farandole.keras._global.how import How
from farandole.keras._global.leading import rank_0_validates
from farandole.keras._global.logical import block_here
from farandole.keras._global.normalization import average_statistics
from farandole.keras._global.outputs import in_order
from farandole.keras._global.sources import are_arrays, held_out, source_of, unpacked
from farandole.keras._global.together import Batch, Together

_OPTIONS = frozenset(
    ("compression", "sparse_as_dense", "gradient_predivide_factor", "groups", "num_groups", "name")
)


class Model(Together):
    """A Keras model that trains on all ranks as its program says for one process.

    Batches are those of all ranks together: ``batch_size`` and the batches of a dataset are split
    by sample among the ranks. There is one update per batch, with the gradient of the loss of the
    whole batch, whether or not its samples divide. Losses, metrics, what ``evaluate`` gives and
    what ``predict`` gives are those of one process, and the same on every rank.

    All ranks call the same methods in the same order. What is not here is the model's own.

    Args:
        model: a Keras 3 model: sequential, functional, or a class of your own. A ``train_step`` of
            your own is written as for one process.
        seed: of the order of arrays and of batches with ``shuffle=True``, and of DataLoaders that
            shuffle without a generator.
        same_batches: compare checksums of the batches between the ranks, where each makes the whole
            batch by itself.
        data_policy: who reads what of the data of fit, evaluate and predict. "index": each rank its
            own samples only, as of arrays; of a ``tf.data.Dataset`` it runs the maps for these
            only. "slice": each rank the whole batch, of which it keeps its part. "leader": rank 0
            reads, and deals out the parts; what the others pass is not looked at. "auto": "index"
            where that can be, else "slice".
        logical_ranks: cut batches for that many ranks, whatever the number of those that there
            are, each of which computes several parts. Then weights, losses and metrics are the same
            in every bit for any number of ranks. A power of two goes on any number up to it.
        sync_batch_norm: every ``BatchNormalization`` takes the statistics of the whole batch, as in
            one process. Else of each rank's own samples, but for layers with
            ``synchronized=True``.
        options: of ``DistributedOptimizer``: ``compression``, ``sparse_as_dense``,
            ``gradient_predivide_factor``, ``groups``, ``num_groups``, ``name``.

    Raises:
        InvalidArgument: an argument is wrong.
        NotInitialized: before ``init()``.

    Examples:
        >>> import farandole.keras as fd, keras, numpy as np
        >>> fd.init()
        >>> net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model = fd.Model(net)
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((64, 2)), np.ones(64), batch_size=32, verbose=0)
    """

    @checked(model=("a Keras 3 model", lambda v: isinstance(v, keras.Model)))
    def __init__(
        self,
        model: Any,
        *,
        seed: int = DEFAULT_SEED,
        same_batches: bool = True,
        data_policy: Policy = "auto",
        logical_ranks: int | None = None,
        sync_batch_norm: bool = False,
        **options: Any,
    ) -> None:
        strange = sorted(options.keys() - _OPTIONS)
        if strange:
            raise InvalidArgument(
                f"Model({strange[0]}=…): there is no such option; there are "
                + ", ".join(sorted(_OPTIONS))
            )
        check_policy(data_policy, "Model(): data_policy")
        _world.size()  # raises before init()
        refuse_in_elastic_jobs(
            "farandole.keras.Model",
            "what its fit deals out is for the ranks that began it\n"
            "  advice: DistributedOptimizer and plain fit, in hvd.elastic.run",
        )
        if "train_step" in vars(model):
            raise InvalidArgument(
                f"the Keras model '{model.name}' has a train_step put on it, as by another "
                "farandole.keras.Model around it; use that one, or make the Keras model anew"
            )
        block = None if logical_ranks is None else block_here(logical_ranks, options)
        super().__init__(
            model,
            seed,
            block,
            options,
            same_batches=same_batches,
            data_policy=data_policy,
            sync_batch_norm=sync_batch_norm,
        )

    @property
    def model(self) -> Any:
        """The Keras model."""
        return self._model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for this rank's own inputs."""
        return self._model(*args, **kwargs)

    # ---- compile ----

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As Keras' ``compile``. The optimizer becomes a ``DistributedOptimizer``; it stays the
        same object.

        Raises:
            InvalidArgument: the optimizer is one already, that does not average.
        """
        self._model.compile(*args, **kwargs)
        self._adopt()

    # ---- training ----

    @takes(Fit)
    def fit(self, given: Fit) -> Any:
        """As Keras' ``fit``; batches are those of all ranks together.

        Args:
            x: arrays (dicts, tuples, lists of them), a ``tf.data.Dataset``, a ``PyDataset``, a
                generator, a ``DataLoader`` or a ``farandole.data.FromRank0``.
            batch_size: of arrays: samples of all ranks together; default 32.
            shuffle: of arrays: the same order on every rank, and for any number of ranks.

        Raises:
            InvalidArgument: not compiled, or an argument is wrong; on every rank.
            Mismatch: the ranks' models, data or arguments differ; on every rank.
        """

        def prepare() -> Prepared:
            self._require_compiled("fit")
            given.check()
            train = (given.x, given.y, given.sample_weight)
            validation = given.validation_data
            leads = self._policy == "leader"
            if given.validation_split and validation is None and not leads:
                train, validation = held_out(train, given.validation_split)
            validates = validation is not None
            if leads:
                validates = rank_0_validates(validation, given.validation_split)
            passes = max(self._passes, given.initial_epoch)
            how = How(
                "fit()", self._seed, given.batch_size, given.steps_per_epoch, given.shuffle,
                given.class_weight, passes, self._block, self._policy,
            )  # fmt: skip
            sources = [source_of(train, how)]
            if validates:
                size = given.batch_size if are_arrays(validation) else None
                size = given.validation_batch_size or size
                how = self._how("fit(validation_data)", size, given.validation_steps)
                sources.append(source_of(unpacked(validation), how))
            rows = [
                f"epochs {given.epochs}, initial_epoch {given.initial_epoch}",
                f"steps_per_epoch {given.steps_per_epoch}, "
                f"validation_steps {given.validation_steps}, "
                f"validation_freq {given.validation_freq}",
                f"class_weight {shown(given.class_weight)}",
                f"logical_ranks {None if self._block is None else self._block.parts}",
                f"{len(sources) - 1} validation data",
                *rows_of(given.callbacks),
            ]
            return sources, rows

        sources = self._begin("fit()", prepare)
        self._normalization.warn_of_few_samples(sources[0].batch)
        mine = of_this_rank(given.callbacks)

        def restored(epoch: int) -> None:
            sources[0].begin_at(max(self._passes, given.initial_epoch, epoch))
            self._share_weights()

        train, test = looking_at_batches(given.callbacks)
        loads, train, test = self._any_rank(restores(mine), train, test)
        agree = AgreeInFit(
            restored=restored if loads else None,
            compare=lambda: self._compare_batches(sources[:1], "fit()"),
            agree=self._agree_after,
        )
        with self._reads(sources), writing_once(self._model):
            history = self._model.fit(
                sources[0].data,
                epochs=given.epochs,
                verbose=self._verbose(given.verbose),
                callbacks=[*self._whole_logs(train=train, test=test), *mine, agree],
                validation_data=sources[1].data if len(sources) > 1 else None,
                shuffle=False,
                initial_epoch=given.initial_epoch,
                steps_per_epoch=given.steps_per_epoch,
                validation_steps=given.validation_steps,
                validation_freq=given.validation_freq,
            )
        if history.epoch:
            self._passes = max(self._passes + len(history.epoch), history.epoch[-1] + 1)
        self._agree_after("as fit() ends", False)  # files that rank 0 wrote are there
        return history

    @takes(TrainOnBatch)
    def train_on_batch(self, given: TrainOnBatch) -> Any:
        """As Keras' ``train_on_batch``, of a batch of all ranks together, which each passes."""
        x, y, sample_weight, class_weight, return_dict = given

        def batch() -> Batch:
            how = How("train_on_batch()", self._seed)
            check_class_weight(how.what, class_weight)
            return x, y, weights_of(y, sample_weight, class_weight, how)

        return self._on_batch("train_on_batch", batch, return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """As Keras' ``test_on_batch``, of a batch of all ranks together, which each passes."""
        return self._on_batch("test_on_batch", lambda: (x, y, sample_weight), return_dict)

    def _on_batch(self, name: str, given: Callable[[], Batch], return_dict: bool) -> Any:
        source = self._batch(f"{name}()", given)
        with self._reads([source]):
            # Keras packs what it gets once more, as a batch without targets.
            logs = getattr(self._model, name)(source.data[0], return_dict=True)
            results = self._model._get_metrics_result_or_logs(logs)
        numbers = {key: _number(value) for key, value in results.items()}
        return numbers if return_dict else self._model._flatten_metrics_in_order(numbers)

    # ---- evaluation, prediction ----

    @takes(Evaluate)
    def evaluate(self, given: Evaluate) -> Any:
        """As Keras' ``evaluate``; each rank computes its part, and all get the whole's results.

        Raises:
            InvalidArgument: not compiled, or an argument is wrong; on every rank.
            Mismatch: the ranks' models, data or arguments differ; on every rank.
        """
        x, y, batch_size, verbose, sample_weight, steps, callbacks, return_dict = given

        def prepare() -> Prepared:
            self._require_compiled("evaluate")
            check_steps("evaluate()", batch_size=batch_size, steps=steps)
            listed(callbacks)  # or what it refuses
            how = self._how("evaluate()", batch_size, steps)
            return [source_of((x, y, sample_weight), how)], [f"steps {steps}"]

        sources = self._begin("evaluate()", prepare)
        average_statistics(self._model)
        (test,) = self._any_rank(looking_at_batches(callbacks)[1])
        with self._reads(sources):
            return self._evaluate(
                sources[0].data,
                verbose=self._verbose(verbose),
                steps=steps,
                callbacks=[*self._whole_logs(test=test), *of_this_rank(callbacks)],
                return_dict=return_dict,
            )

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """As Keras' ``predict``; each rank computes its part, and all get everything, in the order
        of the data. Callbacks see this rank's outputs.

        Raises:
            InvalidArgument: an argument is wrong; on every rank.
            Mismatch: the ranks' models, data or arguments differ; on every rank.
        """

        def prepare() -> Prepared:
            check_steps("predict()", batch_size=batch_size, steps=steps)
            listed(callbacks)
            how = self._how("predict()", batch_size, steps)
            return [source_of((x, None, None), how)], [f"steps {steps}"]

        sources = self._begin("predict()", prepare, for_outputs=True)
        average_statistics(self._model)
        with self._reads(sources):
            outputs = self._model.predict(
                sources[0].data,
                verbose=self._verbose(verbose),
                steps=steps,
                callbacks=of_this_rank(callbacks),
            )
        self._compare_batches(sources, "predict()")
        return in_order(outputs, self._block)

    def predict_on_batch(self, x: Any) -> Any:
        """As Keras' ``predict_on_batch``, of a batch of all ranks together, which each passes."""
        source = self._batch("predict_on_batch()", lambda: (x, None, None), for_outputs=True)
        with self._reads([source]):
            outputs = self._model.predict_on_batch(source.data[0])
        return in_order(outputs, self._block)

    # ---- files, weights ----

    def save(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As Keras' ``save``; every rank calls it, rank 0 writes. Plain Keras loads the file.

        Raises:
            InvalidArgument: rank 0 could not write; on the other ranks. On rank 0, Keras' error.
        """
        self._write("save()", lambda: self._model.save(filepath, *args, **kwargs))

    def save_weights(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Likewise, of the weights."""
        self._write("save_weights()", lambda: self._model.save_weights(filepath, *args, **kwargs))

    def load_weights(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """As Keras' ``load_weights``; every rank calls it, rank 0 reads, and all get the weights.

        Raises:
            InvalidArgument: rank 0 could not read; on the other ranks. On rank 0, Keras' error.
        """
        self._read("load_weights()", lambda: self._model.load_weights(filepath, *args, **kwargs))

    def set_weights(self, weights: Any) -> None:
        """As Keras' ``set_weights``. Before they are next used, all ranks get rank 0's."""
        self._model.set_weights(weights)
        self._due = True

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """As Keras' ``summary``, on rank 0 alone."""
        if _world.rank() == 0:
            self._model.summary(*args, **kwargs)

    def _how(self, what: str, batch_size: int | None, steps: int | None) -> How:
        return How(what, self._seed, batch_size, steps, block=self._block, policy=self._policy)

    @staticmethod
    def _verbose(verbose: Any) -> Any:
        return verbose if _world.rank() == 0 else 0


def _number(result: Any) -> Any:
    """As Keras shows a metric's result, which may be several numbers."""
    value = keras.ops.convert_to_numpy(result)
    return float(value) if value.ndim == 0 else result
