"""The computation of a stage on a micro-batch: one function for all backends."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras

from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.data._tree import leaves

_MEANS = ("sum_over_batch_size", "mean")


def reduction_of(loss: Any) -> str:
    """How compile()'s losses reduce over samples: "mean" or "sum". Raises InvalidArgument."""
    found = set[str]()
    for each in leaves(loss):
        reduction = getattr(each, "reduction", "sum_over_batch_size")
        if reduction not in (*_MEANS, "sum"):
            raise InvalidArgument(
                f"loss {shown(getattr(each, 'name', each))} has reduction={reduction!r}, whose "
                "divisor a micro-batch does not know\n"
                "  advice: reduction='sum_over_batch_size' or 'sum'"
            )
        found.add("sum" if reduction == "sum" else "mean")
    if len(found) > 1:
        raise InvalidArgument(
            "losses have reductions 'sum' and 'sum_over_batch_size'; in a Pipeline all have one"
        )
    return found.pop() if found else "mean"


class Computing:
    """The computation of one stage.

    Args:
        module: its model, compiled.
        reduction: how its losses reduce over samples.
    """

    def __init__(self, module: Any, reduction: str, *, is_last: bool) -> None:
        self.module, self.is_last = module, is_last
        self.reduction = reduction
        self._share: Any = None  # inside a computation

    def follow_losses(self) -> None:
        """Updates Keras' mean of each output's loss by micro-batches. Called once, when it exists.

        With several outputs Keras keeps these means over the batches, weighted by their samples, or
        by 1 in a program that does not know how many there are (TensorFlow's)."""
        compiled = self.module._compile_loss
        for mean in [] if compiled is None else compiled.metrics:
            mean.update_state = partial(self._add, mean)

    def _add(self, mean: Any, value: Any, sample_weight: Any = None) -> None:
        del sample_weight
        share, total = self._share[0], self._share[1]
        compiles = keras.backend.backend() == "tensorflow" and not self.module.run_eagerly
        weight = 1.0 if compiles else total
        value = keras.ops.cast(value, mean.dtype)
        mean.total.assign_add(value * weight * (share if self.reduction == "mean" else 1.0))
        mean.count.assign_add(share * weight)

    def train(self, inputs: Any, y: Any, w: Any, share: Any) -> tuple[list[Any], Any]:
        """Outputs to send, and the part of the whole batch's loss that comes from this stage and
        micro-batch: None if there is none."""
        return self._computed(inputs, y, w, share, training=True)

    def test(self, inputs: Any, y: Any, w: Any, share: Any) -> tuple[list[Any], Any]:
        """The same in inference."""
        return self._computed(inputs, y, w, share, training=False)

    def predict(self, inputs: Any) -> list[Any]:
        """Outputs, flat."""
        outputs: list[Any] = keras.tree.flatten(self.module(inputs, training=False))
        return outputs

    def _computed(
        self, inputs: Any, y: Any, w: Any, share: Any, *, training: bool
    ) -> tuple[list[Any], Any]:
        """`share`: this micro-batch's fraction of the batch's samples, and the number of these."""
        module, self._share = self.module, share
        share = share[0]
        outputs = module(inputs, training=training)
        beside = sum(module.losses) if module.losses else None  # of weights and activities
        if not self.is_last:
            return keras.tree.flatten(outputs), None if beside is None else beside * share
        loss = module.compute_loss(
            x=inputs, y=y, y_pred=outputs, sample_weight=w, training=training
        )
        module.compute_metrics(inputs, y, outputs, w)
        if self.reduction == "mean":
            return [], loss * share
        if beside is None:
            return [], loss
        return [], (loss - beside) + beside * share
