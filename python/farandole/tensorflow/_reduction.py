"""A step's gradients on their way to the mean (or sum) of all ranks.

In a graph every gradient is an operation of its own, so that it is reduced while the graph still
computes others; the engine fuses those that are ready together. Eagerly there is nothing left to
compute when gradients are here, and all are one operation. In a graph no reduced gradient is there
before all of them are: a step that fails halfway updates no variable.

First of all the ranks compare what they are about to reduce (the *note*: a line a gradient). So a
rank whose model differs, or whose gradient is None where others have one, is named on all ranks
before anybody waits for what never comes. The operations of a graph follow this comparison, and
say so: when a rank compares anew, those of its step before that never came are given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import tensorflow as tf

from farandole._numerics import mode
from farandole.common import _reduction
from farandole.common._groups import Groups
from farandole.common._labels import without_numbers
from farandole.common._numerics import FLAG
from farandole.common._process_set import members_of, number_of
from farandole.common._reduction import Adasum, Average, Max, Min, Product, Sum, core_op
from farandole.tensorflow import _graph, _sparse
from farandole.tensorflow._calls import Request, members_when_run, run, run_all, tensor_from
from farandole.tensorflow._finite import FiniteCheck, scales_losses
from farandole.tensorflow._weights import Compared, raw
from farandole.tensorflow.adasum import adasum_together

# The request, which gradients it has, how to unpack them, and whether they are slices.
_Plan = tuple[Request, list[int], list[Any], bool]


@dataclass(frozen=True)
class Reduction(_reduction.Reduction):
    """The options of all frameworks, with those that TensorFlow adds.

    Raises:
        InvalidArgument: an argument is wrong, or they do not go together.
    """

    ops: ClassVar[tuple[int, ...]] = (Average, Sum, Adasum, Min, Max, Product)

    groups: Groups = 0
    label: str = "gradients"

    def __post_init__(self) -> None:
        if self.horovods_op != Adasum:
            core_op(self.horovods_op)
        super().__post_init__()

    @property
    def members(self) -> int:
        """The number of ranks that reduce. Another rank is refused when it reduces."""
        return len(members_of(self._set)[0])

    @property
    def op(self) -> str:
        return "mean" if self._divided and _graph.goes_on() else super().op

    @property
    def postscale(self) -> float:
        """In a graph that goes on, the engine divides, by the ranks there are when it runs."""
        divides = self._divided and _graph.goes_on()
        return self.gradient_predivide_factor if divides else super().postscale

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        names: Sequence[str],
        weights: Compared | None = None,
        *,
        finite: bool = False,
    ) -> list[Any]:
        """The reduced gradients; None stays None, on all ranks alike.

        Args:
            gradients: tensors, ``tf.IndexedSlices`` and None.
            variables: what they are the gradients of: for ``groups``.
            names: of the variables.
            weights: compares their values, once the ranks' models are known to be alike.
            finite: a step will use these gradients, so they are checked.

        Raises:
            NumericsError: eagerly and by the setting, where some rank's are not finite; in a graph
                its text is that of the error of an op.
        """
        _graph.check_place()
        ours = [self._made_dense(*row) for row in zip(gradients, names, strict=True)]
        if self.members == 1 and not _graph.goes_on():
            return [_sparse.merged(g) if _is_sparse(g) else g for g in ours]
        note = "\n".join(_line(*row) for row in zip(names, ours, strict=True))
        if self.horovods_op == Adasum:
            return self._by_adasum(ours, names, note, weights, finite)
        if tf.executing_eagerly():
            plans = self._eager_plans(ours, note)
            check, flagged = self._checked(ours, plans, names, finite)
            with nullcontext() if weights is None else weights.after_step():
                results = [run(request) for request, *_ in plans]
        else:
            plans = self._graph_plans(ours, variables, names)
            check, flagged = self._checked(ours, plans, names, finite)
            opener, begun = self._begun(note, weights)
            for request, *_ in plans:
                request.note = opener.called
            with begun:
                results = run_all([request for request, *_ in plans])
        first = [] if check is None else check.judge(results[flagged][-1])
        return all_or_none(self._unpacked(ours, plans, results), first)

    # ---- in detail ----

    def _checked(
        self, ours: Sequence[Any], plans: list[_Plan], names: Sequence[str], finite: bool
    ) -> tuple[FiniteCheck | None, int]:
        """Adds a check's flag to the last operation of dense gradients, whose position it returns.
        The flag waits for all gradients, as that operation probably does anyway."""
        looked: list[tuple[int, Any]] = []
        for request, places, _, sparse in plans:
            values = [ours[i].values for i in places] if sparse else request.tensors
            looked += zip(places, values, strict=False)
        looked.sort(key=lambda row: row[0])
        check = self._check(names, looked, finite and self.horovods_op in (Average, Sum))
        if check is None:
            return None, -1
        dense = [at for at, (*_, sparse) in enumerate(plans) if not sparse]
        if not dense:
            dense = [len(plans)]
            plans.append(self._dense_plan(ours, [], f"{self.label}/{FLAG}"))
        flagged = dense[-1]
        request = plans[flagged][0]
        request.tensors = [*request.tensors, check.flag]
        return check, flagged

    def _check(
        self, names: Sequence[str], looked: Sequence[tuple[int, Any]], finite: bool
    ) -> FiniteCheck | None:
        if not finite or mode() == "off":
            return None
        return FiniteCheck(self.label, names, self.process_set, looked)

    def _by_adasum(
        self,
        ours: list[Any],
        names: Sequence[str],
        note: str,
        weights: Compared | None,
        finite: bool,
    ) -> list[Any]:
        """Each gradient is folded by itself, but all of them by the same few collectives."""
        places = [i for i, gradient in enumerate(ours) if gradient is not None]
        _, begun = self._begun(note, weights)
        with begun:
            wires = [self.compression.compress(tensor_from(ours[i], names[i])) for i in places]
            sent = [wire for wire, _ in wires]
            check = self._check(names, list(zip(places, sent, strict=True)), finite and bool(sent))
            flags = [] if check is None else [check.flag]
            folded = adasum_together(sent, self.label, self._set, flags)
        reduced = list(ours)
        for i, (_, context), result in zip(places, wires, folded, strict=False):
            reduced[i] = self.compression.decompress(result, context)
        return all_or_none(reduced, [] if check is None else check.judge(folded[-1]))

    def _begun(
        self, note: str, weights: Compared | None
    ) -> tuple[Request, AbstractContextManager[Any]]:
        """The operation that begins a step, and a context for those after it."""
        opener = Request("barrier", [], f"{self.label} of a step", self._set, note=note)
        if tf.executing_eagerly():
            run(opener)
            return opener, nullcontext() if weights is None else weights.after_step()
        if weights is not None:
            weights.add_to(opener)
        begun = run(opener)[0]
        if weights is not None:
            begun = weights.in_graph(opener, begun)
        return opener, tf.control_dependencies([begun])

    @property
    def _set(self) -> int:
        return number_of(self.process_set)

    def _made_dense(self, gradient: Any, name: str) -> Any:
        if not _is_sparse(gradient):
            return gradient
        if self.sparse_as_dense:
            return tf.convert_to_tensor(gradient)
        _sparse.check_op(self.horovods_op, f"'{name}' has tf.IndexedSlices: ")
        return gradient

    def _dense_plan(
        self, ours: Sequence[Any], places: list[int], name: str, note: str = ""
    ) -> _Plan:
        wires = [self.compression.compress(tensor_from(ours[i], name)) for i in places]
        sent = [wire for wire, _ in wires] or [tf.zeros([0])]
        how = (self._set, self.op, self.prescale, self.postscale)
        request = Request("all_reduce", sent, name, *how, note=note)
        return request, places, [context for _, context in wires], False

    def _sparse_plan(
        self, ours: Sequence[Any], places: list[int], name: str, note: str = ""
    ) -> _Plan:
        slices = [ours[i] for i in places]
        return _sparse.request_for(slices, name, self.process_set, note), places, [], True

    def _eager_plans(self, ours: Sequence[Any], note: str) -> list[_Plan]:
        dense = [i for i, g in enumerate(ours) if g is not None and not _is_sparse(g)]
        sparse = [i for i, g in enumerate(ours) if _is_sparse(g)]
        # The note comes with the first operation, which is empty on a rank without dense gradients.
        # So the first operations of all ranks are of one kind.
        plans = [self._dense_plan(ours, dense, self.label, note)]
        if sparse:
            plans.append(self._sparse_plan(ours, sparse, f"slices of {self.label}"))
        return plans

    def _graph_plans(
        self, ours: Sequence[Any], variables: Sequence[Any], names: Sequence[str]
    ) -> list[_Plan]:
        plans = []
        dense = [i for i, g in enumerate(ours) if g is not None and not _is_sparse(g)]
        for places in self._grouped(dense, variables):
            name = names[places[0]] if len(places) == 1 else f"group of {names[places[0]]}"
            plans.append(self._dense_plan(ours, places, f"{self.label}/{name}"))
        for i, gradient in enumerate(ours):
            if _is_sparse(gradient):
                plans.append(self._sparse_plan(ours, [i], f"{self.label}/{names[i]}"))
        return plans

    def _grouped(self, places: list[int], variables: Sequence[Any]) -> list[list[int]]:
        """Gradients grouped into operations, in the order in which they probably come: the last
        variable's is the first."""
        if isinstance(self.groups, int):
            if self.groups == 0:
                return [[i] for i in reversed(places)]
            length = max(1, -(-len(places) // self.groups))
            return [places[at : at + length] for at in range(0, len(places), length)][::-1]
        group_of = {id(raw(v)): g for g, group in enumerate(self.groups) for v in group}
        together: dict[Any, list[int]] = {}
        for i in reversed(places):
            together.setdefault(group_of.get(id(raw(variables[i])), -1 - i), []).append(i)
        return list(together.values())

    def _unpacked(
        self, ours: list[Any], plans: list[_Plan], results: list[list[tf.Tensor]]
    ) -> list[Any]:
        reduced = list(ours)
        for (_, places, contexts, sparse), made in zip(plans, results, strict=True):
            if sparse:
                slices = [ours[i] for i in places]
                values = _sparse.results_of(made, slices, self.horovods_op, self.process_set)
            else:
                values = [
                    self.compression.decompress(result, context)
                    for result, context in zip(made[: len(places)], contexts, strict=True)
                ]
            for i, value in zip(places, values, strict=True):
                reduced[i] = value
        return reduced


def all_or_none(gradients: list[Any], first: Sequence[Any] = ()) -> list[Any]:
    """In a graph, makes each gradient wait for all of them and for `first`, since one may come and
    another fail."""
    there = sum(g is not None for g in gradients)
    if tf.executing_eagerly() or there + len(first) < 2:
        return gradients
    with after(gradients), tf.control_dependencies(first):
        return [None if g is None else _identity(g) for g in gradients]


def after(gradients: Sequence[Any]) -> AbstractContextManager[Any]:
    """A context, for a graph: what is made in it runs once all of these are there."""
    if tf.executing_eagerly() or all(g is None for g in gradients):
        return nullcontext()
    tensors = [tensor for g in gradients if g is not None for tensor in _tensors_of(g)]
    context: AbstractContextManager[Any] = tf.control_dependencies([tf.group(*tensors)])
    return context


def _tensors_of(gradient: Any) -> list[tf.Tensor]:
    return [gradient.values, gradient.indices] if _is_sparse(gradient) else [gradient]


def _identity(gradient: Any) -> Any:
    if not _is_sparse(gradient):
        return tf.identity(gradient)
    values = tf.identity(gradient.values)
    return tf.IndexedSlices(values, tf.identity(gradient.indices), gradient.dense_shape)


class Local:
    """Variables whose gradients stay this rank's own.

    Args:
        scale: divides these by the number of ranks, as if the others' were zero.
    """

    def __init__(self, scale: bool) -> None:
        self._scale = scale
        self._kept: dict[int, Any] = {}  # by id, which stays theirs while they are kept

    def add(self, variable: Any) -> None:
        self._kept[id(raw(variable))] = raw(variable)

    def __contains__(self, variable: Any) -> bool:
        return id(raw(variable)) in self._kept

    def reduce_others(
        self,
        reduction: Reduction,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        names: Sequence[str],
    ) -> list[Any]:
        """:meth:`Reduction.reduce` of all gradients but theirs."""
        result = [self._scaled(gradient, reduction) for gradient in gradients]
        shared = [i for i, variable in enumerate(variables) if variable not in self]
        chosen = [variables[i] for i in shared]
        called = [names[i] for i in shared]
        weights = Compared(reduction.label, reduction.process_set, chosen, called)
        reduced = reduction.reduce(
            [gradients[i] for i in shared], chosen, called, weights, finite=not scales_losses()
        )
        for i, gradient in zip(shared, reduced, strict=True):
            result[i] = gradient
        return result if len(shared) == len(result) else all_or_none(result)

    def _scaled(self, gradient: Any, reduction: Reduction) -> Any:
        if gradient is None or not self._scale:
            return gradient
        return divided(gradient, members_when_run(reduction._set))


def divided(gradient: Any, by: Any) -> Any:
    """A gradient, which may be slices, divided by a number."""
    factor = tf.cast(by, gradient.dtype)
    if _is_sparse(gradient):
        values = gradient.values / factor
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / factor


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _line(name: str, gradient: Any) -> str:
    if gradient is None:
        return f"'{name}' without a gradient"
    if _is_sparse(gradient):
        return f"'{name}' {gradient.dtype.name} slices"
    return f"'{name}' {gradient.dtype.name} {gradient.shape}"


def names_of(variables: Sequence[Any]) -> list[str]:
    """Unique names of variables: Keras' paths, TensorFlow's names, or their positions."""
    names: list[str] = []
    for place, variable in enumerate(variables):
        name = _name_of(variable, place)
        names.append(f"{name} [{place}]" if name in names else name)
    return names


def _name_of(variable: Any, place: int) -> str:
    for attribute in ("path", "name"):
        try:
            name = getattr(variable, attribute)
        except AttributeError:  # as eager tensors raise
            continue
        if isinstance(name, str) and name:
            plain = name.partition(":")[0]
            return without_numbers(plain) if attribute == "path" else plain
    return f"source {place}"
