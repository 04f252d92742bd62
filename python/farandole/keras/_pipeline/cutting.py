"""A model's graph in stages, each of which is a model.

A *call* is a node of the graph: a layer, or an operation, that is called on tensors. Calls are
ordered as they are computed, and a stage has consecutive ones. Between two stages go the tensors
that are made on one side and used on the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import keras

from farandole._arguments import is_whole, shown
from farandole._core import InvalidArgument
from farandole.pipeline import _partition


class Graph:
    """The graph of a model that is built.

    Raises:
        InvalidArgument: it has none, or a layer cannot be in a pipeline.
    """

    def __init__(self, model: Any) -> None:
        self.name = getattr(model, "name", "")
        if isinstance(model, keras.Sequential):
            if not model.built or not model.inputs:
                raise InvalidArgument(
                    f"the model '{model.name}' is a Sequential that does not know its inputs\n"
                    "  advice: begin it with keras.Input(shape)"
                )
            model = model._functional
        if not isinstance(model, keras.Model) or not hasattr(model, "_nodes_by_depth"):
            raise InvalidArgument(
                f"model is {shown(model)}; it is a sequential or a functional Keras model, whose "
                "graph shows where it can be cut"
            )
        self.model = model
        by_depth = model._nodes_by_depth
        nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
        self.calls = [node for node in nodes if not node.is_input]
        for call in self.calls:
            _check_layer(call.operation)
        _refuse_masks_of(model)

    def names(self) -> list[str]:
        return [call.operation.name for call in self.calls]

    def sizes(self) -> list[int]:
        """The number of parameters of each call. A layer counts at its first call only."""
        seen = set[int]()
        sizes = []
        for call in self.calls:
            weights = getattr(call.operation, "weights", [])
            new = [] if id(call.operation) in seen else weights
            seen.add(id(call.operation))
            sizes.append(sum(int(_elements(w)) for w in new))
        return sizes

    def between(self, bounds: Sequence[int], boundary: int) -> list[Any]:
        """The tensors that go from one stage to the next."""
        at = bounds[boundary]
        made = [*self.model.inputs, *(t for c in self.calls[:at] for t in c.output_tensors)]
        used = {id(t) for call in self.calls[at:] for t in call.input_tensors}
        used |= {id(t) for t in self.model.outputs}
        later = {id(t) for call in self.calls[at:] for t in call.output_tensors}
        return [t for t in made if id(t) in used - later]

    def variables(self, bounds: Sequence[int], stage: int) -> list[Any]:
        """The variables of a stage's layers, also those that are no weights."""
        calls = self.calls[bounds[stage] : bounds[stage + 1]]
        layers = list({id(call.operation): call.operation for call in calls}.values())
        found = [v for layer in layers for v in getattr(layer, "variables", [])]
        return list({id(v): v for v in found}.values())

    def stage(self, bounds: Sequence[int], stage: int) -> Any:
        """The model of a stage: its layers, called anew. Their earlier calls are forgotten, since
        these would keep all other layers alive."""
        last = len(bounds) - 2
        calls = self.calls[bounds[stage] : bounds[stage + 1]]
        for call in calls:
            call.operation._inbound_nodes.clear()
            call.operation._outbound_nodes.clear()
        made: dict[int, Any] = {}

        def begun(tensor: Any) -> Any:
            name = tensor._keras_history.operation.name if stage == 0 else None
            made[id(tensor)] = keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype, name=name)
            return made[id(tensor)]

        inputs = keras.tree.map_structure(
            begun, self.model._inputs_struct if stage == 0 else self.between(bounds, stage)
        )
        for call in calls:
            args, kwargs = call.arguments.fill_in(made)
            outputs = keras.tree.flatten(call.operation(*args, **kwargs))
            ids = [id(tensor) for tensor in call.output_tensors]
            made |= dict(zip(ids, outputs, strict=True))
        outputs = keras.tree.map_structure(
            lambda tensor: made[id(tensor)],
            self.model._outputs_struct if stage == last else self.between(bounds, stage + 1),
        )
        return keras.Model(inputs, outputs, name=f"{self.name}_stage_{stage}")

    def refuse_shared(self, bounds: Sequence[int]) -> None:
        """Refuses weights that several stages use: each stage would train a copy of its own."""
        owner: dict[int, tuple[int, str]] = {}
        for stage, (begin, end) in enumerate(pairwise(bounds)):
            for call in self.calls[begin:end]:
                for weight in getattr(call.operation, "weights", []):
                    name = call.operation.name
                    other, first = owner.setdefault(id(weight), (stage, name))
                    if other != stage:
                        raise InvalidArgument(
                            f"layer '{name}' of stage {stage} has a weight of '{first}' of stage "
                            f"{other}: each stage would train its own\n"
                            "  advice: a split that puts them into one stage"
                        )


def _elements(weight: Any) -> int:
    count = 1
    for n in weight.shape:
        count *= n
    return count


def _check_layer(layer: Any) -> None:
    if getattr(layer, "synchronized", False):
        raise InvalidArgument(
            f"layer '{layer.name}' has synchronized=True: ranks have other layers of a Pipeline\n"
            "  advice: synchronized=False, which takes the statistics of each micro-batch"
        )


def _refuse_masks_of(model: Any) -> None:
    """Layers get masks as tensors of the graph. But a loss is divided by what the mask of the whole
    batch leaves, which a micro-batch does not know."""
    for output in model.outputs:
        if getattr(output, "_keras_mask", None) is not None:
            raise InvalidArgument(
                f"output '{output._keras_history.operation.name}' has a mask, by which Keras "
                "divides the loss of the whole batch, which a micro-batch does not know\n"
                "  advice: sample weights, which say what counts, and a layer that drops the mask"
            )


def bounds_of(split: Any, graph: Graph, stages: int) -> list[int]:
    """Where each stage begins and ends among the calls. Raises InvalidArgument."""
    names, sizes = graph.names(), graph.sizes()
    if len(names) < stages:
        raise InvalidArgument(
            f"stages={stages}, and the model has {len(names)} layers; every stage has one at least"
        )
    if split == "layers":
        return _partition.balanced([1.0] * len(names), stages)
    if split == "parameters":
        # Layers without parameters cost something, too: of equal cuts, the one by layers.
        little = (sum(sizes) or 1) / len(sizes) * 1e-3
        return _partition.balanced([each + little for each in sizes], stages)
    if isinstance(split, str) or not isinstance(split, Sequence):
        raise InvalidArgument(
            f"split is {shown(split)}; it is 'parameters', 'layers', or a list of the first layer "
            "of each stage but the first, by name or number"
        )
    return _partition.at([_number(each, names) for each in split], len(names), stages)


def _number(layer: Any, names: Sequence[str]) -> int:
    if is_whole(layer):
        return int(layer)
    if layer not in names:
        raise InvalidArgument(
            f"split names a layer {shown(layer)}; the model has {', '.join(names)}"
        )
    return names.index(layer)
