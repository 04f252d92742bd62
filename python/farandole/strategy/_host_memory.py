"""Memory that the ranks of one host map, in which rank 0 writes values and all ranks read them.

Note [Buffers of one value]

TensorFlow lets a variable have a tensor on memory of ours, and every tensor that is read from the
variable has the same memory. Such a tensor is a snapshot: it may live on after the variable has a
new value. So a new value never replaces bytes that any rank may still read. It is written into
another buffer, and the old one is free once no rank has an array on it. In most programs a variable
has two buffers, which take turns.

Behind the data, a buffer has a mark of each rank: a byte that is 1 as long as the rank may read
it. Rank 0 sets all marks when it writes, since a rank may come late to its array, and each rank
clears its own when its last array is gone. So every rank has to take an array of every value.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import defaultdict
from typing import Any

import numpy as np

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._objects import allgather_object, broadcast_object, told

_ALIGNED = 64  # as TensorFlow wants the data of a tensor
_MAP = 256 << 20  # of address space

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class HostMemory:
    """Collective: made by all ranks, which are on one host.

    Raises:
        InvalidArgument: a rank cannot open the memory; on every rank.
    """

    def __init__(self) -> None:
        self._rank, self._ranks = _world.rank(), _world.size()  # finalizers outlive the world
        self._file = _opened_by_all()
        weakref.finalize(self, os.close, self._file).atexit = False
        self._maps: dict[int, mmap.mmap] = {}  # by where each begins
        self._arrays: defaultdict[int, set[int]] = defaultdict(set)  # on each buffer, here
        self._made = 0
        # Finalizers may run in any thread, and within this very code.
        self._lock = threading.RLock()
        self._end = 0  # rank 0: of the buffers
        self._buffers: defaultdict[int, list[int]] = defaultdict(list)  # rank 0: by owner
        self._left: defaultdict[int, list[int]] = defaultdict(list)  # by length: of no owner

    def write(self, owner: int, value: Bytes) -> int:
        """On rank 0: puts a value of the owner's into a buffer that no rank reads; returns where
        the buffer begins."""
        length = value.size
        mine = self._buffers[owner]
        free = [begin for begin in mine if not self._is_read(begin, length)]
        if not free:
            free.append(self._allot(length))
            mine.append(free[0])
        for begin in free[1:]:  # snapshots had more than two, and are gone
            memory, at = self._mapped(begin, length)
            memory.madvise(mmap.MADV_REMOVE, at, self._bytes_of(length))
            mine.remove(begin)
            self._left[length].append(begin)
        memory, at = self._mapped(free[0], length)
        np.frombuffer(memory, np.uint8, length, at)[:] = value
        memory[self._marks(at, length)] = b"\1" * self._ranks
        return free[0]

    def array(self, begin: int, length: int) -> Bytes:
        """The bytes of a buffer. It is not written while the array is there, on any rank."""
        memory, at = self._mapped(begin, length)
        found = np.frombuffer(memory, np.uint8, length, at)
        with self._lock:
            self._made += 1
            number = self._made
            self._arrays[begin].add(number)
        weakref.finalize(found, self._dropped, begin, length, number).atexit = False
        return found

    def leave(self, owner: int, length: int) -> None:
        """On rank 0: another value of that length may have its buffers, once no rank reads them."""
        self._left[length] += self._buffers.pop(owner, [])

    def buffers(self) -> int:
        """On rank 0: the number of buffers of all values."""
        return sum(map(len, self._buffers.values()))

    def _dropped(self, begin: int, length: int, number: int) -> None:
        with self._lock:
            here = self._arrays[begin]
            here.discard(number)
            if not here:
                memory, at = self._mapped(begin, length)
                memory[self._marks(at, length).start + self._rank] = 0

    def _is_read(self, begin: int, length: int) -> bool:
        memory, at = self._mapped(begin, length)
        return any(memory[self._marks(at, length)])

    def _marks(self, at: int, length: int) -> slice:
        """The marks of the ranks on a buffer, as a slice of its map."""
        first = at + _padded(length)
        return slice(first, first + self._ranks)

    def _allot(self, length: int) -> int:
        for begin in self._left[length]:
            if not self._is_read(begin, length):
                self._left[length].remove(begin)
                return begin
        begin, size = self._end, self._bytes_of(length)
        if begin % _MAP + size > _MAP:  # it lies in one map, or has one of its own
            begin = _whole_maps(begin)
        self._end = begin + size if size <= _MAP else _whole_maps(begin + size)
        os.ftruncate(self._file, _whole_maps(self._end))
        return begin

    def _bytes_of(self, length: int) -> int:
        """The size of a buffer with its marks, a byte for each rank: in whole pages."""
        return -(-(_padded(length) + self._ranks) // mmap.PAGESIZE) * mmap.PAGESIZE

    def _mapped(self, begin: int, length: int) -> tuple[mmap.mmap, int]:
        """The map that has the buffer, and where in it. Maps are large and few, since each keeps a
        file descriptor; what is not written takes no memory."""
        size = _whole_maps(self._bytes_of(length))
        start = begin // _MAP * _MAP
        with self._lock:
            if start not in self._maps:
                self._maps[start] = mmap.mmap(self._file, size, offset=start)
            return self._maps[start], begin - start


def _whole_maps(length: int) -> int:
    return -(-length // _MAP) * _MAP


def _padded(length: int) -> int:
    return -(-length // _ALIGNED) * _ALIGNED


def _opened_by_all() -> int:
    """The memory has no name that could be left behind: others open it through rank 0's process,
    and compare what they have found there."""
    file = -1
    mine = None
    if _world.rank() == 0:
        file = os.memfd_create("farandole-variables", os.MFD_CLOEXEC)
        mine = (f"/proc/{os.getpid()}/fd/{file}", _identity(file))
    path, identity = broadcast_object(mine, 0, "memory of central storage")
    error: Exception | None = None
    if _world.rank() != 0:
        try:
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if _identity(file) != identity:
                raise OSError(f"{path} is another process' file")
        except OSError as failed:
            error = failed
    for rank, why in enumerate(allgather_object(told(error), "memory of central storage")):
        if why is not None:
            raise InvalidArgument(
                f"CentralStorageStrategy: rank {rank} cannot open the memory of rank 0 ({why})\n"
                "  advice: run all ranks as one user and in one container, or use "
                "MirroredStrategy"
            )
    return file


def _identity(file: int) -> tuple[int, int]:
    status = os.fstat(file)
    return status.st_dev, status.st_ino


class Zeros:
    """Arrays of zeros that take no memory: their pages are never written."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(0, np.uint8)

    def array(self, length: int) -> Bytes:
        if self._bytes.size < length:
            kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._bytes = np.frombuffer(mmap.mmap(-1, length, flags=kind), np.uint8)
        return self._bytes[:length]
