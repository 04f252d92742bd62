"""A step on one rank: what a stage computes, between the messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from farandole._arguments import shown
from farandole._core import InvalidArgument, NumericsError
from farandole._numerics import Found
from farandole.data._tree import leaves, map_leaves, samples
from farandole.pipeline._places import Place
from farandole.pipeline._runner import Fared
from farandole.pipeline._shares import micro_batches
from farandole.pipeline._wire import Form, Message
from farandole.pipeline._work import ForwardWork
from farandole.torch._pipeline.refusals import warn_of_few_samples
from farandole.torch._pipeline.replicas import ReplicaGradients
from farandole.torch._pipeline.tensors import Received, form_of, ready
from farandole.torch._training.finite import OwnGradients

_NOTHING = Form(None, ())


class Stage(NamedTuple):
    """This rank's stage: all that stays the same from step to step."""

    place: Place
    module: nn.Module
    layers: Sequence[nn.Module]
    micro_batches: int
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    reduction: str
    count_fn: Callable[[Any], Any] | None
    replicas: ReplicaGradients | None  # of this stage
    finite: OwnGradients  # of all ranks of all stages


class _Kept(NamedTuple):
    """Kept from a micro-batch's forward to its backward."""

    received: Received | None
    outputs: list[torch.Tensor]  # the loss alone, on the last stage
    counts: bool  # its loss; else it takes part with gradients of zero


class StageWork(ForwardWork):
    """Forward only: what all steps have in common.

    Args:
        measures: whether to look at what layers keep.
    """

    kind = "predict"
    training = False

    def __init__(self, stage: Stage, inputs: Any, targets: Any, *, measures: bool = False) -> None:
        super().__init__()
        self._stage, self._inputs, self._targets = stage, inputs, targets
        self._measures = measures
        self._parts: list[slice] = []  # of the batch; empty where this rank has none

    # ---- the batch ----

    def begin(self) -> Sequence[int | None]:
        place, m = self._stage.place, self._stage.micro_batches
        if place.is_first and self._inputs is None:
            raise InvalidArgument("inputs is None on the first stage, which computes on them")
        self._check_targets()
        sizes = {
            name: samples(each, f"the batch's {name}")
            for name, each in (("inputs", self._inputs), ("targets", self._targets))
            if each is not None
        }
        if not sizes:
            return [None] * m
        if len(set(sizes.values())) > 1:
            raise InvalidArgument(
                f"the batch has {sizes['inputs']} inputs and {sizes['targets']} targets"
            )
        total = next(iter(sizes.values()))
        if total == 0:
            raise InvalidArgument("the batch is empty")
        self._parts = micro_batches(total, place, m)
        self._weigh(total)
        return [p.stop - p.start for p in self._parts]

    def _check_targets(self) -> None:
        """Checks the targets, where there is a loss to compute."""

    def _weigh(self, total: int) -> None:
        """Weights the micro-batches of `total` samples, likewise."""

    def _cut(self, tree: Any, k: int) -> Any:
        return map_leaves(lambda leaf: leaf[self._parts[k]], tree)

    # ---- forward ----

    def forward(self, k: int, samples: int, received: Message | None) -> tuple[Form, list[Any]]:
        del samples  # for subclasses
        got = None if received is None else Received(received, training=self.training)
        x = self._cut(self._inputs, k) if got is None else got.tree
        with torch.set_grad_enabled(self.training):
            outputs = self._measured(x) if self._measures and k == 0 else self._computed(x)
            if self._stage.place.is_last:
                self.take(k, got, outputs)
                return _NOTHING, []
            form, tensors = form_of(outputs)
        self.keep(k, got, [each for each in tensors if each.requires_grad])
        sent = [each for each in map(ready, tensors) if each is not None]
        return form, sent

    def _computed(self, x: Any) -> Any:
        for layer in self._stage.layers:
            x = layer(x)
        return x

    def _measured(self, x: Any) -> Any:
        """The same; also measures the memory that is kept until backward: the inputs, and the
        outputs of modules without children."""
        seen = {leaf.data_ptr(): leaf.nbytes for leaf in leaves(x)}

        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            del module, inputs
            for leaf in leaves(output):
                if isinstance(leaf, torch.Tensor):
                    seen[leaf.data_ptr()] = leaf.nbytes

        parts = [each for each in self._stage.module.modules() if not any(each.children())]
        hooks = [each.register_forward_hook(look) for each in parts]
        try:
            return self._computed(x)
        finally:
            for hook in hooks:
                hook.remove()
            self._bytes = sum(seen.values())

    def take(self, k: int, received: Received | None, outputs: Any) -> None:
        """Takes the last stage's outputs of a micro-batch."""
        del received
        self.outputs[k] = outputs

    def keep(self, k: int, received: Received | None, outputs: list[torch.Tensor]) -> None:
        """Keeps the outputs of other stages for backward, in training."""

    def backward(self, k: int, gradients: Message | None) -> tuple[Form, list[Any]]:
        raise NotImplementedError


class LossWork(StageWork):
    """Forward, to the loss of the whole batch."""

    kind = "evaluate"
    _weights: Sequence[float] = ()  # by micro-batch; nothing counts in one of 0

    def _check_targets(self) -> None:
        if not self._stage.place.is_last:
            return
        if self._targets is None:
            raise InvalidArgument("targets is None on the last stage, which computes the loss")
        if self._stage.loss_fn is None:
            raise InvalidArgument("the Pipeline was made without loss_fn")

    def _weigh(self, total: int) -> None:
        """Every rank of the last stage has the targets of the whole batch, and counts alone."""
        stage = self._stage
        if not stage.place.is_last:
            return
        if stage.reduction == "sum":
            self._weights = [float(p.stop > p.start) for p in self._parts]
            return
        counts = [float(p.stop - p.start) for p in self._parts]
        whole = float(total)
        if stage.count_fn is not None:
            rows = enumerate(counts)
            counts = [self._counted(self._cut(self._targets, k)) if n else 0.0 for k, n in rows]
            whole = self._counted(self._targets)
            if whole == 0:
                raise InvalidArgument(
                    "count() is 0: nothing of this batch counts, and its loss is no number\n"
                    "  advice: leave such batches out of the data"
                )
        self._weights = [count / whole for count in counts]

    def _counted(self, targets: Any) -> float:
        assert self._stage.count_fn is not None
        count = float(self._stage.count_fn(targets))
        if not 0 <= count < float("inf"):
            raise InvalidArgument(f"count() gives {count}; it gives a number of at least 0")
        return count

    def take(self, k: int, received: Received | None, outputs: Any) -> None:
        assert self._stage.loss_fn is not None
        loss = self._stage.loss_fn(outputs, self._cut(self._targets, k))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = getattr(loss, "shape", None)
            what = shown(loss) if shape is None else f"a tensor of shape {tuple(shape)}"
            raise InvalidArgument(
                f"loss_fn gives {what}; it gives a tensor of one number, the "
                f"{self._stage.reduction} over the samples of a micro-batch"
            )
        weight = self._weights[k]
        if weight:
            self._loss += float(loss.detach()) * weight
        self.keep_loss(k, received, loss, outputs)

    def keep_loss(
        self, k: int, received: Received | None, loss: torch.Tensor, outputs: Any
    ) -> None:
        """Keeps the loss of the last stage for backward, in training."""


class TrainWork(LossWork):
    """Forward and backward."""

    kind = "step"
    training = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._kept: dict[int, _Kept] = {}
        self._has_gradient = False  # the loss of a micro-batch so far
        self._found: Found | None = None  # of this rank's gradients

    def forward(self, k: int, samples: int, received: Message | None) -> tuple[Form, list[Any]]:
        if self._measures and k == 0 and self._stage.place.replica == 0:
            warn_of_few_samples(self._stage.module, samples)
        return super().forward(k, samples, received)

    def keep(self, k: int, received: Received | None, outputs: list[torch.Tensor]) -> None:
        self._kept[k] = _Kept(received, outputs, True)

    def keep_loss(
        self, k: int, received: Received | None, loss: torch.Tensor, outputs: Any
    ) -> None:
        # The exchange takes the mean over replicas.
        weight = self._weights[k] * self._stage.place.replicas
        if weight:
            self._has_gradient |= loss.requires_grad
            self._kept[k] = _Kept(received, [loss * weight], True)
            return
        # Nothing of it counts, and its loss may be 0/0: zeros are what it gives to the others.
        found = [each for each in leaves(outputs) if each.requires_grad]
        self._kept[k] = _Kept(received, found, False)

    def backward(self, k: int, gradients: Message | None) -> tuple[Form, list[Any]]:
        received, outputs, counts = self._kept.pop(k)
        given: list[torch.Tensor | None] = [None] * len(outputs)  # of a loss: 1
        if gradients is not None:
            given = list(gradients.tensors)
        elif not counts:
            given = [torch.zeros_like(each) for each in outputs]
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, given, strict=True)
            # Where a later stage has not used an output, nothing comes of it.
            if output.requires_grad and (gradient is not None or gradients is None)
        ]
        if pairs:
            torch.autograd.backward([each for each, _ in pairs], [each for _, each in pairs])
        return (_NOTHING, []) if received is None else received.to_send()

    def has_gradient(self) -> bool:
        return self._has_gradient

    def is_finite(self) -> bool:
        return self._found is None

    def end(self, *, failed: bool) -> None:
        replicas, finite = self._stage.replicas, self._stage.finite
        if not failed and finite.looks:
            self._found = finite.found()
        exchange = None if replicas is None else replicas.exchange()
        if exchange is None:
            return
        if failed:
            exchange.abandon()
        else:
            exchange.reduce()

    def forget(self) -> None:
        super().forget()
        self._kept.clear()
        for p in self._stage.module.parameters():
            p.grad = None

    def check(self, rows: Sequence[Fared]) -> None:
        """Checks how all ranks fared. The loss of some micro-batches or replicas may be a constant,
        where nothing in them counts; not that of the whole batch.

        Raises:
            InvalidArgument: it is one; on every rank. All gradients are dropped then.
            NumericsError: by the setting, likewise; some rank's gradients are not finite.
        """
        if any(row.has_gradient for row in rows):
            self._judge(rows)
            return
        self.forget()
        raise InvalidArgument(
            "the loss has no gradient: it depends on no parameter that requires one\n"
            "  advice: compute it from the outputs by what can be differentiated; for a loss alone "
            "there is evaluate()"
        )

    def _judge(self, rows: Sequence[Fared]) -> None:
        if all(row.is_finite for row in rows):
            return
        try:
            self._stage.finite.report(self._found)
        except NumericsError:
            self.forget()
            raise
