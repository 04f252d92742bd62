"""Messages between one server and one worker: a head of numbers, a table of numbers, bytes.

Each pair is a group of its own, so that the death of a worker is nobody else's failure.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from farandole import _json, _world
from farandole._core import Group, Handle, InternalError
from farandole.parameter_server._rows import Gradient, Rows

# The kind, first in a head. Servers answer workers: to PULL, TICKET, WAIT, SAVE, ADD and FLUSH.
PULL, PUSH, TICKET, WAIT, REST, SAVE, PAUSE, BYE, ADD, ASSIGN, FLUSH, ANSWER, HERE = range(13)
_PARTS = ("message", "table", "bytes")  # names of what is sent
_NUMBERS = 8  # of a head: kind, length of the table, of the bytes, and five of the kind's own
_DENSE = -1
NOTHING = np.empty(0, np.int64)


def number_of(text: str) -> int:
    """A hash of the text, of 56 bits, so that int64 has room for it."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


class Message(NamedTuple):
    numbers: tuple[int, ...]  # five
    kind: int
    table: np.ndarray  # int64
    data: np.ndarray  # uint8


class Pair:
    """One end of the connection between a server and a worker, or any two ranks."""

    def __init__(self, server: int, worker: int, number: int, timeout: float) -> None:
        """Both ranks of the world make it, with the same number."""
        token = number_of(f"parameter server {number} {server} {worker}")
        self.group: Group = _world.world().form([server, worker], token, timeout)
        self.peer = 1 - self.group.rank

    def send(
        self,
        kind: int,
        numbers: Sequence[int] = (),
        table: np.ndarray = NOTHING,
        data: np.ndarray | None = None,
    ) -> None:
        for handle in self.start(kind, numbers, table, data):
            handle.wait()

    def start(
        self,
        kind: int,
        numbers: Sequence[int] = (),
        table: np.ndarray = NOTHING,
        data: np.ndarray | None = None,
    ) -> list[Handle[None]]:
        """Sends without waiting; the arrays are to stay as they are until the handles are done."""
        head = np.zeros(_NUMBERS, np.int64)
        head[:3] = kind, len(table), 0 if data is None else len(data)
        head[3 : 3 + len(numbers)] = numbers
        parts = (head, table, np.empty(0, np.uint8) if data is None else data)
        return [
            self.group.start_between("send", part, self.peer, 0, None, name, None)
            for name, part in zip(_PARTS, parts, strict=True)
            if len(part)
        ]

    def receive(self, timeout: float | None = None) -> Message:
        """The next message of the peer.

        Args:
            timeout: seconds until it fails, 0: never; default ``FARANDOLE_TIMEOUT``.
        """
        head = np.empty(_NUMBERS, np.int64)
        self.group.run_between("recv", head, self.peer, 0, _PARTS[0], timeout)
        kind, length, nbytes, *numbers = head.tolist()
        table, data = np.empty(length, np.int64), np.empty(nbytes, np.uint8)
        parts: tuple[np.ndarray, np.ndarray] = (table, data)
        for name, part in zip(_PARTS[1:], parts, strict=True):
            if len(part):
                self.group.run_between("recv", part, self.peer, 0, name, None)
        return Message(tuple(numbers), kind, table, data)


# ---- gradients and rows as a table and bytes ----


def as_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One array of their bytes, one after the other."""
    if not parts:
        return np.empty(0, np.uint8)
    return as_bytes(parts[0]) if len(parts) == 1 else np.concatenate([as_bytes(p) for p in parts])


class Piece(NamedTuple):
    """A server's part of one variable, by its shape there."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def packed(gradients: Sequence[tuple[int, Gradient]]) -> tuple[np.ndarray, np.ndarray]:
    """Gradients with the positions of their pieces, as a table and bytes. The table has for each
    the position and the number of rows, and then their indices; or DENSE."""
    table: list[np.ndarray] = []
    parts = []
    for place, gradient in gradients:
        if isinstance(gradient, Rows):
            table += [np.array([place, len(gradient.indices)]), gradient.indices]
            parts.append(gradient.values)
        else:
            table.append(np.array([place, _DENSE]))
            parts.append(gradient)
    return (np.concatenate(table) if table else NOTHING), joined(parts)


def unpacked(pieces: Sequence[Piece], message: Message) -> dict[str, Gradient]:
    """The gradients by name, copied from the message.

    Raises:
        InternalError: the message is malformed.
    """
    found: dict[str, Gradient] = {}
    at = offset = 0
    while at < len(message.table):
        piece, rows = _checked_piece(pieces, message.table[at:])
        dense = rows == _DENSE
        shape = piece.shape if dense else (rows, *piece.shape[1:])
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(piece.dtype).itemsize
        if offset + nbytes > len(message.data):
            raise InternalError(f"a message about '{piece.name}' ends {nbytes} bytes too early")
        # Bytes of one dtype may not begin where those of the next are aligned.
        values = np.frombuffer(
            message.data[offset : offset + nbytes].tobytes(), piece.dtype
        ).reshape(shape)
        offset += nbytes
        at += 2
        if dense:
            found[piece.name] = values
        else:
            indices = message.table[at : at + rows]
            if rows and not 0 <= indices.min() <= indices.max() < piece.shape[0]:
                raise InternalError(f"a message about rows that '{piece.name}' does not have")
            found[piece.name] = Rows(indices, values)
            at += rows
    return found


def _checked_piece(pieces: Sequence[Piece], rest: np.ndarray) -> tuple[Piece, int]:
    """The next piece of the table, and the number of its rows, whose indices follow."""
    place, rows = (int(each) for each in rest[:2]) if len(rest) > 1 else (-1, 0)
    if not 0 <= place < len(pieces):
        raise InternalError(f"a message about piece {place} of {len(pieces)}")
    if rows != _DENSE and not (0 <= rows <= len(rest) - 2 and pieces[place].shape):
        raise InternalError(f"a message about {rows} rows of '{pieces[place].name}'")
    return pieces[place], rows


def described(pieces: Sequence[tuple[Piece, np.ndarray]]) -> tuple[list[int], np.ndarray]:
    """New pieces with their values: numbers and bytes of an ADD."""
    head = json.dumps([piece for piece, _ in pieces]).encode()
    parts = [np.frombuffer(head, np.uint8), *(value for _, value in pieces)]
    return [len(head)], joined(parts)


def new_pieces(message: Message) -> list[tuple[Piece, np.ndarray]]:
    """The new pieces of an ADD, with their values.

    Raises:
        InternalError: the message is malformed.
    """
    length = message.numbers[0]
    found = []
    rest = message.data[length:]
    try:
        for name, shape, dtype in _json.read(message.data[:length].tobytes()):
            kind = np.dtype(dtype)
            if min(shape, default=0) < 0:
                raise ValueError(f"shape {shape}")
            nbytes = math.prod(shape) * kind.itemsize
            value = rest[:nbytes].copy().view(kind).reshape(shape)  # no more than has come
            rest = rest[nbytes:]
            found.append((Piece(str(name), tuple(shape), str(dtype)), value))
    except (ValueError, TypeError) as error:
        raise InternalError(f"a message about new variables is none: {error}") from error
    return found
