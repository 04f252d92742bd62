"""A rank's part of a PyTorch DataLoader, which gives batches of all ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from farandole import _world
from farandole._core import InvalidArgument
from farandole.data._logical import Block
from farandole.data._order import DEFAULT_SEED
from farandole.data._parts import Part, part_of
from farandole.data._share import Share, taken

Note = Callable[[list[Any]], None]
_Of = tuple[int, Share]  # of a sample: the part of the batch that it is in, and its share
_Put = Callable[[list[Part]], Any]  # what a loader gives of a batch's parts


def split_loader(
    loader: Any,
    note: Note | None = None,
    seed: int = DEFAULT_SEED,
    size: int | None = None,
    rank: int | None = None,
) -> Any:
    """A DataLoader of this rank's parts: pairs of a batch, and [[samples of this rank, of all
    ranks]], float32 of shape (1, 2).

    Of a map-style dataset it reads this rank's samples alone (policy `index`). A sampler that
    shuffles without a generator of its own gets one with the seed. Of an iterable dataset it makes
    whole batches and keeps its part (policy `slice`).

    Args:
        loader: a torch.utils.data.DataLoader of batches.
        note: called with the sample numbers, or the arrays, of the first batch of every pass.

    Raises:
        InvalidArgument: it gives single samples.
    """
    here = _world.rank() if rank is None else rank
    where = Block(_world.size() if size is None else size, range(here, here + 1))
    return _split(loader, note, seed, where, _first)


def split_loader_in(loader: Any, note: Note | None, seed: int, block: Block | None) -> Any:
    """The same with the parts of a block: pairs of a list of batches, and their shares, of shape
    (parts, 2)."""
    if block is None:
        return split_loader(loader, note, seed)
    return _split(loader, note, seed, block, _together)


def _split(loader: Any, note: Note | None, seed: int, where: Block, put: _Put) -> Any:
    from torch.utils.data import DataLoader, IterableDataset

    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
            "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
        )
        if hasattr(loader, name)
    }  # fmt: skip
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise _not_batched()
        options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        options["collate_fn"] = _Slice(loader.collate_fn, where, put)
        return DataLoader(loader.dataset, **options)
    if loader.batch_sampler is None:
        raise _not_batched()
    numbered: Any = _Numbered(loader.dataset)
    return DataLoader(
        numbered,
        batch_sampler=_Mine(_seeded(loader.batch_sampler, seed), where, note),
        collate_fn=_Collate(loader.collate_fn, put),
        **options,
    )


def _not_batched() -> InvalidArgument:
    return InvalidArgument(
        "the DataLoader is not batched\n"
        "  advice: DataLoader(…, batch_size=B), where B is the batch of all ranks together"
    )


def _seeded(batch_sampler: Any, seed: int) -> Any:
    """The same one, but for a sampler that shuffles with what every process draws by itself."""
    import torch

    sampler: Any = getattr(batch_sampler, "sampler", None)
    if getattr(sampler, "generator", 0) is not None:  # has one, or does not shuffle
        return batch_sampler
    seeded, batches = copy.copy(sampler), copy.copy(batch_sampler)
    seeded.generator = torch.Generator().manual_seed(seed)
    batches.sampler = seeded
    return batches


class _Mine:
    """A batch sampler: of each batch the sample numbers of one rank, each with the part that it is
    of, and its share."""

    def __init__(self, batches: Any, where: Block, note: Note | None) -> None:
        self._batches, self._where, self._note = batches, where, note

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[tuple[Any, _Of]]]:
        for i, batch in enumerate(self._batches):
            numbers = list(batch)
            if i == 0 and self._note is not None:
                self._note(numbers)
            parts, mine = self._where
            cuts = [(part, *taken(len(numbers), parts, part)) for part in mine]
            yield [(number, (part, share)) for part, cut, share in cuts for number in numbers[cut]]


class _Numbered:
    """A dataset whose samples come with what they were asked for with."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, key: tuple[Any, _Of]) -> tuple[Any, _Of]:
        return self._dataset[key[0]], key[1]


class _Collate:
    def __init__(self, own: Callable[[list[Any]], Any], put: _Put) -> None:
        self._own, self._put = own, put

    def __call__(self, samples: list[tuple[Any, _Of]]) -> Any:
        parts = [list(part) for _, part in itertools.groupby(samples, lambda each: each[1])]
        return self._put(
            [Part(self._own([sample for sample, _ in part]), part[0][1][1]) for part in parts]
        )


class _Slice:
    def __init__(self, own: Callable[[list[Any]], Any], where: Block, put: _Put) -> None:
        self._own, self._where, self._put = own, where, put

    def __call__(self, samples: list[Any]) -> Any:
        batch, (parts, mine) = self._own(samples), self._where
        return self._put([part_of(batch, parts, part) for part in mine])


def _first(parts: list[Part]) -> Any:
    return parts[0].batch, _tensor(parts)


def _together(parts: list[Part]) -> Any:
    return [part.batch for part in parts], _tensor(parts)


def _tensor(parts: list[Part]) -> Any:
    import torch

    return torch.tensor([part.share for part in parts], dtype=torch.float32)
