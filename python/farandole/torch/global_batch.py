"""The global batch: the program of one process, its batches those of all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch.utils.data import DataLoader

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole.data._logical import Block, fold
from farandole.data._order import DEFAULT_SEED
from farandole.data._torch import batches_of
from farandole.torch._entries import entry
from farandole.torch._global.ahead import ReadAhead
from farandole.torch._global.beginning import (
    check_arguments,
    compare_everything,
    prepare_alike,
    refuse_other_worlds,
    share_between_ranks,
)
from farandole.torch._global.kept import KeptGradients, trained_by
from farandole.torch._global.logical import LogicalRanks, block_for
from farandole.torch._global.losses import Divisors, Shapes, check_loss, part_of_mean
from farandole.torch._global.normalization import (
    refuse_micro_batches,
    statistics_of,
    warn_of_few_samples,
    warn_of_own_statistics,
)
from farandole.torch._global.passes import Passes
from farandole.torch._global.reading import Micro, NumberReader, Reader, SliceReader, Whole
from farandole.torch._global.sums import gather_parts, number_over_ranks, sum_of_parts
from farandole.torch._training import worlds
from farandole.torch._training.weighing import weighed
from farandole.torch._training.wrapped import WrappedOptimizer

_T = TypeVar("_T")


class GlobalBatch(worlds.Follower):
    """A DataLoader whose batches are those of all ranks together: every rank gets its part of each,
    and one update per batch gives the weights and losses of one process, on any number of ranks.

    Making it and iterating over it are collective. A batch of n samples is split contiguously; a
    rank without samples gets the batch's first sample, which counts nowhere. With a model, all
    ranks begin with rank 0's weights and buffers; with an optimizer, also with its state, and it
    becomes a ``DistributedOptimizer``, whose ``backward()`` takes losses of ``scale_loss`` only.

    Args:
        loader: a ``torch.utils.data.DataLoader`` as of one process, of the batch of all ranks. Its
            workers, sampler, ``batch_sampler``, generator and ``drop_last`` are kept. A sampler
            that shuffles without a generator gets one with the seed.
        model: that is trained.
        optimizer: of that model.
        micro_batch_size: at most so many samples at once on a rank. A batch then comes in several
            micro-batches; ``sync_gradients`` is true in the last one.
        logical_ranks: every batch is cut into so many parts, whatever the number of ranks, which
            then does not change a bit. A rank gets several parts, one after the other, each a
            batch of its own; ``sync_gradients`` is true in the last one.
        count: of a batch, what the mean loss over it is divided by, as the number of tokens that
            are not padding, or the sum of the samples' weights: a function of what the loader
            gives. Default: its samples.
        seed: of a shuffle without a generator; with logical_ranks also of what layers draw.
        same_batches: False leaves out comparing the batches of a dataset that has no numbers,
            where every rank draws at random within samples.
        options: those of ``DistributedOptimizer``; gradients are averaged over all ranks.

    Raises:
        InvalidArgument: an argument is wrong, on this rank or on another one, which is named.
        Mismatch: the ranks' models or arguments differ; in a loop over it: their batches do.

    Examples:
        >>> import torch, farandole.torch as fd
        >>> fd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=4)
        >>> batches = fd.GlobalBatch(loader, model, optimizer)
        >>> for x in batches:
        ...     optimizer.zero_grad()
        ...     loss = model(x).square().mean()
        ...     batches.scale_loss(loss).backward()
        ...     optimizer.step()
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        micro_batch_size: int | None = None,
        logical_ranks: int | None = None,
        count: Callable[[Any], Any] | None = None,
        seed: int = DEFAULT_SEED,
        same_batches: bool = True,
        **options: Any,
    ) -> None:
        self.loader = loader
        self._model, self._optimizer, self._count = model, optimizer, count
        self._divisors, self._shapes = Divisors(), Shapes()
        self._at_once, self._seed, self._same_batches = micro_batch_size, seed, same_batches
        self._logical_ranks = logical_ranks
        self._passes: Passes

        def prepare() -> None:
            check_arguments(loader, model, optimizer, micro_batch_size, count, options)
            self._find_block(options)
            if model is not None:
                refuse_micro_batches(model, micro_batch_size)

        prepare_alike(prepare, model, optimizer, logical_ranks)
        self._loops = 0  # begun, to tell them apart
        self._whole: Whole | None = None
        self._micro: Micro | None = None
        self._everywhere: float | None = None  # what the present batch counts, on all ranks
        several = micro_batch_size is not None or logical_ranks is not None
        self._ahead = ReadAhead(weights_differ=several or count is not None)
        self._kept_gradients = KeptGradients(optimizer)
        self.sync_gradients = True
        share_between_ranks(model, optimizer, options, logical_ranks)
        self._logical = self._computes_in_parts()
        compare_everything(model, optimizer)
        later = worlds.makes_later()
        self._epoch = None if later else _world.epoch()  # of the world it is in
        self._kept = not later  # a state has it, where it goes on in other worlds
        if later:
            worlds.follow(self)
        if model is not None:
            warn_of_few_samples(model, self.batch_size, micro_batch_size, self._block.parts)
            if self._logical is None:
                warn_of_own_statistics(model)

    def _find_block(self, options: dict[str, Any]) -> None:
        """This rank's part of batches in the present world."""
        self._size, here = _world.size(), _world.rank()
        self._block = Block(self._size, range(here, here + 1))
        if self._logical_ranks is not None:
            self._block = block_for(self._logical_ranks, self._model, options)
        reader = self._reader(self._seed, self._same_batches)
        self._passes = Passes(self.loader, reader, self._logical_ranks)

    def _computes_in_parts(self) -> LogicalRanks | None:
        if self._logical_ranks is None:
            return None
        return LogicalRanks(self._block, self._model, self._optimizer, self._seed)

    def _reader(self, seed: int, same_batches: bool) -> Reader:
        batches = batches_of(self.loader, seed)
        if batches is None:
            return SliceReader(self.loader, self._block, self._at_once, same_batches)
        return NumberReader(self.loader, batches, self._block, self._at_once)

    # ---- batches ----

    @property
    def batch_size(self) -> int | None:
        """Samples of all ranks in a batch; None where the batch sampler does not say."""
        return self._passes.batch_size

    def __len__(self) -> int:
        """Batches of all ranks in a pass."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """This rank's part of every batch, as the loader gives batches; in micro-batches, if there
        is a micro_batch_size, and part by part, with logical_ranks. Collective.

        Raises:
            InvalidArgument: another rank could not read; on that rank, its own error.
            Mismatch: ranks read different batches.
        """
        refuse_other_worlds(self._kept, self._epoch)
        self._loops += 1
        mine = self._loops
        self._ahead.begin_pass()
        for whole in self._passes:
            self._whole, self._everywhere = whole, None
            self._ahead.begin_batch(whole.total)
            with statistics_of(self._model, whole, self._size):
                if self._logical is None:
                    yield from self._micro_batches(whole, mine)
                    continue
                with self._logical.batch(whole.total):
                    yield from self._micro_batches(whole, mine)
                    self._logical.end()
        self._ahead.end_pass()

    def _micro_batches(self, whole: Whole, loop: int) -> Iterator[Any]:
        for micro in whole.micros:
            last = micro is whole.micros[-1]
            self._micro = micro
            self._hold(not last)
            self._kept_gradients.begin(first=micro is whole.micros[0])
            if self._logical is not None:
                position = self._passes.position
                step = position.epoch, position.batches
                self._logical.begin(micro, last=last, step=step)
            try:
                yield micro.batch
            finally:
                if loop == self._loops:
                    self._hold(False)
            if loop != self._loops:
                raise InvalidArgument(
                    "another loop over this GlobalBatch has begun\n"
                    "  advice: make a GlobalBatch for each of two loops at a time"
                )

    def _hold(self, held: bool) -> None:
        self.sync_gradients = not held
        if isinstance(self._optimizer, WrappedOptimizer):
            self._optimizer.hold(held)

    # ---- this rank's part ----

    @property
    def samples(self) -> int:
        """This rank's samples of the present (micro-)batch that count; 0 where it has none."""
        return self._present().samples

    @property
    def total(self) -> int:
        """Samples of the present batch, of all ranks."""
        return self._batch().total

    @property
    def part(self) -> int:
        """The number of the present part of the batch: this rank, or a logical rank."""
        return self._present().part

    def _present(self) -> Micro:
        if self._micro is None:
            raise InvalidArgument("there is no batch yet; loop over the GlobalBatch")
        return self._micro

    def _batch(self) -> Whole:
        self._present()
        assert self._whole is not None
        return self._whole

    def count_of_part(self) -> float:
        """The divisor of a mean loss over this rank's part of the present (micro-)batch; 0 where
        the rank has no samples."""
        return self._counted(self._present())

    def _counted(self, micro: Micro) -> float:
        if self._count is None or micro.samples == 0:
            return float(micro.samples)
        count = float(self._count(micro.batch))
        if not 0 <= count < float("inf"):
            raise InvalidArgument(f"count() gives {count}; it gives a number of at least 0")
        return count

    # ---- the loss ----

    @entry()
    def scale_loss(
        self, loss: torch.Tensor, reduction: Literal["mean", "sum"] = "mean"
    ) -> torch.Tensor:
        """The loss with the weight of this rank's part of the batch: the mean over ranks of its
        gradients, and of itself, is that of the whole batch; with ``logical_ranks`` the sum over
        all parts. With ``count=`` it is collective, once per batch.

        Args:
            loss: of this rank's part of the present (micro-)batch, a tensor of one number.
            reduction: "mean": it was divided by its samples, or by what ``count`` gives; "sum": it
                was not.

        Raises:
            InvalidArgument: an argument is wrong, there is no batch yet, or nothing in it counts.
        """
        check_loss(loss, reduction)
        scaled = self._scaled(loss, reduction)
        if self._size > 1 and scaled.requires_grad:
            self._ahead.watch(scaled)
        if self._logical is None and len(self._batch().micros) > 1 and scaled.requires_grad:
            self._kept_gradients.watch(scaled)
        return scaled

    def _scaled(self, loss: torch.Tensor, reduction: str) -> torch.Tensor:
        micro, size = self._present(), self._size if self._logical is None else 1
        if micro.samples and self.total > micro.samples:
            self._shapes.look(loss, micro.samples)
        if reduction == "sum":
            return weighed(loss, float(size if micro.samples else 0))
        if self._count is None:
            if micro.samples and self.total > micro.samples:
                self._divisors.look(loss, micro.samples)
            return weighed(loss, micro.samples * size / self.total)
        if self._everywhere is None:
            self._everywhere = number_over_ranks(self._counted_here())
        parameters = [p for p in trained_by(self._optimizer) if p.requires_grad]
        return part_of_mean(loss, self._counted(micro), self._everywhere, size, parameters)

    def _counted_here(self) -> float:
        parts = [
            [self._counted(micro) for micro in self._batch().micros if micro.part == part]
            for part in self._block.mine
        ]
        return fold([sum(counts) for counts in parts], float.__add__)

    # ---- metrics ----

    @overload
    def sum(self, value: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor: ...
    @overload
    def sum(self, value: float | Sequence[float]) -> float: ...
    def sum(self, value: Any) -> Any:
        """The sum over ranks of a number or a tensor of this rank's part; a rank without samples
        does not count. Collective. Not with several micro-batches, of which ranks may have
        different numbers.

        Args:
            value: with ``logical_ranks``: in the last part, a list of those of all this rank's
                parts. The sum has the same bits for any number of ranks.

        Returns:
            As it came: a float of a number, a tensor (without gradients) of a tensor.

        Raises:
            InvalidArgument: with ``logical_ranks``, it is no such list, or more parts come; the
                pass is over, and its last batch had no samples for some rank.
        """
        values, samples = self._of_parts("sum()", value)
        self._refuse_sum_of_pass()
        return sum_of_parts(values, samples)

    def _refuse_sum_of_pass(self) -> None:
        """A rank without samples in the last batch may have had some before."""
        is_of_several = self._ahead.is_over and self._ahead.batches > 1
        if is_of_several and self.total < self._block.parts:
            raise InvalidArgument(
                f"sum() when the pass is over, whose last batch had {self.total} samples for "
                f"{self._block.parts} parts: what a rank without samples has does not count\n"
                "  advice: Metrics, which adds up what counts; or sum() of each batch in the loop"
            )

    def gather_for_metrics(self, outputs: _T) -> _T:
        """Tensors of the samples of this rank's part to those of the whole batch, on every rank, in
        the order of one process; what does not count is left out. Collective; not with several
        micro-batches.

        Args:
            outputs: tensors whose first dimension is the samples; dicts, tuples, lists of them.
                With ``logical_ranks``: in the last part, a list of those of all this rank's parts;
                what comes back is as one of them.

        Raises:
            InvalidArgument: a tensor has no first dimension, or another length; with
                ``logical_ranks``, it is no such list, or more parts come.
        """
        whole: _T = gather_parts(*self._of_parts("gather_for_metrics()", outputs))
        return whole

    def _of_parts(self, what: str, values: Any) -> tuple[list[Any], list[int]]:
        """By part of this rank: the values, and how many samples it has."""
        self._refuse_micro_batches(what)
        samples = [micro.samples for micro in self._batch().micros]
        if self._logical is None:
            return [values], samples
        if not self.sync_gradients:
            raise InvalidArgument(
                f"{what} in the middle of a batch, of which more parts come: ranks have "
                "differently many, and would wait for each other\n  advice: make a list of what "
                f"the parts have, and if batches.sync_gradients: batches.{what[:-2]}(list)"
            )
        if not isinstance(values, list) or len(values) != len(samples):
            raise InvalidArgument(
                f"{what}: {shown(values)}; with logical_ranks={self._block.parts} it takes a list "
                f"of what each part has, of which this rank has {len(samples)}"
            )
        return values, samples

    def _refuse_micro_batches(self, what: str) -> None:
        self._present()
        if self._at_once is not None:
            raise InvalidArgument(
                f"{what} with micro_batch_size={self._at_once}: ranks may have different numbers "
                "of micro-batches, and would wait for each other\n  advice: Metrics, which adds up "
                "on each rank; or a GlobalBatch without micro_batch_size"
            )

    # ---- state ----

    @property
    def epoch(self) -> int:
        """Passes over the data that are over."""
        return self._passes.position.epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the program stands: after the batch that the loop is in. The same on every rank;
        ``load_state_dict`` takes it on any number of ranks.

        Raises:
            InvalidArgument: more micro-batches of the present batch come.
        """
        if not self.sync_gradients:
            raise InvalidArgument(
                "state_dict() in the middle of a batch, of which more micro-batches come\n"
                "  advice: if batches.sync_gradients: save, after the step"
            )
        return self._passes.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next loop goes on there: the same samples in the same order as if it had never been
        left. Every rank loads the same state.

        Raises:
            InvalidArgument: it is no such state, or of other data.
        """
        self._passes.load(state)

    # ---- in an elastic job (_training/worlds.py) ----

    def note_kept(self) -> None:
        """A TorchState has it."""
        self._kept = True

    def is_superseded(self) -> bool:
        return False

    def described(self) -> str:
        return f"a GlobalBatch of {self.batch_size} samples, logical_ranks={self._logical_ranks}"

    def leave_world(self) -> None:
        self._loops += 1  # that one is over, also where a traceback keeps it
        self._hold(False)
        if self._logical is not None:
            self._logical.leave()

    def enter_world(self) -> None:
        """The next loop goes on where the last one stood, or what was loaded since."""
        state = self._passes.state()
        self._epoch = _world.epoch()
        self._find_block({})
        self._passes.load(state)
        self._whole = self._micro = self._everywhere = None
        self._logical = self._computes_in_parts()
