"""Tensors that are sent between stages, and the way back for their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole.data._tree import map_leaves
from farandole.pipeline._wire import MOST_TENSORS, Form, Leaf, Message
from farandole.torch._tensors import DTYPE_NAMES, DTYPES, borrow, check_on_host


class TorchTensors:
    """PyTorch's tensors as the engine's buffers."""

    def sent(self, tensor: torch.Tensor) -> Any:
        return borrow(tensor.detach())

    def empty(self, leaf: Leaf) -> torch.Tensor:
        return torch.empty(leaf.shape, dtype=DTYPES[leaf.dtype])


def form_of(tree: Any) -> tuple[Form, list[torch.Tensor]]:
    """The form and the tensors of a stage's outputs, to be sent. Raises InvalidArgument."""
    tensors: list[torch.Tensor] = []

    def number(leaf: Any) -> int:
        if not isinstance(leaf, torch.Tensor):
            raise InvalidArgument(
                f"this stage makes {type_of(leaf)}; between stages there are tensors, and "
                "dicts, tuples and lists of them"
            )
        check_on_host(leaf, "what this stage makes")
        tensors.append(leaf)
        return len(tensors) - 1

    structure = map_leaves(number, tree)
    if len(tensors) > MOST_TENSORS:
        raise InvalidArgument(
            f"this stage makes {len(tensors)} tensors; between stages there are at most "
            f"{MOST_TENSORS}"
        )
    return Form(structure, tuple(_leaf(each) for each in tensors)), tensors


def _leaf(tensor: torch.Tensor) -> Leaf:
    return Leaf(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.requires_grad)


def ready(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor as it can be sent: detached, contiguous, and no lazy view."""
    if tensor is None:
        return None
    return tensor.detach().contiguous().resolve_conj().resolve_neg()


class Received:
    """The inputs that a stage receives of a micro-batch, where its graph begins.

    The tensors are no leaves: layers may change them in place, as they may in one process.
    """

    def __init__(self, message: Message, *, training: bool) -> None:
        assert message.form is not None
        form, tensors = message.form, list(message.tensors)
        self._arrived = _Arrived()
        self._differentiable = [leaf.differentiable and training for leaf in form.leaves]
        self.nbytes = sum(each.nbytes for each in tensors)
        if any(self._differentiable):
            anchor = torch.empty(0, requires_grad=True)
            begin: Any = _Beginning.apply
            tensors = list(begin(anchor, self._arrived, tensors, self._differentiable))
        self.tree = map_leaves(lambda i: tensors[i], form.structure)
        self._leaves = form.leaves

    def to_send(self) -> tuple[Form, list[torch.Tensor | None]]:
        """The gradients, after backward."""
        gradients = list(self._arrived.gradients) or [None] * len(self._leaves)
        rows = zip(self._leaves, gradients, self._differentiable, strict=True)
        kept = [(leaf, ready(gradient)) for leaf, gradient, counts in rows if counts]
        form = Form(None, tuple(leaf._replace(differentiable=False) for leaf, _ in kept))
        return form, [gradient for _, gradient in kept]


class _Arrived:
    """The gradients of a stage's inputs, held apart so that no tensor refers to itself."""

    gradients: Sequence[torch.Tensor | None] = ()


class _Beginning(torch.autograd.Function):
    """The start of this stage's graph; backward goes on in the stage before."""

    @staticmethod
    def forward(
        context: Any,
        anchor: torch.Tensor,
        arrived: _Arrived,
        tensors: list[torch.Tensor],
        differentiable: list[bool],
    ) -> tuple[torch.Tensor, ...]:
        del anchor  # it is for autograd, which makes no node where nothing requires a gradient
        context.arrived = arrived
        context.set_materialize_grads(False)
        pairs = zip(tensors, differentiable, strict=True)
        context.mark_non_differentiable(*[each for each, has in pairs if not has])
        return tuple(tensors)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor | None) -> tuple[None, ...]:
        context.arrived.gradients = gradients
        return None, None, None, None
