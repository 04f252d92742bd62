"""A step on one rank: what a stage computes, between the messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from farandole._core import InvalidArgument
from farandole._numerics import Found, first_found
from farandole.data._tree import leaves, map_leaves, samples
from farandole.keras._pipeline.gradients import Engine, Made
from farandole.keras._pipeline.replicas import Replicas
from farandole.keras._pipeline.tensors import array_of, form_of, gradients_of
from farandole.pipeline._places import Place
from farandole.pipeline._shares import micro_batches
from farandole.pipeline._wire import Form, Message
from farandole.pipeline._work import ForwardWork

_NOTHING = Form(None, ())


class Stage(NamedTuple):
    """The objects that stay the same from step to step."""

    place: Place
    module: Any  # a Keras model
    engine: Engine
    micro_batches: int


class StageWork(ForwardWork):
    """Forward only: what all steps have in common.

    Args:
        place: of this rank.
        make: makes the `Stage`; if it raises, the step fails.
        batch: inputs, targets and weights of the batch of all replicas.
    """

    kind = "predict"
    training = False

    _stage: Stage

    def __init__(
        self, place: Place, replicas: Replicas, make: Callable[[], Stage], batch: Sequence[Any]
    ) -> None:
        super().__init__()
        self._place, self._replicas, self._make = place, replicas, make
        self._x, self._y, self._w = [*batch, None, None][:3]
        self._parts: list[slice] = []
        self._total = 0

    def begin(self) -> Sequence[int | None]:
        self._stage = self._make()
        self._total = samples(
            [each for each in (self._x, self._y) if each is not None], "the batch"
        )
        if self._total == 0:
            raise InvalidArgument("the batch is empty")
        self._parts = micro_batches(self._total, self._stage.place, self._stage.micro_batches)
        return [part.stop - part.start for part in self._parts]

    def _cut(self, tree: Any, k: int) -> Any:
        return map_leaves(lambda leaf: keras.ops.convert_to_tensor(leaf[self._parts[k]]), tree)

    def _inputs(self, k: int, received: Message | None) -> Any:
        """Inputs in the form that this stage's model takes."""
        if received is None:
            return self._cut(self._x, k)
        tensors = [keras.ops.convert_to_tensor(each) for each in received.tensors]
        return tensors if len(self._stage.module.inputs) > 1 else tensors[0]

    def forward(self, k: int, samples: int, received: Message | None) -> tuple[Form, list[Any]]:
        made = self.computed(k, samples, received)
        if made.loss is not None:
            self._loss += float(keras.ops.convert_to_numpy(made.loss))
        if self._stage.place.is_last:
            return _NOTHING, []
        form, arrays = form_of(made.outputs, differentiable=self.training)
        self._bytes = sum(each.nbytes for each in arrays)
        if received is not None:
            self._bytes += sum(each.nbytes for each in received.tensors)
        return form, list(arrays)

    def computed(self, k: int, samples: int, received: Message | None) -> Made:
        del samples
        outputs = self._stage.engine.predict(self._inputs(k, received))
        if self._stage.place.is_last:
            self.outputs[k] = outputs
        return Made(outputs, None, None)

    def backward(self, k: int, gradients: Message | None) -> tuple[Form, list[Any]]:
        raise NotImplementedError


class LossWork(StageWork):
    """Forward, to the loss of the whole batch, and to metrics."""

    kind = "evaluate"

    def begin(self) -> Sequence[int | None]:
        if self._place.is_last and self._y is None:
            raise InvalidArgument("the batch has no targets, of which the loss is computed")
        return super().begin()

    def _share(self, samples: int) -> Any:
        """See Computing."""
        return np.array([samples / self._total, self._total], np.float32)

    def _data(self, k: int) -> tuple[Any, Any]:
        """Targets and weights, where the loss is computed."""
        if not self._stage.place.is_last:
            return None, None
        return self._cut(self._y, k), self._cut(self._w, k)

    def computed(self, k: int, samples: int, received: Message | None) -> Made:
        return self._stage.engine.test(
            self._inputs(k, received), *self._data(k), self._share(samples)
        )


class TrainWork(LossWork):
    """Forward and backward; at the end the gradients of the whole batch.

    Args:
        looks: whether to check that this rank's gradients are finite.
    """

    kind = "step"
    training = True

    def __init__(self, *given: Any, looks: bool) -> None:
        super().__init__(*given)
        self._kept: dict[int, tuple[Made, Message | None]] = {}
        self._looks = looks
        self.gradients: list[Any] = []
        self.found: Found | None = None  # not finite in this rank's, before they are summed

    def begin(self) -> Sequence[int | None]:
        counts = super().begin()
        self.gradients = [None] * len(self._stage.module.trainable_variables)
        return counts

    def computed(self, k: int, samples: int, received: Message | None) -> Made:
        made = self._stage.engine.train(
            self._inputs(k, received), *self._data(k), self._share(samples)
        )
        self._kept[k] = made, received
        return made

    def backward(self, k: int, gradients: Message | None) -> tuple[Form, list[Any]]:
        made, received = self._kept.pop(k)
        given = None if gradients is None else self._by_output(made, gradients)
        of_inputs, of_variables = self._stage.engine.backward(made, given)
        for i, gradient in enumerate(of_variables):
            if gradient is not None:
                before = self.gradients[i]
                self.gradients[i] = gradient if before is None else before + gradient
        if received is None:
            return _NOTHING, []
        assert received.form is not None
        return gradients_of(received.form, of_inputs)

    @staticmethod
    def _by_output(made: Made, gradients: Message) -> list[Any]:
        """The gradient of each output; None for an output without one."""
        tensors = iter(gradients.tensors)
        found = []
        for output in made.outputs:
            floating = keras.backend.is_float_dtype(keras.backend.standardize_dtype(output.dtype))
            array = next(tensors) if floating else None
            found.append(None if array is None else keras.ops.convert_to_tensor(array))
        return found

    def is_finite(self) -> bool:
        return self.found is None

    def end(self, *, failed: bool) -> None:
        if self._looks and not failed:
            there = [(i, each) for i, each in enumerate(self.gradients) if each is not None]
            self.found = first_found((i, array_of(each)) for i, each in reversed(there))
        self.gradients = self._replicas.summed(self.gradients, failed=failed)

    def forget(self) -> None:
        super().forget()
        self._kept.clear()


def count_of(batch: Sequence[Any]) -> int:
    """The number of samples."""
    return int(leaves(batch[0])[0].shape[0])
