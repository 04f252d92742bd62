"""The weight of gradients on PyTorch, where they are reduced while autograd computes others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


class Hooks:
    """Those of one model's parameters, in a step of the user's own."""

    def __init__(self) -> None:
        self.unweighed: set[int] = set()  # ids of variables whose gradients have no weight
        self._asks = False

    @contextmanager
    def weighing(self, variables: Iterable[Any], weight: float) -> Iterator[None]:
        """A context for a step, in which backward() weighs gradients."""
        weighed = [] if weight == 1.0 else list(variables)
        hooks = [v.value.register_hook(self._weighing(id(v), weight)) for v in weighed]
        self.unweighed.clear()
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _weighing(self, variable: int, weight: float) -> Callable[[Any], Any]:
        def hook(gradient: Any) -> Any:
            if self._asks:
                return gradient
            self.unweighed.discard(variable)
            return gradient * weight

        return hook

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A context for torch.autograd.grad, which gives gradients without a weight."""
        self._asks = True
        try:
            yield
        finally:
            self._asks = False


def is_made_of(loss: Any, losses: Iterable[Any]) -> bool:
    """Whether autograd's graph of a loss has one of these in it."""
    known = {each.grad_fn for each in losses} - {None}
    waiting = [loss.node if hasattr(loss, "node") else loss.grad_fn]  # of an edge, or a tensor
    seen = {None}
    while waiting:
        node = waiting.pop()
        if node in known:
            return True
        if node not in seen:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions]
    return False
