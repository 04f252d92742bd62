"""Copies of states in memory: of tensors where they lie, of anything else deeply.

A commit reuses the memory of the one before the last, where tensors have the same form. So the last
one stays whole until the new one is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch


class Commit:
    """The last copy, and the memory for the next one."""

    def __init__(self, value: Any) -> None:
        self._last, self._other = copied(value), None

    def write(self, value: Any) -> None:
        """Makes the next copy, which does not count yet."""
        self._other = copied(value, self._other)

    def keep(self) -> None:
        """Makes that copy the last one."""
        self._last, self._other = self._other, self._last

    def value(self) -> Any:
        """A copy of the last one, which the caller may keep and change."""
        return copied(self._last)


@torch.no_grad()
def copied(value: Any, spare: Any = None) -> Any:
    """`spare`: a former copy, which is not needed any more."""
    if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
        return _copied_tensor(value, spare)
    if isinstance(value, dict):
        return _copied_dict(value, spare if isinstance(spare, dict) else {})
    if type(value) in (list, tuple):
        alike = type(spare) is type(value) and len(spare) == len(value)
        olds = spare if alike else [None] * len(value)
        return type(value)(copied(v, old) for v, old in zip(value, olds, strict=True))
    return copy.deepcopy(value)


def _copied_tensor(value: torch.Tensor, spare: Any) -> torch.Tensor:
    alike = (
        isinstance(spare, torch.Tensor)
        and value.layout == spare.layout == torch.strided
        and (spare.shape, spare.dtype, spare.device) == (value.shape, value.dtype, value.device)
    )
    if alike:
        kept: torch.Tensor = spare
        return kept.copy_(value)
    return value.detach().clone()


def _copied_dict(value: dict[Any, Any], spare: dict[Any, Any]) -> dict[Any, Any]:
    made = copy.copy(value)  # of its class
    if hasattr(value, "_metadata"):  # the versions of a module's state_dict
        made._metadata = copy.deepcopy(value._metadata)  # type: ignore[attr-defined]
    for key, item in value.items():
        made[key] = copied(item, spare.get(key))
    return made
