"""One rank's parameters, optimizer state and objects for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from farandole import _world
from farandole._arguments import type_of
from farandole._core import InvalidArgument
from farandole._unreduced import note_broadcast
from farandole.common._objects import agree, allgather_object, broadcast_object
from farandole.torch import _devices
from farandole.torch._entries import public
from farandole.torch._tensors import check_tensor
from farandole.torch._training import unwrapped
from farandole.torch._training.sharded import ShardedOptimizer
from farandole.torch.ops import broadcast_async_, synchronize

__all__ = [
    "allgather_object",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
]

_Maybe = torch.Tensor | None
Parameters = Mapping[str, _Maybe] | Iterable[_Maybe | tuple[str, _Maybe]]


@public
def broadcast_parameters(params: Parameters, root_rank: int) -> None:
    """Overwrites tensors with the root's.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, or a list of tensors or
            (name, tensor). What is None is skipped, on every rank.
        root_rank: whose values.

    Raises:
        InvalidArgument: params is something else, or a tensor cannot be sent.
        Mismatch: the ranks' names or shapes differ; says which.

    Examples:
        >>> import torch, farandole.torch as hvd
        >>> hvd.init()
        >>> hvd.broadcast_parameters(torch.nn.Linear(2, 1).state_dict(), root_rank=0)
    """
    named: list[tuple[str, torch.Tensor]] = []
    for name, tensor in _pairs(params):
        if tensor is not None:
            check_tensor(tensor, f"'{name}'", or_complex=True)
            named.append((name, tensor.detach()))
    # Compared before anything is overwritten, and in one message.
    agree("parameters to broadcast", [f"'{n}' {list(t.shape)} {t.dtype}" for n, t in named])
    _broadcast_all(named, root_rank)
    note_broadcast("broadcast_parameters")
    unwrapped.note_broadcast(named)


def _pairs(params: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    if isinstance(params, torch.Tensor | str) or not isinstance(params, Iterable):
        raise InvalidArgument(
            f"params is {type_of(params)}; pass a state_dict, or a list of tensors or "
            "(name, tensor)"
        )
    pairs = []
    for i, row in enumerate(params):
        named = isinstance(row, tuple) and len(row) == 2 and isinstance(row[0], str)
        pairs.append(row if named else (f"parameter {i}", row))
    return pairs


def _broadcast_all(named: Iterable[tuple[str, torch.Tensor]], root_rank: int) -> None:
    """All at once, then all waited for: they fly together."""
    flights = []
    for name, tensor in named:
        if tensor.numel() == 0:
            continue
        # Strides may differ between ranks: only contiguous memory means the same everywhere.
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        flights.append((broadcast_async_(flat, root_rank, name), flat, tensor))
    for handle, flat, tensor in flights:
        synchronize(handle)
        if flat is not tensor:
            tensor.copy_(flat)


class _Slot(NamedTuple):
    """Stands for a tensor that is sent by itself."""

    number: int


def _take_out(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with slots for its tensors, which are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        check_tensor(value, "optimizer state", or_complex=True)
        tensors.append(value.detach())
        return _Slot(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _take_out(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_take_out(item, tensors) for item in value)
    return value


def _put_back(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, _Slot):
        return tensors[value.number]
    if isinstance(value, dict):
        return {key: _put_back(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put_back(item, tensors) for item in value)
    return value


@public
def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,  # noqa: ARG001 - Horovod's signature
) -> None:
    """Gives every rank's optimizer the root's state and options (learning rate and so on).

    No step is taken: the root says what state there is, and the others create it.

    Args:
        optimizer: of the same class and over the same parameters on every rank.
        root_rank: whose state.
        model: accepted as Horovod does, and not needed.

    Raises:
        InvalidArgument: an optimizer whose state is not by parameter (LBFGS).
        Mismatch: the ranks' optimizers differ; says how.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidArgument("the state of LBFGS is not supported")
    if isinstance(optimizer, ShardedOptimizer):
        raise InvalidArgument(
            "with sharded_update=True every rank has a part of the state\n  advice: broadcast it "
            "before DistributedOptimizer, or load the same state_dict() on every rank"
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    agree(
        "the optimizer",
        [
            type(optimizer).__name__,
            *(f"a group of {len(g['params'])} parameters" for g in optimizer.param_groups),
            *(f"a parameter {list(p.shape)} {p.dtype}" for p in parameters),
        ],
    )
    number_of = {id(p): i for i, p in enumerate(parameters)}
    tensors: list[torch.Tensor] = []
    beside: list[int] = []  # by tensor, the number of its parameter
    structure: Any = None
    if _world.rank() == root_rank:
        state = {}
        for p, values in optimizer.state.items():
            if id(p) in number_of:
                number = number_of[id(p)]
                state[number] = _take_out(values, tensors)
                beside += [number] * (len(tensors) - len(beside))
        rest = {
            "of no parameter": {
                key: values
                for key, values in optimizer.state.items()
                if not isinstance(key, torch.Tensor)
            },
            "options": [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ],
        }
        structure = {"state": state, **_take_out(rest, tensors)}
        beside += [0] * (len(tensors) - len(beside))
    layouts = [
        (tuple(t.shape), t.stride(), t.dtype, number if _devices.device_of(t) is not None else None)
        for t, number in zip(tensors, beside, strict=True)
    ]
    structure, layouts = broadcast_object((structure, layouts), root_rank, "optimizer state")
    if _world.rank() != root_rank:
        tensors = [torch.empty_strided(*place, dtype=dtype) for *place, dtype, _ in layouts]
    _broadcast_all(((f"optimizer state {i}", t) for i, t in enumerate(tensors)), root_rank)
    if _world.rank() == root_rank:
        return
    for i, (*_, number) in enumerate(layouts):
        if number is not None:  # the root has it on a device
            tensors[i] = _devices.copied_to(parameters[number], tensors[i])
    whole = _put_back(structure, tensors)
    optimizer.state.clear()
    for number, values in whole["state"].items():
        optimizer.state[parameters[number]] = values
    optimizer.state.update(whole["of no parameter"])
    for group, options in zip(optimizer.param_groups, whole["options"], strict=True):
        group.update(options)
