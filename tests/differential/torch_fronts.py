"""PyTorch programs: by DistributedOptimizer, by DDP over our backend, and by GlobalBatch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import programs
from programs import BATCH, STEPS, WIDTH, Front, Program, Result

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


MODELS = {
    each.__name__: each
    for each in (
        mlp,
        conv,
        channels_last,
        mixed_layout,
        tied,
        frozen,
        odd,
        checkpointed,
        batch_norm,
        embedding,
    )
}

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

REPLACING = ("data", "set", "cast")  # these give a gradient other memory

# ---- what programs do to weights, in the midst of training and with gradients standing ----


def _half_and_back(model: Any, _: Any) -> None:
    state = copy.deepcopy(model.state_dict())
    model.half()
    model.float()
    model.load_state_dict(state)


def _save_and_load(model: Any, optimizer: Any) -> None:
    import torch

    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)


def _new_data(model: Any, _: Any) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def _unfreeze(model: Any, _: Any) -> None:
    for p in model.parameters():
        p.requires_grad_(True)


def _other_layout(model: Any, _: Any) -> None:
    import torch

    model.to(memory_format=torch.channels_last)


ACTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda *_: None,
    "half_and_back": _half_and_back,
    "double": lambda model, _: model.double(),
    "share_memory": lambda model, _: model.share_memory(),
    "new_data": _new_data,
    "save_and_load": _save_and_load,
    "other_layout": _other_layout,
    "unfreeze": _unfreeze,
}


def optimizer_of(program: Program, model: Any) -> Any:
    import torch

    kind, parameters = program["optimizer"], list(model.parameters())
    if kind == "momentum":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    if kind == "groups":
        return torch.optim.SGD(
            [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.02}], lr=0.1
        )
    if kind.startswith("adam"):
        options = (
            {"foreach": True} if kind.endswith("foreach") else {"fused": kind.endswith("fused")}
        )
        return torch.optim.Adam(parameters, lr=0.02, **options)
    return torch.optim.SGD(parameters, lr=0.1)


# ---- one loop for all fronts ----


class Setting:
    """How a front trains: what it makes of the model, the optimizer and the data."""

    def __init__(self, program: Program) -> None:
        import torch

        torch.manual_seed(0)
        self.program = program
        self.model = MODELS[program["model"]]()
        self.optimizer = optimizer_of(program, self.model)
        self.rank, self.size = 0, 1

    def lay_out(self) -> None:
        import torch

        if self.program["model"] == "mixed_layout" and self.rank % 2:
            self.model.to(memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        return self.model(x)

    def rows(self) -> slice:
        return programs.rows_of(self.rank, self.size)

    def scaled(self, loss: Any) -> Any:
        return loss

    def accumulating(self) -> Any:
        """Where a pass that is not the last of its window runs."""
        return nullcontext()

    def mean_of(self, losses: list[float]) -> list[float]:
        return losses

    def close(self) -> None:
        pass


def windows(program: Program) -> Iterator[list[int]]:
    """Numbers of the batches of each step."""
    passes = {"one": [1], "two": [2], "cut": [2, 1], "no_sync": [2]}[program["accumulate"]]
    number = 0
    for step in range(STEPS):
        count = passes[step % len(passes)]
        yield [number + i for i in range(count)]
        number += count


def train(setting: Setting) -> Result:
    import torch

    program, model, optimizer = setting.program, setting.model, setting.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=program["precision"] == "scaler")
    before = {n: p.detach().clone().numpy() for n, p in model.named_parameters()}
    losses: list[float] = []

    def one_pass(number: int) -> Any:
        loss = loss_of(setting, number)
        losses.append(float(loss.detach()))
        scaler.scale(setting.scaled(loss)).backward()
        return loss

    for step, numbers in enumerate(windows(program)):
        if step == 2:
            ACTIONS[program["weights"]](model, optimizer)
        if program["optimizer"] == "closure":
            optimizer.step(lambda n=numbers[0]: (optimizer.zero_grad(), one_pass(n))[1])
            continue
        for number in numbers:
            with setting.accumulating() if number != numbers[-1] else nullcontext():
                one_pass(number)
        if program["touch"] != "nothing":
            scaler.unscale_(optimizer)
            TOUCHES[program["touch"]](model)
        scaler.step(optimizer)
        scaler.update()
        if program["zero"] == "none":
            optimizer.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=False)
    after = {
        n: p.detach().double().numpy() if p.dtype == torch.float64 else p.detach().numpy()
        for n, p in model.named_parameters()
    }
    buffers = {n: b.numpy() for n, b in model.named_buffers() if b.is_floating_point()}
    told = [each if math.isfinite(each) else -1.0 for each in setting.mean_of(losses)]
    setting.close()
    before |= {n: b * 0 for n, b in buffers.items()}
    return Result(before, programs.copied(after | buffers), told)


def loss_of(setting: Setting, number: int) -> Any:
    import torch

    program, rows = setting.program, setting.rows()
    x, y = (torch.from_numpy(each[rows]) for each in programs.batch(number))
    weights = torch.arange(BATCH, dtype=torch.float32)[rows] / BATCH
    kind = next(setting.model.parameters()).dtype
    out = setting.forward(x.to(kind))
    loss = LOSSES[program["loss"]](out, y.to(kind), weights.to(kind))
    # The scaler must see an overflow that one rank has.
    overflows = program["precision"] == "scaler" and number in (1, 2) and rows.start == 0
    return loss * math.inf if overflows else loss


class Hook(Setting):
    """DistributedOptimizer: gradients of ranks are averaged, those of a sum are added up."""

    def __init__(self, program: Program) -> None:
        import farandole.torch as hvd

        super().__init__(program)
        self.rank, self.size = hvd.rank(), hvd.size()
        if program["model"] == "batch_norm":
            self.model = hvd.convert_sync_batchnorm(self.model)
            self.optimizer = optimizer_of(program, self.model)
        self.lay_out()
        hvd.broadcast_parameters(self.model.state_dict(), root_rank=0)
        options: dict[str, Any] = {
            "none": {}, "groups": {"groups": 2}, "sharded": {"sharded_update": True},
            "in_place": {"in_place_bytes": 0}, "predivide": {"gradient_predivide_factor": 2.0},
            "small": {"bucket_bytes": 64, "first_bucket_bytes": 64},
        }[program["options"]]  # fmt: skip
        if program["loss"] == "sum":
            options["op"] = hvd.Sum
        if program["accumulate"] in ("two", "cut"):
            options["backward_passes_per_step"] = 2
        named = self.model.named_parameters()
        self.optimizer = hvd.DistributedOptimizer(self.optimizer, named, **options)
        self._no_sync = program["accumulate"] == "no_sync"

    def accumulating(self) -> Any:
        return self.optimizer.no_sync() if self._no_sync else nullcontext()

    def mean_of(self, losses: list[float]) -> list[float]:
        import torch

        import farandole.torch as hvd

        op = hvd.Sum if self.program["loss"] == "sum" else hvd.Average
        return hvd.allreduce(torch.tensor(losses, dtype=torch.float64), op=op).tolist()


class Ddp(Setting):
    def __init__(self, program: Program) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        super().__init__(program)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        options: dict[str, Any] = {
            "none": {}, "view": {"gradient_as_bucket_view": True}, "static": {"static_graph": True},
            "find_unused": {},
        }[program["options"]]  # fmt: skip
        if program["model"] == "odd" or program["options"] == "find_unused":
            options["find_unused_parameters"] = True
        self._wrapped = DistributedDataParallel(self.model, **options)

    def forward(self, x: Any) -> Any:
        return self._wrapped(x)

    def accumulating(self) -> Any:
        return self._wrapped.no_sync()

    def mean_of(self, losses: list[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        told = torch.tensor(losses, dtype=torch.float64)
        dist.all_reduce(told)
        return (told / self.size).tolist()


class Global(Setting):
    """GlobalBatch: each batch of its loader is one of the program's."""

    def __init__(self, program: Program) -> None:
        import torch

        import farandole.torch as fd

        super().__init__(program)
        self.fd = fd
        if program["model"] == "batch_norm":
            self.model = fd.convert_sync_batchnorm(self.model)
            self.optimizer = optimizer_of(program, self.model)
        self.rank = fd.rank()
        self.lay_out()
        self._numbers = [n for window in windows(program) for n in window]
        samples = torch.arange(len(self._numbers) * BATCH)
        loader = torch.utils.data.DataLoader(samples, batch_size=BATCH)
        options: dict[str, Any] = {
            "none": {}, "groups": {"groups": 2}, "sharded": {"sharded_update": True},
        }[program["options"]]  # fmt: skip
        self._batches = fd.GlobalBatch(loader, self.model, self.optimizer, **options)
        self._left = iter(self._batches)

    def rows(self) -> slice:
        mine = next(self._left)
        first = int(mine[0]) % BATCH
        return slice(first, first + len(mine))

    def scaled(self, loss: Any) -> Any:
        return self._batches.scale_loss(loss, "sum" if self.program["loss"] == "sum" else "mean")

    def close(self) -> None:
        assert next(self._left, None) is None

    def mean_of(self, losses: list[float]) -> list[float]:
        import torch

        op = self.fd.Sum if self.program["loss"] == "sum" else self.fd.Average
        return self.fd.allreduce(torch.tensor(losses, dtype=torch.float64), op=op).tolist()


def by(kind: type[Setting]) -> Callable[[Program, bool], Result]:
    return lambda program, parallel: train((kind if parallel else Setting)(program))


# ---- the table ----

COLUMNS: dict[str, list[str]] = {
    "model": list(MODELS),
    "loss": list(LOSSES),
    "touch": list(TOUCHES),
    "weights": list(ACTIONS),
    "optimizer": ["sgd", "momentum", "groups", "adam", "adam_foreach", "adam_fused", "closure"],
    "accumulate": ["one", "two", "cut", "no_sync"],
    "precision": ["float32", "scaler"],
    "zero": ["none", "zeros"],
}


def fits(program: Program) -> bool:
    """What PyTorch alone can train, and what a front is for."""
    has = dict(program.values)
    plain = (
        has["accumulate"] == "one" and has["precision"] == "float32" and has["touch"] == "nothing"
    )
    if has["optimizer"] == "closure" and not plain:
        return False
    if has["model"] == "embedding" and (
        has["optimizer"] not in ("sgd", "groups") or has["precision"] == "scaler"
        or has["touch"] != "nothing"
        or has["weights"] in ("half_and_back", "double", "share_memory")
    ):  # fmt: skip
        return False
    if has["model"] == "odd" and (
        has["weights"] in ("half_and_back", "double") or has["precision"] == "scaler"
    ):
        return False
    if has["weights"] == "unfreeze" and has["model"] != "frozen":
        return False
    # A changed dtype leaves the optimizer with state of another one.
    if has["weights"] == "double" and (has["optimizer"] != "sgd" or has["precision"] == "scaler"):
        return False
    # A scaler has seen the gradients that these replace.
    if has["precision"] == "scaler" and has["touch"] in REPLACING[1:]:
        return False
    # Statistics of a sum over passes of different sizes.
    return not (has["model"] == "batch_norm" and has["precision"] == "scaler")


def hook_fits(program: Program) -> bool:
    has = dict(program.values)
    if has["options"] == "sharded" and (
        has["touch"] != "nothing" or has["precision"] == "scaler"
        or has["weights"] not in ("nothing", "save_and_load")
        or has["model"] in ("embedding", "odd")
    ):  # fmt: skip
        return False
    if has["options"] == "predivide" and has["loss"] == "sum":
        return False
    return fits(program)


def ddp_fits(program: Program) -> bool:
    """DDP averages; it knows neither sparse nor complex gradients of its own accord, nor sums."""
    has = dict(program.values)
    if has["loss"] == "sum" or has["model"] in ("embedding", "odd", "batch_norm", "mixed_layout"):
        return False
    if has["options"] in ("static", "find_unused") and (
        has["accumulate"] != "one" or has["model"] == "checkpointed"
    ):
        return False
    # Over any backend DDP loses its hooks where parameters move, and a gradient that is a view of
    # its bucket is not what the optimizer reads once its memory is replaced.
    if has["weights"] in ("double", "half_and_back", "new_data", "other_layout", "unfreeze"):
        return False
    if has["options"] == "view" and (has["touch"] in REPLACING or has["weights"] == "share_memory"):
        return False
    return has["accumulate"] != "cut" and fits(program)


def global_fits(program: Program) -> bool:
    has = dict(program.values)
    return has["accumulate"] == "one" and hook_fits(program)


def begin_hook() -> None:
    import torch

    import farandole.torch as hvd

    torch.set_num_threads(1)
    hvd.init()


def begin_ddp() -> None:
    import warnings

    import torch
    import torch.distributed as dist

    import farandole.torch.distributed  # noqa: F401

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("farandole")


def table(*options: str) -> programs.Table:
    return {**COLUMNS, "options": options}


FRONTS = {
    "torch.hook": Front(
        "torch", table("none", "groups", "sharded", "in_place", "small", "predivide"), begin_hook,
        by(Hook), hook_fits,
    ),
    "torch.ddp": Front(
        "torch", table("none", "view", "static", "find_unused"), begin_ddp, by(Ddp), ddp_fits
    ),
    "torch.global": Front(
        "torch", table("none", "groups", "sharded"), begin_hook, by(Global), global_fits
    ),
}  # fmt: skip
