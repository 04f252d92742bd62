"""The numbers of an optimizer's param groups, such as learning rates, compared between ranks, and
the names that its parameters are known by.

A scheduler that goes by each rank's own loss gives ranks other rates, and their weights part. Each
step carries a digest of these numbers beside the gradients, so that the next backward says so.
"""

from __future__ import annotations

import hashlib
import numbers
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch

from farandole import _core, _world
from farandole.common._objects import allgather_object, compare
from farandole.common._process_set import ProcessSet
from farandole.common._weights import period
from farandole.torch._training.names import Names

_OF_THE_KERNEL = {"foreach", "fused", "capturable", "differentiable"}  # may differ between hosts


_ADVICE = (
    "give schedulers that go by a loss the mean of all ranks' (hvd.allreduce); what has parted is "
    "mended by hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
    "hvd.broadcast_optimizer_state(optimizer, root_rank=0); where settings differ on purpose, set "
    "FARANDOLE_CHECK_WEIGHTS=off"
)


class Settings:
    """The settings of one optimizer, in its steps.

    Args:
        label: equal on all ranks, and no other optimizer's.
        optimizer: gives it, if it is known and still there.
        process_set: the ranks that reduce.
        names: of its parameters.
    """

    def __init__(
        self,
        label: str,
        optimizer: Callable[[], torch.optim.Optimizer | None],
        process_set: ProcessSet,
        names: Names,
    ) -> None:
        self._label, self._optimizer, self._process_set = label, optimizer, process_set
        self._compares = period() is not None
        self._shown: array[float] | None = None
        self._names: Names | None = names  # while they may differ

    def show(self, reducer: _core.Reducer) -> None:
        """Gives a step this rank's, before it is launched."""
        optimizer = self._optimizer() if self._compares else None
        if optimizer is None:
            return
        present = array("d", (number for _, _, number in _numbers_of(optimizer)))
        if present != self._shown:
            names = 0 if self._names is None else self._names.digest()
            digest = hashlib.blake2b(present, digest_size=8).digest()
            reducer.show_settings(int.from_bytes(digest, "little") ^ names)
            self._shown = present

    def compare(self, reducer: _core.Reducer) -> None:
        """When that step is over. Raises Mismatch on every rank where two have shown other ones; it
        names the first setting that differs."""
        if not reducer.settings_differ:
            return
        optimizer = self._optimizer()
        present = [] if optimizer is None else _numbers_of(optimizer)
        rows = [f"{key} of param group {g}: {x}" for g, key, x in present]
        mine = (_world.rank(), rows)
        by_rank = dict(allgather_object(mine, self._label, self._process_set))
        compare("the optimizer's settings", by_rank, _ADVICE)
        self.compare_names(reducer)
        self._names = self._shown = None  # some ranks know none, as their parameters have moved

    def compare_names(self, reducer: _core.Reducer) -> None:
        """The same of the parameters' names alone."""
        if reducer.settings_differ and self._names is not None:
            self._names.compare(f"names in {self._label}", self._process_set)


def _numbers_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, str, float]]:
    """Param group, name and value of the numbers by which it updates. Those on devices are left
    out, as the host would wait for them."""
    defaults = getattr(optimizer, "defaults", {})  # a wrapper of another optimizer may have none
    known = sorted(defaults.keys() - _OF_THE_KERNEL)
    for g, group in enumerate(optimizer.param_groups):
        for key in known:
            value = group.get(key)
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if type(each) is float or _is_number(each):
                    yield g, key, float(each)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.is_cpu and value.numel() == 1 and not value.is_complex()
    return isinstance(value, numbers.Real)
