"""An optimizer that never gets a gradient, while backward() gives them to others in its place.

PyTorch steps such an optimizer without a word. A wrapped optimizer is meant to train. If other
parameters of the same shapes get gradients from step to step, and no optimizer has them, it was
made for another model.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Sequence

import torch

from farandole._core import InvalidArgument


class Silence:
    """Watches one optimizer until its first gradient. Then `over` is set, here or by a hook.

    Args:
        names: of the parameters; the error names the last.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._names, self._parameters = names, parameters
        self._steps = 0
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # others' gradients
        self.over = not parameters

    def check(self) -> InvalidArgument | None:
        """Before a step: what is wrong, if something is."""
        if self.over or any(p.grad is not None for p in self._parameters):
            self.over = True
            return None
        self._steps += 1
        if self._steps & (self._steps - 1) != 0:
            return None  # a program that alternates optimizers need not look in every step
        others = self._others_with_new_gradients()
        ours = Counter(p.shape for p in self._parameters)
        if self._steps == 1 or ours - Counter(p.shape for p in others):
            return None
        return InvalidArgument(
            f"step() of an optimizer whose parameters never had a gradient ('{self._names[-1]}' "
            f"and the other {len(self._names) - 1}): backward() gives gradients to others of the "
            "same shapes, which no optimizer has\n  advice: make the optimizer, and then the "
            "DistributedOptimizer, with the parameters of the model that is trained, after it was "
            "copied, converted or had its parameters replaced"
        )

    def refuse(self) -> None:
        """Raises what check() returns."""
        if (why := self.check()) is not None:
            raise why

    def _others_with_new_gradients(self) -> list[torch.Tensor]:
        """Tensors whose gradient changed since the last call. Models that are gone may have left
        some behind, in caches and cycles."""
        changed = []
        seen, self._seen = self._seen, {}
        for p in _nobodys():
            grad = p.grad
            assert grad is not None
            before, version = seen.get(id(p), (None, 0))
            if before is None or before() is not grad or version != grad._version:
                changed.append(p)
            self._seen[id(p)] = weakref.ref(grad), grad._version
        return changed


def _nobodys() -> list[torch.Tensor]:
    """The tensors that have a gradient and belong to no optimizer."""
    tensors = []
    theirs: set[int] = set()
    kinds: dict[type, type | None] = {}  # there are a million objects, of few types
    for o in gc.get_objects():
        kind = type(o)
        if kind not in kinds:
            known = (k for k in (torch.Tensor, torch.optim.Optimizer) if issubclass(kind, k))
            kinds[kind] = next(known, None)
        if kinds[kind] is None:
            continue
        if kinds[kind] is torch.Tensor:
            if o.is_leaf and o.grad is not None:
                tensors.append(o)
        else:
            groups = getattr(o, "param_groups", ())
            theirs.update(id(p) for group in groups for p in group["params"])
    return [p for p in tensors if id(p) not in theirs]
