"""A rank's part of a PyTorch DataLoader, which gives batches of all ranks."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from farandole._core import InvalidArgument
from farandole.data._logical import Block, ranks_own
from farandole.data._order import DEFAULT_SEED
from farandole.data._parts import part_of
from farandole.data._policy import Policy, check_policy, refuse_index
from farandole.data._same import ReadBatches
from farandole.data._share import Share, taken
from farandole.data._tree import samples as samples_in

_Put = Callable[[list[Any]], Any]  # the parts of a batch, as they are given


def split_loader(
    loader: Any,
    read: ReadBatches | None = None,
    seed: int = DEFAULT_SEED,
    size: int | None = None,
    rank: int | None = None,
    *,
    policy: Policy = "auto",
) -> Any:
    """A DataLoader of this rank's parts: pairs of a batch, and [[samples of this rank, of all
    ranks]], float32 of shape (1, 2).

    Of a map-style dataset it reads this rank's samples alone (policy `index`). A sampler that
    shuffles without a generator of its own gets one with the seed. Of an iterable dataset it makes
    whole batches and keeps its part (policy `slice`).

    Args:
        loader: a torch.utils.data.DataLoader of batches.
        read: keeps checksums of the batches' sample numbers, for the ranks to compare. An iterable
            dataset has none.
        policy: "slice": whole batches also of a map-style dataset.

    Raises:
        InvalidArgument: it gives single samples, or has a DistributedSampler; or the policy is
            "index", of an iterable dataset.
    """
    check_policy(policy, "split_loader(): policy", without=("leader",))
    return _split(loader, read, seed, ranks_own(size, rank), itemgetter(0), policy)


def split_loader_in(
    loader: Any, read: ReadBatches | None, seed: int, block: Block | None, policy: Policy
) -> Any:
    """The same with the parts of a block of logical ranks: pairs of a list of batches, and their
    shares, of shape (parts, 2)."""
    put: _Put = itemgetter(0) if block is None else list
    return _split(loader, read, seed, block or ranks_own(), put, policy)


def _split(
    loader: Any,
    read: ReadBatches | None,
    seed: int,
    block: Block,
    put: _Put,
    policy: Policy,
) -> Any:
    batches = _going_on(loader.batch_sampler, batches_of(loader, seed), seed)
    whole = _Slice(loader.collate_fn, block, put)
    if batches is None:
        if policy == "index":
            raise refuse_index("this DataLoader", "its dataset is iterable, without numbers")
        return loader_of_slices(loader, whole)
    if policy == "slice":
        return _numbered(loader, _Mine(batches, Block(1, range(1)), read), _SliceOfNumbers(whole))
    return _numbered(loader, _Mine(batches, block, read), _CollateParts(loader.collate_fn, put))


def batches_of(loader: Any, seed: int = DEFAULT_SEED) -> Any | None:
    """The sampler of its batches' sample numbers, in the same order on every rank; None where the
    dataset has no numbers.

    Raises:
        InvalidArgument: it gives single samples, or has a DistributedSampler.
    """
    from torch.utils.data import IterableDataset
    from torch.utils.data.distributed import DistributedSampler

    without_numbers = isinstance(loader.dataset, IterableDataset)
    if (loader.batch_size if without_numbers else loader.batch_sampler) is None:
        raise InvalidArgument(
            "the DataLoader is not batched\n"
            "  advice: DataLoader(…, batch_size=B), where B is the batch of all ranks together"
        )
    if without_numbers:
        return None
    sampler = getattr(loader.batch_sampler, "sampler", None)
    if isinstance(sampler, DistributedSampler) and sampler.num_replicas > 1:
        raise InvalidArgument(
            "the DataLoader has a DistributedSampler, which gives each rank other samples already\n"
            "  advice: DataLoader(…, shuffle=True), as in the program of one process"
        )
    return _seeded(loader.batch_sampler, seed)


def loader_of_numbers(loader: Any, mine: Any, shown: Callable[[Share], Any]) -> Any:
    """A DataLoader like this one, of a rank's samples alone: pairs of a batch and its share.

    Args:
        mine: a batch sampler that gives `Asked`.
        shown: what of a share the loader gives.
    """
    return _numbered(loader, mine, _Collate(loader.collate_fn, shown))


def _numbered(loader: Any, mine: Any, collate: Any) -> Any:
    from torch.utils.data import DataLoader

    numbered: Any = _Numbered(loader.dataset)
    return DataLoader(numbered, batch_sampler=mine, collate_fn=collate, **_options(loader))


def loader_of_slices(loader: Any, collate: Any) -> Any:
    """A DataLoader like this one, that makes whole batches of which a rank keeps its part.

    Args:
        collate: the samples of a batch to what the loader gives.
    """
    from torch.utils.data import DataLoader

    sizes = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
    return DataLoader(loader.dataset, collate_fn=collate, **sizes, **_options(loader))


def _options(loader: Any) -> dict[str, Any]:
    return {
        name: getattr(loader, name)
        for name in (
            "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context",
            "generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order",
        )
        if hasattr(loader, name)
    }  # fmt: skip


_kept: WeakKeyDictionary[Any, dict[int, Any]] = WeakKeyDictionary()


def _going_on(batch_sampler: Any, seeded: Any, seed: int) -> Any:
    """The seeded sampler, kept with the user's own so that its order goes on in later calls."""
    if seeded is None or seeded is batch_sampler:
        return seeded
    return _kept.setdefault(batch_sampler, {}).setdefault(seed, seeded)


def _seeded(batch_sampler: Any, seed: int) -> Any:
    """The same one, or a seeded copy if every process would draw its own shuffle."""
    import torch

    sampler: Any = getattr(batch_sampler, "sampler", None)
    if getattr(sampler, "generator", 0) is not None:  # has one, or does not shuffle
        return batch_sampler
    seeded, batches = copy.copy(sampler), copy.copy(batch_sampler)
    seeded.generator = torch.Generator().manual_seed(seed)
    batches.sampler = seeded
    return batches


class _Mine:
    """A batch sampler: of each batch the sample numbers of a rank's parts, one after the other,
    with the shares of these."""

    def __init__(self, batches: Any, block: Block, read: ReadBatches | None) -> None:
        self._batches, self._block, self._read = batches, block, read

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Asked]:
        (parts, mine), read = self._block, self._read
        of_pass = 0 if read is None else read.begin()
        for i, batch in enumerate(self._batches):
            numbers = list(batch)
            if read is not None:
                read.tell(of_pass, i, zlib.crc32(repr(numbers).encode()))
            cuts = [taken(len(numbers), parts, part) for part in mine]
            yield Asked(
                [number for cut, _ in cuts for number in numbers[cut]],
                [share for _, share in cuts],
            )


class Asked(NamedTuple):
    """The request of a batch sampler to a dataset."""

    numbers: list[Any]  # of samples
    share: Any  # a share; or those of a block


class _Numbered:
    """A dataset whose samples come with the share that they were asked for with."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._fetch = getattr(dataset, "__getitems__", None)  # of a whole batch at once

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: Any) -> Any:
        return self._dataset[number]

    def __getitems__(self, asked: Asked) -> tuple[Any, Any]:
        if self._fetch:
            return self._fetch(asked.numbers), asked.share
        return [self._dataset[number] for number in asked.numbers], asked.share


class _Collate:
    def __init__(self, own: Callable[[list[Any]], Any], shown: Callable[[Share], Any]) -> None:
        self._own, self._shown = own, shown

    def __call__(self, fetched: tuple[Any, Share]) -> Any:
        samples, share = fetched
        return self._own(samples), self._shown(share)


class _CollateParts:
    """The same of several parts, each by itself."""

    def __init__(self, own: Callable[[list[Any]], Any], put: _Put) -> None:
        self._own, self._put = own, put

    def __call__(self, fetched: tuple[Any, list[Share]]) -> Any:
        samples, shares = fetched
        if len(shares) == 1:  # as a dataset's own __getitems__ gave them
            return self._put([self._own(samples)]), _tensor(shares)
        rest = iter(samples)
        batches = [
            self._own(list(itertools.islice(rest, max(share.samples, 1)))) for share in shares
        ]
        return self._put(batches), _tensor(shares)


class _Slice:
    def __init__(self, own: Callable[[list[Any]], Any], block: Block, put: _Put) -> None:
        self._own, self._block, self._put = own, block, put

    def __call__(self, samples: list[Any]) -> Any:
        batch, (parts, mine) = collated(self._own, samples), self._block
        cut = [part_of(batch, parts, part) for part in mine]
        return self._put([part.batch for part in cut]), _tensor([part.share for part in cut])


def collated(own: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    """A whole batch, which is to be cut along its first dimension.

    Raises:
        InvalidArgument: that is not the samples.
    """
    batch = own(samples)
    rows = samples_in(batch, "the batch")
    if rows != len(samples):
        raise InvalidArgument(
            f"collate_fn has made a batch whose first dimension is {rows} of {len(samples)} "
            "samples, and ranks cut it there\n  advice: a batch of (samples, …), as with "
            "batch_first=True; what leaves samples out or adds some goes into the dataset"
        )
    return batch


class _SliceOfNumbers:
    def __init__(self, whole: _Slice) -> None:
        self._whole = whole

    def __call__(self, fetched: tuple[list[Any], Any]) -> Any:
        return self._whole(fetched[0])


def _tensor(shares: list[Share]) -> Any:
    import torch

    return torch.tensor(shares, dtype=torch.float32)
