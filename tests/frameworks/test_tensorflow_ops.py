"""The collectives on TensorFlow's tensors against numpy: eagerly, in functions, and gradients."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

import rank_cases
import tensorflow as tf
from adasum_reference import numpys_adasum
from rank_cases import make_tests, on_ranks

import farandole as fd
import farandole.tensorflow as hvd
from wrong_arguments import problems_in

DTYPES = [
    tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.uint8, tf.uint16, tf.uint32, tf.uint64,
    tf.int8, tf.int16, tf.int32, tf.int64,
]  # fmt: skip
OTHER_OPS = [hvd.Min, hvd.Max, hvd.Product, hvd.Adasum]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1000,)]
refused = functools.partial(rank_cases.refused, kind=tf.errors.InvalidArgumentError)


def numbers(shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Small integers: every sum and product of four is exact in every dtype."""
    return np.random.default_rng(17 * rank + 1).integers(0, 3, shape)


def mine(shape: tuple[int, ...], dtype: tf.DType) -> tf.Tensor:
    return tf.cast(tf.constant(numbers(shape, hvd.rank()), tf.int32), dtype)


def of_all(shape: tuple[int, ...]) -> np.ndarray:
    return np.stack([numbers(shape, r) for r in range(hvd.size())])


def same(a: tf.Tensor, b: Any) -> None:
    """Bit for bit, where b is exactly representable."""
    expected = tf.cast(tf.constant(np.asarray(b)), a.dtype)
    assert a.shape == expected.shape, (a.shape, expected.shape)
    assert np.array_equal(a.numpy(), expected.numpy()), (a, expected)


def both(call: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The results eagerly and in a function."""
    return [call(*arguments), tf.function(call)(*arguments)]


def every_way(call: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Also in a graph of TensorFlow 1, which runs nothing that the result does not need."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        feeds = [tf.compat.v1.placeholder(a.dtype, a.shape) for a in arguments]
        found = session.run(
            call(*feeds), {f: a.numpy() for f, a in zip(feeds, arguments, strict=True)}
        )
    return [*both(call, *arguments), tf.constant(found)]


@on_ranks(1, 2, 3)
def allreduce_is_right_for_every_dtype_and_op() -> None:
    for dtype in DTYPES:
        for shape in SHAPES:
            whole, x = of_all(shape), mine(shape, dtype)
            expected = {
                hvd.Sum: whole.sum(0),
                hvd.Min: whole.min(0),
                hvd.Max: whole.max(0),
                hvd.Product: whole.prod(0),
            }
            for op, right in expected.items():
                same(hvd.allreduce(x, op=op), right)
            mean = hvd.allreduce(x)
            if dtype.is_floating:
                np.testing.assert_allclose(
                    tf.cast(mean, tf.float64).numpy(),
                    whole.mean(0),
                    rtol=1e-2 if dtype.size == 2 else 1e-6,
                )
            else:
                same(mean, whole.sum(0) // hvd.size())


@on_ranks(1, 2, 3)
def every_collective_is_right_in_a_function() -> None:
    ranks = range(hvd.size())

    @tf.function
    def all_of_them(x: tf.Tensor, rows: tf.Tensor, splits: tf.Tensor) -> Any:
        return (
            hvd.allreduce(x, op=hvd.Sum),
            hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0),
            hvd.allgather(rows),
            hvd.broadcast(x, hvd.size() - 1),
            hvd.reducescatter(x, op=hvd.Sum),
            *hvd.alltoall(rows, splits),
            *hvd.grouped_allreduce([x, tf.cast(x, tf.float64)], op=hvd.Max),
            *hvd.grouped_allgather([rows, x]),
            *hvd.grouped_reducescatter([x, x + 1], op=hvd.Sum),
        )

    for step in range(3):
        x = np.arange(10.0).reshape(5, 2) * (hvd.rank() + 1) + step
        all_x = [np.arange(10.0).reshape(5, 2) * (r + 1) + step for r in ranks]
        rows = [np.full((r + hvd.size(), 3), r + step) for r in ranks]
        splits = [[1] * (hvd.size() - 1) + [1 + r] for r in ranks]
        results = all_of_them(
            tf.constant(x, tf.float32),
            tf.constant(rows[hvd.rank()], tf.int64),
            tf.constant(splits[hvd.rank()]),
        )
        total = sum(all_x)
        part = np.array_split(total, hvd.size())[hvd.rank()]
        part_1 = np.array_split(total + hvd.size(), hvd.size())[hvd.rank()]
        begins = [sum(splits[r][: hvd.rank()]) for r in ranks]
        counts = [splits[r][hvd.rank()] for r in ranks]
        moved = np.concatenate(
            [rows[r][b : b + n] for r, b, n in zip(ranks, begins, counts, strict=True)]
        )
        expected = [
            total, total * 2, np.concatenate(rows), all_x[-1], part, moved, counts,
            np.max(all_x, 0), np.max(all_x, 0), np.concatenate(rows), np.concatenate(all_x),
            part, part_1,
        ]  # fmt: skip
        for result, right in zip(results, expected, strict=True):
            same(result, right)
        assert results[6].dtype == tf.int32


@on_ranks(2)
def shapes_are_known_while_a_function_is_made() -> None:
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def look(x: tf.Tensor) -> tf.Tensor:
        assert hvd.allreduce(x).shape.as_list() == [None, 3]
        assert hvd.allgather(x).shape.as_list() == [None, 3]
        y = tf.ensure_shape(x, [5, 3])
        assert hvd.reducescatter(y).shape.as_list() == [3 - hvd.rank(), 3]
        rows, received = hvd.alltoall(y, [2, 3])
        assert rows.shape.as_list() == [None, 3]
        assert received.shape.as_list() == [2]
        return hvd.broadcast(y, 0)

    same(look(tf.ones([5, 3])), np.ones([5, 3]))


@on_ranks(2)
def tensors_are_left_as_they_are() -> None:
    x = tf.constant([1.0, 2.0])
    for result in both(lambda t: hvd.allreduce(t, op=hvd.Sum), x):
        same(result, [2.0, 4.0])
    same(x, [1.0, 2.0])
    v = tf.Variable([3.0])

    @tf.function
    def around() -> tuple[tf.Tensor, tf.Tensor]:
        total = hvd.allreduce(v, op=hvd.Sum)
        return total, v + 0.0

    total, kept = around()
    same(total, [6.0])
    same(kept, [3.0])


@on_ranks(2)
def ranks_come_in_any_order() -> None:
    """Behind work of different length on each rank, the executor runs ops in any order."""
    count = 40

    def slowed(i: int, x: tf.Tensor) -> tf.Tensor:
        y = tf.random.normal([48 + 16 * ((i * 7 + hvd.rank() * 13) % 5)] * 2)
        for _ in range((i * 5 + hvd.rank() * 3) % 5):
            y = tf.linalg.matmul(y, y) * 1e-3
        return x + 0 * tf.reduce_sum(y)

    @tf.function
    def step(xs: list[tf.Tensor]) -> list[tf.Tensor]:
        return [hvd.allreduce(slowed(i, x), op=hvd.Sum) for i, x in enumerate(xs)]

    for _ in range(5):
        results = step([tf.fill([i + 1], float(i + 100 * hvd.rank())) for i in range(count)])
        for i, result in enumerate(results):
            same(result, np.full(i + 1, 2 * i + 100.0))


@on_ranks(2)
def equal_operations_are_neither_merged_nor_folded() -> None:
    """Rank 1 does eagerly, one by one, what rank 0's function must do in every call."""

    @tf.function
    def equal(x: tf.Tensor) -> list[tf.Tensor]:
        twice = [hvd.allreduce(x, op=hvd.Sum, name="equal") for _ in range(2)]
        return [*twice, hvd.allreduce(tf.constant([1.0]), op=hvd.Sum, name="constant")]

    for step in range(3):
        others = [10.0 + step, 20.0 + step, 30.0 + step]
        if hvd.rank() == 0:
            results = equal(tf.constant([1.0]))
        else:
            function = "equal_operations_are_neither_merged_nor_folded.equal"
            results = [
                hvd.allreduce(tf.constant([x]), op=hvd.Sum, name=f"{function}/{name}")
                for name, x in zip(["equal", "equal_1", "constant"], others, strict=True)
            ]
        for result, x in zip(results, others, strict=True):
            same(result, [1.0 + x])


@on_ranks(2)
def a_result_that_one_rank_does_not_use_is_still_reduced() -> None:
    @tf.function
    def use(x: tf.Tensor) -> tf.Tensor:
        total = hvd.allreduce(x, op=hvd.Sum)
        return total if hvd.rank() == 0 else x

    for step in range(3):
        same(use(tf.constant([1.0 + step])), [2.0 + 2 * step] if hvd.rank() == 0 else [1.0 + step])


@on_ranks(2, 3)
def loops_and_branches_work() -> None:
    @tf.function
    def loop(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(4):
            x = hvd.allreduce(x, op=hvd.Sum)
        return x

    same(loop(tf.ones(3)), np.full(3, float(hvd.size() ** 4)))

    @tf.function
    def parallel(rows: tf.Tensor) -> tf.Tensor:
        return tf.map_fn(lambda row: hvd.allreduce(row, op=hvd.Sum, name="row"), rows)

    rows = np.arange(60.0).reshape(30, 2)
    same(
        parallel(tf.constant(rows, tf.float32) * (hvd.rank() + 1)),
        rows * sum(range(hvd.size() + 1)),
    )

    @tf.function
    def branch(x: tf.Tensor, reduce: tf.Tensor) -> tf.Tensor:
        return tf.cond(reduce, lambda: hvd.allreduce(x, op=hvd.Sum), lambda: x)

    same(branch(tf.ones(2), tf.constant(True)), np.full(2, float(hvd.size())))
    same(branch(tf.ones(2), tf.constant(False)), np.ones(2))


def late(x: tf.Tensor, turns: int) -> tf.Tensor:
    y = tf.random.normal([200, 200])
    for _ in range(turns):
        y = tf.linalg.matmul(y, y) * 1e-3
    return x + 0 * tf.reduce_sum(y)


@on_ranks(2, 3)
def calls_of_one_function_are_not_mixed_up() -> None:
    """Its operations are called the same in both; ranks are ready for them in opposite orders."""
    size, rank = hvd.size(), hvd.rank()
    weight = tf.Variable(tf.ones([4, 1]))  # is read alone: nothing else orders the calls

    @tf.function
    def encode(x: tf.Tensor) -> tf.Tensor:
        return hvd.allgather(tf.linalg.matmul(x, weight))

    @tf.function
    def step(x: tf.Tensor) -> list[tf.Tensor]:
        return [encode(late(x, 8 * rank)), encode(late(10 * x, 8 * (size - rank)))]

    x = tf.ones([1, 4]) * (rank + 1.0)
    of_ranks = 4 * np.arange(1.0, size + 1).reshape(-1, 1)
    same(encode(x), of_ranks)
    for _ in range(5):
        for view, factor in zip(step(x), (1, 10), strict=True):
            same(view, factor * of_ranks)


@on_ranks(2, 3)
def gradients_are_those_of_the_joined_program() -> None:
    size, rank = hvd.size(), hvd.rank()
    x = tf.constant(np.arange(6.0).reshape(3, 2) + rank, tf.float32)
    weight = (np.arange(6.0).reshape(3, 2) * (rank + 1)).astype(np.float32)
    all_weights = [np.arange(6.0).reshape(3, 2) * (r + 1) for r in range(size)]

    def of(function: Callable[[tf.Tensor], tf.Tensor]) -> list[tf.Tensor]:
        def run(t: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                tape.watch(t)
                y = tf.reduce_sum(function(t))
            return tape.gradient(y, t)

        return every_way(run, x)

    for gradient in of(lambda t: hvd.allreduce(t, op=hvd.Sum) * weight):
        same(gradient, sum(all_weights))
    for gradient in of(lambda t: hvd.allreduce(t, prescale_factor=2.0) * weight):
        np.testing.assert_allclose(gradient, sum(all_weights) / size * 2, rtol=1e-6)
    for gradient in of(lambda t: hvd.broadcast(t, 0) * weight):
        right = sum(all_weights) / size if rank == 0 else np.zeros((3, 2))
        np.testing.assert_allclose(gradient, right, rtol=1e-6)
    scale = np.arange(3.0 * size, dtype=np.float32)[:, None] * (rank + 1)
    for gradient in of(lambda t: hvd.allgather(t) * scale):
        own = np.arange(3.0 * rank, 3.0 * rank + 3)[:, None] * sum(range(size + 1)) / size
        np.testing.assert_allclose(gradient, own * np.ones((3, 2)), rtol=1e-6)
    for gradient in of(lambda t: hvd.reducescatter(t, op=hvd.Sum) * (rank + 1.0)):
        owner = np.concatenate(
            [
                np.full(len(part), r + 1.0)
                for r, part in enumerate(np.array_split(np.arange(3), size))
            ]
        )
        np.testing.assert_allclose(gradient, owner[:, None] * size * np.ones((3, 2)), rtol=1e-6)
    even = tf.constant(np.arange(2.0 * size), tf.float32)

    def exchange(t: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(t)
            y = tf.reduce_sum(hvd.alltoall(t) * (rank + 1.0))
        return tape.gradient(y, t)

    for gradient in every_way(exchange, even):
        same(gradient, np.repeat(np.arange(size) + 1.0, 2))


@on_ranks(2)
def slices_are_gathered() -> None:
    rank = hvd.rank()

    def reduce(values: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
        slices = tf.IndexedSlices(values, indices, tf.constant([5, 2]))
        dense = tf.ones(2) * (rank + 1.0)
        joined, total = hvd.grouped_allreduce([slices, dense], op=hvd.Sum)
        same_total = tf.reduce_sum(total)
        return tf.convert_to_tensor(joined) + 0 * same_total

    values = tf.ones([1 + rank, 2]) * (rank + 1.0)
    indices = tf.constant([0, 3][: 1 + rank])
    expected = np.zeros((5, 2))
    expected[0] += 1 + 2
    expected[3] += 2
    for result in both(reduce, values, indices):
        same(result, expected)
    mean = hvd.allreduce(tf.IndexedSlices(values, indices, tf.constant([5, 2])))
    same(tf.convert_to_tensor(mean), expected / 2)


@on_ranks(1, 2, 3)
def rows_that_ranks_share_come_back_as_one() -> None:
    """Every dtype is covered, and means equal those of dense tensors."""
    rank, size = hvd.rank(), hvd.size()
    for dtype in DTYPES:
        signed = dtype.is_floating or not dtype.is_unsigned
        low = -5 if signed else 5
        values = tf.cast(tf.constant([[low], [3], [rank + 2]]), dtype)
        slices = tf.IndexedSlices(values, tf.constant([7, 1, 7]), tf.constant([9, 1]))
        total = [size * low + sum(r + 2 for r in range(size)), 3 * size]
        sums, dense = hvd.grouped_allreduce([slices, values], op=hvd.Sum)
        means = hvd.allreduce(slices)
        of_group, its_dense = hvd.grouped_allreduce([slices, values])
        for found, factor in ((sums, 1), (means, size), (of_group, size)):
            assert found.values.dtype == dtype
            assert found.indices.numpy().tolist() == [7, 1]
            right = np.array(total) / factor
            same(found.values[:, 0], right if dtype.is_floating else np.trunc(right).astype(int))
        assert dense.dtype == its_dense.dtype == dtype


@on_ranks(1, 2)
def a_long_batch_of_halves_does_not_stop_growing() -> None:
    count = 4096  # ones: in a half, 2048 and one is 2048
    ones = tf.IndexedSlices(tf.ones([count, 1], tf.float16), tf.zeros([count], tf.int64))
    for result in both(lambda: hvd.allreduce(ones, op=hvd.Sum).values):
        same(result, [[count * hvd.size()]])


@on_ranks(1, 2)
def what_has_no_meaning_for_slices_is_not_implemented() -> None:
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    table = tf.Variable(tf.ones([3, 2]), name="table")

    def gradient(op: int) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [1]))
        return hvd.DistributedGradientTape(tape, op=op).gradient(loss, [table])

    for call, pattern in (
        *((lambda op=op: hvd.allreduce(slices, op=op), "Average or Sum") for op in OTHER_OPS),
        *((lambda op=op: gradient(op), "'table' has tf.IndexedSlices") for op in OTHER_OPS),
        (lambda: hvd.allreduce(slices, prescale_factor=2.0), "without factors"),
        (lambda: hvd.allreduce(tf.IndexedSlices(tf.constant([[True]]), tf.constant([0]))), "bool"),
    ):
        refused(call, pattern)
        with pytest.raises(NotImplementedError, match=pattern) as caught:
            call()
        assert isinstance(caught.value, fd.Error)


@on_ranks(2)
def a_wrong_tensor_beside_slices_is_refused_before_they_are_sent() -> None:
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    if hvd.rank() == 0:  # nobody else knows of it
        refused(lambda: hvd.grouped_allreduce([slices, "text"]), "tensor 1 is of string")
    same(tf.convert_to_tensor(hvd.allreduce(slices)), [[1, 1], [0, 0], [0, 0]])


@on_ranks(2)
def dense_on_one_rank_and_slices_on_another_is_an_error_on_all() -> None:
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([5, 2]))
    value = slices if hvd.rank() else tf.ones([5, 2])
    in_function = tf.function(lambda: hvd.allreduce(value, name="mixed in a function"))
    for call in (
        lambda: hvd.allreduce(value, name="mixed"),
        lambda: hvd.allreduce(value),
        lambda: hvd.grouped_allreduce([tf.ones(3), value], name="mixed group"),
        in_function,
    ):
        expected = r"1 tf\.IndexedSlices.* rank 1"
        with pytest.raises(tf.errors.FailedPreconditionError, match=expected):
            call()
    same(tf.convert_to_tensor(hvd.allreduce(slices, name="mixed")), np.eye(5, 2)[:, :1] * [1, 1])


@on_ranks(1, 2, 3)
def adasum_is_numpys_and_the_same_on_all_ranks() -> None:
    shapes = [(), (0,), (1,), (7,), (3, 5), (1000,)]
    for dtype, tolerance in ((tf.float32, 1e-6), (tf.float64, 1e-14), (tf.bfloat16, 1e-2)):
        ranks = [
            [
                tf.cast(np.random.default_rng(10 * r + i).normal(size=shape) * (r != 1 or i), dtype)
                for i, shape in enumerate(shapes)
            ]  # one of rank 1's is zero
            for r in range(hvd.size())
        ]
        own = ranks[hvd.rank()]
        for factor, results in {
            1: tf.function(lambda own=own: hvd.grouped_allreduce(own, op=hvd.Adasum))(),
            2: hvd.grouped_allreduce(own, op=hvd.Adasum, postscale_factor=2.0),
        }.items():
            for i, result in enumerate(results):
                assert result.dtype == dtype
                assert result.shape == own[i].shape
                for theirs in tf.unstack(hvd.allgather(result[None]), hvd.size()):
                    assert np.array_equal(theirs.numpy(), result.numpy())
                rows = [theirs[i].numpy().astype(np.float64) for theirs in ranks]
                found = result.numpy().astype(np.float64) / factor
                assert np.allclose(found, numpys_adasum(rows), 0, 8 * tolerance), (i, dtype)
    refused(lambda: hvd.allreduce(tf.constant([1]), op=hvd.Adasum), "int32; op=Adasum takes float")


@on_ranks(3)
def process_sets_and_numbers_of_ranks() -> None:
    evens = hvd.add_process_set([0, 2])
    x = tf.ones(2) * (hvd.rank() + 1.0)
    if evens.included():
        for result in both(lambda t: hvd.allreduce(t, op=hvd.Sum, process_set=evens), x):
            same(result, np.full(2, 4.0))
        same(
            hvd.reducescatter(tf.range(3.0), op=hvd.Sum, process_set=evens),
            [0.0, 2.0] if hvd.rank() == 0 else [4.0],
        )
    else:
        with pytest.raises(tf.errors.InvalidArgumentError, match="rank 1 is not in process set"):
            hvd.allreduce(x, process_set=evens)
    asked = tf.function(
        lambda: (
            hvd.rank_op(),
            hvd.size_op(),
            hvd.size_op(evens.process_set_id),
            hvd.process_set_included_op(evens.process_set_id),
            hvd.local_rank_op(),
            hvd.local_size_op(),
        )
    )
    right = (hvd.rank(), 3, 2, int(evens.included()), hvd.rank(), 3)
    assert tuple(int(t) for t in asked()) == right
    hvd.barrier()
    assert hvd.remove_process_set(evens)


@on_ranks(3)
def a_joined_rank_takes_part() -> None:
    if hvd.rank() == 1:
        last = hvd.join()
    else:
        for result in both(
            lambda t: hvd.allreduce(t, op=hvd.Sum, name="while one has joined"), tf.ones(2)
        ):
            same(result, [2.0, 2.0])
        last = hvd.join()
    assert int(last) in range(3)
    assert len(set(hvd.allgather_object(int(last)))) == 1


@on_ranks(2)
def disagreement_is_an_error_on_all_ranks_and_the_next_call_works() -> None:
    def check(call: Callable[[], Any], pattern: str) -> None:
        for run in (call, tf.function(call)):
            with pytest.raises(tf.errors.FailedPreconditionError, match=pattern):
                run()
            same(hvd.allreduce(tf.ones(1), op=hvd.Sum, name="after"), [2.0])

    rank = hvd.rank()
    check(lambda: hvd.allreduce(tf.ones(2 + rank), name="shapes"), "shape of all_reduce '.*shapes'")
    check(
        lambda: hvd.allreduce(tf.cast(tf.ones(2), [tf.float32, tf.int32][rank]), name="types"),
        "dtype of all_reduce '.*types'",
    )
    check(lambda: hvd.broadcast(tf.ones(2), rank, name="roots"), "root of broadcast '.*roots'")
    check(lambda: hvd.allgather(tf.ones([1, 2 + rank]), name="rows"), "shape of all_gather '.*rows")
    check(lambda: hvd.allreduce(tf.ones(2), op=[hvd.Sum, hvd.Max][rank], name="op"), "the op of")


@on_ranks(2)
def bad_input_is_refused_here_and_at_once() -> None:
    refused(lambda: hvd.allreduce(tf.constant(["a"])), "string, which is not supported")
    refused(lambda: hvd.allreduce(tf.constant([1 + 2j])), "complex128, which is not supported")
    refused(lambda: hvd.allreduce(tf.ones(2), op=17), "op=17 is unknown")
    refused(lambda: hvd.reducescatter(tf.ones(2), op=hvd.Adasum), "for allreduce and grouped")
    refused(lambda: hvd.allgather(tf.constant(1.0)), "0 dimensions")
    refused(lambda: hvd.reducescatter(tf.ones(2), op=hvd.Max), "Average or Sum")
    refused(lambda: hvd.alltoall(tf.ones(4), splits=[[1, 3]]), "list of numbers")
    refused(lambda: hvd.grouped_allreduce([tf.ones(1), object()]), "tensor 1 is not a tensor")
    for call, pattern in (
        (lambda: hvd.alltoall(tf.ones(3)), "3 rows, which 2 ranks do not divide"),
        (lambda: hvd.alltoall(tf.ones(3), splits=[1, 1]), "sum to 2"),
        (lambda: hvd.broadcast(tf.ones(3), 7), "root 7"),
    ):
        for run in (call, tf.function(call)):
            with pytest.raises(tf.errors.InvalidArgumentError, match=pattern):
                run()
    compiled = tf.function(lambda: hvd.allreduce(tf.ones(2)), jit_compile=True)
    refused(compiled, "set jit_compile=False")
    same(hvd.allreduce(tf.ones(1), op=hvd.Sum, name="after"), [2.0])
    v = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        y = hvd.allreduce(v, op=hvd.Max)
    refused(lambda: tape.gradient(y, v), "by max has no gradient")


@on_ranks(2)
def a_failed_op_says_first_what_went_wrong() -> None:
    """And then TensorFlow where it stands."""

    def disagree(name: str) -> tf.Tensor:
        return hvd.allreduce(tf.ones(2 + hvd.rank()), name=name)

    def in_a_session() -> None:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            session.run(disagree("in a session"))

    for call, where in (
        (lambda: disagree("eager"), "Op:FarandoleAllReduce"),
        (tf.function(lambda: disagree("function")), "[[{{node FarandoleAllReduce}}]]"),
        (in_a_session, "Original stack trace"),
    ):
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            call()
        text = str(caught.value)
        assert text.startswith("farandole.Mismatch: ranks disagree on the "), text
        assert where in text, text
        assert text.count("ranks disagree") == 1
        assert "rank 1" in text.splitlines()[0]
        assert text.index("  advice:") < text.index(where)
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.reshape(tf.ones(3), [2])  # not ours
    assert "farandole" not in str(caught.value)


@on_ranks(2)
def a_graph_is_built_before_init_and_runs_after_it() -> None:
    hvd.shutdown()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        v = tf.compat.v1.get_variable("v", initializer=tf.constant([0.0, 0.0]))
        begin = hvd.broadcast_global_variables(1)
        hook = hvd.BroadcastGlobalVariablesHook(0)
        hook.begin()
        scattered = hvd.reducescatter(v, op=hvd.Sum)
        rows, received = hvd.alltoall(v, [1, 1])
        assert (scattered.shape.rank, rows.shape.rank, received.shape.rank) == (1, 1, 1)
        session.run(v.initializer)
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"call init\(\) first"):
            session.run(begin)
        fd.init()
        rank = hvd.rank()
        session.run(v.assign([1.0 + rank, 2.0]))
        session.run(begin)
        assert session.run(v).tolist() == [2.0, 2.0]
        assert session.run(scattered).tolist() == [4.0]
        session.run(v.assign([3.0 + rank, 4.0]))
        hook.after_create_session(session, None)
        assert session.run(v).tolist() == [3.0, 4.0]
    with pytest.raises(fd.NotInitialized):
        fd.shutdown() or hvd.allreduce(tf.ones(1))
    hvd.init()


@on_ranks(2)
def graphs_of_tensorflow_1_work() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x = tf.compat.v1.placeholder(tf.float32, [2])
        total = hvd.allreduce(x, op=hvd.Sum)
        v = tf.compat.v1.get_variable("v", initializer=tf.constant([1.0 + hvd.rank()]))
        hook = hvd.BroadcastGlobalVariablesHook(1)
        hook.begin()
        session.run(tf.compat.v1.global_variables_initializer())
        assert session.run(total, {x: [1.0, 2.0]}).tolist() == [2.0, 4.0]
        hook.after_create_session(session, None)
        assert session.run(v).tolist() == [2.0]
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        own = type(optimizer)
        optimizer = hvd.DistributedOptimizer(optimizer)
        assert isinstance(optimizer, own)
        step = optimizer.minimize(tf.reduce_sum(v * (1.0 + hvd.rank())))
        session.run(step)
        assert session.run(v).tolist() == [2.0 - 0.5 * 1.5]


@on_ranks(1)
def a_wrong_argument_is_an_error_of_ours() -> None:
    right = {
        "tensor": lambda: tf.ones(2), "tensors": lambda: [tf.ones(2)], "obj": 1, "num_rank": 1,
        "variables": lambda: [tf.Variable(tf.ones(2))], "gradtape": lambda: tf.GradientTape(),
        "optimizer": lambda: tf.compat.v1.train.GradientDescentOptimizer(0.1),
        "process_set": lambda: [0], "ranks_or_comm": [0], "ext_name": "horovod.tensorflow",
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `average` is deprecated
        for module in (hvd, hvd.functions, hvd.mpi_ops, hvd.util):
            problems = problems_in(
                module, right, apart=["init", "shutdown", "start_timeline", "stop_timeline"],
                also={
                    "check_extension": (ImportError,), "broadcast_global_variables": (RuntimeError,)
                },
            )  # fmt: skip
            assert problems == [], "\n".join(problems)
    refused(
        lambda: hvd.grouped_reducescatter([tf.ones(2)], prescale_factor="x"),
        "grouped_reducescatter(): prescale_factor is 'x'; it is a number",
    )
    in_function = tf.function(lambda: hvd.broadcast(tf.ones(2), root_rank=0.5))
    refused(in_function, "broadcast(): root_rank is 0.5; it is a whole number")
    same(hvd.allreduce(tf.ones(2)), [1, 1])


@on_ranks(1)
def variables_alone_and_in_lists_become_references() -> None:
    variables = [tf.Variable(1.0), tf.Variable(2.0)]
    for given in (variables[0], variables, [variables, "text"]):
        refs = hvd.util.vars_to_refs(given)
        assert hash(refs) is not None
        assert hvd.util.refs_to_vars(refs) == given


def test_importing_farandole_alone_does_not_import_tensorflow() -> None:
    script = "import sys, farandole; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_compressors_have_horovods_names() -> None:
    compression = importlib.import_module("farandole.tensorflow.compression")
    assert compression.FP16Compressor is hvd.Compression.fp16
    assert compression.NoneCompressor is hvd.Compression.none


test_on_ranks = make_tests(__name__, "tensorflow")
