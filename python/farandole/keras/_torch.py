"""Keras on PyTorch: gradients are reduced by hooks while backward computes others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from farandole._core import InvalidArgument
from farandole._limits import Limits
from farandole._numerics import Found
from farandole.common._groups import members
from farandole.common._numerics import numerics_of
from farandole.common._process_set import group_of
from farandole.common._reduction import Average, Sum
from farandole.keras._exchange import (
    BROADCAST,
    Alike,
    Exchange,
    PlannedExchange,
    agreed_label,
    compare_gradients,
    compare_models,
    label_of,
)
from farandole.keras._global.steps import running
from farandole.keras._reduction import Reduction
from farandole.torch._finite import exact_kind, total_of
from farandole.torch._operations.allreduce import grouped_allreduce
from farandole.torch._tensors import check_on_host
from farandole.torch._training.exchange import GradientExchange
from farandole.torch._training.passes import untraced
from farandole.torch._training.weights import beginning_of


class HookedExchange(Exchange):
    """Reduces the gradients that autograd accumulates, when ``backward()`` returns.

    Gradients that come another way, and those of the first step, are reduced when the optimizer
    gets them. So are all of them once another optimizer has taken one of the variables.

    Args:
        variables: all that the optimizer has and the ranks share.
    """

    agreed_label = staticmethod(untraced(agreed_label))

    @classmethod
    def of_steps(cls) -> type[Exchange]:
        return GivenExchange  # hooks are those of the model's optimizer

    @untraced
    def __init__(
        self, label: str, reduction: Reduction, variables: Sequence[Any], *, at_update: bool
    ) -> None:
        super().__init__(label, reduction)
        compare_models(label, reduction, variables)
        self._compared = False
        named = [(f"{label}/{label_of(i, v)}", v.value) for i, v in enumerate(variables)]
        for name, p in named:
            check_on_host(p, f"'{name}'")
        self._parameters = {id(p) for _, p in named if p.requires_grad and p.numel() > 0}
        group = group_of(reduction.process_set)
        assert group is not None  # others than members have an AloneExchange
        self._exchange = GradientExchange(
            group,
            [(n, p) for n, p in reversed(named) if id(p) in self._parameters],
            reduction,
            weights=[(label_of(i, v), v.value) for i, v in enumerate(variables)],
            line=BROADCAST,
            limits=Limits.of(None, None),
            groups={
                id(variables[i].value): g
                for g, places in enumerate(members(reduction.groups, variables))
                for i in places
            },
        )
        self._exchange.completes = _Beginnings(self)
        self._is_held = at_update  # what backward brings is one pass of several
        if at_update:
            self._hold = self._exchange.held()
            self._hold.__enter__()

    @untraced
    def compare_also(self, alike: Sequence[Alike]) -> None:
        super().compare_also(alike)
        self._exchange.compare_also(self)

    # The interface that the torch exchange uses (torch/_training/weights.py).

    line = BROADCAST

    def rows(self) -> dict[str, list[torch.Tensor]]:
        return {
            row.name: [beginning_of(row.variable.value) if row.is_state else row.variable.value]
            for row in self.alike
        }

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        reduced = self._reduced(gradients, variables)
        if not self.skips:
            self._judge()
        return reduced

    @untraced
    def _judge(self) -> None:
        self._exchange.finite.note_use()

    @untraced
    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if self._exchange.taken is not None and self._is_plain_mean:
            return self._as_given(list(gradients))
        if self._exchange.reduced:
            own = [v.value.grad for v in variables]
            pairs = zip(gradients, own, strict=True)
            if self._is_plain_mean and any(
                g is not None and p is not None and g is not p for g, p in pairs
            ):  # a step has made others of them, which may differ between ranks
                return self._as_given(list(gradients))
            return self._with_late(list(gradients), variables)
        if not self._compared:
            kinds = ["without a gradient" if g is None else "dense" for g in gradients]
            compare_gradients(self.label, self.reduction, variables, kinds)
            self._compared = True
        self._put(gradients, variables)
        self._exchange.synchronize()
        return self._reduced_of(gradients, variables)

    def _put(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Puts them where backward() does."""
        for gradient, v in zip(gradients, variables, strict=True):
            p = v.value
            if id(p) in self._parameters:
                p.grad = None if gradient is None else gradient.detach()
            elif gradient is not None and p.numel() > 0:
                raise InvalidArgument(
                    f"{self.label} gets a gradient of '{v.path}', which it did not have when it "
                    "was first applied\n"
                    "  advice: put a DistributedOptimizer around a new optimizer when the model "
                    "changes, as model.compile() does"
                )

    def _reduced_of(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return [
            v.value.grad if id(v.value) in self._parameters else gradient
            for gradient, v in zip(gradients, variables, strict=True)
        ]

    @property
    def hears_backward(self) -> bool:
        exchange = self._exchange
        return exchange.taken is None and not exchange.has_left and not self._is_held

    @untraced
    def reduce_in_backward(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        self._put(gradients, variables)
        self.reduce_again()
        return self._reduced_of(gradients, variables)

    def reduce_again(self) -> None:
        """Takes part in a backward() of other ranks."""
        self._exchange.reduce()

    def present_pass(self) -> Any:
        """What stands for the backward() that runs."""
        return self._exchange.present_pass()

    def has_changed(self) -> bool:
        """Whether a program has written into the reduced gradients."""
        return self.has_reduced and self._exchange.has_changed()

    @property
    def has_reduced(self) -> bool:
        """False from when another optimizer took its variables, and so its hooks."""
        return self._exchange.taken is None and bool(self._exchange.reduced)

    @property
    def _is_plain_mean(self) -> bool:
        return self._exchange.is_mean and self.reduction.passes_factor == 1

    def _as_given(self, gradients: list[Any]) -> list[Any]:
        """Reduces the gradients that the optimizer gets, if a later one's hooks have some of its
        variables: a step has two, and the first was built with all of the model's. Gradients that
        those hooks have reduced are equal on all ranks, so their mean is the same."""
        return _reduced_at_once(f"{self.label} as given", self.reduction, gradients)

    def _with_late(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduces gradients that come from the program, beside those that backward has reduced."""
        parameters = [v.value for v in variables]
        late = [
            i
            for i, (gradient, p) in enumerate(zip(gradients, parameters, strict=True))
            if gradient is not None and p.grad is None and self._exchange.awaits(p)
        ]
        for i in late:
            parameters[i].grad = gradients[i].detach()
        if late:
            self._exchange.synchronize()
        for i in late:
            gradients[i] = parameters[i].grad
        return gradients

    @untraced
    def stepped(self) -> None:
        self._exchange.note_step()

    def end(self) -> None:
        self._exchange.end_hearing()
        self._exchange.retire()


class _Beginnings:
    """Tells a step of the user's own of each backward() as the first gradient is there."""

    def __init__(self, exchange: HookedExchange) -> None:
        self._exchange = weakref.ref(exchange)
        self._told: weakref.ref[Any] | None = None  # the pass, which may have failed

    def complete(self, p: torch.Tensor) -> None:  # noqa: ARG002
        steps, exchange = running(), self._exchange()
        if exchange is None or steps is None or steps.own_gradients is None:
            return
        present = exchange.present_pass()
        if self._told is None or self._told() is not present:
            self._told = weakref.ref(present)
            steps.own_gradients.begin_pass(exchange)

    def complete_rest(self) -> None:
        """Nothing is left to tell."""


class GivenExchange(PlannedExchange):
    """Reduces gradients that a step asks autograd for, which no hook sees."""

    agreed_label = staticmethod(untraced(agreed_label))

    @untraced
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        return super().reduce(gradients, variables)

    def reduce_all(
        self,
        names: Sequence[str],
        gradients: Sequence[Any],
        variables: Sequence[Any],  # noqa: ARG002
    ) -> list[Any]:
        steps, reduction = running(), self.reduction
        numerics = numerics_of(f"gradients of {self.label}", tuple(names), reduction.process_set)
        if self.skips or not numerics.looks or steps is None or steps.is_not_finite:
            return _reduced_at_once(self.label, reduction, list(gradients))
        found = _first_not_finite(gradients, reduction)
        flag = torch.tensor([found is not None], dtype=torch.float32)
        *reduced, flag = _reduced_at_once(self.label, reduction, [*gradients, flag])
        if flag.item() != 0:
            steps.is_not_finite = True
            numerics.report(found)
        return reduced


def _first_not_finite(gradients: Sequence[Any], reduction: Reduction) -> Found | None:
    """Of what is sent."""
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            wire, _ = reduction.compression.compress(gradient.detach())
            kind = exact_kind(wire, total_of(wire))
            if kind is not None:
                return Found(i, kind)
    return None


def _reduced_at_once(label: str, reduction: Reduction, gradients: list[Any]) -> list[Any]:
    there = [i for i, gradient in enumerate(gradients) if gradient is not None]
    reduced = grouped_allreduce(
        [gradients[i].detach() for i in there],
        name=label,
        compression=reduction.compression,
        op=Average if reduction.op == "mean" else Sum,
        prescale_factor=reduction.prescale,
        postscale_factor=reduction.postscale,
        process_set=reduction.process_set,
    )
    for i, gradient in zip(there, reduced, strict=True):
        gradients[i] = gradient
    return gradients
