"""The gradients of one optimizer on their way to the mean (or sum) of all ranks.

`Exchange` is what the optimizer's wrapper asks for. Where a framework builds a program before it
runs (TensorFlow, JAX), `PlannedExchange` compares with the other ranks what the program will
reduce, once for every list of variables; a backend adds how its tensors are reduced.
"""

from __future__ import annotations

import importlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common import _groups
from farandole.common._labels import without_numbers
from farandole.common._objects import agree, allgather_object, compare
from farandole.common._process_set import ProcessSet
from farandole.keras._reduction import Reduction

# Advice in errors: the calls that make all ranks' weights equal.
BROADCAST = (
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0) to the callbacks of fit(), or "
    "hvd.broadcast_variables(model.weights, root_rank=0)"
)

OF_STEP = "train_step"  # the name of gradients that no optimizer reduces, but a step


def label_of(position: int, variable: Any) -> str:
    """A variable's name for errors, traces and the wire."""
    path = str(getattr(variable, "path", None) or getattr(variable, "name", "variable"))
    return f"{without_numbers(path.partition(':')[0])} [{position}]"


def rows_of(variables: Sequence[Any]) -> list[str]:
    """A line for each variable, which ranks compare."""
    return [
        f"'{label_of(i, v)}' {list(v.shape)} {keras.backend.standardize_dtype(v.dtype)}"
        for i, v in enumerate(variables)
    ]


_first_steps = threading.Lock()


def agreed_label(name: str, label: str, process_set: ProcessSet) -> str:
    """Collective: the first rank's label for an optimizer, which all ranks take.

    Numbers in labels differ where one rank has made more optimizers than others. So the operation
    itself has a fixed name, which depends on no number.

    Raises:
        Mismatch: it is another optimizer on another rank, or none: a step asks for gradients.
    """
    with _first_steps:
        theirs = allgather_object((_world.rank(), name, label), "a first step", process_set)
    compare(
        "whose gradients are next in a step",
        {
            rank: ["those that train_step() asks for" if called == OF_STEP else called]
            for rank, called, _ in theirs
        },
        "apply the same optimizers on every rank, and in a train_step() of your own ask for "
        "gradients of trainable variables as often on every rank",
    )
    return theirs[0][2]


def compare_models(label: str, reduction: Reduction, variables: Sequence[Any]) -> None:
    """Raises Mismatch on every rank, naming the first variable or option that differs."""
    what, members = f"the variables of {label}", reduction.process_set
    groups = _groups.members(reduction.groups, variables)
    options = f"{reduction}, groups {groups or 'none'}"
    mine = (_world.rank(), options, rows_of(variables))
    theirs = allgather_object(mine, what, members)
    compare(f"the options of {label}", {rank: [options] for rank, options, _ in theirs})
    compare(what, {rank: rows for rank, _, rows in theirs})


def compare_gradients(
    label: str, reduction: Reduction, variables: Sequence[Any], kinds: Sequence[str]
) -> None:
    """Raises Mismatch on every rank, naming the first variable that has a gradient on some ranks
    and none, or one of another kind, on others."""
    what, members = f"the gradients of {label}", reduction.process_set
    rows = zip(variables, kinds, strict=True)
    words = [f"'{label_of(i, v)}' {kind}" for i, (v, kind) in enumerate(rows)]
    agree(what, words, members, "let the loss depend on the same variables on every rank")


def times(gradient: Any, factor: float) -> Any:
    """Multiplies a gradient of any kind that a backend has; None stays None."""
    if gradient is None or factor == 1:
        return gradient
    if _has_slices(gradient):  # which have no product
        return type(gradient)(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def dense(gradient: Any) -> Any:
    """Turns slices into a whole array, and adds up rows that occur twice. (Keras'
    `convert_to_tensor` leaves slices as they are.)"""
    if not _has_slices(gradient):
        return gradient
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def _has_slices(gradient: Any) -> bool:
    return hasattr(gradient, "dense_shape")  # tf.IndexedSlices


def _merged(gradient: Any) -> Any:
    if not _has_slices(gradient):
        return gradient
    from farandole.tensorflow._sparse import merged

    return merged(gradient)


class Alike(NamedTuple):
    """A variable that all ranks have alike, and that no gradient of this optimizer updates."""

    name: str
    variable: Any
    is_state: bool = False  # of the optimizer


class Exchange(ABC):
    """Reduces an optimizer's gradients. Every rank makes it when the first ones come."""

    alike: Sequence[Alike] = ()  # compared with the weights
    compares = True  # weights, as a step begins

    def __init__(self, label: str, reduction: Reduction) -> None:
        self.label = label
        self.reduction = reduction
        self.skips = False  # the step looks for infinities itself, and updates nothing if it finds

    @staticmethod  # noqa: B027 - most have nothing to do
    def prepare() -> None:
        """Called as an optimizer is made distributed."""

    @staticmethod
    def has_others(reduction: Reduction) -> bool:
        """Whether there are other ranks to reduce with."""
        return reduction.members > 1

    agreed_label = staticmethod(agreed_label)

    @classmethod
    def of_steps(cls) -> type[Exchange]:
        """The class of those that a step of the user's own reduces by itself."""
        return cls

    def compare_also(self, alike: Sequence[Alike]) -> None:
        """Compares these from now on, too. Every rank calls it."""
        self.alike = alike

    @abstractmethod
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduced gradients; None where no rank has one.

        Raises:
            Mismatch: the ranks' variables, options, gradients or weights differ; says which
                variable.
        """

    def at_update(
        self,
        optimizer: Any,  # noqa: ARG002
        gradients: list[Any],
        reduce: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:
        """Reduces what the optimizer has accumulated, in the pass that updates."""
        return reduce(gradients)  # there is no other pass, on most backends

    @property
    def has_reduced(self) -> bool:
        """Whether the gradients of a step are reduced before an optimizer gets them."""
        return False

    @property
    def hears_backward(self) -> bool:
        """Whether each backward() reduces what it brings."""
        return False

    def reduce_in_backward(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Takes part in a backward() of other ranks, if this one `hears_backward`, with gradients
        that an optimizer gets by none."""
        raise NotImplementedError

    def local(self, gradient: Any) -> Any:
        """Scales a gradient that stays this rank's own."""
        return times(gradient, self.reduction.local_scale)

    def updating(self, gradients: Sequence[Any]) -> AbstractContextManager[Any]:  # noqa: ARG002
        """A context in which the optimizer uses these reduced gradients. It changes no variable
        before all of them are there."""
        return nullcontext()  # most have them at once

    def stepped(self) -> None:
        """The optimizer has used the gradients."""
        del self  # AutoGraph takes no function without a statement

    def end(self) -> None:  # noqa: B027 - most have nothing to do
        """Its world has ended."""


_BACKENDS = {"jax": "ProgramExchange", "tensorflow": "GraphExchange", "torch": "HookedExchange"}


def backend() -> type[Exchange]:
    """The exchanges of the backend that Keras runs on. Raises InvalidArgument where there are
    none."""
    name = keras.backend.backend()
    if name not in _BACKENDS:
        raise InvalidArgument(
            f"Keras runs on {name}, on which farandole does not train; set KERAS_BACKEND to "
            + ", ".join(_BACKENDS)
        )
    found: type[Exchange] = getattr(
        importlib.import_module(f"farandole.keras._{name}"), _BACKENDS[name]
    )
    return found


class AloneExchange(Exchange):
    """One rank by itself: there is nothing to reduce, but factors apply, and rows are added up as
    with several ranks."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:  # noqa: ARG002
        return [times(_merged(g), self.reduction.passes_factor) for g in gradients]


class PlannedExchange(Exchange):
    """Compares with other ranks when a program is built, once for every list of variables. A later
    difference (one rank alone builds its program again) shows in `reduce_all`, whose operations
    describe what they reduce."""

    def __init__(
        self,
        label: str,
        reduction: Reduction,
        variables: Sequence[Any],
        *,
        at_update: bool,  # noqa: ARG002
    ) -> None:
        super().__init__(label, reduction)
        places = _groups.members(reduction.groups, variables)
        self.groups = [[variables[i] for i in group] for group in places]
        self._compared: set[tuple[str, ...]] = set()  # labels of the variables

    def kind_of(self, gradient: Any) -> str:  # noqa: ARG002
        """Describes a gradient. Ranks reduce only gradients of equal descriptions."""
        return "dense"

    @abstractmethod
    def reduce_all(
        self, names: Sequence[str], gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """The reduced gradients, in the order of the variables; None stays None."""

    def compare_weights(self, variables: Sequence[Any]) -> None:  # noqa: ARG002 - for subclasses
        """Compares weights as a step begins, if reduce_all() does not."""
        return  # AutoGraph warns of a body that is a docstring alone

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        labels = tuple(label_of(i, v) for i, v in enumerate(variables))
        if labels not in self._compared:
            kinds = ["without a gradient" if g is None else self.kind_of(g) for g in gradients]
            compare_models(self.label, self.reduction, variables)
            compare_gradients(self.label, self.reduction, variables, kinds)
            self._compared.add(labels)
        if self.compares:
            self.compare_weights(variables)
        return self.reduce_all(labels, gradients, variables)
