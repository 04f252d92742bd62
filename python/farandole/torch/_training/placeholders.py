"""Placeholders in `optimizer.state` for a state that is in shards: programs reset an optimizer by
removing what is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farandole._core import InvalidArgument

_State = dict[Any, Any]
_CONTENT = {"in shards": True}


class Placeholders:
    """A placeholder for each parameter that was updated.

    Args:
        names: of the parameters; none for an optimizer without state.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.Tensor]) -> None:
        self._named = list(zip(names, parameters, strict=False))
        self._held: dict[int, dict[str, bool]] = {}

    def put(self, state: _State, steps: Sequence[int]) -> None:
        """Puts those of parameters with steps there, in place of whatever is there."""
        for i, (_, p) in reversed(list(enumerate(self._named))):
            if steps[i] > 0:
                state[p] = self._held.setdefault(i, dict(_CONTENT))

    def put_new(self, state: _State, steps: Sequence[int]) -> None:
        """The same after a step, which may have been the first one of some of them."""
        if len(self._held) < len(self._named):
            self.put(state, steps)

    def take_removed(self, state: _State) -> list[int]:
        """Forgets and returns the parameters whose placeholders a program has removed.

        Raises:
            InvalidArgument: it has put something else there.
        """
        removed = []
        for i, (name, p) in enumerate(self._named):
            held, there = self._held.get(i), state.get(p)
            if there is held and (held is None or held == _CONTENT):
                continue
            if there:
                raise _written(name, there)
            if held is not None:
                removed.append(i)
        for i in removed:
            del self._held[i]
        return removed


def _written(name: str, there: Any) -> InvalidArgument:
    keys = ", ".join(map(str, there)) if isinstance(there, dict) else type(there).__name__
    return InvalidArgument(
        f"optimizer.state of parameter '{name}' was written by hand ({keys}), where each rank has "
        "a part of the state\n  advice: give the whole state to optimizer.load_state_dict() on "
        "every rank"
    )
