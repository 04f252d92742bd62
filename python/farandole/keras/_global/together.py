"""One model on all ranks, which agree, share and compare before, in and after a pass over data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._objects import agree, allgather_object, attempt, made_by_first
from farandole.common._reduction import Average, Sum, core_op
from farandole.data._logical import Block
from farandole.data._policy import Policy
from farandole.data._tree import samples
from farandole.keras._accumulated import accumulated_of, average_accumulated, besides, share_all
from farandole.keras._constants import compute_again
from farandole.keras._exchange import Alike
from farandole.keras._global import (
    own_gradients,
    own_steps,
    whole_metrics,
)
from farandole.keras._global.agreement import (
    ADVICE,
    Prepared,
    agreed,
    require_same_batch,
    rows_of_compiled,
)
from farandole.keras._global.alike import agree_after, rows_of_alike, weights_alike
from farandole.keras._global.callbacks import WholeLogs
from farandole.keras._global.how import How, Source
from farandole.keras._global.logical import hold_updates, seed_states
from farandole.keras._global.logical_steps import logical_steps
from farandole.keras._global.losses import share_losses
from farandole.keras._global.metrics import (
    Shown,
    has_own_step,
    of_own_logs,
    values_of,
    with_global_state,
)
from farandole.keras._global.normalization import Normalization, average_statistics
from farandole.keras._global.own_gradients import OwnGradients
from farandole.keras._global.row_states import cut_row_states
from farandole.keras._global.shared_steps import shared_steps
from farandole.keras._global.sources import source_of
from farandole.keras._global.steps import Steps, weigh_loss
from farandole.keras._global.whole_metrics import tell_whole_batches
from farandole.keras._wrapped import State, distributed_in, state_of
from farandole.keras.optimizer import DistributedOptimizer, state_of_step
from farandole.keras.values import broadcast_variables

_OWN = frozenset(
    (
        "_model", "_block", "_steps", "_seed", "_same", "_options", "_due", "_passes", "_reading",
        "_evaluate", "_op", "_options_of_others", "_normalization", "_policy", "_looks", "_others",
        "_policies_compared", "_shown", "_of_own", "_own_results",
    )
)  # fmt: skip

Batch = tuple[Any, Any, Any]  # inputs, targets, weights


class Together:
    """A Keras model with our steps and optimizer in it, and around it an object that is the model
    to whoever asks for anything else: all of ``farandole.keras.Model`` but the calls of a program.

    Args:
        block: of logical ranks.
        options: of ``DistributedOptimizer``.
        sync_batch_norm: every layer that normalizes takes the statistics of all ranks' samples.
    """

    def __init__(
        self,
        model: Any,
        seed: int,
        block: Block | None,
        options: Mapping[str, Any],
        *,
        same_batches: bool,
        data_policy: Policy,
        sync_batch_norm: bool,
    ) -> None:
        self._model = model
        self._block = block
        if self._block is not None:
            self._op = Sum  # of parts, each of which weighs as much as it has samples
        self._steps = Steps(self._block)
        self._steps.weighs_gradients = has_own_step(model, "train_step")
        self._steps.adopt = self._adopt_optimizer
        self._others: list[Any] = []  # optimizers of the model's own step
        whole_metrics.learn()
        own_steps.learn()
        own_gradients.learn()
        if self._steps.weighs_gradients and block is None:
            self._steps.own_gradients = OwnGradients(model, self._steps, self._reduce_own)
        self._of_own: dict[int, State] = {}  # by number: how it reduces gradients of its own step
        self._normalization = Normalization(model, self._steps, every=sync_batch_norm)
        self._normalization.check()
        self._shown = Shown()
        self._seed = seed
        self._same = same_batches
        self._policy: Policy = data_policy
        self._policies_compared = False
        self._options = dict(options)
        self._options_of_others = {k: v for k, v in options.items() if k not in ("name", "groups")}
        self._looks = False  # Keras would look at a batch first, to build the model
        self._due = True  # rank 0's weights for all, before they are next used
        self._passes = 0  # over training data
        self._reading: list[Source] | None = None  # during fit and evaluate
        made = (
            shared_steps(model, self._steps, self._normalization)
            if self._block is None
            else logical_steps(model, self._steps, seed)
        )
        for name, step in made.items():
            setattr(model, name, step)
        if has_own_step(model, "compute_loss"):
            own_steps.share_compute_loss(model, self._steps)
        own_steps.share_added_losses(model, self._steps)
        self._intercept()
        if model.compiled:
            self._adopt()

    # farandole.strategy overrides these.

    _op = Average
    _reducing = staticmethod(lambda optimizer: optimizer)
    _of_all_ranks = staticmethod(with_global_state)

    def _by_itself(self) -> AbstractContextManager[Any]:
        """Around what this rank alone reads."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._model, name, value)

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            "a farandole.keras.Model is neither copied nor pickled\n"
            "  advice: copy or pickle model.model, and put a Model around the copy"
        )

    # ---- as the model is made ----

    def _intercept(self) -> None:
        model = self._model
        own_build, own_result = model._symbolic_build, model._get_metrics_result_or_logs

        def symbolic_build(*args: Any, **kwargs: Any) -> None:
            if self._reading is None:  # else it is built, and does not know batches with a share
                own_build(*args, **kwargs)
            elif self._looks and "iterator" in kwargs:
                self._looks = False
                look_into(kwargs["iterator"])

        def result_or_logs(logs: Any) -> Any:
            if self._reading is None:
                return own_result(logs)
            return self._global_results(own_result, logs)

        self._evaluate, self._own_results = model.evaluate, own_result

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            if self._reading is None or "_use_cached_eval_dataset" in kwargs:  # fit()'s own
                return self._evaluate(*args, **kwargs)
            with self._reads(None):  # a callback's, on this rank's own data
                return self._evaluate(*args, **kwargs)

        model._symbolic_build, model._get_metrics_result_or_logs = symbolic_build, result_or_logs
        model.evaluate = evaluate

    @contextmanager
    def _reads(self, sources: list[Source] | None) -> Iterator[None]:
        before, self._reading = self._reading, sources
        try:
            yield
        finally:
            self._reading = before

    def _adopt(self) -> None:
        model = self._model
        optimizer = model.optimizer
        if optimizer is not None:
            wrapped = distributed_in(optimizer)
            if wrapped is None:
                DistributedOptimizer(self._reducing(optimizer), op=self._op, **self._options)
                wrapped = distributed_in(optimizer)
            elif self._block is not None:
                raise InvalidArgument(
                    "compile(): the optimizer is a DistributedOptimizer; with logical_ranks, pass "
                    "the Keras optimizer itself"
                )
            elif state_of(wrapped).reduction.op != core_op(self._op):
                raise InvalidArgument(
                    "compile(): the optimizer is a DistributedOptimizer that does not "
                    f"{'average' if self._op == Average else 'sum'}; pass the Keras optimizer "
                    "itself"
                )
            state_of(wrapped).alike = self._alike
            state_of(wrapped).is_early = self._steps.own_gradients is not None
            weigh_loss(optimizer, self._steps)
            if self._block is not None:
                state_of(wrapped).holds = True
                hold_updates(model, self._steps)
        if model._compile_loss is not None:
            share_losses(model._compile_loss, self._steps)
        model.train_function = model.test_function = model.predict_function = None
        self._due = True

    def _adopt_optimizer(self, optimizer: Any) -> None:
        """One that the model was not compiled with."""
        DistributedOptimizer(self._reducing(optimizer), op=self._op, **self._options_of_others)
        wrapped = distributed_in(optimizer)
        state_of(wrapped).alike = self._alike
        self._others.append(optimizer)

    def _reduce_own(self, number: int, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Gradients that the model's own step asks for, for the number-th time."""
        optimizer = self._model.optimizer
        if number not in self._of_own:
            self._of_own[number] = state_of_step(self._op, **self._options_of_others)
        exchange = self._of_own[number].ready_exchange(optimizer)
        # Later in a step weights may be aside of where they are, and graphs have no order there.
        exchange.compares = number == 1
        return exchange.reduce(gradients, variables)

    def _alike(self, optimizer: Any) -> list[Alike]:
        """Besides the weights that it updates, all ranks have these alike when it does."""
        weights = weights_alike(self._model, self._block, self._normalization)
        return rows_of_alike(optimizer, weights, self._state_of(optimizer))

    def _state_of(self, optimizer: Any) -> list[Any]:
        """Returns those of its variables that all ranks have alike."""
        return besides(optimizer.variables, accumulated_of(optimizer))

    # ---- as all ranks use it ----

    def _require_compiled(self, name: str) -> None:
        if not self._model.compiled:
            raise InvalidArgument(f"{name}(): the model is not compiled; call compile() before")

    def _begin(
        self, what: str, prepare: Callable[[], Prepared], *, for_outputs: bool = False
    ) -> list[Source]:
        """Collective: the data on every rank, or an error on every rank; the model is built then,
        with the same weights on all."""
        self._compare_policies()

        def prepare_and_build() -> Prepared:
            sources, rows = prepare()
            if self._model.compiled:
                rows = [*rows, *rows_of_compiled(self._model)]
            self._looks = sources[0].is_looked_into and not is_built(self._model)
            self._build(sources[0].sample(), for_outputs=for_outputs)
            self._normalization.check()  # also layers that were not there before
            return sources, [*rows, self._normalization.row()]

        sources, due = agreed(what, prepare_and_build, self._due)
        if due:
            self._share_weights()
            self._due = False
        return sources

    def _compare_policies(self) -> None:
        """Once, before data are looked at: a rank that leads calls what the others call, too."""
        if self._policies_compared or _world.size() == 1:
            return
        agree("the options of Model()", [f"data_policy={self._policy!r}"], advice=ADVICE)
        self._policies_compared = True

    def _build(self, sample: Any, *, for_outputs: bool) -> None:
        model = self._model
        self._cut_row_states()
        if model.compiled and not for_outputs:
            model._symbolic_build(data_batch=sample)
        elif not model.built:
            model(sample[0])
        self._tell_whole_batches()

    def _cut_row_states(self) -> None:
        cut_row_states(self._model, self._block)

    def _tell_whole_batches(self) -> list[Any]:
        """Metrics of the user's own that are new; see whole_metrics.py."""
        return tell_whole_batches(self._model, self._steps)

    def _share_weights(self) -> None:
        """Collective. Raises Mismatch where the ranks' models differ."""
        model = self._model
        optimizers = [*self._others, model.optimizer if model.compiled else None]
        there = [each for each in optimizers if each is not None and each.built]
        if _world.size() > 1:
            seeds = [] if self._block is None else seed_states(model)
            state = [variable for each in there for variable in each.variables]
            every = [*model.weights, *state, *seeds]
            share_all(every, there, self._send_weights, self._accumulated_of)
            compute_again(model)

    def _accumulated_of(self, optimizer: Any) -> list[Any]:
        return accumulated_of(optimizer)

    def _send_weights(self, variables: list[Any]) -> None:
        broadcast_variables(variables, 0)

    def _batch(self, what: str, given: Callable[[], Batch], *, for_outputs: bool = False) -> Source:
        """One batch, which every rank has passed; they compare it, in few bytes."""

        def prepare() -> Prepared:
            if not for_outputs:
                self._require_compiled(what.removesuffix("()"))
            batch = given()
            n = samples(batch[0], f"{what}: the batch")
            how = How(what, self._seed, batch_size=n, block=self._block)
            source = source_of(batch, how)
            source.data = source.data[0]
            return [source], []

        if self._due:
            return self._begin(what, prepare, for_outputs=for_outputs)[0]
        source, error = attempt(lambda: prepare()[0][0])
        require_same_batch(what, source, error)
        assert source is not None  # else it raises
        return source

    def _compare_batches(self, sources: list[Source], what: str) -> None:
        if self._same and _world.size() > 1:
            for source in sources:
                source.read.compare(what)

    def _global_results(self, own: Callable[[Any], Any], logs: Any) -> Any:
        """At the end of an epoch, or of an evaluation."""
        assert self._reading is not None
        self._compare_batches(self._reading, "fit() or evaluate()")
        if self._block is not None:  # its steps have all parts' already
            return own(logs)
        average_statistics(self._model)

        def show(results: Any, values: Any) -> None:
            self._shown.show(results, values, self._model)

        return self._results_of_all(own, logs, show)

    def _results_of_all(
        self, own: Callable[[Any], Any], logs: Any, show: Callable[[Any, Any], None]
    ) -> Any:
        def computed() -> Any:
            results = own(logs)
            if results is logs:
                return logs
            values = values_of(results)
            show(results, values)
            return values

        results = self._of_all_ranks(self._model, computed)
        if results is logs and logs and _world.size() > 1:  # of a step of the user's own
            return self._own_logs(logs)
        return results

    def _logs_of_all(self, logs: dict[str, Any]) -> Any:
        """Collective: after a batch, the logs of all ranks for callbacks."""
        from keras.src.utils.python_utils import pythonify_logs

        if keras.backend.backend() == "jax":
            self._model.jax_state_sync()
        return pythonify_logs(self._results_of_all(self._own_results, logs, lambda *_: None))

    def _whole_logs(self, *, train: bool = False, test: bool = False) -> list[Any]:
        """The callback that gives others the logs of all ranks, where any of them looks."""
        if _world.size() == 1 or self._block is not None or not (train or test):
            return []
        return [WholeLogs(self._logs_of_all, train=train, test=test)]

    @staticmethod
    def _any_rank(*here: bool) -> list[bool]:
        """Collective: whether each is true on any rank."""
        return [any(each) for each in zip(*allgather_object(here, "callbacks"), strict=True)]

    def _agree_after(self, when: str, stop: bool) -> bool:
        """Collective: whether any rank is to stop. Raises Mismatch where ranks have parted."""
        model = self._model
        optimizers = [*self._others, *([model.optimizer] if model.optimizer is not None else [])]
        return agree_after(
            when, stop, optimizers, weights_alike(model, self._block, self._normalization)
        )

    def _own_logs(self, logs: dict[str, Any]) -> Any:
        def results() -> Any:
            return values_of(self._model.get_metrics_result())

        with self._by_itself():
            mine = results()
        return of_own_logs(logs, mine, self._of_all_ranks(self._model, results))

    def _write(self, what: str, write: Callable[[], Any]) -> None:
        average_statistics(self._model)
        optimizer = self._model.optimizer if self._model.compiled else None
        if optimizer is not None and optimizer.built:
            average_accumulated(optimizer, self._accumulated_of(optimizer))
        self._on_rank_0(what, write)

    def _read(self, what: str, read: Callable[[], Any]) -> None:
        """The file may be on rank 0's host alone, which has written it."""
        self._on_rank_0(what, read)
        self._share_weights()

    def _on_rank_0(self, what: str, do: Callable[[], Any]) -> None:
        def alone() -> None:
            with self._by_itself():
                do()

        made_by_first(what, alone, f"{what}: rank 0 could not")


def look_into(iterator: Any) -> None:
    """One of Keras' over an epoch, as Keras would to see a batch."""
    _, _, batch = next(iter(iterator))
    if not isinstance(batch, tuple | list):  # on JAX
        next(batch)


def is_built(model: Any) -> bool:
    """Whether Keras would not build it, nor what it was compiled with."""
    compiled = (model._compile_metrics, model._compile_loss) if model.compiled else ()
    parts = [*model._flatten_layers(), *(each for each in compiled if each is not None)]
    return all(each.built for each in parts)
