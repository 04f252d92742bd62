"""Elastic training: what goes from one world into the next, and the loop over worlds.

Functions that were traced in one world (``tf.function``) run in the next ones, of other sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from farandole._core import InvalidArgument
from farandole.common._objects import agree, run_named
from farandole.common._variables_state import ModelState, Values, VariablesState
from farandole.common._worlds import Framework
from farandole.common.elastic import run_fn
from farandole.tensorflow import _plugin
from farandole.tensorflow._reduction import names_of
from farandole.tensorflow._verdicts import cause_of
from farandole.tensorflow.functions import broadcast_variables

__all__ = ["TensorFlowKerasState", "TensorFlowState", "run"]

_R = TypeVar("_R")


def run(func: Callable[..., _R]) -> Callable[..., _R]:
    """Decorates the function that trains, whose first argument is the state: in an elastic job it
    is called again, with the state of the last commit, where ranks were lost or have come.

    Examples:
        >>> import tensorflow as tf, farandole.tensorflow as hvd
        >>> hvd.init()
        >>> v = tf.Variable([0.0, 0.0])
        >>> @hvd.elastic.run
        ... def train(state):
        ...     while state.step < 4:
        ...         v.assign_add(hvd.allreduce(tf.ones(2)))
        ...         state.step += 1
        ...         state.commit()
        >>> train(hvd.elastic.TensorFlowState([v], step=0))
        >>> v.numpy().tolist()
        [4.0, 4.0]
    """
    return run_fn(func, Framework(init=lambda: _plugin.init(), cause_of=cause_of))


class TensorFlowState(VariablesState):
    """Variables, and objects, which are attributes.

    Args:
        variables: ``tf.Variable``, alike on all ranks; in a graph of TensorFlow 1 by default all of
            its global ones.
        session: of such a graph, where the variables have their values; default: the default one.
        kwargs: the objects' names and first values.

    Raises:
        InvalidArgument: there are no variables, or no session; or a name is one of the state's own.
        Mismatch: from ``sync()``: the ranks' variables differ; says which.
    """

    def __init__(
        self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any
    ) -> None:
        in_graph = not tf.executing_eagerly()
        if variables is None:
            variables = tf.compat.v1.global_variables() if in_graph else []
        self.variables: list[Any] = list(variables)
        self.session = session
        if in_graph and session is None:
            self.session = tf.compat.v1.get_default_session()
            if self.session is None:
                raise InvalidArgument("TensorFlowState() in a graph of TensorFlow 1 has no session")
        if not self.variables:
            raise InvalidArgument(
                "TensorFlowState() has no variables\n"
                "  advice: pass those that are trained, and the optimizer's"
            )
        super().__init__(**kwargs)

    def _shared(self) -> list[Any]:
        return self.variables

    def _read(self, variables: Sequence[Any]) -> Values:
        if self.session is None:
            return super()._read(variables)
        return [np.array(value, order="C") for value in self.session.run(list(variables))]

    def _write(self, variables: Sequence[Any], values: Values) -> None:
        if self.session is None:
            super()._write(variables, values)
            return
        for variable, value in zip(variables, values, strict=True):
            variable.load(value, self.session)

    def _share(self, variables: Sequence[Any]) -> None:
        if self.session is None:
            broadcast_variables(variables, root_rank=0)
            return
        values, names = self._read(variables), names_of(variables)
        rows = zip(names, values, strict=True)
        agree("variables of the state", [f"'{n}' {list(v.shape)} {v.dtype}" for n, v in rows])
        for name, value in zip(names, values, strict=True):
            if value.size:
                run_named("broadcast", f"state of {name}", value, value, root=0)
        self._write(variables, values)


class TensorFlowKerasState(ModelState):
    """A Keras model on TensorFlow with its optimizer, and objects, which are attributes.

    Args:
        model: one that is built.
        optimizer: default: the one that the model was compiled with, if it was.
        backend: Horovod's; does nothing.
        kwargs: the objects' names and first values.

    Raises:
        InvalidArgument: the model is none, or not built; or a name is one of the state's own.
        Mismatch: from ``sync()``: the ranks' models differ; says which variable.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        backend: Any = None,  # noqa: ARG002 - Horovod's signature
        **kwargs: Any,
    ) -> None:
        super().__init__(model, optimizer, **kwargs)

    def _share(self, variables: Sequence[Any]) -> None:
        from farandole.keras._accumulated import share_all  # Keras is there, as a model is

        optimizers = [] if self.optimizer is None else [self.optimizer]
        share_all(variables, optimizers, lambda ours: broadcast_variables(ours, root_rank=0))
