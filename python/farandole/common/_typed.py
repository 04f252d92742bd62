"""Plain values as bytes that run nothing where they are read, as a pickle may.

    None, bool, int, float, complex, str, bytes
    list, tuple, dict, OrderedDict       of such values; keys of dicts, too
    named tuples of farandole's own      likewise
    arrays and numbers of numpy          of any dtype but objects and records
    tensors of PyTorch                   dense, on the host, without a gradient's history; their
                                         dtypes and sizes. To read one imports PyTorch

The bytes are the length of a text, a text of JSON that has the tree, and the arrays' contents. A
value that the tree has several times is written once, and read as one object.
"""

from __future__ import annotations

import importlib
import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from farandole import _json
from farandole._arguments import is_text, type_of

_LENGTH = 8  # bytes
_DEEPEST = 50  # levels of values in values: each takes some of Python's stack
_KINDS = "biufcSUMm?"  # of numpy's dtypes
_MOST_BITS = 4096  # of an int; Python limits the digits that it reads
_LONG = 64  # characters of a text that is worth a reference
_MOST_DIMENSIONS, _LONGEST = 64, 1 << 62  # of an array
_SURROGATES = ("utf-8", "surrogatepass")
_ELSEWHERE = {"torch": "farandole.common._torch_typed"}  # by the package of a value's class
_ROWS = (  # modules with named tuples that ranks send each other
    "farandole.data._parts", "farandole.data._share", "farandole.pipeline._wire",
    "farandole.strategy._closures",
)  # fmt: skip


class Untyped(Exception):
    """A value is none of these; says what it is, as the subject of a sentence."""


def written(value: Any, before: bytes = b"") -> bytes:
    """The bytes, behind others. Raises Untyped."""
    writer = _Writer()
    tree = json.dumps(writer.words(value, 0), separators=(",", ":")).encode()
    return b"".join([before, len(tree).to_bytes(_LENGTH, "little"), tree, *writer.contents])


def read(data: memoryview | bytes) -> Any:
    """Raises ValueError where nothing has written these bytes so."""
    whole = memoryview(data)
    begin = _LENGTH + int.from_bytes(whole[:_LENGTH], "little")
    if len(whole) < begin:
        raise ValueError(f"{len(whole)} bytes of a text that ends at {begin}")
    reader = _Reader(whole[begin:])
    try:
        value = reader.value(_json.read(bytes(whole[_LENGTH:begin])))
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # wherever a word that nobody writes leads
        raise ValueError(f"malformed: {type(error).__name__}: {error}") from None
    if reader.left:
        raise ValueError(f"{reader.left} bytes are too many")
    return value


class _Writer:
    def __init__(self) -> None:
        self.contents: list[Any] = []
        self._met: dict[int, int] = {}  # numbers of values that may be met again, by id

    def words(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int and value.bit_length() <= _MOST_BITS:
            return value
        if kind is float:
            if math.isfinite(value):
                return value
            return ["f", int.from_bytes(struct.pack("<d", value), "little")]
        if kind is complex:
            return ["c", self.words(value.real, depth), self.words(value.imag, depth)]
        if (met := self._met.get(id(value))) is not None:
            return ["r", met]
        if depth > _DEEPEST:
            raise Untyped(f"a value that is nested more than {_DEEPEST} levels deep")
        if kind in (list, dict, OrderedDict):
            self._number(value)
            return self._of_mutable(value, depth)
        words = self._of_constant(value, depth)
        if kind is not str or len(value) >= _LONG:
            self._number(value)
        return words

    def _of_mutable(self, value: Any, depth: int) -> Any:
        if type(value) is list:
            return ["l", *self._each(value, depth)]
        flat = self._each((each for pair in value.items() for each in pair), depth)
        if type(value) is dict:
            return ["d", *flat]
        return ["o", self.words(vars(value) or None, depth + 1), *flat]

    def _of_constant(self, value: Any, depth: int) -> Any:
        kind = type(value)
        if kind is str:
            if value.isascii() or is_text(value):
                return value
            return ["u", self._kept(value.encode(*_SURROGATES))]
        if kind is bytes:
            return ["b", self._kept(value)]
        if kind is tuple:
            return ["t", *self._each(value, depth)]
        if _is_row(kind):
            return ["x", kind.__module__, kind.__name__, *self._each(value, depth)]
        if isinstance(value, np.generic) and kind is value.dtype.type and _is_plain(value.dtype):
            return ["s", value.dtype.str, self._kept(value.tobytes())]
        if kind is np.ndarray and _is_plain(value.dtype):
            order = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
            content = self._kept(value.tobytes(order))
            return ["n", value.dtype.str, list(value.shape), order, content]
        package = kind.__module__.partition(".")[0]
        if package not in _ELSEWHERE:
            raise Untyped(type_of(value))
        *words, content = importlib.import_module(_ELSEWHERE[package]).words_of(value)
        return ["e", package, *words, self._kept(content)]

    def _each(self, values: Iterable[Any], depth: int) -> Iterator[Any]:
        return (self.words(value, depth + 1) for value in values)

    def _number(self, value: Any) -> None:
        self._met[id(value)] = len(self._met)

    def _kept(self, content: bytes) -> int:
        self.contents.append(content)
        return len(content)


class _Reader:
    def __init__(self, contents: memoryview) -> None:
        self._contents, self._begin = contents, 0
        self._made: list[Any] = []  # in the order of their numbers

    @property
    def left(self) -> int:
        return len(self._contents) - self._begin

    def value(self, words: Any) -> Any:
        if isinstance(words, list):
            tag, *rest = words
            return _READ[tag](self, *rest)
        if isinstance(words, dict):
            raise ValueError("a dict is written as a list")
        return self.new(words) if isinstance(words, str) and len(words) >= _LONG else words

    def list_of(self, *items: Any) -> list[Any]:
        made: list[Any] = self.new([])
        made.extend(map(self.value, items))
        return made

    def ordered(self, attributes: Any, *flat: Any) -> dict[Any, Any]:
        made = self.new(OrderedDict())
        vars(made).update(self.value(attributes) or {})
        return self.filled(made, flat)

    def row(self, module: str, name: str, *items: Any) -> Any:
        if module not in _ROWS:
            raise ValueError(f"{module} has no rows")
        kind = vars(importlib.import_module(module))[name]
        if not _is_row(kind):
            raise ValueError(f"{module}.{name} is no row")
        return self.new(kind._make(map(self.value, items)))

    def elsewhere(self, package: str, *words: Any) -> Any:
        *rest, size = words
        theirs = importlib.import_module(_ELSEWHERE[package])
        return self.new(theirs.made_of(*rest, bytearray(self.taken(size))))

    def numbers(self, text: str, shape: list[int], order: str, size: int) -> Any:
        dtype = np.dtype(text)
        if not _is_plain(dtype) or elements_of(shape) * dtype.itemsize != size:
            raise ValueError(f"an array of {dtype} and shape {shape} in {size} bytes")
        make: Any = np.ndarray
        return make(shape, dtype, bytearray(self.taken(size)), order=order)

    def filled(self, made: dict[Any, Any], flat: tuple[Any, ...]) -> dict[Any, Any]:
        words: Iterator[Any] = iter(flat)
        for each in words:
            key = self.value(each)  # before its value, as they were written
            made[key] = self.value(next(words))
        return made

    def known(self, number: int) -> Any:
        return self._made[range(len(self._made))[number]]

    def new(self, made: Any) -> Any:
        self._made.append(made)
        return made

    def taken(self, size: int) -> memoryview:
        if not 0 <= size <= self.left:
            raise ValueError(f"{size} bytes where {self.left} are left")
        self._begin += size
        return self._contents[self._begin - size : self._begin]


_READ: dict[str, Callable[..., Any]] = {  # by the tag of a list
    "b": lambda reader, size: reader.new(bytes(reader.taken(size))),
    "c": lambda reader, real, imaginary: complex(reader.value(real), reader.value(imaginary)),
    "d": lambda reader, *flat: reader.filled(reader.new({}), flat),
    "e": _Reader.elsewhere,
    "f": lambda _, bits: struct.unpack("<d", bits.to_bytes(8, "little"))[0],
    "l": _Reader.list_of,
    "n": lambda reader, *about: reader.new(reader.numbers(*about)),
    "o": _Reader.ordered,
    "r": _Reader.known,
    "s": lambda reader, dtype, size: reader.new(reader.numbers(dtype, [], "C", size)[()]),
    "t": lambda reader, *items: reader.new(tuple(map(reader.value, items))),
    "u": lambda reader, size: reader.new(bytes(reader.taken(size)).decode(*_SURROGATES)),
    "x": _Reader.row,
}


def elements_of(shape: list[int]) -> int:
    """Raises ValueError for what is no shape."""
    if len(shape) > _MOST_DIMENSIONS or not all(0 <= n < _LONGEST for n in shape):
        raise ValueError("it is no shape")
    return math.prod(shape)


def _is_row(kind: Any) -> bool:
    is_row = isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")
    return is_row and kind.__module__ in _ROWS


def _is_plain(dtype: Any) -> bool:
    known = dtype.kind in _KINDS and dtype.itemsize > 0 and dtype.metadata is None
    return known and np.dtype(dtype.str) == dtype
