"""Steps of a serial model on this rank's part of a batch.

Note [How a share reaches a step]

What Keras reads are not batches, but those with their share (marks.py): [[count, total]], which is
data, so it is right in any program, however far ahead it is read and however many steps run in one
call. The model's steps are replaced, on this one object, by steps that take it off, keep it in
`Steps.share` while the model's own step runs or is traced, and there

    Optimizer.scale_loss     multiplies by count * size / total: the mean of the ranks' gradients is
                             that of all samples. In a step of the user's own it does not, since
                             nobody knows which losses that scales: there gradients are weighed,
                             and reduced where the framework gives them (own_gradients.py), or
                             else as an optimizer gets them (own_steps.py)
    each loss                see losses.py: where its divisor is not the number of samples
    joined statistics        leave a sample out that does not count (normalization.py)
    the metrics' state       is of this rank's samples, and is summed over ranks when somebody asks
                             (metrics.py)

A rank without samples computes on one that does not count (farandole.data): its gradient weighs 0,
and its metrics and moving averages stay as they were, but for those of all ranks' samples.

Data without a share (a user's own calls of the model) are steps as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import keras

from farandole import _world
from farandole.data._logical import Block
from farandole.keras._global.loss_kinds import Kind, kind_of
from farandole.keras._global.marks import Shared
from farandole.keras._global.passes import Hooks
from farandole.keras._global.saying import say

LEFT_OPEN = (None, "none")  # reductions of losses that are a number for each sample
_OF_LOSS = (
    "a train_step() or compute_loss() has a loss of its own, and how that combines samples is not "
    "known: it is taken for a mean over the samples of its batch. Of a sum by a constant steps are "
    "then too small by the number of ranks; a loss that mixes samples, as one of pairs does, mixes "
    "those of one rank alone\n"
    "  advice: self.compute_loss(), a loss of Keras or tf.nn.compute_average_loss(); of a mean, "
    "self.optimizer.scale_loss(loss) says that it is one"
)
_OF_CHANGES = (
    "a train_step() changes gradients before the optimizer gets them, where each rank has those of "
    "its own samples: clipping by a norm, and skipping a step, then differ from one process\n"
    "  advice: the optimizer's clipnorm, clipvalue or global_clipnorm, which act on the gradients "
    "of the whole batch; or gradients of trainable variables by a tape in train_step() itself"
)


class Steps:
    """Holds what the steps of one model know of the batch that they compute."""

    def __init__(self, block: Block | None = None) -> None:
        self.block = block  # of logical ranks (logical.py)
        self.share: Any = None  # a tensor, inside a step whose batch has one
        self.total: int | None = None  # on JAX: samples of that batch
        self.held: list[Any] | None = None  # gradients, inside a step that is to update nothing
        self.weighs_gradients = False  # and not the loss
        self.knows_loss = False  # inside a step: that its loss is no sum over the rank's samples
        self._known: dict[int, tuple[Any, Kind]] = {}  # numbers of a step whose kind is known
        self._kinds: set[Kind | None] = set()  # of losses, inside a step of the user's own
        self._gradients: list[Any] = []  # that tapes have given as they are, likewise
        self.reduced: set[int] = set()  # ids of variables whose gradients are reduced already
        self.given_back: dict[int, Any] = {}  # such gradients, by id
        self.is_not_finite = False  # a gradient of this step, which was told of
        self.hooks = Hooks()
        self._rows: int | None = None  # of its batch on this rank, where that is a number
        self.say_once = cache(say)
        self.tells_of_losses = True  # of those that a step calls by itself
        self.own_gradients: Any = None  # an OwnGradients, where frameworks' gradients are reduced
        # Makes an optimizer reduce that the model was not compiled with.
        self.adopt: Callable[[Any], None] = lambda _: None

    def count_and_total(self) -> tuple[Any, Any]:
        """Tensors of no dimension; the count is at least 1."""
        return keras.ops.maximum(self.share[0, 0], 1.0), self.share[0, 1]

    @property
    def counts(self) -> Any:
        """Whether this rank has samples in the batch."""
        return self.share[0, 0] > 0

    def weight(self, dtype: Any) -> Any:
        """Returns the weight of this rank's samples."""
        # The gradients of logical ranks are summed, those of ranks averaged.
        ranks = _world.size() if self.block is None else 1
        share = keras.ops.cast(self.share, dtype)
        return share[0, 0] * ranks / share[0, 1]

    def scaled(self, loss: Any) -> Any:
        """Scales a loss by this rank's weight.

        For a vector of losses TensorFlow's gradient is that of their sum, not of their mean.
        """
        if self.share is None:
            return loss
        weight = 1.0 if self.weighs_gradients else self.weight("float32")
        if len(loss.shape) > 0:
            count, total = self.count_and_total()
            weight = weight * total / count
        return self.know(loss * keras.ops.cast(weight, keras.backend.standardize_dtype(loss.dtype)))

    def weighed(self, gradients: Iterable[Any], variables: Iterable[Any] = ()) -> list[Any]:
        """As an optimizer gets them. On PyTorch they have their weight already, by `hooked`.

        Args:
            variables: of which they are the gradients, as far as they are known.
        """
        ours = list(gradients)
        if self.share is None or not self.weighs_gradients:
            return ours
        known = [id(v) in self.reduced for v in variables]
        known += [False] * (len(ours) - len(known))
        if all(known):
            return ours
        if keras.backend.backend() == "torch" and self.block is None:
            is_early = self.own_gradients is not None and self.own_gradients.are_reduced
            if not is_early and self.are_changed(ours, variables):
                self.say_once(_OF_CHANGES)
            return ours
        kind = _one_of(self._kinds)  # nobody knows which gradient is of which loss
        self.tell_of_loss(kind)
        rows = list(zip(ours, known, strict=False))
        if self.are_changed([g for g, is_done in rows if not is_done], ()):
            self.say_once(_OF_CHANGES)
        return [g if is_done else self.one_weighed(g, kind) for g, is_done in rows]

    def are_changed(self, gradients: Iterable[Any], variables: Iterable[Any]) -> bool:
        """Whether a step of the user's own has made others of the gradients that the framework
        gave it, as far as that is seen."""
        if not self.weighs_gradients:
            return False
        if keras.backend.backend() == "torch":
            pairs = zip(gradients, variables, strict=False)
            return not all(_is_as_backward_left_it(gradient, v.value) for gradient, v in pairs)
        given = set(map(id, self._gradients))
        return bool(given) and not given.issuperset({*map(id, gradients)} - {id(None)})

    # ---- losses of a step of the user's own ----

    def know(self, loss: Any) -> Any:
        """Returns the loss, which is a mean over samples if nothing else is seen in its graph."""
        self.knows_loss = True
        self._known[id(loss)] = loss, self._kind_of(loss) or Kind.MEAN
        return loss

    @contextmanager
    def not_telling_of_losses(self) -> Iterator[None]:
        before, self.tells_of_losses = self.tells_of_losses, False
        try:
            yield
        finally:
            self.tells_of_losses = before

    def as_mean(self, loss: Any) -> Any:
        """Returns a loss of the user's own such that the mean over ranks is that of the batch."""
        if _axes(loss) > 0:
            return loss  # scaled() has the factor of one loss for each sample
        kind = self._kind_of(loss)
        self.tell_of_loss(kind)
        return self.know(self.weighed_as(kind, loss))

    def weighed_as(self, kind: Kind | None, loss: Any) -> Any:
        """The same of a loss of this kind."""
        if kind is not Kind.SUM:
            return loss
        dtype = keras.backend.standardize_dtype(loss.dtype)
        return loss * keras.ops.cast(self._factor(kind), dtype)

    def is_of_each(self, losses: Any) -> bool:
        """Whether there is one for each sample of the part."""
        return _axes(losses) > 0 and losses.shape[0] == self._rows

    def covers(self, outputs: Any) -> bool:
        """Whether they are of all samples of the rank's part, and not of some."""
        shape: Any = getattr(outputs, "shape", ())
        rows = shape[0] if len(shape) > 0 else 0
        whole = self._rows or 0
        return rows is None or (whole > 0 and rows > 0 and rows % whole == 0)

    def is_of_batch(self, kind: Kind | None) -> bool:
        """Whether a loss of this kind is known to be of all samples of the part."""
        return kind is not None or (self.knows_loss and not hasattr(self.share, "graph"))

    def kind_of(self, losses: list[Any]) -> Kind | None:
        """Of their sum, which is differentiated."""
        return _one_of(set(map(self._kind_of, losses)))

    def known_losses(self) -> list[Any]:
        """Those of the step whose kind is known."""
        return [loss for loss, _ in self._known.values()]

    def _kind_of(self, number: Any) -> Kind | None:
        known = {key: kind for key, (_, kind) in self._known.items()}
        return known[id(number)] if id(number) in known else kind_of(number, known)

    def see(self, losses: list[Any], gradients: list[Any]) -> None:
        """A tape has given this rank's own gradients."""
        self._kinds |= set(map(self._kind_of, losses))
        self._gradients += gradients

    def factor_of(self, value: Any) -> Any:
        """Beside the weight, of a number that the step computes."""
        return self._factor(self._kind_of(value))

    def _factor(self, kind: Kind | None) -> Any:
        if kind is not Kind.SUM:
            return 1.0
        count, total = self.count_and_total()
        return total / count

    def tell_of_loss(self, kind: Kind | None) -> None:
        """Says once that the step has a loss whose use of samples is not known."""
        has_graph = hasattr(self.share, "graph")  # of which all is known that can be
        if kind is None and (has_graph or not self.knows_loss):
            self.say_once(_OF_LOSS)

    def one_weighed(self, gradient: Any, kind: Kind | None) -> Any:
        """Of a loss of this kind."""
        if gradient is None:
            return None
        if hasattr(gradient, "dense_shape"):  # tf.IndexedSlices
            values = self.one_weighed(gradient.values, kind)
            return type(gradient)(values, gradient.indices, gradient.dense_shape)
        dtype = keras.backend.standardize_dtype(gradient.dtype)
        exact = dtype if dtype == "float64" else "float32"
        weight = self.weight(exact) * keras.ops.cast(self._factor(kind), exact)
        return keras.ops.cast(keras.ops.cast(gradient, exact) * weight, dtype)

    @contextmanager
    def hooked(self, variables: Iterable[Any]) -> Iterator[None]:
        """On PyTorch, where gradients are reduced while autograd computes others."""
        weight = float(self.weight("float64")) if self.weighs_gradients else 1.0
        with self.hooks.weighing(variables, weight):
            yield
        if self.weighs_gradients:
            self.tell_of_loss(None)

    @contextmanager
    def of(self, shared: Shared) -> Iterator[None]:
        self.share, self.total = shared.share, shared.total
        arrays = keras.tree.flatten(shared.batch)
        shapes: list[Any] = [getattr(each, "shape", ()) for each in arrays]
        self._rows = next((shape[0] for shape in shapes if len(shape) > 0), None)
        self.knows_loss = self.is_not_finite = False
        self._known, self._kinds, self._gradients = {}, set(), []
        self.reduced, self.given_back = set(), {}
        _running.append(self)
        try:
            yield
        finally:
            _running.pop()
            self.share = self.total = None
            self._known, self._gradients, self.given_back = {}, [], {}

    @contextmanager
    def holding(self, shared: Shared) -> Iterator[list[Any]]:
        """Gradients that the optimizer gets meanwhile come here, and update nothing."""
        held: list[Any] = []
        self.held = held
        try:
            with self.of(shared):
                yield held
        finally:
            self.held = None


def _one_of(kinds: set[Kind | None]) -> Kind | None:
    return next(iter(kinds)) if len(kinds) == 1 else None


def _is_as_backward_left_it(gradient: Any, parameter: Any) -> bool:
    """PyTorch counts what writes into a tensor."""
    return gradient is None or (gradient is parameter.grad and gradient._version == 0)


_running: list[Steps] = []


def running() -> Steps | None:
    """Returns the steps of the model whose step runs or is traced."""
    return _running[-1] if _running else None


def weigh_loss(optimizer: Any, steps: Steps) -> None:
    """From now on the optimizer scales losses by the weight of the step's share, too, in a step of
    Keras' own."""
    own = type(optimizer).scale_loss.__get__(optimizer)
    optimizer.scale_loss = lambda loss: steps.scaled(own(loss))


def _axes(value: Any) -> int:
    """How many; -1 where TensorFlow does not know."""
    shape: Any = getattr(value, "shape", ())
    return -1 if getattr(shape, "rank", 0) is None else len(shape)
