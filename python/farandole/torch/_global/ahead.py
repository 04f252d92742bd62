"""Notices a program that fetches the next batch before it computes on the present one.

A loss gets the weight of the batch that was given out last. Such a program gives it that of the
next one, and its last backward comes when the pass is over.
"""

from __future__ import annotations

from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole.torch._entries import entry


class ReadAhead:
    """The batches of a pass and the backwards of their losses.

    Args:
        weights_differ: batches of as many samples may have different weights.
    """

    def __init__(self, *, weights_differ: bool) -> None:
        self._weights_differ = weights_differ
        self.begin_pass()

    def begin_pass(self) -> None:
        self.batches = 0  # given out
        self._totals: set[int] = set()  # samples of these
        self._learns = False  # a backward has come since the last one
        self.is_over = False

    def begin_batch(self, total: int) -> None:
        self.batches += 1
        self._totals.add(total)
        self._learns = False

    def end_pass(self) -> None:
        self.is_over = True

    def watch(self, loss: torch.Tensor) -> None:
        """Looks at the backwards of a loss."""
        hook: Any = loss.register_hook
        hook(self._learn_late if self.is_over else self._learn)

    @entry()
    def _learn(self, _: torch.Tensor) -> None:
        self._learns = True

    @entry()
    def _learn_late(self, _: torch.Tensor) -> None:
        """A backward of a loss that got its weight when the pass was over."""
        differ = self._weights_differ or len(self._totals) > 1
        if self._learns and self.batches > 1 and differ:
            raise InvalidArgument(
                "backward() of another loss when the pass over the GlobalBatch is over: the "
                "program fetches each batch before it computes on the one before, so losses had "
                "the weights of other batches\n  advice: fetch a batch when the step before it is "
                "done; DataLoader(prefetch_factor=…) reads ahead by itself"
            )
