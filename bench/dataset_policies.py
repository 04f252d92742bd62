"""The cost of a rank's part of a dataset: farandole run -np 2 -- python bench/dataset_policies.py

Steps of `fit` of a small network, which take turns in blocks: every rank makes the whole batch and
keeps its part (slice), or runs the maps for its own samples (index). Pipelines:

    costly map    a millisecond of arithmetic for a sample, as decoding an image takes

and, without a network, the cost of reading a batch:

    light map     bytes to numbers from 0 to 1, by both policies
    no map        from memory, whole or cut; of arrays, whole or a part

Each has a wall time, and the processor time of all threads of a rank, which other programs change
less. A ratio is of the two times for a step of a block, each of the rank with the longest one;
the result is the median over the blocks, with the interval of the sign test.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import farandole.keras as fd
from farandole._bench.statistics import median, median_interval
from farandole.common._objects import allgather_object
from farandole.data import Arrays, ReadBatches, split_dataset
from farandole.data._policy import Policy

PIXELS = 32 * 32 * 3
SLICE: Policy = "slice"
INDEX: Policy = "index"


def costly(image: Any, label: Any) -> Any:
    """A chain that nothing can be left out of."""
    matrix = tf.reshape(tf.cast(image, tf.float32), [32, 96]) / 255
    square = tf.matmul(matrix, matrix, transpose_b=True) / 96
    for _ in range(600):
        square = tf.tanh(tf.matmul(square, square))
    return tf.reshape(matrix + square[:, :1], [PIXELS]), label


def light(image: Any, label: Any) -> Any:
    return tf.cast(image, tf.float32) / 255, label


def images(samples: int) -> Any:
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (samples, PIXELS), dtype=np.uint8)
    return x, random.integers(0, 10, samples)


def network() -> Any:
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((PIXELS,)), keras.layers.Dense(10, "softmax")])


class Timed:
    """Blocks of steps."""

    steps: int

    def run(self) -> None:
        raise NotImplementedError

    def block(self) -> list[float]:
        """Seconds of a step, and of the processor."""
        began = time.perf_counter(), time.process_time()
        self.run()
        spent = time.perf_counter() - began[0], time.process_time() - began[1]
        ranks = allgather_object(spent, "seconds")
        return [max(each) / self.steps for each in zip(*ranks, strict=True)]


class Fit(Timed):
    """By a policy."""

    def __init__(self, make: Callable[[], Any], policy: Any, steps: int) -> None:
        self.data, self.steps = make(), steps
        self.model = fd.Model(network(), data_policy=policy)
        self.model.compile("sgd", "sparse_categorical_crossentropy")

    def run(self) -> None:
        self.model.fit(self.data, steps_per_epoch=self.steps, verbose=0)


class Read(Timed):
    """Batches that are only read."""

    def __init__(self, data: Iterator[Any], steps: int) -> None:
        self.data, self.steps = data, steps

    def run(self) -> None:
        for _ in range(self.steps):
            next(self.data)


def compare(what: str, ways: list[Any], blocks: int) -> None:
    for way in ways:
        way.block()
    times: list[list[list[float]]] = []  # by block and way: of the wall, of the processor
    for block in range(blocks):
        both: list[list[float]] = [[], []]
        for i in (0, 1) if block % 2 else (1, 0):
            both[i] = ways[i].block()
        times.append(both)
    if fd.rank() != 0:
        return
    for clock, kind in enumerate(("wall", "processor")):
        first, second = (1e3 * median([both[i][clock] for both in times]) for i in (0, 1))
        ratios = [both[1][clock] / both[0][clock] for both in times]
        middle, low, high, confidence = median_interval(ratios)
        print(
            f"{what}, {kind}: {first:.3f} and {second:.3f} ms, {middle:.3f} of it "
            f"({low:.3f} to {high:.3f} with {confidence:.0%})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--batch", type=int, default=64, help="samples of all ranks")
    parser.add_argument("--steps", type=int, default=24, help="in a block")
    arguments = parser.parse_args()
    fd.init()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    batch, steps = arguments.batch, arguments.steps
    arrays = images(batch * 16)

    def source() -> Any:
        return tf.data.Dataset.from_tensor_slices(arrays)

    for name, function, calls in (
        ("costly map", costly, None),
        ("costly map in parallel", costly, tf.data.AUTOTUNE),
    ):

        def make(function: Any = function, calls: Any = calls) -> Any:
            return source().map(function, num_parallel_calls=calls).batch(batch).repeat()

        ways = [Fit(make, policy, steps) for policy in (SLICE, INDEX)]
        compare(f"fit, {name}, slice and index", ways, arguments.blocks)
    scaled = source().map(light).batch(batch).repeat()
    reads = [
        Read(iter(split_dataset(scaled, ReadBatches(), policy=policy)), 10 * steps)
        for policy in (SLICE, INDEX)
    ]
    compare("a batch of a light map, slice and index", reads, arguments.blocks)
    whole = source().batch(batch).repeat()
    part = split_dataset(whole, ReadBatches())
    reads = [Read(iter(each), 20 * steps) for each in (whole.prefetch(2), part)]
    compare("a batch from memory, whole and cut", reads, arguments.blocks)
    cut = Arrays(arrays, batch, shuffle=True)

    def endless(parts: Callable[[int], Any]) -> Iterator[Any]:
        epoch = 0
        while True:
            yield from parts(epoch)
            epoch += 1

    ways = [
        Read(endless(lambda epoch: cut.parts(epoch, 1, 0)), 20 * steps),
        Read(endless(cut.parts), 20 * steps),
    ]
    compare("a batch of arrays, whole and a part", ways, arguments.blocks)


if __name__ == "__main__":
    main()
