"""Sparse gradients of one optimizer: the entries of all ranks, gathered while backward goes on.

The reducer agrees on which parameters these are (its ``left_out``). From then on every rank sends
its entries of each of them in every step, and none where it has no gradient::

    start(i, gradient)     when it is ready
    start_rest()           at the end of backward
    finish(i)              the reduced gradient
    drain()                drops gathers without a finish()

Gathers go by name, so their order may differ between ranks and between optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from farandole._core import Error, InvalidArgument
from farandole.common._process_set import ProcessSet
from farandole.torch._operations import calls
from farandole.torch._operations.handles import wait
from farandole.torch.compression import Compressor


class SparseGradients:
    """
    Args:
        label: equal on all ranks, and no other optimizer's.
        named: names and parameters by number.
        compression: of the entries' values.
        prescale, postscale: factors on every rank's gradient, and on the sum.
    """

    def __init__(
        self,
        label: str,
        named: Sequence[tuple[str, torch.Tensor]],
        process_set: ProcessSet,
        *,
        compression: type[Compressor],
        prescale: float,
        postscale: float,
    ) -> None:
        self.dims: dict[int, int] = {}  # sparse dimensions by parameter: those that come here
        self._names = [f"{label}: {name}" for name, _ in named]
        self._parameters = [p for _, p in named]
        self._process_set = process_set
        self._compression = compression
        self._prescale, self._postscale = prescale, postscale
        self._flights: dict[int, tuple[int, object]] = {}  # handle and context of compression

    def start(self, i: int, gradient: torch.Tensor) -> None:
        """Sends this rank's entries of parameter i."""
        mine = gradient.detach().coalesce()
        if mine.sparse_dim() != self.dims[i]:
            raise InvalidArgument(
                f"the gradient of {self._names[i]} is sparse in {mine.sparse_dim()} dimensions, "
                f"and was in {self.dims[i]}"
            )
        values = mine.values()
        if self._prescale != 1:
            values = values * self._prescale
        self._send(i, mine.indices().t().contiguous(), values)

    def start_rest(self) -> None:
        """Sends no entries where there was no gradient. Waits for nobody."""
        for i, dims in self.dims.items():
            if i not in self._flights:
                p = self._parameters[i].detach()
                indices = torch.empty(0, dims, dtype=torch.int64, device=p.device)
                self._send(i, indices, p.new_empty(0, *p.shape[dims:]))

    def _send(self, i: int, indices: torch.Tensor, values: torch.Tensor) -> None:
        wire, context = self._compression.compress(values.contiguous())
        if wire.dim() == 0 or wire.shape[0] != len(indices):
            raise InvalidArgument(
                f"compression gave {tuple(wire.shape)} of the {len(indices)} entries of "
                f"{self._names[i]}; pass sparse_as_dense=True"
            )
        handle = calls.allgather([indices, wire], self._names[i], self._process_set)
        self._flights[i] = handle, context

    def finish(self, i: int) -> torch.Tensor:
        """Waits for the entries of all ranks; their sum, coalesced, is the same on each of them."""
        handle, context = self._flights.pop(i)
        indices, wire = wait(handle)
        values = self._compression.decompress(wire, context)
        shape = self._parameters[i].shape
        total = torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False)
        total = total.coalesce()
        if self._postscale != 1:
            total.values().mul_(self._postscale)
        return total

    def drain(self) -> None:
        """Waits for what is under way, and forgets it."""
        while self._flights:
            handle, _ = self._flights.popitem()[1]
            with suppress(Error):  # of a step that failed: its own error said so
                wait(handle)
