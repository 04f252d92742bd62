"""Whether gradients are finite: one number that goes with them, eagerly and in graphs.

Sums of gradients are not finite where one of their numbers is not. In a graph a branch behind the
reduction tells the other ranks of it; it runs only where some rank's flag is up. No reduced
gradient is there before it, so a session of TensorFlow 1 that is asked for one runs it, too.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from farandole._numerics import INFINITE, NAN, Found
from farandole.common._numerics import numerics_of
from farandole.common._process_set import ProcessSet


def scales_losses() -> bool:
    """Whether the program's losses may be scaled. Infinities, and NaN that come of them, are then
    no fault: the user of the gradients looks for them. A tape does not see which user that is."""
    if tf.config.optimizer.get_experimental_options().get("auto_mixed_precision"):
        return True  # of TensorFlow 1, whose rewriting of graphs scales losses
    keras: Any = sys.modules.get("keras")
    policy = keras.mixed_precision.global_policy() if hasattr(keras, "mixed_precision") else None
    return getattr(policy, "compute_dtype", None) == "float16"


class FiniteCheck:
    """The check of one reduction's gradients.

    Args:
        label: of the gradients.
        names: of all variables.
        looked: for each gradient its variable's position, and its values as they are sent.
    """

    def __init__(
        self,
        label: str,
        names: Sequence[str],
        process_set: ProcessSet,
        looked: Sequence[tuple[int, Any]],
    ) -> None:
        self._how = (label, tuple(names), process_set)
        rows = [(i, tensor) for i, tensor in looked if tensor.dtype.is_floating]
        self._places = [i for i, _ in rows]
        sums = [_sum(tensor) for _, tensor in rows]
        self._sums = tf.stack(sums) if sums else tf.zeros([0])
        total = tf.reduce_sum(self._sums, keepdims=True)
        self.flag = tf.cast(tf.logical_not(tf.math.is_finite(total)), tf.float32)

    def judge(self, flag: Any) -> list[Any]:
        """Collective if the flag is up on some rank.

        Args:
            flag: that of all ranks.

        Returns:
            In a graph, what the step has to wait for.

        Raises:
            NumericsError: eagerly; in a graph its text is that of the error of an op.
        """
        if tf.executing_eagerly():
            if flag[0].numpy() != 0:
                self._report(self._sums)
            return []

        def tell() -> Any:
            with tf.control_dependencies([tf.py_function(self._report, [self._sums], [])]):
                return tf.constant(True)

        return [tf.cond(flag[0] > 0, tell, lambda: tf.constant(False))]

    def _report(self, sums: Any) -> None:
        values = sums.numpy()
        bad = np.flatnonzero(~np.isfinite(values))
        mine = None
        if len(bad):
            at = int(bad[-1])  # the last variable's gradient comes first
            mine = Found(self._places[at], NAN if np.isnan(values[at]) else INFINITE)
        numerics_of(*self._how).report(mine)


def _sum(tensor: Any) -> Any:
    wide = tf.cast(tensor, tf.float32) if tensor.dtype.size == 2 else tensor
    return tf.cast(tf.reduce_sum(wide), tf.float32)
