"""The names under which a program has broadcast parameters, known by the memory that they lie in.

An optimizer may have its parameters in another order on each rank, as those of a set. Where shapes
are equal, nothing else tells: the gradients of different parameters would be averaged, and weights
that began with equal values, such as biases of zero, would stay equal in every place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions

from farandole import _world
from farandole.common._objects import allgather_object, compare, gathered
from farandole.common._process_set import ProcessSet, global_process_set, number_of
from farandole.common._weights import period

_WeakMemory: Any = reductions.StorageWeakRef

# The memory and the name of each tensor that was broadcast in this world, by its address.
_given: dict[int, tuple[Any, str]] = {}

_ADVICE = (
    "give the optimizer its parameters in the same order on every rank, as model.parameters() "
    "does: the order of a set, or of what is sorted by id(), is another one in every process"
)


def note_broadcast(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """These have the same values on all ranks now, and these names."""
    for name, tensor in named:
        _given[tensor.data_ptr()] = _WeakMemory(tensor.untyped_storage()), name


def were_broadcast() -> bool:
    """Whether some were, in this world; the same on every rank."""
    return bool(_given)


def name_of(p: torch.Tensor) -> str | None:
    """None where it was not broadcast, or has moved since."""
    memory, name = _given.get(p.data_ptr(), (None, None))
    return None if memory is None or memory.expired() else name


_world.before_leaving(_given.clear)


class Names:
    """The names of an optimizer's parameters, as they are now or when they are compared.

    Args:
        named: in an order that ranks think they have in common, by what errors call them.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._named = list(named)
        self._before = [name_of(p) for _, p in named]  # some have moved when they are compared
        self._digest: int | None = None
        self._are_compared = False

    def digest(self) -> int:
        """0 as long as none is known."""
        if self._digest is None and were_broadcast():
            names = self._names()
            text = "\n".join(name or "" for name in names).encode()
            digest = hashlib.blake2b(text, digest_size=8).digest()
            self._digest = int.from_bytes(digest, "little") if any(names) else 0
        return self._digest or 0

    def _names(self) -> list[str | None]:
        rows = zip(self._named, self._before, strict=True)
        return [name_of(p) or before for (_, p), before in rows]

    def compare_once(self, label: str) -> None:
        """In the first call that has some. Collective. Raises as compare()."""
        if self._are_compared or period() is None or not were_broadcast():
            return
        self._are_compared = True
        mine = np.array([self.digest()], np.uint64)
        if len(set(gathered(mine, label, number_of(global_process_set)).tolist())) > 1:
            self.compare(f"{label}, whole", global_process_set)

    def compare(self, label: str, process_set: ProcessSet) -> None:
        """Collective. Raises Mismatch on every rank where parameters have changed places, with the
        first of them; where a rank knows no name, it may be any."""
        by_rank = dict(allgather_object((_world.rank(), self._names()), label, process_set))
        if not _is_permuted(
            list(by_rank.values())
        ):  # the same memory was broadcast under two names
            return
        known = [next(filter(None, names), "") for names in zip(*by_rank.values(), strict=True)]
        rows = {rank: self._described(names, known) for rank, names in by_rank.items()}
        compare("the order of the optimizer's parameters", rows, _ADVICE)

    def _described(self, names: Sequence[str | None], known: Sequence[str]) -> list[str]:
        """The rows to compare. `known`: by others, for parameters without a name."""
        each = zip(names, known, self._named, strict=True)
        return [f"'{name or other}' is {place}" for name, other, (place, _) in each]


def _is_permuted(names: Sequence[Sequence[str | None]]) -> bool:
    """Whether what one rank has in one place, another one has in another place."""
    if len(set(map(len, names))) > 1:  # which others tell of
        return False
    first = names[0]
    return any(
        a is not None and b is not None and a != b and (a in other or b in first)
        for other in names[1:]
        for a, b in zip(first, other, strict=True)
    )
