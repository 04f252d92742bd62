"""Finds the rows of embeddings that a batch looks up, so that a worker fetches no others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import keras as _keras
import numpy as np

from farandole.parameter_server._rows import LOOK_FOR_ROWS, Gradient, Rows

keras: Any = _keras  # untyped


class _Indices(NamedTuple):
    """One use of a table: how its indices follow from a batch's inputs."""

    inputs: list[int]  # positions among the model's
    compute: Any  # from these; None where it is the input itself


class Lookups:
    """The large tables of ``Embedding`` layers whose indices follow from inputs without a weight.

    Models are sequential or functional. A gradient in a row that was not looked up means that
    something else reads the table, such as a loss or a ``Lambda``: then all of it is fetched.
    """

    def __init__(self, model: Any, variables: Mapping[str, Any]) -> None:
        self._graph = _graph_of(model)
        self._of: dict[str, list[_Indices]] = {}  # by the tables' names
        if self._graph is None:
            return
        for name, variable in variables.items():
            if variable.dtype in ("float32", "float64") and _is_large(variable):
                layers = [each for each in self._graph.layers if _has(each, variable)]
                found = self._indices_of(layers[0], variable) if len(layers) == 1 else None
                if found:
                    self._of[name] = found

    def of(self, x: Any, variables: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The rows that inputs `x` look up, by the tables' names: each once, and in order."""
        if not self._of:
            return {}
        inputs = self._graph._standardize_inputs(x)
        rows = {}
        for name, uses in self._of.items():
            found = np.unique(np.concatenate([_evaluated(use, inputs) for use in uses]))
            # The framework reports indices that are out of range.
            if len(found) and found[0] >= 0 and found[-1] < variables[name].shape[0]:
                rows[name] = found
        return rows

    def check(self, name: str, touched: np.ndarray, rows: np.ndarray) -> None:
        """`touched`: the rows that have a gradient; `rows`: those that were looked up."""
        if not np.isin(touched, rows, assume_unique=True).all():
            self._of.pop(name, None)

    def _indices_of(self, layer: Any, table: Any) -> list[_Indices] | None:
        if type(layer) is not keras.layers.Embedding or layer.embeddings_regularizer is not None:
            return None
        if layer.lora_enabled or table is not layer._embeddings:
            return None
        calls = [node for nodes in self._graph._nodes_by_depth.values() for node in nodes]
        nodes = [node for node in layer._inbound_nodes if node in calls]
        uses = [self._use(node.input_tensors[0]) for node in nodes]
        return None if None in uses else uses  # type: ignore[return-value]

    def _use(self, tensor: Any) -> _Indices | None:
        order = [id(each) for each in self._graph._inputs]
        if id(tensor) in order:
            return _Indices([order.index(id(tensor))], None)
        sources = _sources_of(tensor)
        if sources is None or any(id(each) not in order for each in sources):
            return None
        return _Indices(
            [order.index(id(each)) for each in sources], keras.Function(sources, tensor)
        )


def _graph_of(model: Any) -> Any:
    if isinstance(model, keras.Sequential):
        return model._functional
    return model if hasattr(model, "_nodes_by_depth") else None


def _is_large(variable: Any) -> bool:
    nbytes = int(np.prod(variable.shape)) * np.dtype(variable.dtype).itemsize
    return len(variable.shape) == 2 and nbytes >= LOOK_FOR_ROWS


def _has(layer: Any, variable: Any) -> bool:
    return any(each is variable for each in layer.trainable_variables)


def _sources_of(tensor: Any) -> list[Any] | None:
    """The inputs that a tensor depends on; None if a layer with weights is in between."""
    operation, index, _ = tensor._keras_history
    node = operation._inbound_nodes[index]
    if not node.input_tensors:
        return [tensor]
    if getattr(operation, "variables", ()):
        return None
    found: dict[int, Any] = {}
    for each in node.input_tensors:
        sources = _sources_of(each)
        if sources is None:
            return None
        found |= {id(source): source for source in sources}
    return list(found.values())


def _evaluated(use: _Indices, inputs: list[Any]) -> np.ndarray:
    chosen = [inputs[at] for at in use.inputs]
    value = chosen[0] if use.compute is None else use.compute(chosen)
    indices = np.asarray(keras.ops.convert_to_numpy(value), dtype=np.int64)
    return np.ravel(indices)


def rows_with_values(gradient: Gradient) -> np.ndarray:
    """The indices of rows that are not zero."""
    if isinstance(gradient, Rows):
        return np.asarray(gradient.indices, np.int64)
    touched: Any = gradient.any(axis=tuple(range(1, gradient.ndim)))
    return np.asarray(np.flatnonzero(touched), np.int64)


def assign_rows(variable: Any, rows: np.ndarray, values: np.ndarray) -> None:
    """Assigns rows, in place where the backend can."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        variable.value.scatter_nd_update(rows[:, None], values)
    elif backend == "torch":
        import torch

        with torch.no_grad():
            here = variable.value
            here[torch.from_numpy(rows).to(here.device)] = torch.from_numpy(values).to(here.device)
    else:  # JAX would compile a program for each number of rows
        whole = np.array(variable.value)
        whole[rows] = values
        variable.assign(whole)
