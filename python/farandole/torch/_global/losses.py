"""Weights the loss of a part of a batch, so that the mean over ranks is that of the batch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from farandole import _world
from farandole._arguments import shown, type_of
from farandole._core import InvalidArgument
from farandole.torch._training.weighing import weighed

REDUCTIONS = ("mean", "sum")


def check_loss(loss: Any, reduction: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise InvalidArgument(
            f"scale_loss(): loss is {type_of(loss)}{shape}; it is a tensor of one number, "
            "the mean or the sum over this rank's samples"
        )
    if reduction not in REDUCTIONS:
        raise InvalidArgument(
            f"scale_loss(): reduction is {shown(reduction)}; it is 'mean' or 'sum', as the loss is"
        )


class Divisors:
    """Looks whether losses are means over samples, until one is not."""

    def __init__(self) -> None:
        self._looks = _LOOKS

    def look(self, loss: torch.Tensor, samples: int) -> None:
        """Warns of a cross entropy that PyTorch has divided by the targets of this rank that count,
        or by their weights, if samples differ in these: so do ranks, and the mean of their losses
        is not that of the batch."""
        node = _cross_entropy(loss.grad_fn) if self._looks else None
        if node is None or node._saved_target.numel() % samples:
            return
        self._looks -= not loss.is_cpu  # the program waits for the device
        targets = node._saved_target.reshape(samples, -1)
        counts = targets != node._saved_ignore_index
        if node._saved_weight is not None:
            counts = node._saved_weight[targets.where(counts, 0)] * counts
        each = counts.sum(dim=1)
        if not bool((each == each[0]).all()):
            self._looks = 0
            warnings.warn(
                f"scale_loss(): the loss was divided by {float(each.sum()):g}, what counts of this "
                f"rank's {targets.numel()} targets, as cross_entropy does with ignore_index or "
                "weight; the result is not that of one process\n  advice: GlobalBatch(…, "
                "count=lambda batch: what the loss is divided by)",
                stacklevel=5,
            )


_LOOKS = 3  # on a device


class Shapes:
    """Looks whether losses are means or sums over samples, until one is not."""

    def __init__(self) -> None:
        self._looks = _LOOKS

    def look(self, loss: torch.Tensor, samples: int) -> None:
        """Warns, on rank 0, of a loss that is no linear function of what was reduced over samples,
        as the root of a mean: the mean of ranks' losses is not that of the batch then."""
        if self._looks == 0:
            return
        self._looks -= 1
        names = _nonlinear(loss.grad_fn, samples)
        if not 0 < len(names) < samples:  # as many: a loop over the samples
            return
        self._looks = 0
        if _world.rank() == 0:
            warnings.warn(
                f"scale_loss(): the loss has a {names[0]} of numbers that are reduced over samples "
                "already, so the mean over ranks is not the loss of the batch, and the result not "
                "that of one process",
                stacklevel=5,
            )


_LINEAR = (
    "AddBackward0", "SubBackward0", "RsubBackward1", "MulBackward0", "NegBackward0", "DivBackward0",
    "ToCopyBackward0",
)  # fmt: skip
_NONLINEAR = {
    "SqrtBackward0": "square root",
    "LogBackward0": "logarithm",
    "ExpBackward0": "exponential",
    "PowBackward0": "power",
    "ReciprocalBackward0": "ratio",
}
_REDUCTIONS = (
    "MeanBackward", "SumBackward", "NllLoss", "MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCross",
)  # fmt: skip
_BY_ELEMENT = ("PowBackward0", "AbsBackward0", "MulBackward0")


def _nonlinear(node: Any, samples: int) -> list[str]:
    """The nonlinear functions of reduced numbers that a loss is a sum of, or a multiple."""
    found, todo, seen = list[str](), [node], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen or not _is_number(node):
            continue
        seen.add(node)
        kind, below = node.name(), [each for each, _ in node.next_functions]
        is_reduced = [_is_reduced(each, samples) for each in below]
        if kind in _NONLINEAR and is_reduced[0]:
            found.append(_NONLINEAR[kind])
        elif kind == "DivBackward0" and is_reduced[1]:
            found.append("ratio")
        elif kind == "MulBackward0" and all(is_reduced):
            found.append("product")
        elif kind in _LINEAR:
            todo += below
    return found


def _is_number(node: Any) -> bool:
    metadata = getattr(node, "_input_metadata", None)
    return metadata is not None and all(tuple(each.shape) == () for each in metadata)


def _is_reduced(node: Any, samples: int) -> bool:
    """Whether a number comes from a reduction over samples. Not from parameters alone, as a
    temperature or the norm of weights."""
    todo, seen = [node], set[Any]()
    while todo:
        node = todo.pop()
        if node is None or node in seen or not _is_number(node):
            continue
        seen.add(node)
        below = [each for each, _ in node.next_functions]
        if not node.name().startswith(_REDUCTIONS):
            todo += below
        elif any(_has_samples(each, samples) for each in below):
            return True
    return False


def _has_samples(node: Any, samples: int) -> bool:
    """Whether what goes into a reduction has a row for each sample, and is not a parameter's."""
    shapes = [tuple(each.shape) for each in getattr(node, "_input_metadata", ())]
    if not any(shape[:1] == (samples,) for shape in shapes):
        return False
    while node is not None and node.name() in _BY_ELEMENT:
        node = next((each for each, _ in node.next_functions if each is not None), None)
    return node is not None and not node.name().endswith("AccumulateGrad")


def _cross_entropy(node: Any) -> Any:
    """The mean that a loss is a multiple of; None if it is none."""
    while node is not None and node.name() in ("MulBackward0", "DivBackward0"):
        node = next((each for each, _ in node.next_functions if each is not None), None)
    is_one = node is not None and node.name() in ("NllLossBackward0", "NllLoss2DBackward0")
    return node if is_one and node._saved_reduction == 1 else None


def part_of_mean(
    loss: torch.Tensor, mine: float, everywhere: float, size: int, parameters: Sequence[Any]
) -> torch.Tensor:
    """Weights a loss that was divided by `mine`, where the batch's is divided by `everywhere`.

    Args:
        parameters: they get gradients of zero where nothing of this rank counts, as its loss is
            0/0 then.
    """
    if everywhere == 0:
        raise InvalidArgument(
            "scale_loss(): count() is 0 on every rank: nothing of this batch counts, and its loss "
            "is no number\n  advice: leave such batches out of the data"
        )
    if mine == 0 and not bool(torch.isfinite(loss)):
        if not parameters:
            raise InvalidArgument(
                "scale_loss(): nothing of this rank's part of the batch counts, and its loss is "
                f"{loss.item()}\n  advice: pass the optimizer to GlobalBatch, or divide by "
                "count.clamp(min=1)"
            )
        loss = _Zeros.apply(*parameters)  # type: ignore[no-untyped-call]
    return weighed(loss, mine * size / everywhere)


class _Zeros(torch.autograd.Function):
    """0, with gradients of zero."""

    @staticmethod
    def forward(context: Any, *parameters: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(context: Any, _: torch.Tensor) -> Any:
        return tuple(torch.zeros_like(p) for p in context.saved_tensors)
