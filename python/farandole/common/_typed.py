"""Plain values as bytes that nobody can abuse: to read them runs no code, as to read a pickle may.

    None, bool, int, float, complex, str, bytes
    list, tuple, dict, OrderedDict               of such values; keys of dicts, too
    named tuples of farandole's own              likewise
    arrays and numbers of numpy                  of any type but objects and records
    tensors of PyTorch                           on the host, dense, without a gradient's history;
                                                 their dtypes and sizes

The bytes are the length of a text, a text of JSON that has the tree, and the arrays' contents. A
list, a dict or an array that the tree has twice is read as one object, as from a pickle.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from farandole import _json
from farandole._arguments import type_of

_LENGTH = 8  # bytes
_KINDS = "biufcSUMm?"  # of numpy's dtypes
_MOST_BITS = 4096  # of an int; Python limits the digits that it reads
_ELSEWHERE = {"torch": "farandole.common._torch_typed"}  # by the package of a value's class
_SCALARS = (bool, str, type(None))


class Untyped(Exception):
    """A value is none of these."""


def written(value: Any) -> bytes:
    """Raises Untyped, with what the value has that cannot be written."""
    writer = _Writer()
    try:
        tree = json.dumps(writer.words(value), separators=(",", ":")).encode()
    except RecursionError:
        raise Untyped("values that are nested too deeply") from None
    return b"".join([len(tree).to_bytes(_LENGTH, "little"), tree, *writer.contents])


def read(data: bytes) -> Any:
    """Raises ValueError where nothing has written these bytes so."""
    begin = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    if len(data) < begin:
        raise ValueError(f"{len(data)} bytes of a text that ends at {begin}")
    reader = _Reader(memoryview(data)[begin:])
    try:
        value = reader.value(_json.read(data[_LENGTH:begin]))
    except Exception as error:  # wherever a word that nobody writes leads
        raise ValueError(f"malformed: {type(error).__name__}: {error}") from None
    if reader.left:
        raise ValueError(f"{reader.left} bytes are too many")
    return value


class _Writer:
    def __init__(self) -> None:
        self.contents: list[Any] = []
        self._met: dict[Any, int] = {}
        self._memory: dict[Any, Any] = {}  # of tensors: what lies there

    def words(self, value: Any) -> Any:
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is int and value.bit_length() <= _MOST_BITS:
            return value
        if kind is float:
            return value if math.isfinite(value) else ["f", repr(value)]
        if kind is complex:
            return ["c", self.words(value.real), self.words(value.imag)]
        if kind is bytes:
            return ["b", self._kept(value)]
        if kind is tuple:
            return ["t", *map(self.words, value)]
        if _is_own_row(kind):
            return ["x", kind.__module__, kind.__name__, *map(self.words, value)]
        if kind is list:
            return self._once(id(value), lambda: ["l", *map(self.words, value)])
        if kind in (dict, OrderedDict):
            tag = "d" if kind is dict else "o"
            flat = (each for pair in value.items() for each in pair)
            return self._once(id(value), lambda: [tag, *map(self.words, flat)])
        if isinstance(value, np.generic) and _is_plain(value.dtype):
            return ["s", value.dtype.str, self._kept(value.tobytes())]
        if kind is np.ndarray and _is_plain(value.dtype):
            return self._once(id(value), lambda: self._array(value))
        return self._elsewhere(value)

    def _once(self, key: Any, words: Callable[[], Any]) -> Any:
        if key in self._met:
            return ["r", self._met[key]]
        self._met[key] = len(self._met)
        return words()

    def _array(self, array: Any) -> Any:
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        return ["n", array.dtype.str, list(array.shape), order, self._kept(array.tobytes(order))]

    def _elsewhere(self, value: Any) -> Any:
        package = type(value).__module__.partition(".")[0]
        if package not in _ELSEWHERE:
            raise Untyped(type_of(value))
        theirs = importlib.import_module(_ELSEWHERE[package])
        if (words := theirs.words_beside_tensors(value)) is not None:
            return ["p", package, *words]
        memory, key = theirs.place_of(value)  # raises Untyped
        if self._memory.setdefault(memory, key) != key:
            raise Untyped("tensors that share memory in part")
        dtype, shape, content = theirs.words_of(value)
        return self._once(key, lambda: ["e", package, dtype, shape, self._kept(content)])

    def _kept(self, content: Any) -> int:
        self.contents.append(content)
        return len(content)


class _Reader:
    def __init__(self, contents: memoryview) -> None:
        self._contents, self._begin = contents, 0
        self._made: list[Any] = []

    @property
    def left(self) -> int:
        return len(self._contents) - self._begin

    def value(self, words: Any) -> Any:
        if not isinstance(words, list):
            return _scalar(words)
        tag, *rest = words
        return getattr(self, f"_of_{tag}")(*rest)

    def _of_f(self, text: str) -> float:
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text]

    def _of_c(self, real: Any, imaginary: Any) -> complex:
        return complex(self.value(real), self.value(imaginary))

    def _of_b(self, size: int) -> bytes:
        return bytes(self._taken(size))

    def _of_t(self, *items: Any) -> tuple[Any, ...]:
        return tuple(map(self.value, items))

    def _of_x(self, module: str, name: str, *items: Any) -> Any:
        kind = vars(sys.modules[module])[name]
        if not _is_own_row(kind):
            raise ValueError(f"{module}.{name} is no row")
        return kind._make(map(self.value, items))

    def _of_l(self, *items: Any) -> list[Any]:
        made = self._new([])
        made.extend(map(self.value, items))
        return made

    def _of_d(self, *flat: Any) -> dict[Any, Any]:
        return self._filled({}, flat)

    def _of_o(self, *flat: Any) -> dict[Any, Any]:
        return self._filled(OrderedDict(), flat)

    def _of_r(self, number: int) -> Any:
        return self._made[range(len(self._made))[number]]

    def _of_s(self, dtype: str, size: int) -> Any:
        return self._numbers(dtype, [], "C", size)[()]

    def _of_n(self, dtype: str, shape: list[int], order: str, size: int) -> Any:
        return self._new(self._numbers(dtype, shape, order, size))

    def _of_e(self, package: str, dtype: str, shape: list[int], size: int) -> Any:
        theirs = importlib.import_module(_ELSEWHERE[package])
        return self._new(theirs.made_of(dtype, shape, bytearray(self._taken(size))))

    def _of_p(self, package: str, *words: Any) -> Any:
        return importlib.import_module(_ELSEWHERE[package]).beside_tensors(*words)

    def _numbers(self, text: str, shape: list[int], order: str, size: int) -> Any:
        dtype = np.dtype(text)
        fits = min(shape, default=0) >= 0 and math.prod(shape) * dtype.itemsize == size
        if not fits or not _is_plain(dtype):
            raise ValueError(f"an array of {dtype} and shape {shape} in {size} bytes")
        array: Any = np.ndarray
        return array(shape, dtype, bytearray(self._taken(size)), order=order)

    def _filled(self, made: dict[Any, Any], flat: tuple[Any, ...]) -> dict[Any, Any]:
        self._new(made)
        each: Iterator[Any] = iter(flat)
        for key, value in zip(each, each, strict=True):
            made[self.value(key)] = self.value(value)
        return made

    def _new(self, made: Any) -> Any:
        self._made.append(made)
        return made

    def _taken(self, size: int) -> memoryview:
        if not 0 <= size <= self.left:
            raise ValueError(f"{size} bytes where {self.left} are left")
        self._begin += size
        return self._contents[self._begin - size : self._begin]


def _scalar(words: Any) -> Any:
    if isinstance(words, dict):
        raise ValueError("a dict is written as a list")
    return words


def _is_own_row(kind: Any) -> bool:
    is_row = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_row and kind.__module__.startswith("farandole.")


def _is_plain(dtype: Any) -> bool:
    return dtype.kind in _KINDS and dtype.itemsize > 0 and np.dtype(dtype.str) == dtype
