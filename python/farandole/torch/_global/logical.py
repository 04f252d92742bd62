"""Logical ranks in a loop over a GlobalBatch: the same bits for any number of ranks.

Note [Same bits in a loop of your own]

The loop gets the parts of a batch that are this rank's, one after the other. What a part gives
depends on the part alone:

    gradients   of a loss that weighs count / total; they fold in the canonical tree, and the sum
                over ranks is its upper part (torch/_training/parts.py)
    buffers     as the running averages of BatchNorm: begin alike in each part, and become the mean
                of all parts, by their samples (statistics.py)
    dropout     draws with a seed of the epoch, the batch and the part
    metrics     are added up for each part by itself; sums over parts are exact before they round
    threads     follow from the number of parts, since kernels have other bits on other numbers
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole.data._logical import Block, block_here, fix_torch_threads
from farandole.torch._global.normalization import refuse_synchronized
from farandole.torch._global.reading import Micro
from farandole.torch._global.statistics import Statistics
from farandole.torch._training.parts import PartGradients
from farandole.torch._training.reduced import ReducedOptimizer


def block_for(logical_ranks: Any, model: Any, options: dict[str, Any]) -> Block:
    """This rank's block of logical ranks.

    Raises:
        InvalidArgument: they do not fit on this many ranks, or another option excludes them.
    """
    block = block_here(logical_ranks, "GlobalBatch", options)
    for name, why in [
        ("sharded_update", "no rank has the gradients that parts fold into"),
        ("sparse_as_dense", "sparse gradients are refused"),
    ]:
        if options.get(name):
            raise InvalidArgument(
                f"GlobalBatch(logical_ranks={logical_ranks}, {name}=True): {why}; leave out one of "
                "them"
            )
    if model is not None:
        refuse_synchronized(model, logical_ranks)
    fix_torch_threads(logical_ranks)
    return block


class LogicalRanks:
    """This rank's logical ranks, as a program computes their parts.

    Args:
        model, optimizer: of the GlobalBatch, as far as it has them. The optimizer is a
            DistributedOptimizer already.
        seed: of the random numbers that layers draw.
    """

    def __init__(self, block: Block, model: Any, optimizer: Any, seed: int) -> None:
        self.block, self._seed = block, seed
        self._statistics = None if model is None else Statistics(model)
        self._gradients: PartGradients | None = None
        if optimizer is not None:
            assert isinstance(optimizer, ReducedOptimizer)
            self._gradients = optimizer.parts or optimizer.compute_in_parts(block.parts)
        self._micro: Micro | None = None  # that is being computed
        self._part = -1  # of it; or the last one that has ended
        self._samples = self._total = 0  # of that part, and of the batch
        self._batches = 0  # begun, to tell them apart
        self._random: torch.Tensor | None = None  # the generator's state outside of a batch

    @contextmanager
    def batch(self, total: int) -> Iterator[None]:
        """The parts of a batch of `total` samples are given out inside. Random numbers that the
        program draws there do not change those that it draws elsewhere."""
        self._close()  # an error may keep the loop alive that it has ended
        self._batches += 1
        this, self._total = self._batches, total
        self._random = torch.get_rng_state()
        self._micro, self._part = None, -1
        if self._statistics is not None:
            self._statistics.begin_batch()
        if self._gradients is not None:
            self._gradients.begin_batch()
            self._gradients.buffers = {} if self._statistics is None else self._statistics.before
            self._gradients.reduced = self._end_batch
        try:
            yield
        finally:
            if this == self._batches:
                self._close()

    def leave(self) -> None:
        """A batch that the program is in ends here."""
        self._close()
        self._batches += 1

    def _close(self) -> None:
        if self._random is None:
            return
        torch.set_rng_state(self._random)
        self._random = None
        if self._statistics is not None:
            self._statistics.forget()
        if self._gradients is not None:
            self._gradients.forget()

    def begin(self, micro: Micro, *, last: bool, step: tuple[int, int]) -> None:
        """A micro-batch is given out.

        Args:
            last: of this rank's of the batch.
            step: epoch and batch.
        """
        if micro.part != self._part:
            self._end_part()
            self._part, self._samples = micro.part, 0
            entropy = struct.pack("4Q", self._seed % 2**64, *step, micro.part)
            digest = hashlib.blake2b(entropy, digest_size=8).digest()
            _seed_all(int.from_bytes(digest, "little"))
        self._micro = micro
        self._samples += micro.samples
        if self._gradients is not None:
            self._gradients.expect(micro.part, last=last)

    def end(self) -> None:
        """Ends a batch after its last micro-batch, unless its backward did. Collective."""
        self._end_batch()

    def _end_batch(self) -> None:
        """Merges the buffers of all parts, right after the last backward: all ranks are at the same
        point then, and the program cannot have saved the buffers yet."""
        if self._micro is None:
            return
        self._end_part()
        self._micro = None
        if self._statistics is not None:
            self._statistics.join(self._total)

    def _end_part(self) -> None:
        if self._micro is not None and self._statistics is not None:
            self._statistics.end_part(self._samples)


def _seed_all(seed: int) -> None:
    """torch.manual_seed(), which takes most of a millisecond where no device was ever used: it
    keeps a traceback for each kind of them."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
