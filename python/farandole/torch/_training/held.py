"""Whether a program can reach a gradient by another way than ``p.grad``.

It may keep the tensor in a list, or give all gradients views of one flat tensor. It then clears and
scales them there, and expects autograd to add to that memory. So such a gradient stays where it is.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch

_overlaps: Any = vars(torch)["_debug_has_internal_overlap"]
_YES = 1
_uses_of: Any = vars(torch._C).get("_storage_Use_Count")  # of a storage; since PyTorch 2.1


def is_held(grad: torch.Tensor, given: weakref.ref[torch.Tensor] | None) -> bool:
    """`given`: the gradient that we have given the program last, whose memory is also that of
    others. The caller, buckets.py, has `grad` in one variable, and its caller in another."""
    if sys.getrefcount(grad) <= _REFERENCES:
        if _uses_of is None or (given is not None and given() is grad):
            return False
        if _uses_of(grad.untyped_storage()._cdata) <= _USES:
            return False
    return not grad.is_inference() and _overlaps(grad) != _YES  # else nothing can be written there


def _nobody_holds() -> tuple[int, int]:
    p = torch.zeros(1, requires_grad=True)
    p.grad = torch.zeros(1)

    def references(grad: torch.Tensor, given: None) -> int:  # as many variables as is_held() has
        del given
        return sys.getrefcount(grad)

    def asked(grad: torch.Tensor) -> int:  # as Buckets.is_held()
        return references(grad, None)

    grad = p.grad
    uses = 0 if _uses_of is None else int(_uses_of(grad.untyped_storage()._cdata))
    return asked(grad), uses


# As a gradient shows them that only its parameter knows.
_REFERENCES, _USES = _nobody_holds()
