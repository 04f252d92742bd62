"""Maps that each rank runs for its own samples alone (policy `index` of a tf.data.Dataset).

A map() of single samples makes the same of a sample before and after they are put in order. So it
can be taken out of the pipeline: what is left gives batches of what the map gets, which cost
little; of these a rank takes its part, and runs the map on that.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from farandole.data._pipeline import Step, chain
from farandole.data._same import checksum, sampled

# They look at no sample's values: which ones come, in which order, is the same of any samples.
ORDERS = frozenset(("shuffle", "repeat", "take", "skip", "shard", "prefetch", "with_options"))
_WITHOUT_STATE = ORDERS - {"repeat"} | {"batch", "concatenate", "map", "padded_batch", "zip"}
# Ops that TensorFlow says have a state, and that give the same for a sample on any rank.
_HARMLESS = frozenset(
    (
        "Assert", "If", "While", "Case", "PartitionedCall", "StatefulPartitionedCall", "PrintV2",
        "LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather",
        "VarIsInitializedOp", "Placeholder",
    )
)  # fmt: skip


def passes_are_orders(end: Step) -> bool:
    """Whether nothing but the orders of shuffles differs between its passes: then one that is given
    up early changes the next ones as one to its end does, however far it was read ahead."""
    if end.inputs and (end.again is None or end.name not in _WITHOUT_STATE):
        return False
    if end.name == "map" and _state_of(end.function.traced):
        return False
    return all(map(passes_are_orders, end.inputs))


class Moving(NamedTuple):
    """The maps that can be taken out."""

    maps: list[Step]  # in the order in which they run
    size: int  # of a batch


class InTheWay(NamedTuple):
    """The reason why no map can be taken out."""

    why: str
    step: Step | None = None

    def __str__(self) -> str:
        return self.why if self.step is None else f"{self.step} {self.why}"


def movable(end: Step) -> Moving | InTheWay:
    """The maps that can be taken out of a pipeline."""
    steps = chain(end)
    for step in steps:
        if step.again is not None and step.name == "batch":
            return _before(steps, step)
        if step.again is None or step.name not in ORDERS:
            return InTheWay(_AFTER.get(step.name, "makes or changes batches by itself"), step)
    return InTheWay("there is no batch()")


_AFTER = {
    "map": "comes after batch(): it works on whole batches",
    "cache": "comes after batch(): it keeps whole batches",
}


def _before(steps: Iterator[Step], batch: Step) -> Moving | InTheWay:
    """The maps below a batch() that can be taken out."""
    maps: list[Step] = []  # the last one first
    end = InTheWay("there is no map() before batch()")
    for step in steps:
        found = _why_not(step)
        if found is not None:
            end = found
            break
        if step.name == "map":
            maps.append(step)
    while maps:  # the first one that runs gets what is put in batches
        why = _why_no_batch(maps[-1].inputs[0].dataset)
        if not why:
            return Moving(maps[::-1], batch.size)
        end = InTheWay(why, maps.pop())
    return end


def _why_not(step: Step) -> InTheWay | None:
    """Why neither it nor what is below can be taken out."""
    if step.name == "map":
        if step.again is None:
            return InTheWay("takes or gives other than dense tensors", step)
        state = _state_of(step.function.traced)
        return InTheWay(state, step) if state else None
    if step.again is not None and step.name in ORDERS:
        return None
    return InTheWay(f"there is no map() between {step} and batch()")


def _state_of(function: Any) -> str:
    """The state by which a traced function may give other values on another rank; '' if none."""
    graph = function.graph
    definition = graph.as_graph_def()
    own = _functions_in(definition)
    for op in dict.fromkeys(node.op for node in _nodes(definition)):
        if op in own or op in _HARMLESS or not _has_state(graph, op):
            continue
        if op in ("PyFunc", "EagerPyFunc"):
            return (
                f"runs Python code ({op}), which may draw at random; of tf.numpy_function(…, "
                "stateful=False) farandole knows that it does not"
            )
        kind = "draws at random" if "Random" in op or "Multinomial" in op else "keeps a state"
        return f"{kind} ({op})"
    return ""


def _has_state(graph: Any, op: str) -> bool:
    try:
        return bool(graph.op_def_for_type(op).is_stateful)
    except Exception:  # of another version, or an op that TensorFlow does not know here
        return True


def checksum_of(maps: list[Step]) -> int:
    """The same on ranks whose maps compute the same: of their ops and constants. A number that is
    drawn in a map by numpy, say, is a constant of it, and another one in each process."""
    total = 0
    for step in maps:
        function = step.function.traced
        definition = function.graph.as_graph_def()
        own = _functions_in(definition)
        inside = [_sum_of(each.node_def, own) for each in definition.library.function]
        total = zlib.crc32(repr((_sum_of(definition.node, own), sum(inside))).encode(), total)
        known = [each for each in function.captured_inputs if each.dtype.is_numpy_compatible]
        total = zlib.crc32(repr([checksum(sampled(each)) for each in known]).encode(), total)
    return total


def _sum_of(nodes: Any, own: set[str]) -> int:
    total = 0
    for node in nodes:
        op = "" if node.op in own else node.op  # their names have numbers of the process
        total = zlib.crc32(op.encode(), total)
        total = zlib.crc32(node.attr["value"].SerializeToString(), total)
    return total


def _functions_in(definition: Any) -> set[str]:
    return {each.signature.name for each in definition.library.function}


def _nodes(definition: Any) -> Iterator[Any]:
    """The nodes of a graph and of the functions in it."""
    yield from definition.node
    for function in definition.library.function:
        yield from function.node_def


def _why_no_batch(dataset: Any) -> str:
    """Why its elements make no batches."""
    import tensorflow as tf

    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec):
            return f"takes {type(spec).__name__.removesuffix('Spec')}s"
        if not spec.shape.is_fully_defined():
            return f"takes tensors of shape {spec.shape}, which may not fit in one batch"
        if spec.dtype in (tf.variant, tf.resource):
            return f"takes values of type {spec.dtype.name}"
    return ""
