"""A Keras model made in a strategy's scope, which trains as farandole.keras.Model does.

The user calls the Keras model. `_keras.py` passes the calls on to one of these, which calls Keras'
own methods with this rank's parts of the batches. Metrics are reduced where they are read.

With TensorFlow's strategies Keras divides losses by the number of replicas, and replicas sum
gradients. That is right for means alone: Keras divides no loss with reduction="sum" and none that
is one number, and no program's own. So in a step the strategy says that there is one replica:
nothing is divided, and gradients are averaged by the weight of each rank's samples, as everywhere
in farandole.keras.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from farandole.keras._accumulated import inner_of
from farandole.keras._global.metrics import share_whole_states
from farandole.keras._wrapped import distributed_in, state_of
from farandole.keras.model import Model
from farandole.strategy._variables import require_of
from farandole.tensorflow._weights import raw


class SharedModel(Model):
    """See there.

    Args:
        model: the Keras model.
        strategy: in whose scope it was made.
    """

    # In a scope one that scales losses calls the one inside in a context of its own.
    _reducing = staticmethod(inner_of)

    @staticmethod
    def _of_all_ranks(model: Any, compute: Callable[[], Any]) -> Any:
        share_whole_states(model)
        return compute()  # other variables are read so

    def _tell_whole_batches(self) -> list[Any]:
        new = super()._tell_whole_batches()
        for variable in (v for metric in new for v in metric.variables):
            raw(variable)._aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA  # and no sum
        return new

    def _by_itself(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.strategy.extended.by_itself()
        return context

    def __init__(self, model: Any, strategy: Any) -> None:
        vars(self)["strategy"] = strategy
        vars(self)["plainly"] = False  # calls of the Keras model mean what they say
        super().__init__(model)

    def _intercept(self) -> None:
        super()._intercept()
        model = self._model
        vars(model).pop("evaluate")  # calls in callbacks are of all ranks, like others
        own = model._maybe_symbolic_build

        def maybe_symbolic_build(*args: Any, **kwargs: Any) -> None:
            if self._reading is None:  # else it is built; Keras would open one more iterator
                own(*args, **kwargs)

        model._maybe_symbolic_build = maybe_symbolic_build

    def is_reading(self, data: Any) -> bool:
        """Whether Keras' loop is called with it, by `fit` and the like."""
        return any(data is source.data for source in self._reading or ())

    @property
    def in_loop(self) -> bool:
        """Whether Keras' loop runs, and what is called now is called by it, or a callback."""
        return self._reading is not None

    def _build(self, sample: Any, *, for_outputs: bool) -> None:
        model = self._model
        with self.strategy.scope():
            super()._build(sample, for_outputs=for_outputs)
        for variable in [*model.weights, *model.metrics_variables]:
            require_of(self.strategy, getattr(variable, "value", variable))
        self._pack()

    def _cut_row_states(self) -> None:
        """Ranks may have different numbers of samples, and none of their states is another's."""
        with self.strategy.extended.by_itself():
            super()._cut_row_states()

    def _pack(self) -> None:
        """Groups the variables that are sent together, by the strategy's options."""
        groups = self.strategy.extended.packing.groups_of(self._model.trainable_variables)
        optimizer = distributed_in(self._model)
        if groups and optimizer is not None and state_of(optimizer).exchange is None:
            state = state_of(optimizer)
            state.reduction = replace(state.reduction, groups=groups)

    @contextmanager
    def called_plainly(self) -> Iterator[None]:
        before = self.plainly
        vars(self)["plainly"] = True
        try:
            yield
        finally:
            vars(self)["plainly"] = before

    def _write(self, what: str, write: Callable[[], Any]) -> None:
        with self.called_plainly():
            super()._write(what, write)

    def _send_weights(self, variables: list[Any]) -> None:
        super()._send_weights(self.strategy.extended.publish_among(variables))

    def _state_of(self, optimizer: Any) -> list[Any]:
        """Without what rank 0 alone has (_central.py)."""
        own = super()._state_of(optimizer)
        return [v for v in own if not getattr(raw(v), "is_state", False)]

    def _accumulated_of(self, optimizer: Any) -> list[Any]:
        own = super()._accumulated_of(optimizer)
        return [v for v in own if not getattr(raw(v), "is_state", False)]

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        with self.called_plainly():
            super().load_weights(*args, **kwargs)

    def set_weights(self, weights: Any) -> None:
        with self.called_plainly():
            super().set_weights(weights)

    def adopt(self) -> None:
        """After `compile`."""
        self._adopt()
