"""Objects of one rank for all, as pickles, by name: whatever the framework.

The ranks of a job are processes of one user, which is checked when they meet, and run the same
program.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np

from farandole import _core, _world
from farandole.common._process_set import ProcessSet, global_process_set, number_of


def _pickled(obj: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(bytearray(pickle.dumps(obj)), np.uint8)


def _broadcast(array: Any, root_rank: int, name: str, number: int) -> None:
    handle = _core.names_of(_world.world()).submit(
        "broadcast", name, [(array, array, array.shape)], set=number, root=root_rank
    )
    _core.wait_by_number(handle)


def _gathered(array: Any, name: str, number: int) -> Any:
    def finish(made: Any, _: Any) -> Any:
        memory, dtype, shape = made[0]
        return np.frombuffer(memory, dtype, math.prod(shape)) if 0 not in shape else array[:0]

    handle = _core.names_of(_world.world()).submit(
        "all_gather", name, [(array, None, array.shape)], set=number, finish=finish
    )
    return _core.wait_by_number(handle)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the root's object on every rank of the set; it is pickled."""
    number, label = number_of(process_set), name or "object"
    root = _world.rank() == root_rank
    data = _pickled(obj) if root else np.empty(0, np.uint8)
    size = np.array([len(data)])
    _broadcast(size, root_rank, f"{label}.size", number)
    if not root:
        data = np.empty(int(size[0]), np.uint8)
    _broadcast(data, root_rank, f"{label}.data", number)
    return obj if root else pickle.loads(data.tobytes())


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks of the set, in rank order; they are pickled."""
    number, label = number_of(process_set), name or "object"
    data = _pickled(obj)
    sizes = _gathered(np.array([len(data)]), f"{label}.size", number).tolist()
    whole = _gathered(data, f"{label}.data", number).tobytes()
    objects, begin = [], 0
    for size in sizes:
        objects.append(pickle.loads(whole[begin : begin + size]))
        begin += size
    return objects
