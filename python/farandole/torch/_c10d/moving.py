"""The collectives that do not reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole._collectives.rows import everyones
from farandole._core import InvalidArgument, Mismatch
from farandole.torch._c10d.arguments import (
    check_equal,
    check_shares,
    differing_counts,
    elements,
    one,
    sizes,
)
from farandole.torch._c10d.engine_group import EngineGroup, Tensors, defaults
from farandole.torch._c10d.tensors import in_place, pairs, received, received_list, sent, sent_list
from farandole.torch._c10d.works import Work, together
from farandole.torch._entries import entry


class Moving(EngineGroup):
    """Broadcast, gathers, scatter and all-to-all."""

    @entry("c10d::broadcast_")
    def broadcast(self, tensors: Tensors, opts: Any = defaults) -> Any:
        here, finish = in_place(one(tensors, "broadcast"))
        root = opts.rootRank
        finish = finish if root != self.rank() else None
        return self._run("broadcast", here, here, opts, list(tensors), finish, root=root)

    @entry("c10d::_allgather_base_")
    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = defaults
    ) -> Any:
        check_shares(output, input, self.size(), "all_gather_single")
        target, finish = received(output)
        return self._run("all_gather", sent(input), target, opts, [output], finish)

    @entry("c10d::allgather_")
    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = defaults) -> Any:
        return self._gathered(one(outputs, "all_gather"), one(inputs, "all_gather"), opts)

    def _gathered(self, parts: Tensors, tensor: torch.Tensor, opts: Any) -> Work:
        counts = differing_counts(parts, tensor, self.rank(), self.size(), "all_gather")
        target, finish = received_list(parts)
        result = [list(parts)]
        return self._run("all_gather", sent(tensor), target, opts, result, finish, counts=counts)

    @entry("c10d::allgather_into_tensor_coalesced_")
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = defaults
    ) -> Any:
        for taken, given in zip(outputs, inputs, strict=True):
            check_shares(taken, given, self.size(), "all_gather_single")
        targets, finishes = pairs([received(t) for t in outputs])
        sources = [sent(t) for t in inputs]
        return self._run_grouped("all_gather", sources, targets, opts, list(outputs), finishes)

    @entry("c10d::allgather_coalesced_")
    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = defaults
    ) -> Any:
        """``outputs[r][i]`` becomes the ``i``-th tensor of rank ``r``."""
        with self._block("all_gather_coalesced", self._seconds(opts)):
            works = [
                self._gathered([parts[i] for parts in outputs], tensor, opts)
                for i, tensor in enumerate(inputs)
            ]
        return together(works, [work.result() for work in works])

    @entry("c10d::gather_")
    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = defaults) -> Any:
        tensor, root = one(inputs, "gather"), opts.rootRank
        if root != self.rank():
            return self._run("gather", sent(tensor), None, opts, [], root=root)
        parts = one(outputs, "gather")
        check_equal(parts, tensor, self.size(), "gather")
        target, finish = received_list(parts)
        return self._run("gather", sent(tensor), target, opts, [list(parts)], finish, root=root)

    @entry("c10d::scatter_")
    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = defaults) -> Any:
        output, root = one(outputs, "scatter"), opts.rootRank
        target, finish = received(output)
        if root != self.rank():
            return self._run("scatter", None, target, opts, [output], finish, root=root)
        parts = one(inputs, "scatter")
        check_equal(parts, output, self.size(), "scatter")
        return self._run("scatter", sent_list(parts), target, opts, [output], finish, root=root)

    @entry("c10d::alltoall_base_")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = defaults,
    ) -> Any:
        source, (target, finish) = sent(input), received(output)
        counts: Sequence[int] = ()
        if output_splits or input_splits:
            # The ranks exchange their splits first, so this waits for them.
            counts = self._all_splits(
                elements(input, input_splits, self.size(), "input"),
                elements(output, output_splits, self.size(), "output"),
                opts,
            )
        elif input.numel() != output.numel() or input.numel() % self.size():
            raise InvalidArgument(
                f"all_to_all_single of {tuple(input.shape)} into {tuple(output.shape)}: without "
                f"splits they are equal, and cut into {self.size()} equal parts"
            )
        return self._run("all_to_all", source, target, opts, [output], finish, counts=counts)

    @entry("c10d::alltoall_")
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = defaults) -> Any:
        for tensors, what in ((inputs, "input"), (outputs, "output")):
            if len(tensors) != self.size():
                raise InvalidArgument(
                    f"all_to_all: {len(tensors)} {what} tensors for {self.size()} ranks"
                )
        counts = self._all_splits(sizes(inputs), sizes(outputs), opts)
        target, finish = received_list(outputs)
        source, result = sent_list(inputs), list(outputs)
        return self._run("all_to_all", source, target, opts, result, finish, counts=counts)

    def _all_splits(self, sends: list[int], takes: list[int], opts: Any) -> list[int]:
        """Element counts from each rank to each. All ranks raise one error if two disagree."""
        table = everyones(sends + takes, self._group, self._seconds(opts))
        size = self.size()
        wrong = [
            f"rank {a} sends {table[a][b]} elements to rank {b}, which takes {table[b][size + a]}"
            for a in range(size)
            for b in range(size)
            if table[a][b] != table[b][size + a]
        ]
        if wrong:
            raise Mismatch(f"ranks disagree on the splits of all_to_all: {'; '.join(wrong)}")
        return [n for row in table for n in row[:size]]

    # Names of the same methods before PyTorch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
