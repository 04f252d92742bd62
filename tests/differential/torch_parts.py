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


def recurrent(kind: str) -> nn.Module:
    from torch import nn

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = getattr(nn, kind)(2, 3, num_layers=2, batch_first=True)
            self.head = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.cells(x.unflatten(1, (2, 2)))[0][:, -1])

    return Recurrent()


def lstm() -> nn.Module:
    return recurrent("LSTM")


def gru() -> nn.Module:
    return recurrent("GRU")


def attention() -> nn.Module:
    from torch import nn

    class Attention(nn.Module):
        """Without the keys' bias, whose gradient is 0 but for rounding."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(2, WIDTH), nn.LayerNorm(WIDTH)
            self.body = nn.MultiheadAttention(WIDTH, 2, bias=False, batch_first=True)
            self.head = nn.Linear(2 * WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.first(x.unflatten(1, (2, 2))))
            return self.head((x + self.body(x, x, x, need_weights=False)[0]).flatten(1))

    return Attention()


def group_norm() -> nn.Module:
    from torch import nn

    return nn.Sequential(nn.Linear(WIDTH, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 2))


def instance_norm() -> nn.Module:
    """With running statistics, the mean of those of its samples."""
    from torch import nn

    norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    body = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1, bias=False))
    return nn.Sequential(body, norm, nn.Tanh(), nn.Flatten(), nn.Linear(27, 2))


def weight_norm() -> nn.Module:
    from torch import nn

    model = mlp()
    nn.utils.parametrizations.weight_norm(model[0])  # type: ignore[index]
    return model


def spectral_norm() -> nn.Module:
    """Each forward pass moves its buffers."""
    from torch import nn

    model = mlp()
    nn.utils.parametrizations.spectral_norm(model[0])  # type: ignore[index]
    return model


def embedded(**options: Any) -> nn.Module:
    from torch import nn

    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3, **options), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.table((x.abs() * 2).long().clamp(max=4)).sum(1))

    return Embedded()


def embedding() -> nn.Module:
    return embedded(sparse=True)


def padded() -> nn.Module:
    return embedded(padding_idx=1)


def max_norm() -> nn.Module:
    """Each forward pass scales the rows that it reads."""
    return embedded(max_norm=0.5)


def experts() -> nn.Module:
    """Of which each has the samples that are routed to it, and is not called where none are."""
    from torch import nn

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            to = (x[:, 0] > 0).long() + 2 * (x[:, 1] > 1.2).long()
            out = x.new_zeros(len(x), 2)
            for i, expert in enumerate(self.body):
                if (mine := to == i).any():
                    out = out.masked_scatter(mine[:, None], expert(x[mine]).to(out.dtype))
            return out

    return Experts()


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
        checkpointed, reentrant, batch_norm, embedding, compiled, functional, lstm, gru, attention,
        group_norm, instance_norm, weight_norm, spectral_norm, padded, max_norm, experts,
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

# ---- how programs clear gradients after a step ----

Clear = Callable[[], None]


def _none(_: Any, optimizers: list[Any]) -> Clear:
    return lambda: [optimizer.zero_grad() for optimizer in optimizers] and None


def _zeros(_: Any, optimizers: list[Any]) -> Clear:
    return lambda: [optimizer.zero_grad(set_to_none=False) for optimizer in optimizers] and None


def _learning(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad and p.numel() > 0]


def _flat(model: Any, optimizers: list[Any]) -> Clear:
    """All gradients are views of one tensor, which the program clears."""
    import torch

    flat = {p.dtype: torch.zeros(0, dtype=p.dtype) for p in _learning(model)}
    for dtype in flat:
        mine = [p for p in _learning(model) if p.dtype == dtype]
        flat[dtype] = torch.zeros(sum(p.numel() for p in mine), dtype=dtype)
        parts = flat[dtype].split([p.numel() for p in mine])
        for p, part in zip(mine, parts, strict=True):
            p.grad = part.view(p.shape)

    del optimizers
    return lambda: torch._foreach_zero_(list(flat.values()))


def _kept(model: Any, optimizers: list[Any]) -> Clear:
    """The program keeps the first step's gradients, and clears these."""
    import torch

    kept: list[Any] = []

    def clear() -> None:
        if not kept:
            kept.extend(p.grad for p in _learning(model) if p.grad is not None)
        torch._foreach_zero_(kept)

    del optimizers
    return clear


CLEARS: dict[str, Callable[[Any, list[Any]], Clear]] = {
    "none": _none, "zeros": _zeros, "flat": _flat, "kept": _kept,
}  # fmt: skip

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


def _clip_values(model: Any) -> None:
    import torch

    torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)


def _clip_layers(model: Any) -> None:
    import torch

    for layer in model.children():
        torch.nn.utils.clip_grad_norm_([p for p in layer.parameters() if p.grad is not None], 0.2)


def _noise(p: Any) -> None:
    import torch

    dice = torch.Generator().manual_seed(p.numel())
    p.grad.add_(torch.randn(p.shape, generator=dice).to(p.grad.dtype), alpha=0.01)


def _centralize(p: Any) -> None:
    if p.dim() > 1 and p.numel():
        p.grad.sub_(p.grad.mean(dim=tuple(range(1, p.dim())), keepdim=True))


def _clamp(p: Any) -> None:
    if not p.is_complex():
        p.grad.clamp_(-0.05, 0.05)


def _foreach(model: Any) -> None:
    import torch

    kept = [p.grad for p in model.parameters() if p.grad is not None and not p.grad.is_sparse]
    if kept:
        torch._foreach_mul_(kept, 0.5)


def _drop(model: Any) -> None:
    next(iter(model.parameters())).grad = None


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
    "clip_values": _clip_values,
    "clip_layers": _clip_layers,
    "noise": _each(_noise),
    "centralize": _each(_centralize),
    "clamp": _each(_clamp),
    "foreach": _foreach,
    "drop": _drop,
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


def _reset_state(_: Any, optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.state.clear()


def _turn_groups(_: Any, optimizers: Any) -> None:
    for optimizer in optimizers:
        optimizer.param_groups.reverse()


def _leave_out(_: Any, optimizers: Any) -> None:
    """A parameter that no group has from now on."""
    del optimizers[-1].param_groups[-1]["params"][0]


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
    "reset_state": _reset_state,
    "turn_groups": _turn_groups,
    "leave_out": _leave_out,
}


# ---- optimizers ----


def _two(parameters: list[Any]) -> list[Any]:
    import torch

    half = len(parameters) // 2
    first = torch.optim.SGD(parameters[:half], lr=0.1)
    return [first, torch.optim.Adam(parameters[half:], lr=0.02)]


def _overlapping(parameters: list[Any]) -> list[Any]:
    """Both have the first parameter."""
    import torch

    half = len(parameters) // 2
    of = (parameters[:half], [parameters[0], *parameters[half:]])
    return [torch.optim.SGD(each, lr=0.1) for each in of]


def _groups(parameters: list[Any], **second: Any) -> list[Any]:
    return [{"params": parameters[:1]}, {"params": parameters[1:], **second}]


def _split(
    parameters: list[Any], belongs: Callable[[Any], bool], first: Callable[[Any], Any]
) -> list[Any]:
    """An optimizer of those that it is made for, and SGD for the others."""
    import torch

    chosen = [p for p in parameters if belongs(p)]
    others = [p for p in parameters if not belongs(p)]
    made = [first(chosen)] if chosen else []
    return [*made, torch.optim.SGD(others, lr=0.1)] if others else made


OPTIMIZERS: dict[str, Callable[[list[Any], Any], Any]] = {
    "sgd": lambda p, o: o.SGD(p, lr=0.1),
    "momentum": lambda p, o: o.SGD(p, lr=0.05, momentum=0.9),
    "nesterov": lambda p, o: o.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "maximize": lambda p, o: o.SGD(p, lr=0.02, momentum=0.5, dampening=0.1, maximize=True),
    "groups": lambda p, o: o.SGD(_groups(p, lr=0.02), lr=0.1),
    "adam": lambda p, o: o.Adam(p, lr=0.02),
    "adam_foreach": lambda p, o: o.Adam(p, lr=0.02, foreach=True),
    "adam_fused": lambda p, o: o.Adam(p, lr=0.02, fused=True),
    "adam_tensor": lambda p, o: o.Adam(p, lr=torch_number(0.02), foreach=False),
    "amsgrad": lambda p, o: o.Adam(p, lr=0.02, amsgrad=True),
    "adamw": lambda p, o: o.AdamW(_groups(p, lr=0.05, weight_decay=0.0), lr=0.02, weight_decay=0.3),
    "nadam": lambda p, o: o.NAdam(p, lr=0.02),
    "radam": lambda p, o: o.RAdam(p, lr=0.05),
    "rmsprop": lambda p, o: o.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "rprop": lambda p, o: o.Rprop(p, lr=0.02),
    "asgd": lambda p, o: o.ASGD(p, lr=0.1, t0=1),
    "adagrad": lambda p, o: o.Adagrad(p, lr=0.05),
    "adafactor": lambda p, o: o.Adafactor(p, lr=0.1),
    "muon": lambda p, o: _split(p, lambda each: each.dim() == 2, lambda of: o.Muon(of, lr=0.02)),
    "sparse_adam": lambda p, o: _split(
        p, lambda each: each.shape == (5, 3), lambda of: o.SparseAdam(of, lr=0.02)),
    "two": lambda p, _: _two(p),
    "overlapping": lambda p, _: _overlapping(p),
    "closure": lambda p, o: o.SGD(p, lr=0.1),
    "lbfgs": lambda p, o: o.LBFGS(p, lr=0.1, max_iter=2),
}  # fmt: skip


def torch_number(value: float) -> Any:
    import torch

    return torch.tensor(value)


def optimizers_of(program: Program, model: Any) -> list[Any]:
    import torch

    made = OPTIMIZERS[program["optimizer"]](list(model.parameters()), torch.optim)
    return made if isinstance(made, list) else [made]


# ---- schedules of one optimizer; each has step(), of the mean loss ----


class Averaging:
    """Weights are averaged after each step, and what they were in the end is their mean."""

    def __init__(self, optimizer: Any, model: Any) -> None:
        from torch.optim.swa_utils import SWALR, AveragedModel

        self._model, self._average = model, AveragedModel(model)
        self._rates = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)

    def step(self) -> None:
        self._average.update_parameters(self._model)
        self._rates.step()

    def end(self) -> None:
        self._model.load_state_dict(self._average.module.state_dict())


class ByHand:
    """The program sets the learning rate of each group by itself."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        for i, group in enumerate(self._optimizer.param_groups):
            group["lr"] = group["lr"] * (0.7 - 0.2 * i)


def _warm_up(optimizer: Any, s: Any) -> Any:
    parts = [s.LinearLR(optimizer, 0.3, total_iters=2), s.StepLR(optimizer, 1, 0.5)]
    return s.SequentialLR(optimizer, parts, milestones=[2])


SCHEDULES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "step": lambda o, s, _: s.StepLR(o, 1, 0.5),
    "lambda_before": lambda o, s, _: s.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one_cycle": lambda o, s, _: s.OneCycleLR(o, 0.1, total_steps=9),
    "one_cycle_before": lambda o, s, _: s.OneCycleLR(o, 0.1, total_steps=9),
    "plateau": lambda o, s, _: s.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.3),
    "warm_up": lambda o, s, _: _warm_up(o, s),
    "swa": lambda o, _, model: Averaging(o, model),
    "by_hand": lambda o, *_: ByHand(o),
}


def schedules_of(program: Program, model: Any, optimizers: list[Any]) -> list[Any]:
    import torch

    if program["schedule"] == "none":
        return []
    make = SCHEDULES[program["schedule"]]
    return [make(each, torch.optim.lr_scheduler, model) for each in optimizers]
