"""The streams for which operations on devices wait: those in which their own arrays are made, all
of them, and no other. Ranks over the fake driver."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fake_device import Array, Rank

import farandole as fd
import harness
from farandole import _core
from harness import World

Start = Callable[..., World]

COUNT = 3000
TIME_TO_GO_WRONG = 0.05  # seconds, in which what does not wait goes on


class OwnStreams(Rank):
    """Each array is made in a stream of its own."""

    def __init__(self) -> None:
        super().__init__("interface")
        self.made: list[ctypes.c_void_p] = []

    def numbers(self, value: int) -> Array:
        """Whole numbers, whose sums are exact."""
        array = self.array(COUNT, "float32").put(raw(value))
        array.get()
        array.stream = self.machine.made("cuStreamCreateWithPriority", 1, 0)
        self.made.append(array.stream)
        return array

    @contextlib.contextmanager
    def busy(self, array: Array) -> Iterator[None]:
        """The array's stream does nothing meanwhile."""
        go_on = self.machine.keep_busy(array.device, array.stream)
        try:
            yield
        finally:
            go_on()

    @contextlib.contextmanager
    def late(self, array: Array, value: int) -> Iterator[None]:
        """The array gets these numbers in its stream, when all else was asked for."""
        array.read()
        ctypes.memmove(array.aside, raw(value), array.nbytes)
        with self.busy(array):
            self.machine.copy(array.address, array.aside, array.nbytes, array.stream)
            yield
            time.sleep(TIME_TO_GO_WRONG)

    def is_done(self, array: Array) -> bool:
        return bool(self.machine.driver.cuStreamQuery(array.stream) == 0)

    def end(self) -> None:
        gc.collect()
        for stream in self.made:
            self.machine.call("cuStreamDestroy_v2", stream)
        super().end()


def raw(value: int) -> bytes:
    return np.full(COUNT, value + fd.rank(), np.float32).tobytes()


def total(value: int) -> bytes:
    """The sum of what all ranks have of it."""
    ranks = fd.size()
    return np.full(COUNT, value * ranks + ranks * (ranks - 1) // 2, np.float32).tobytes()


def reduced(rank: OwnStreams, array: Array, stream: ctypes.c_void_p) -> bytes:
    """The array's contents after the work that is in a stream."""
    rank.machine.copy(array.aside, array.address, array.nbytes, stream)
    rank.machine.call("cuStreamSynchronize", stream)
    return ctypes.string_at(array.aside, array.nbytes)


def beside_another_group() -> None:
    rank = OwnStreams()
    x, y = rank.numbers(10), rank.numbers(20)
    other = fd.split(0)
    with rank.busy(x):
        first = fd.all_reduce(x, out=x, async_op=True)
        fd.all_reduce(y, out=y, group=other)
        y.look()
        harness.wait_until(lambda: rank.is_done(y), "an operation whose array is there")
        assert y.read() == total(20)
    first.wait()
    assert x.get() == total(10)
    del first, other
    rank.end()


def behind_all_arrays() -> None:
    rank = OwnStreams()
    x, y = rank.numbers(10), rank.numbers(20)
    arrays = [x, y]
    fd.grouped_all_reduce(arrays, out=[rank.numbers(0), rank.numbers(0)])
    with rank.late(y, 30):
        fd.grouped_all_reduce(arrays, out=arrays)  # the first one's stream waits for both
    assert x.get() == total(10)
    assert reduced(rank, y, x.stream) == total(30)
    rank.end()


@pytest.mark.parametrize("path", ["step", "spin"])
@pytest.mark.parametrize("case", [beside_another_group, behind_all_arrays])
def test_an_operation(by_steps: Start, case: Callable[[], None], path: str) -> None:
    by_steps(2, FARANDOLE_DEVICE_PATH=path).run(case)


class Gradients:
    """Two parameters of an optimizer, in one bucket."""

    def __init__(self) -> None:
        kinds = [("one", COUNT, "float32", -1), ("other", COUNT, "float32", -1)]
        self.reducer = _core.Reducer(
            fd.world(), kinds, "sum", 1.0, 1.0, 1 << 20, 1 << 20, 1 << 30, True
        )
        self.carrier = _core.DeviceGradients(self.reducer, 0, [True, True])

    def reduce(self, *gradients: Array) -> None:
        for i, gradient in enumerate(gradients):
            self.carrier.bring(i, gradient.address, gradient.stream.value or 0, gradient)
        self.reducer.launch_rest()
        self.reducer.wait()
        self.carrier.take_back([0, 1], gradients[0].stream.value or 0)


def bucket_beside_a_group() -> None:
    rank = OwnStreams()
    x, y, z = rank.numbers(10), rank.numbers(20), rank.numbers(30)
    gradients = Gradients()
    for _ in range(2):  # after which its plan is final
        gradients.reduce(rank.numbers(1), rank.numbers(2))
    assert rank.machine.launched() > 0, "they are reduced where they lie"
    with rank.busy(z):
        first = fd.all_reduce(z, out=z, async_op=True)
        gradients.reduce(x, y)
        x.look()
        harness.wait_until(lambda: rank.is_done(x), "gradients that are there")
        assert x.read() == total(10)
    first.wait()
    assert z.get() == total(30)
    del first, gradients
    rank.end()


def bucket_behind_all_gradients() -> None:
    rank = OwnStreams()
    x, y = rank.numbers(10), rank.numbers(20)
    gradients = Gradients()
    for _ in range(2):
        gradients.reduce(rank.numbers(1), rank.numbers(2))
    with rank.late(y, 40):
        gradients.reduce(x, y)
    assert x.get() == total(10)
    assert reduced(rank, y, x.stream) == total(40)
    del gradients
    rank.end()


@pytest.mark.parametrize("case", [bucket_beside_a_group, bucket_behind_all_gradients])
def test_a_bucket_of_gradients(by_steps: Start, case: Callable[[], None]) -> None:
    by_steps(2).run(case)


def take_step(
    update: _core.ShardedUpdate, shards: _core.DeviceShards, gradient: Array, value: Array
) -> None:
    shards.bring(0, gradient.address, gradient.stream.value or 0, gradient)
    shards.bring_value(0, value.address, value.stream.value or 0)
    update.begin("update", b"\1", [_core.HyperParameters(rate=1.0)], [0])
    update.wait()
    shards.take_back([(0, value.address)], value.stream.value or 0)


def update_behind_gradient_and_value(late: str) -> None:
    """Both of them come in streams of their own."""
    rank = OwnStreams()
    update = _core.ShardedUpdate(
        fd.world(), [("w", COUNT, "float32")], "sgd", 0, "sum",
        bucket_bytes=1 << 20, first_bucket_bytes=1 << 20,
    )  # fmt: skip
    shards = _core.DeviceShards(update, 0, [True])
    gradient, value = rank.numbers(10), rank.numbers(0)

    take_step(update, shards, gradient, value)
    assert rank.machine.launched() > 0, "it is updated where it lies"
    value.put(bytes(value.nbytes)).get()
    with rank.late({"gradient": gradient, "value": value}[late], 50):
        take_step(update, shards, gradient, value)
    begun = np.frombuffer(raw(50) if late == "value" else bytes(value.nbytes), np.float32)
    mine = np.frombuffer(value.get(), np.float32)
    part = slice(2000 * fd.rank(), 2000 * fd.rank() + 1000)  # of what this rank updates
    taken = np.frombuffer(total(50 if late == "gradient" else 10), np.float32)
    assert (mine[part] == (begun - taken)[part]).all()
    del update, shards
    rank.end()


@pytest.mark.parametrize("late", ["gradient", "value"])
def test_a_sharded_update(by_steps: Start, late: str) -> None:
    by_steps(2).run(update_behind_gradient_and_value, late)
