"""The samples that each rank reads, where the ranks change within an epoch."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import torch

from farandole import _world
from farandole._arguments import checked, shown, type_of
from farandole._core import InvalidArgument
from farandole.common._objects import allgather_object

__all__ = ["ElasticSampler"]


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Deals out the samples of an epoch that are not processed yet to the ranks of the present
    world, each to one of them; the first ones come twice where they do not divide.

    Put it into the ``DataLoader`` and into the state, and tell it of every batch that was trained:

        for epoch in range(state.epoch, epochs):
            for i, batch in enumerate(loader):       # DataLoader(dataset, 32, sampler=sampler)
                ...
                state.sampler.record_batch(i, 32)
                state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)

    What was recorded is committed, restored and shared with the state. So over an epoch no sample
    is left out and none counts twice, but for those that fill the last batches up. Those of batches
    after the last commit come again, as what was learnt of them is gone.

    Args:
        dataset: with a length.
        shuffle: another order in every epoch.
        seed: of that order.

    Raises:
        InvalidArgument: the dataset has no length.
    """

    @checked(dataset=("a dataset with a length", lambda v: isinstance(v, Sized)))
    def __init__(self, dataset: Any, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset: Any = dataset
        self.shuffle: bool = shuffle
        self.seed: int = seed
        self.epoch: int = 0
        self.processed_indices: set[int] = set()
        self.own_indices: set[int] = set()  # of these, what this rank alone knows of
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Another one begins: nothing is processed."""
        self.epoch = epoch
        self.processed_indices, self.own_indices = set(), set()
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """The batch of that number since the loop over the sampler began was trained, on all ranks:
        as ranks train in step, one that is lost takes nothing with it that others do not know."""
        begin, end = batch_idx * batch_size, (batch_idx + 1) * batch_size
        self.processed_indices.update(
            self._dealt[begin * self.num_replicas : end * self.num_replicas]
        )

    def record_indices(self, indices: Iterable[int]) -> None:
        """Some samples were trained, on this rank."""
        new = set(indices)
        self.processed_indices |= new
        self.own_indices |= new

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """The samples of this rank's batch of that number."""
        return self.indices[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the samples that were trained in it: by all ranks, and by this one."""
        return {
            "epoch": self.epoch,
            "processed_indices": set(self.processed_indices),
            "own_indices": set(self.own_indices),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises InvalidArgument for what is no such state."""
        if not isinstance(state_dict, Mapping) or not {"epoch", "processed_indices"} <= {
            *state_dict
        }:
            raise InvalidArgument(
                f"load_state_dict(): {shown(state_dict)} is not what state_dict() of an "
                "ElasticSampler gives"
            )
        self.epoch = state_dict["epoch"]
        self.processed_indices = set(state_dict["processed_indices"])
        self.own_indices = set(state_dict.get("own_indices", ()))
        self.reset()

    def reset(self) -> None:
        """Deals out what is not processed to the ranks that there are now."""
        self.num_replicas: int = _world.size()
        self.rank: int = _world.rank()
        self.remaining_indices: list[int] = [
            i for i in range(len(self.dataset)) if i not in self.processed_indices
        ]
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(self.remaining_indices)
        self.num_samples: int = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size: int = self.num_samples * self.num_replicas
        self._deal()

    def _deal(self) -> None:
        lacking = self.total_size - len(self.remaining_indices)
        self._dealt = self.remaining_indices + self._again(lacking)
        self.indices: list[int] = self._dealt[self.rank :: self.num_replicas]

    def _again(self, lacking: int) -> list[int]:
        rounds = -(-lacking // max(len(self.remaining_indices), 1))
        return (self.remaining_indices * rounds)[:lacking]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples


def merged(sampler: ElasticSampler) -> dict[str, Any]:
    """Rank 0's state, with the samples that each rank alone has processed. Collective."""
    mine = sampler.state_dict()
    if _world.rank() != 0:
        mine["processed_indices"] = set()
    theirs = allgather_object((type_of(sampler.dataset), mine), "elastic sampler")
    first = theirs[0][1]
    own = [state["own_indices"] for _, state in theirs if state["epoch"] == first["epoch"]]
    return {
        "epoch": first["epoch"],
        "processed_indices": first["processed_indices"].union(*own),
        "own_indices": set(),
    }
