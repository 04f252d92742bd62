"""Ranks agree, share and compare before, during and after a pass over data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._objects import agree, allgather_object, attempt, made_by_first
from farandole.data._tree import samples
from farandole.keras._accumulated import accumulated_of, average_accumulated, share_all
from farandole.keras._constants import compute_again
from farandole.keras._global.agreement import (
    ADVICE,
    Prepared,
    agreed,
    require_same_batch,
    rows_of_compiled,
)
from farandole.keras._global.alike import agree_after, weights_alike
from farandole.keras._global.callbacks import WholeLogs
from farandole.keras._global.how import How, Source
from farandole.keras._global.logical import seed_states
from farandole.keras._global.metrics import of_own_logs, values_of
from farandole.keras._global.normalization import average_statistics
from farandole.keras._global.row_states import cut_row_states
from farandole.keras._global.sources import source_of
from farandole.keras._global.whole_metrics import tell_whole_batches
from farandole.keras._global.wrapping import Wrapping, is_built
from farandole.keras.values import broadcast_variables

Batch = tuple[Any, Any, Any]  # inputs, targets, weights


class Together(Wrapping):
    """The collective half of ``farandole.keras.Model``."""

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
