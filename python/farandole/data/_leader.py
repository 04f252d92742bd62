"""Batches that rank 0 alone can read (policy `leader`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._objects import attempt, made_by_first, run_named, told
from farandole.common._pickles import packed, seal, unsealed
from farandole.data._logical import block_of
from farandole.data._parts import Part, part_of
from farandole.data._tree import as_array, map_leaves


class FromRank0:
    """Batches of all ranks that rank 0 reads and deals out: each rank gets its part of every one.

    Iterating over it is collective: every rank takes as many parts, in step with the others. So
    nothing is read ahead; where every rank can read the data, that is faster.

    Args:
        batches: on rank 0: anything that gives batches, once or for every pass anew. Elsewhere it
            is not looked at, and may be None.
        name: in errors and traces; the same on all ranks.

    Examples:
        >>> import farandole as fd, numpy as np
        >>> fd.init()
        >>> for batch, share in FromRank0([np.arange(4)]):
        ...     print(batch.tolist(), share.weight(fd.size()))
        [0, 1, 2, 3] 1.0
    """

    def __init__(self, batches: Iterable[Any] | None = None, name: str = "batches") -> None:
        self._batches = batches if _world.rank() == 0 else None
        self._name = name
        self._deals = 0

    def __iter__(self) -> Iterator[Part]:
        """The parts of one pass.

        Raises:
            InvalidArgument: rank 0 could not read; on the other ranks. On rank 0, its own error.
        """
        return (parts[0] for parts in self.blocks(_world.size()))

    def blocks(self, parts: int) -> Iterator[list[Part]]:
        """The same, for batches that are cut for that many logical ranks."""
        reads = self._read(parts) if _world.rank() == 0 else None
        while (mine := self._deal(reads)) is not None:
            yield mine

    def length(self) -> int | None:
        """Collective: batches of a pass, where rank 0 knows.

        Raises:
            InvalidArgument: rank 0 could not read; on the other ranks. On rank 0, its own error.
        """

        def known() -> int | None:
            try:
                return len(self._batches)  # type: ignore[arg-type]
            except TypeError:  # of a generator, an endless dataset
                return None

        return made_by_first(f"{self._name}.length", known, self._unread)

    def _read(self, parts: int) -> Iterator[list[list[Part]]]:
        if self._batches is None:
            raise InvalidArgument("FromRank0(None) on rank 0, which is the one that reads")
        size = _world.size()
        blocks = [block_of(rank, size, parts).mine for rank in range(size)]
        for batch in self._batches:
            arrays = map_leaves(as_array, batch)
            yield [[part_of(arrays, parts, part) for part in block] for block in blocks]

    def _deal(self, reads: Iterator[list[list[Part]]] | None) -> list[Part] | None:
        """None: there are no more."""
        error: Exception | None = None
        parts: list[bytes] | None = []
        if reads is not None:
            none = [None] * _world.size()
            parts, error = attempt(lambda: [packed(each) for each in next(reads, none)])
        if parts is None:
            parts = [packed(told(error))] * _world.size()
        self._deals += 1
        mine = _dealt(parts, self._name, f"{self._name}, number {self._deals}")
        if error is not None:
            raise error
        if isinstance(mine, str):
            raise InvalidArgument(f"{self._unread}: {mine}")
        assert mine is None or isinstance(mine, list)
        return mine

    @property
    def _unread(self) -> str:
        return f"rank 0 could not read {self._name}"


def _dealt(objects: list[bytes], name: str, what: str) -> Any:
    """This rank's of the packed ones that rank 0 has, one for each."""
    sent = [seal(each, what) for each in objects]
    splits = [len(each) for each in sent] or [0] * _world.size()
    source = np.frombuffer(bytearray(b"".join(sent)), np.uint8)

    def finish(made: Any, _: Any) -> bytes:
        memory, _, shape = made[0]
        return np.frombuffer(memory, np.uint8, shape[0]).tobytes()

    mine = run_named("all_to_all", name, source, None, splits=splits, finish=finish)
    return unsealed(mine, what)
