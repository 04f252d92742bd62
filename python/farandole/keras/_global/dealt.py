"""Batches that rank 0 reads and deals out.

Reading is collective, so no rank may read ahead of the others: a batch that one asks for and
another never does would be waited for. Keras reads a PyDataset when it needs a batch, but on
TensorFlow it reads ahead; there it gets a dataset that does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import keras

from farandole.data import FromRank0, Part
from farandole.data._tree import map_leaves
from farandole.keras._bases import PyDataset
from farandole.keras._global.arrays import marked_parts
from farandole.keras._global.batches import sample, weighted
from farandole.keras._global.how import How, Source, as_tuple
from farandole.keras._global.saying import say_once

_ENDED = (
    "rank 0's batches, of which it did not know how many there are, ended within an epoch, and "
    "begin anew there: in one process Keras ends the epoch\n"
    "  advice: steps that divide the batches, or data with a length"
)


def of_rank_0(x: FromRank0, how: How) -> Source:
    """Collective."""
    if how.policy in ("index", "slice"):
        raise how.error(
            f"policy {how.policy!r} does not go with a FromRank0, which rank 0 reads: that is "
            "'leader', or 'auto'"
        )
    length = x.length()
    if length is None and not how.steps:
        raise how.error(
            "rank 0 does not know how many batches there are\n"
            "  advice: pass steps_per_epoch, steps or validation_steps"
        )
    dealt = _Dealt(x, how, length)
    rows = [f"{length} batches of rank 0"]
    data = _in_step(dealt) if keras.backend.backend() == "tensorflow" else dealt
    return Source(data, lambda: sample(dealt.first[0]), rows, dealt.first[0].share.total)


class _Dealt(PyDataset):
    """This rank's parts, one after the other."""

    def __init__(self, own: FromRank0, how: How, length: int | None) -> None:
        super().__init__()
        self._own, self._how, self._length = own, how, length
        self._pass = self._new_pass()
        self._dealt = 0
        self.first = self._next()
        self._is_first_next = True  # it has been read, to know what batches look like

    @property
    def num_batches(self) -> int | None:
        return self._length

    def __getitem__(self, index: int) -> Any:
        if index == 0 and self._is_first_next:
            self._is_first_next = False
            return self.marked(self.first)
        if index == 0:
            self._pass = self._new_pass()
        return self.marked(self._next())

    def marked(self, parts: list[Part]) -> Any:
        return marked_parts(parts, self._how.block)

    def _new_pass(self) -> Iterator[list[Part]]:
        return self._own.blocks(self._how.here.parts)

    def _next(self) -> list[Part]:
        parts = next(self._pass, None)
        if parts is None:  # of a pass whose length nobody knew
            if self._how.steps and self._dealt % self._how.steps:
                say_once(_ENDED)
            self._pass = self._new_pass()
            parts = next(self._pass, None)
        if parts is None:
            raise self._how.error("rank 0 has no more batches")
        self._dealt += 1
        return [weighted(Part(as_tuple(each.batch), each.share), self._how) for each in parts]

    def __iter__(self) -> Iterator[Any]:
        length = self.num_batches
        return (self[i] for i in (itertools.count() if length is None else range(length)))


def _in_step(dealt: _Dealt) -> Any:
    """A tf.data.Dataset that reads a batch when it is asked for one."""
    import tensorflow as tf

    def spec(leaf: Any) -> Any:
        return tf.TensorSpec((None, *leaf.shape[1:]), tf.dtypes.as_dtype(leaf.dtype))

    signature = map_leaves(spec, dealt.marked(dealt.first))
    data = tf.data.Dataset.from_generator(lambda: iter(dealt), output_signature=signature)
    if dealt.num_batches is not None:
        data = data.apply(tf.data.experimental.assert_cardinality(dealt.num_batches))
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return data.with_options(options)
