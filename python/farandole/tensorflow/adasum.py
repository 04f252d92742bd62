"""Adasum in programs of TensorFlow; see ``farandole.torch.adasum`` for what it is.

Each rank folds one part of every tensor, so that all get the same bits whatever threads TensorFlow
sums with: the parts go to their ranks by an all-to-all, dot products of parts become those of whole
tensors by an all-reduce a level of the tree, and an all-gather brings the parts together.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from farandole.common._process_set import members_of
from farandole.tensorflow._calls import Request, run
from farandole.tensorflow._graph import goes_on, refused

# Below it a tensor counts as zero, and the other one is taken as it is.
_LEAST_NORM = 2.0**-511


def adasum_together(
    tensors: Sequence[tf.Tensor],
    name: str | None,
    number: int,
    beside: Sequence[tf.Tensor] = (),
) -> list[tf.Tensor]:
    """The Adasum of each tensor over a process set, in its dtype; folds are in float64.

    Args:
        beside: numbers whose sums over the ranks are wanted, too. They go with the first dot
            products, and come last.

    Raises:
        Refused: a tensor is not of a floating dtype.
    """
    for i, tensor in enumerate(tensors):
        if not tensor.dtype.is_floating:
            raise refused(f"tensor {i} is of {tensor.dtype.name}; op=Adasum takes floating dtypes")
    if goes_on():
        raise refused(
            "op=Adasum in a graph of an elastic job: the graph is made for one number of ranks\n"
            "  advice: reduce eagerly, or with op=Average"
        )
    size = len(members_of(number)[0])
    if size == 1:
        return [tf.identity(tensor) for tensor in [*tensors, *beside]]
    results: list[tf.Tensor] = list(tensors)
    sums: list[tf.Tensor] = []
    for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        label = f"{name or 'adasum'}, {dtype.name}"
        chosen, others = [tensors[i] for i in places], () if sums else beside
        folded, summed = _of_one_dtype(chosen, label, number, size, others)
        sums += summed
        for i, result in zip(places, folded, strict=True):
            results[i] = result
    return results + sums


def _of_one_dtype(
    tensors: Sequence[tf.Tensor], label: str, number: int, size: int, beside: Sequence[tf.Tensor]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The folded tensors, and the sums."""
    widths = [-(-tf.size(tensor) // size) for tensor in tensors]  # of a rank's part
    columns = [
        tf.reshape(tf.pad(tf.reshape(tensor, [-1]), [[0, w * size - tf.size(tensor)]]), [size, w])
        for tensor, w in zip(tensors, widths, strict=True)
    ]
    sent = tf.concat(columns, 1)
    equally = tf.zeros([0], tf.int64)
    note = "\n".join(f"tensor {i} {tensor.shape}" for i, tensor in enumerate(tensors))
    parts = run(Request("all_to_all", [sent], label, number, splits=equally, note=note))[0]
    rows = tf.unstack(tf.cast(tf.reshape(parts, [size, sum(widths)]), tf.float64), size)
    part, sums = _fold(rows, widths, label, number, beside)
    mine = tf.cast(part, sent.dtype)
    table = run(Request("all_gather", [mine[None]], label, number))[0]
    folded = [
        tf.reshape(tf.reshape(column, [-1])[: tf.size(tensor)], tf.shape(tensor))
        for tensor, column in zip(tensors, tf.split(table, widths, 1), strict=True)
    ]
    return folded, sums


def _fold(
    rows: list[tf.Tensor],
    widths: Sequence[tf.Tensor],
    label: str,
    number: int,
    beside: Sequence[tf.Tensor],
) -> tuple[tf.Tensor, list[tf.Tensor]]:
    """A part of the result, of all ranks' parts; and the sums."""
    sums: list[tf.Tensor] = []
    stride = 1
    while stride < len(rows):
        pairs = [(a, a + stride) for a in range(0, len(rows) - stride, 2 * stride)]
        products = tf.stack([_products(rows[a], rows[b], widths) for a, b in pairs])
        sent = [products, *beside] if stride == 1 else [products]
        whole, *also = run(Request("all_reduce", sent, f"{label}, level {stride}", number))
        sums += also
        for i, (a, b) in enumerate(pairs):
            dot, norm_a, norm_b = (tf.repeat(whole[i, :, k], widths) for k in range(3))
            rows[a] = rows[a] * _share(dot, norm_a) + rows[b] * _share(dot, norm_b)
        stride *= 2
    return rows[0], sums


def _products(a: tf.Tensor, b: tf.Tensor, widths: Sequence[tf.Tensor]) -> tf.Tensor:
    """a·b, a·a and b·b of each tensor's part."""
    columns = zip(tf.split(a, widths), tf.split(b, widths), strict=True)
    return tf.stack(
        [[tf.reduce_sum(p * q) for p, q in ((x, y), (x, x), (y, y))] for x, y in columns]
    )


def _share(dot: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
    """How much of a tensor goes into the fold."""
    known = norm >= _LEAST_NORM
    return tf.where(known, 1 - dot / tf.where(known, norm, tf.ones_like(norm)) * 0.5, 1)
