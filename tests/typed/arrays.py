"""Checks the types of calls on arrays; never run. `make lint` fails if a type changes. A line that
must be refused has an ignore, which is an error once it is not needed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import assert_type

import farandole as fd
from farandole.typing import Level, ReduceOp

Floats = NDArray[np.float32]


def whole(x: Floats, row: np.ndarray[tuple[int], np.dtype[np.int64]], scalar: np.float32) -> None:
    assert_type(fd.all_reduce(x), Floats)
    assert_type(fd.all_reduce(x, "mean", out=x, prescale=0.5, level="fast", name="x"), Floats)
    assert_type(fd.all_reduce(row), np.ndarray[tuple[int], np.dtype[np.int64]])
    assert_type(fd.all_reduce(scalar), np.ndarray[tuple[()], np.dtype[np.float32]])
    assert_type(fd.broadcast(x, root=1), Floats)
    assert_type(fd.reduce(x, root=1), Floats | None)
    assert_type(fd.reduce_scatter(x, counts=[1, 2]), Floats)
    assert_type(fd.reduce_scatter(row), NDArray[np.int64])


def rows(x: Floats, root: bool) -> None:
    assert_type(fd.all_gather(x, uneven=True), Floats)
    assert_type(fd.gather(x, 0, counts=[1, 2]), Floats | None)
    assert_type(fd.all_to_all(x), Floats)
    assert_type(fd.all_to_all(x, [1, 2]), tuple[Floats, list[int]])
    assert_type(fd.scatter(x if root else None), Floats)
    assert_type(fd.scatter(None, out=x), Floats)


def handles(x: Floats, flag: bool) -> None:
    assert_type(fd.all_reduce(x, async_op=True), fd.Handle[Floats])
    assert_type(fd.all_reduce(x, async_op=True).wait(), Floats)
    assert_type(fd.all_reduce(x, async_op=False), Floats)
    assert_type(fd.all_gather(x, async_op=True).wait(), Floats)
    assert_type(fd.gather(x, async_op=True).wait(), Floats | None)
    assert_type(fd.all_to_all(x, [1], async_op=True).wait(), tuple[Floats, list[int]])
    assert_type(fd.send(x, to=1), None)
    assert_type(fd.send(x, to=1, async_op=True), fd.Handle[None])
    assert_type(fd.recv(x, source=1, async_op=True).wait(), Floats)
    assert_type(fd.all_reduce(x, async_op=flag), Any)
    known: fd.Handle = fd.all_reduce(x, async_op=True)
    assert_type(known.wait(), Any)


def grouped(xs: list[Floats]) -> None:
    assert_type(fd.grouped_all_reduce(xs, "max", out=xs), list[Floats])
    assert_type(fd.grouped_all_reduce(xs, async_op=True).wait(), list[Floats])
    assert_type(fd.grouped_broadcast(xs), list[Floats])
    assert_type(fd.grouped_all_gather(xs), list[Floats])
    assert_type(fd.grouped_reduce_scatter(xs, async_op=True), fd.Handle[list[Floats]])


def others(number: float, data: bytearray, op: ReduceOp, level: Level) -> None:
    assert_type(fd.all_reduce(number, op, level=level), Any)
    assert_type(fd.all_reduce(data, out=data), Any)
    assert_type(fd.allocate(3), Floats)
    assert_type(fd.allocate((3, 4), np.int8), NDArray[np.int8])
    assert_type(fd.allocate(3, "float64"), NDArray[Any])
    assert_type(fd.run(len, ("abc",)), list[int])


def refused(x: Floats, group: object) -> None:
    fd.all_reduce([1.0, 2.0])  # type: ignore[call-overload]
    fd.all_reduce(x, "average")  # type: ignore[call-overload]
    fd.all_reduce(x, level="exact")  # type: ignore[call-overload]
    fd.all_reduce(x, title="x")  # type: ignore[call-overload]
    fd.all_reduce(x, group=group)  # type: ignore[call-overload]
    fd.broadcast(x, op="sum")  # type: ignore[call-overload]
    fd.all_to_all(x, 2)  # type: ignore[call-overload]
