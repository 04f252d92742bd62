"""The layers of a model: known to every rank, made where they are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from farandole._arguments import shown, type_of
from farandole._core import InvalidArgument


class Outline(NamedTuple):
    """The description of a layer that every rank keeps."""

    name: str  # as in the model of one process: "3", "head.0"
    kind: str  # its class
    keys: tuple[str, ...]  # of its state, as in the model's
    parameters: int
    bytes: int  # of these

    def __str__(self) -> str:
        return f"layer '{self.name}', a {self.kind} of {self.parameters} parameters"


class Layer(NamedTuple):
    """A layer of a model that is being split into stages."""

    outline: Outline
    make: Callable[[], nn.Module]


def layers_of(model: Any, seed: int) -> list[Layer]:
    """The layers of a model, in order.

    Args:
        model: an ``nn.Sequential``, whose Sequentials count as the layers in them; or a list of
            modules and of functions that make one.
        seed: of layers that are made here: layer i draws from seed + i, on any rank.

    Raises:
        InvalidArgument: it is something else, or a layer cannot be made.
    """
    if isinstance(model, nn.Sequential):
        _refuse_own_forward(model, "model")
        found = list(_walk(model, ""))
    elif isinstance(model, Sequence) and not isinstance(model, str):
        found = [(str(i), each) for i, each in enumerate(model)]
    else:
        raise InvalidArgument(
            f"model is {shown(model)}; it is an nn.Sequential, or a list of modules and of "
            "functions that make one, as functools.partial(nn.Linear, 10, 10)"
        )
    return [_layer(name, each, seed + i) for i, (name, each) in enumerate(found)]


def _walk(model: nn.Sequential, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model._modules.items():
        if child is None:
            continue
        if type(child) is nn.Sequential and not _has_hooks(child):
            yield from _walk(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _has_hooks(module: Any) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _refuse_own_forward(model: nn.Sequential, what: str) -> None:
    if type(model).forward is not nn.Sequential.forward:
        raise InvalidArgument(
            f"{what} is {type_of(model)} with a forward() of its own, which a Pipeline "
            "would not call\n  advice: an nn.Sequential of modules"
        )


def _layer(name: str, given: Any, seed: int) -> Layer:
    if isinstance(given, nn.Module):
        if not _is_meta(given, name):
            return Layer(_outline(name, given), lambda: given)
        return Layer(_outline(name, given), lambda: _materialized(given, name, seed))
    if not callable(given):
        raise InvalidArgument(
            f"layer '{name}' is {shown(given)}; it is a module, or a function that makes one"
        )
    return Layer(_outline(name, _thought(given, name)), lambda: _made(given, name, seed))


def _outline(name: str, module: nn.Module) -> Outline:
    parameters = list(module.parameters())
    for p in parameters:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise InvalidArgument(
                f"layer '{name}' is {type_of(module)}, whose parameters have no shape "
                "before its first forward\n  advice: say its sizes"
            )
    keys = tuple(f"{name}.{key}" for key in module.state_dict())
    count, nbytes = sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)
    return Outline(name, type(module).__name__, keys, count, nbytes)


def _thought(make: Callable[[], Any], name: str) -> nn.Module:
    """The layer without memory, on the meta device. A few layers cannot be made so: these are made,
    one at a time, and dropped."""
    with torch.random.fork_rng(devices=[]):
        try:
            with torch.device("meta"):
                return _checked(make(), name)
        except Exception:
            return _checked(make(), name)


def _made(make: Callable[[], Any], name: str, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _checked(make(), name)


def _checked(made: Any, name: str) -> nn.Module:
    if not isinstance(made, nn.Module):
        raise InvalidArgument(f"the function of layer '{name}' makes {shown(made)}, no module")
    return made


def _is_meta(module: nn.Module, name: str) -> bool:
    everything = [*module.parameters(), *module.buffers()]
    meta = [each for each in everything if each.is_meta]
    if meta and len(meta) < len(everything):
        raise InvalidArgument(
            f"layer '{name}' has parameters on the meta device beside others; it is there, or not"
        )
    return bool(meta)


def _materialized(module: nn.Module, name: str, seed: int) -> nn.Module:
    module.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part, each in module.named_modules():
            own = [*each.parameters(recurse=False), *each.buffers(recurse=False)]
            if not own:
                continue
            reset: Any = getattr(each, "reset_parameters", None)
            reset = reset or getattr(each, "_reset_parameters", None)
            if reset is None:
                raise InvalidArgument(
                    f"layer '{name}' is on the meta device, and its "
                    f"{f'part {part!r}, {type_of(each)},' if part else type(each).__name__} has no "
                    "reset_parameters() to give it its first values\n"
                    "  advice: pass a function that makes the layer"
                )
            reset()
    return module


def stage_of(layers: Sequence[Layer]) -> tuple[nn.Sequential, list[nn.Module]]:
    """A module of some of a model's layers, under the model's names for them; and the layers in
    order."""
    root = nn.Sequential()
    made = []
    for layer in layers:
        *path, last = layer.outline.name.split(".")
        home: nn.Module = root
        for name in path:
            if name not in home._modules:
                home.add_module(name, nn.Sequential())
            home = home.get_submodule(name)
        made.append(layer.make())
        home.add_module(last, made[-1])
    return root, made
