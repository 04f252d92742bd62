"""Parts of PyTorch programs: models, losses, optimizers, and changes to gradients and weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from programs import BATCH, WIDTH, Program

if TYPE_CHECKING:
    import torch
    from torch import nn

# ---- models: from (n, WIDTH) to (n, 2) ----


def mlp() -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 2))


def conv() -> nn.Module:
    from torch import nn

    body = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 4, 2, padding=1), nn.Tanh())
    return nn.Sequential(body, nn.Conv2d(4, 3, 2), nn.Flatten(), nn.Linear(12, 2))


def channels_last() -> nn.Module:
    import torch

    return conv().to(memory_format=torch.channels_last)


def mixed_layout() -> nn.Module:
    """Channels last on every second rank alone: Setting.lay_out."""
    return conv()


def tied() -> nn.Module:
    from torch import nn

    first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(WIDTH, 2))


def frozen() -> nn.Module:
    model = mlp()
    model[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
    return model


def integer() -> nn.Module:
    """A parameter of whole numbers, which no gradient reaches."""
    import torch
    from torch import nn

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.order = nn.Parameter(torch.tensor([1, 0]), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)[:, self.order]

    return Turned()


def nothing_to_train() -> nn.Module:
    """Its inputs have gradients, and none of its parameters."""
    from torch import nn

    class Still(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp().requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x.detach().requires_grad_())

    return Still()


def odd() -> nn.Module:
    """Parameters of no dimension, without elements, complex, and one that is never used."""
    import torch
    from torch import nn

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.turn = nn.Parameter(torch.randn(2, dtype=torch.complex64))
            self.unused = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.body(x) * self.scale + self.empty.sum()
            return (out * self.turn).real

    return Odd()


def checkpointed() -> nn.Module:
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = mlp(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.first, x, use_reentrant=False))

    return Checkpointed()


def reentrant() -> nn.Module:
    """Its first layers are in two checkpoints, of which each runs a backward of its own."""
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Reentrant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = mlp(), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.detach().requires_grad_()
            parts = [checkpoint(self.first, each, use_reentrant=True) for each in (x, 2 * x)]
            return self.last(parts[0] + parts[1])

    return Reentrant()


def batch_norm() -> nn.Module:
    from torch import nn

    class Normal(nn.BatchNorm1d):
        """A subclass, with a hook and a parameter of its own."""

        def __init__(self) -> None:
            super().__init__(6)
            self.gain = nn.Parameter(self.weight.detach() * 1.5)
            self.register_forward_hook(lambda _, __, out: out * 1.25)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.gain

    # No bias before a normalization: its gradient is 0 but for rounding, which Adam would magnify.
    return nn.Sequential(nn.Linear(WIDTH, 6, bias=False), Normal(), nn.Tanh(), nn.Linear(6, 2))


def embedding() -> nn.Module:
    from torch import nn

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table((x.abs() * 2).long().clamp(max=4)).sum(1))

    return Embedded()


def compiled() -> nn.Module:
    """By torch.compile, but for the code that Inductor would write."""
    model = mlp()
    model.compile(backend="aot_eager")
    return model


def functional() -> nn.Module:
    """Called by torch.func, sample by sample."""
    import torch
    from torch import nn

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = dict(self.body.named_parameters())
            return torch.vmap(lambda each: torch.func.functional_call(self.body, own, each))(x)

    return Functional()


MODELS = {
    each.__name__: each
    for each in (
        mlp, conv, channels_last, mixed_layout, tied, frozen, integer, nothing_to_train, odd,
        checkpointed, reentrant, batch_norm, embedding, compiled, functional,
    )
}  # fmt: skip

# ---- losses, of outputs, targets and weights of samples ----

Loss = Callable[[Any, Any, Any], Any]


def _square(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out - y).square().mean(1)


LOSSES: dict[str, Loss] = {
    "mean": lambda out, y, _: _square(out, y).mean(),
    "sum": lambda out, y, _: _square(out, y).sum() / BATCH,
    "weighted": lambda out, y, w: (_square(out, y) * w).mean(),
    "two": lambda out, y, _: _square(out, y).mean() + 0.1 * (out[:, 0] - y[:, 1]).abs().mean(),
}

# ---- what programs do to gradients, after they are whole and before the step ----

Touch = Callable[[Any], None]


def _each(change: Callable[[Any], None]) -> Touch:
    def touch(model: Any) -> None:
        for p in model.parameters():
            if p.grad is not None and not p.grad.is_sparse:
                change(p)

    return touch


def _clip(model: Any) -> None:
    import torch

    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.5)


def _assign_data(p: Any) -> None:
    p.grad.data = p.grad.data * 0.5


def _assign(p: Any) -> None:
    p.grad = p.grad * 0.5


def _set(p: Any) -> None:
    p.grad.set_(p.grad * 0.5)


def _cast(p: Any) -> None:
    if not p.is_complex():
        p.grad.data = p.grad.data.double().float()


TOUCHES: dict[str, Touch] = {
    "nothing": lambda _: None,
    "data": _each(_assign_data),
    "assign": _each(_assign),
    "set": _each(_set),
    "cast": _each(_cast),
    "in_place": _each(lambda p: p.grad.mul_(0.5)),
    "clip": _clip,
}

CLOSURES = ("closure", "lbfgs")  # optimizers that compute the loss by themselves


# ---- hooks of the program's own, registered before or after the optimizer is wrapped ----


def _on_gradients(model: Any) -> None:
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: gradient * 0.5)


def _on_accumulated(model: Any) -> None:
    def halve(p: Any) -> None:
        if not p.grad.is_sparse:
            p.grad.mul_(0.5)

    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(halve)


HOOKS: dict[str, Touch] = {"gradient": _on_gradients, "accumulated": _on_accumulated}

# ---- what programs do to weights, in the midst of training and with gradients standing ----


def _half_and_back(model: Any, _: Any) -> None:
    state = copy.deepcopy(model.state_dict())
    model.half()
    model.float()
    model.load_state_dict(state)


def _save_and_load(model: Any, optimizers: Any) -> None:
    import torch

    weights = copy.deepcopy(model.state_dict())
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    model.load_state_dict(weights)
    for optimizer, state in zip(optimizers, states, strict=True):
        optimizer.load_state_dict(state)


def _assigned(model: Any, _: Any) -> None:
    """Other parameters than those that the optimizer has, as PyTorch's documentation warns."""
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def _averaged(model: Any, _: Any) -> None:
    """Weights become a moving average of themselves, as at the end of an epoch with EMA."""
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0 if p.dtype == torch.int64 else 0.5)
    average.update_parameters(model)
    model.load_state_dict(average.module.state_dict())


def _new_data(model: Any, _: Any) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def _unfreeze(model: Any, _: Any) -> None:
    for p in model.parameters():
        p.requires_grad_(True)


def _other_layout(model: Any, _: Any) -> None:
    import torch

    model.to(memory_format=torch.channels_last)


def _added(model: Any, optimizers: Any) -> None:
    """A parameter that the optimizer gets now, as where a model grows."""
    import torch

    model.extra = torch.nn.Parameter(torch.zeros(2))
    model.register_forward_hook(lambda model, _, out: out + model.extra)
    optimizers[-1].add_param_group({"params": [model.extra]})


ACTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda *_: None,
    "half_and_back": _half_and_back,
    "double": lambda model, _: model.double(),
    "share_memory": lambda model, _: model.share_memory(),
    "new_data": _new_data,
    "assigned": _assigned,
    "averaged": _averaged,
    "save_and_load": _save_and_load,
    "other_layout": _other_layout,
    "unfreeze": _unfreeze,
    "added": _added,
}


def optimizers_of(program: Program, model: Any) -> list[Any]:
    import torch

    kind, parameters = program["optimizer"], list(model.parameters())
    if kind == "two":
        half = len(parameters) // 2
        first = torch.optim.SGD(parameters[:half], lr=0.1)
        return [first, torch.optim.Adam(parameters[half:], lr=0.02)]
    if kind == "momentum":
        return [torch.optim.SGD(parameters, lr=0.05, momentum=0.9)]
    if kind == "groups":
        groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02}]
        return [torch.optim.SGD(groups, lr=0.1)]
    if kind == "lbfgs":
        return [torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)]
    if kind == "adagrad":
        return [torch.optim.Adagrad(parameters, lr=0.05)]
    if kind.startswith("adam"):
        how = {"foreach": True} if kind.endswith("foreach") else {"fused": kind.endswith("fused")}
        return [torch.optim.Adam(parameters, lr=0.02, **how)]
    return [torch.optim.SGD(parameters, lr=0.1)]
