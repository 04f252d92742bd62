"""The collectives that reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole.torch._c10d.arguments import check_shares, differing_counts, one
from farandole.torch._c10d.engine_group import EngineGroup, Tensors, defaults
from farandole.torch._c10d.reductions import engine_op, name_of
from farandole.torch._c10d.tensors import in_place, pairs, received, sent, sent_list
from farandole.torch._entries import entry


class Reducing(EngineGroup):
    """All-reduce, reduce and reduce-scatter, of one tensor and of many."""

    @entry("c10d::allreduce_")
    def allreduce(self, tensors: Any, opts: Any = defaults) -> Any:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        tensor = one(tensors, "all_reduce")
        if tensor.layout != torch.strided:
            return self._by_gloo("all_reduce of sparse tensors", "allreduce", tensors, opts)
        found = engine_op(opts.reduceOp, tensor)
        if found is None:
            kind = f"all_reduce with {name_of(opts.reduceOp)}"
            return self._by_gloo(kind, "allreduce", tensors, opts)
        op, factor = found
        self._looks.look("all_reduce", op, tensors)
        here, finish = in_place(tensor, folded=True)
        return self._run(
            "all_reduce", here, here, opts, list(tensors), finish, op=op, prescale=factor
        )

    @entry("c10d::allreduce_coalesced_")
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = defaults) -> Any:
        found = {engine_op(opts.reduceOp, tensor) for tensor in tensors}
        if None in found:
            kind = f"all_reduce_coalesced with {name_of(opts.reduceOp)}"
            return self._by_gloo(kind, "allreduce_coalesced", tensors, opts)
        ((op, factor),) = found or {("sum", 1.0)}  # type: ignore[misc]
        self._looks.look("all_reduce", op, tensors)
        here, finishes = pairs([in_place(t, folded=True) for t in tensors])
        return self._run_grouped(
            "all_reduce", here, here, opts, list(tensors), finishes, op=op, prescale=factor
        )

    @entry("c10d::reduce_")
    def reduce(self, tensors: Tensors, opts: Any = defaults) -> Any:
        tensor = one(tensors, "reduce")
        found = engine_op(opts.reduceOp, tensor)
        if found is None:
            kind = f"reduce with {name_of(opts.reduceOp)}"
            return self._by_gloo(kind, "reduce", tensors, opts)
        op, factor = found
        root = opts.rootRank
        here, finish = in_place(tensor, folded=True)
        target = here if root == self.rank() else None
        finish = finish if target is not None else None
        result = list(tensors)
        return self._run(
            "reduce", here, target, opts, result, finish, op=op, prescale=factor, root=root
        )

    @entry("c10d::_reduce_scatter_base_")
    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = defaults
    ) -> Any:
        check_shares(input, output, self.size(), "reduce_scatter_single")
        found = self._scattered_op(opts, output, [input])
        target, finish = received(output, folded=True)
        source = sent(input, folded=True)
        return self._run("reduce_scatter", source, target, opts, [output], finish, **found)

    @entry("c10d::reduce_scatter_")
    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = defaults
    ) -> Any:
        output, parts = one(outputs, "reduce_scatter"), one(inputs, "reduce_scatter")
        counts = differing_counts(parts, output, self.rank(), self.size(), "reduce_scatter")
        found = self._scattered_op(opts, output, parts)
        target, finish = received(output, folded=True)
        source = sent_list(parts, folded=True)
        result = list(outputs)
        return self._run(
            "reduce_scatter", source, target, opts, result, finish, counts=counts, **found
        )

    @entry("c10d::reduce_scatter_tensor_coalesced_")
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = defaults
    ) -> Any:
        for given, taken in zip(inputs, outputs, strict=True):
            check_shares(given, taken, self.size(), "reduce_scatter_single")
        found = [
            self._scattered_op(opts, *each)
            for each in zip(outputs, ([i] for i in inputs), strict=True)
        ]
        targets, finishes = pairs([received(t, folded=True) for t in outputs])
        sources = [sent(t, folded=True) for t in inputs]
        result = list(outputs)
        return self._run_grouped(
            "reduce_scatter", sources, targets, opts, result, finishes, **(found or [{}])[0]
        )

    def _scattered_op(
        self, opts: Any, tensor: torch.Tensor, given: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        found = engine_op(opts.reduceOp, tensor)
        if found is None:
            raise InvalidArgument(
                f"reduce_scatter with {name_of(opts.reduceOp)} on {tensor.dtype}: neither "
                "farandole nor gloo has it"
            )
        self._looks.look("reduce_scatter", found[0], given, tensor)
        return {"op": found[0], "prescale": found[1]}

    # Names of the same methods before PyTorch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
