"""Means over the samples of all ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.common._objects import allgather_object, compare
from farandole.torch.global_batch import GlobalBatch


class Metrics:
    """Means over all samples of all ranks, each of which counts once: sums and counts are added up
    on each rank, and over ranks when somebody asks. Where the GlobalBatch has ``logical_ranks``,
    they have the same bits for any number of ranks.

    Args:
        batches: whose present batch the values are of.

    Examples:
        >>> import torch, farandole.torch as fd
        >>> fd.init()
        >>> batches = fd.GlobalBatch(torch.utils.data.DataLoader(torch.arange(5.0), batch_size=4))
        >>> metrics = fd.Metrics(batches)
        >>> for x in batches:
        ...     metrics.update(mean=x.mean(), large=x > 3)
        >>> metrics.compute()
        {'large': 0.2, 'mean': 2.0}
    """

    def __init__(self, batches: GlobalBatch) -> None:
        if not isinstance(batches, GlobalBatch):
            raise InvalidArgument(f"Metrics(): batches is {shown(batches)}; it is a GlobalBatch")
        self._batches = batches
        self._sums: dict[tuple[str, int], tuple[float, float]] = {}  # by name and part
        self._epoch = _world.epoch()  # of the world in which they began

    def update(self, **values: Any) -> None:
        """Adds those of this rank's part of the present (micro-)batch.

        Args:
            values: by name: a number, or a tensor of one, which is a mean over what the batch
                counts (``count=`` of the GlobalBatch); or a tensor of one value per sample.
        """
        self._refuse_other_worlds()
        samples, part = self._batches.samples, self._batches.part
        for name, value in values.items():
            added, count = self._of(name, value, samples)
            before = self._sums.get((name, part), (0.0, 0.0))
            self._sums[name, part] = before[0] + added, before[1] + count

    def _of(self, name: str, value: Any, samples: int) -> tuple[float, float]:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            if tuple(value.shape) != (max(samples, 1),):
                raise InvalidArgument(
                    f"update(): {name} has shape {tuple(value.shape)}, where this rank's part of "
                    f"the batch has {max(samples, 1)} samples; pass one number per sample, or "
                    "their mean"
                )
            return (float(value.detach().double().sum()), samples) if samples else (0.0, 0.0)
        count = self._batches.count_of_part()
        if isinstance(value, torch.Tensor):
            value = value.detach()
        return (float(value) * count, count) if count else (0.0, 0.0)

    def compute(self) -> dict[str, float]:
        """The means, by name, the same on every rank; NaN where nothing counted. Collective.

        Raises:
            Mismatch: a rank has a metric that another has not.
            InvalidArgument: the world has changed since they were last reset.
        """
        self._refuse_other_worlds()
        theirs = [self._rows()] if _world.size() == 1 else allgather_object(self._rows(), "metrics")
        names = {rank: [f"'{name}'" for name in rows] for rank, rows in enumerate(theirs)}
        compare("metrics", names, "update the same metrics on every rank")
        means = {}
        for name in theirs[0]:
            # fsum is exact before it rounds: it does not matter which rank has which part.
            total, count = (math.fsum(sums[i] for r in theirs for sums in r[name]) for i in (0, 1))
            means[name] = total / count if count else math.nan
        return means

    def _rows(self) -> dict[str, list[tuple[float, float]]]:
        """The sums of this rank's parts, by name, in the order of names."""
        rows: dict[str, list[tuple[float, float]]] = {}
        for name, part in sorted(self._sums):
            rows.setdefault(name, []).append(self._sums[name, part])
        return rows

    def reset(self) -> None:
        """Forgets what was added up."""
        self._sums.clear()
        self._epoch = _world.epoch()

    def _refuse_other_worlds(self) -> None:
        """Refuses them, as a lost rank takes its sums with it, and batches after a commit come
        again."""
        if not self._sums:
            self._epoch = _world.epoch()
        elif self._epoch != _world.epoch():
            raise InvalidArgument(
                "the ranks have changed since these Metrics were last reset, and what some of them "
                "had added up may be lost\n  advice: call reset() before every loop over the "
                "GlobalBatch, or make the Metrics there"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Metrics:
        raise InvalidArgument("Metrics belong to one world, and cannot be kept in a state")
