"""Merges layers' buffers over the parts of a batch, such as the running averages of BatchNorm.

Every part of a batch begins with the buffers as they were before the batch. Then a buffer that some
part has changed becomes the same on every rank. Floating-point numbers become the mean of parts, by
their samples and in the order of the canonical tree: running means are then those of the whole
batch. Others, such as counts of batches, become the maximum, as all parts count alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, NoReturn

import numpy as np
import torch

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._objects import gathered
from farandole.common._reduction import Max, Sum
from farandole.data._logical import fold
from farandole.torch.ops import allreduce_async, synchronize

_SAME, _CHANGED, _STRANGE = 0, 1, 2


class _Part(NamedTuple):
    samples: int
    changed: dict[str, torch.Tensor]  # buffers


class Statistics:
    """The buffers of a model whose batches are computed in parts."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.before: dict[str, torch.Tensor] = {}  # as the last batch began
        self._parts: list[_Part] = []  # of this rank
        self._strange: set[str] = set()  # buffers that cannot be merged
        self._joined: set[str] = set()  # buffers that some rank has changed, and will again
        self._open = False

    def begin_batch(self) -> None:
        self.before = {n: b.detach().clone() for n, b in self._model.named_buffers()}
        self._parts, self._strange = [], set()
        self._open = bool(self.before)

    @torch.no_grad()
    def end_part(self, samples: int) -> None:
        if not self._open:
            return
        now = dict(self._model.named_buffers())
        self._strange |= now.keys() ^ self.before.keys()
        changed = {}
        for name, before in self.before.items():
            buffer = now.get(name)
            if buffer is None or _is_same(buffer, before):
                continue
            if buffer.shape != before.shape or buffer.dtype != before.dtype or buffer.is_complex():
                self._strange.add(name)
                continue
            if samples:
                changed[name] = buffer.detach().clone()
            buffer.copy_(before)
        self._parts.append(_Part(samples, changed))

    @torch.no_grad()
    def join(self, total: int) -> None:
        """Collective, once the last part has ended.

        Args:
            total: samples of the batch.

        Raises:
            InvalidArgument: a buffer became another one in a part, on some rank.
        """
        if not self._open:
            return
        self._open = False
        mine = self._flags()
        expected = [name for name in self.before if name in self._joined]
        *values, flags = over_ranks([*map(self._of_this_rank, expected), mine])
        if bool((flags == _STRANGE).any()):
            self._refuse(mine)
        changed = [n for n, flag in zip(self.before, flags, strict=False) if flag == _CHANGED]
        others = [name for name in changed if name not in self._joined]
        found = dict(zip(expected, values, strict=True))
        if others:
            found.update(zip(others, over_ranks([*map(self._of_this_rank, others)]), strict=True))
            self._joined.update(others)
        now = dict(self._model.named_buffers())
        for name in changed:
            value = found[name]
            now[name].copy_(value / total if value.is_floating_point() else value)

    def forget(self) -> None:
        """A batch that is left before its end leaves nothing behind."""
        if self._open:
            self._open = False
            now = dict(self._model.named_buffers())
            with torch.no_grad():
                for name, before in self.before.items():
                    if name in now and now[name].shape == before.shape:
                        now[name].copy_(before)

    def _flags(self) -> torch.Tensor:
        """A flag for each buffer, and one for all that appeared during the batch."""
        flags = [self._flag(name) for name in self.before]
        flags.append(_STRANGE if self._strange - self.before.keys() else _SAME)
        return torch.tensor(flags)

    def _refuse(self, mine: torch.Tensor) -> NoReturn:
        """On all ranks: names one that has such a buffer."""
        flags = mine.numpy()[None].astype(np.uint8)
        theirs = flags
        if _world.size() > 1:
            theirs = gathered(flags, "changed buffers of a GlobalBatch", 0)
        ranks, places = np.nonzero(theirs == _STRANGE)
        names = [*self.before, *sorted(self._strange - self.before.keys()), "?"]
        raise InvalidArgument(
            f"buffer '{names[places[0]]}' of the model became another one while rank "
            f"{ranks[0]} computed a part of a batch, or is complex: logical_ranks join buffers "
            "that keep their shape and dtype"
        )

    def _flag(self, name: str) -> int:
        if name in self._strange:
            return _STRANGE
        return _CHANGED if any(name in part.changed for part in self._parts) else _SAME

    def _of_this_rank(self, name: str) -> torch.Tensor:
        before = self.before[name]
        values = [part.changed.get(name, before) for part in self._parts]
        if before.is_floating_point():
            pairs = zip(values, self._parts, strict=True)
            return fold([_weighed(v, part.samples) for v, part in pairs], torch.add)
        return reduce(torch.maximum, values)


def _weighed(value: torch.Tensor, samples: int) -> torch.Tensor:
    """In float32 at least: sums over samples are too large for halves."""
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    return wide * samples if samples else torch.zeros_like(wide)  # also where it is infinite


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def over_ranks(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Sums of floating-point tensors, and maxima of others, in few collectives that overlap."""
    if _world.size() == 1:
        return list(values)
    together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, value in enumerate(values):
        wide = value.dtype if value.is_floating_point() else torch.int64
        together.setdefault((wide, value.device), []).append(i)
    begun = []
    for (dtype, device), places in together.items():
        flat = torch.cat([values[i].reshape(-1).to(dtype) for i in places])
        op = Sum if dtype.is_floating_point else Max
        name = f"buffers of a GlobalBatch, {dtype} on {device.type}"
        begun.append((places, allreduce_async(flat, op=op, name=name)))
    result = list(values)
    for places, handle in begun:
        pieces = torch.split(synchronize(handle), [values[i].numel() for i in places])
        for i, piece in zip(places, pieces, strict=True):
            result[i] = piece.to(values[i].dtype).reshape(values[i].shape)
    return result
