"""Whether this rank's gradients are finite, and what the other ranks say of theirs.

The flag (common/_numerics.py) is one more parameter of the reducer, whose gradient is 0 or 1. Where
parameters lie on a device it lies there too, and the host never waits for it: its value is read in
the next step. Only FARANDOLE_NUMERICS=error waits, since it must know before weights change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from farandole._numerics import Found
from farandole.common._numerics import FLAG, Numerics
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.torch import _devices
from farandole.torch._finite import exact_kind, kind_of, total_of

_WIDE = (torch.float32, torch.float64)  # their sums of squares seldom overflow


class _Step(NamedTuple):
    """The result of looking at the gradients of one reduction."""

    number: int
    flag: Callable[[], float]  # of all ranks, 0 where all gradients are finite
    mine: Callable[[], Found | None]
    waits: bool  # the flag is read from a device


class FiniteGradients:
    """Looks at the gradients of one exchange.

    Args:
        named: parameters, whose gradients are reduced.
        looks: False where another exchange looks.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        process_set: ProcessSet,
        *,
        looks: bool = True,
    ) -> None:
        self.numerics = Numerics("gradients", [name for name, _ in named], process_set)
        self.looks = looks and self.numerics.looks and bool(named)
        parameters = [p for _, p in named]
        there = [p for p in parameters if _devices.device_of(p) is not None]
        place = (there or parameters or [torch.zeros(1)])[-1]
        self.flag = torch.zeros(1, dtype=place.detach().real.dtype)
        self._homes: list[torch.Tensor] = []  # of its gradient on a device, in turn
        if there:
            self.flag, *self._homes = [_devices.copied_to(place, self.flag) for _ in range(3)]
        self._place, self.is_there = place, bool(there)
        self._number = 0
        self._found: Found | None = None  # in this pass
        self._sums: list[tuple[int, torch.Tensor]] = []  # of those on devices, in this pass
        self._reduced: _Step | None = None  # and not used yet
        self._used: _Step | None = None  # and not judged yet, as its flag was on a device

    @property
    def named(self) -> list[tuple[str, torch.Tensor]]:
        """The flag, which is reduced with the gradients."""
        return [(FLAG, self.flag)] if self.looks else []

    # Before gradients are reduced.

    def begin(self) -> None:
        """Begins a pass that reduces."""
        if self.is_there and self.flag.grad is not None:  # of a pass that failed: still written to
            self._homes[0] = _devices.copied_to(self._place, torch.zeros(1, dtype=self.flag.dtype))
        self._found = self._reduced = self.flag.grad = None
        self._sums.clear()

    def look(self, i: int, values: torch.Tensor) -> None:
        """Looks at the gradient of parameter i, as it is sent."""
        if self._found is not None:
            return
        total = total_of(values)
        if self.is_there and _devices.device_of(values) is not None:
            self._sums.append((i, total))
        elif (kind := exact_kind(values, total)) is not None:
            self._found = Found(i, kind)

    @staticmethod
    def are_finite(values: torch.Tensor) -> bool:
        """Whether a bucket's values are finite, by one number; False also if that overflows."""
        wide = values.dtype in _WIDE  # whose product is faster than a sum
        return kind_of(torch.dot(values, values) if wide else total_of(values)) is None

    @property
    def is_up(self) -> bool:
        """This rank's flag so far, of gradients that lie on the host."""
        return self._found is not None

    def raise_there(self) -> None:
        """Sets the flag's gradient, on a device."""
        flag = torch.full((1,), float(self._found is not None), device=self.flag.device)
        if self._sums:
            totals = [total.to(flag.device, torch.float32) for _, total in self._sums]
            whole = torch.stack(totals).sum()
            flag += (whole - whole) != 0
        self.flag.grad = self._homes[0].copy_(flag)

    # When they are.

    def note_reduced(self, flag: torch.Tensor) -> None:
        """Takes the flag of all ranks."""
        self._number += 1
        found, sums = self._found, list(self._sums)
        if not self.is_there:
            if flag.item() != 0:
                self._reduced = _Step(self._number, lambda: 1.0, lambda: found, waits=False)
            return
        self.flag.grad = None
        self._homes.reverse()
        read = _devices.read_later(flag)
        self._reduced = _Step(self._number, read, lambda: found or _first(sums), waits=True)

    def note_skip(self, found_inf: torch.Tensor | None) -> None:
        """Notes a step that looks for infinities itself, and skips its update if there are any."""
        if found_inf is not None and self._reduced is not None:
            read, skips = self._reduced.flag, found_inf
            self._reduced = self._reduced._replace(flag=lambda: 0.0 if skips.item() else read())

    def note_use(self) -> None:
        """A step is about to use the gradients. Collective if one of them is not finite.

        Raises:
            NumericsError: by the setting.
        """
        step, self._reduced = self._reduced, None
        if step is not None and step.waits and not self.numerics.is_error:
            step, self._used = self._used, step
        if step is not None and step.flag() != 0:
            self.numerics.report(step.mine() if self.numerics.asks_who else None, step.number)


class OwnGradients:
    """Checks the gradients of a step that uses each rank's own, without reducing them before. On
    devices it looks only where it must raise an error, as the host then waits for them.

    Args:
        named: in the order in which their gradients become ready; the first bad one is reported.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.numerics = Numerics("gradients", [name for name, _ in named], process_set)
        self._parameters = [
            p if self.numerics.is_error or _devices.device_of(p) is None else None for _, p in named
        ]
        self.looks = self.numerics.looks  # alike on ranks whose parameters lie on devices
        self._number = 0

    @torch.no_grad()
    def found(self) -> Found | None:
        """This rank's first gradient that is not finite now."""
        self._number += 1
        for i, p in enumerate(self._parameters):
            if p is not None and p.grad is not None:
                kind = exact_kind(p.grad, total_of(p.grad))
                if kind is not None:
                    return Found(i, kind)
        return None

    def judge(self, mine: Found | None) -> None:
        """Collective, in every step. Raises NumericsError by the setting."""
        if self.numerics.on_any_rank(mine is not None):
            self.report(mine)

    def report(self, mine: Found | None) -> None:
        """Reports them in a step where some rank has one. Collective."""
        self.numerics.report(mine, self._number)


def _first(sums: Sequence[tuple[int, torch.Tensor]]) -> Found | None:
    for i, total in sums:
        kind = kind_of(total)
        if kind is not None:
            return Found(i, kind)
    return None
