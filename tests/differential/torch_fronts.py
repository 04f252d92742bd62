"""PyTorch programs: by DistributedOptimizer, DDP and FSDP2 over our backend, and GlobalBatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import programs
from programs import BATCH, STEPS, Front, Program, Result
from torch_parts import ACTIONS, HOOKS, LOSSES, MODELS, REPLACING, TOUCHES, optimizers_of

# ---- one loop for all fronts ----


class Setting:
    """How a front trains: what it makes of the model, the optimizer and the data."""

    def __init__(self, program: Program) -> None:
        import torch

        torch.manual_seed(0)
        self.program = program
        self.model = MODELS[program["model"]]()
        self.optimizers = optimizers_of(program, self.model)
        self.rank, self.size = 0, 1
        self.hook("before")

    def hook(self, when: str) -> None:
        kind, _, at = self.program["hooks"].partition("_")
        if at == when:
            HOOKS[kind](self.model)

    def lay_out(self) -> None:
        import torch

        if self.program["model"] == "mixed_layout" and self.rank % 2:
            self.model.to(memory_format=torch.channels_last)

    def forward(self, x: Any) -> Any:
        return self.model(x)

    def rows(self, number: int) -> slice:
        return programs.rows_of(self.rank, self.size, samples_of(self.program, number))

    def scaled(self, loss: Any) -> Any:
        return loss

    def whole(self, parameter: Any) -> Any:
        """Its value, of which this rank may have a part."""
        return parameter.detach()

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


def samples_of(program: Program, number: int) -> int:
    """Returns the size of a batch. The last one may leave ranks without a sample."""
    last = sum(len(window) for window in windows(program)) - 1
    return {"even": BATCH, "uneven": 7, "short": 2}[program["parts"]] if number == last else BATCH


def train(setting: Setting) -> Result:
    import torch

    program, model, optimizers = setting.program, setting.model, setting.optimizers
    setting.hook("after")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=program["precision"] == "scaler")
    before = {n: setting.whole(p).clone().numpy() for n, p in model.named_parameters()}
    losses: list[float] = []

    def one_pass(number: int) -> Any:
        loss = loss_of(setting, number)
        losses.append(float(loss.detach()))
        scaler.scale(setting.scaled(loss)).backward()
        return loss

    for step, numbers in enumerate(windows(program)):
        if step == 2:
            ACTIONS[program["weights"]](model, optimizers)
        if program["optimizer"] == "closure":
            [only] = optimizers
            only.step(lambda n=numbers[0], only=only: (only.zero_grad(), one_pass(n))[1])
            continue
        for number in numbers:
            with setting.accumulating() if number != numbers[-1] else nullcontext():
                one_pass(number)
        if program["touch"] != "nothing":
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            TOUCHES[program["touch"]](model)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=program["zero"] == "none")
    after = {n: setting.whole(p).numpy() for n, p in model.named_parameters()}
    buffers = {n: b.numpy() for n, b in model.named_buffers() if b.is_floating_point()}
    told = [each if math.isfinite(each) else -1.0 for each in setting.mean_of(losses)]
    setting.close()
    before |= {n: b * 0 for n, b in buffers.items()}
    return Result(before, programs.copied(after | buffers), told)


def loss_of(setting: Setting, number: int) -> Any:
    import torch

    program, rows = setting.program, setting.rows(number)
    x, y = (torch.from_numpy(each[rows]) for each in programs.batch(number))
    weights = torch.arange(BATCH, dtype=torch.float32)[rows] / BATCH
    kind = next(p.dtype for p in setting.model.parameters() if p.is_floating_point())
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
            self.optimizers = optimizers_of(program, self.model)
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
        self.optimizers = [
            hvd.DistributedOptimizer(optimizer, self._named(optimizer), **options)
            for optimizer in self.optimizers
        ]
        self._no_sync = program["accumulate"] == "no_sync"

    def _named(self, optimizer: Any) -> list[tuple[str, Any]]:
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [(name, p) for name, p in self.model.named_parameters() if id(p) in own]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        with ExitStack() as stack:
            for optimizer in self.optimizers if self._no_sync else ():
                stack.enter_context(optimizer.no_sync())
            yield

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


class Fsdp(Setting):
    """fully_shard: each rank has a part of every parameter."""

    def __init__(self, program: Program) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(program)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (self.size,))}
        if program["options"] == "keep":
            options["reshard_after_forward"] = False
        if program["options"] == "layers":
            for layer in self.model.children():
                if list(layer.parameters()):
                    fully_shard(layer, **options)
        fully_shard(self.model, **options)
        self.optimizers = optimizers_of(program, self.model)

    def whole(self, parameter: Any) -> Any:
        return parameter.full_tensor().detach()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    mean_of = Ddp.mean_of


class Global(Setting):
    """GlobalBatch: each batch of its loader is one of the program's."""

    def __init__(self, program: Program) -> None:
        import torch

        import farandole.torch as fd

        super().__init__(program)
        self.fd = fd
        if program["model"] == "batch_norm":
            self.model = fd.convert_sync_batchnorm(self.model)
            self.optimizers = optimizers_of(program, self.model)
        self.rank = fd.rank()
        self.lay_out()
        self._told: list[float] = []  # losses, each with its weight
        numbers = [number for window in windows(program) for number in window]
        samples = torch.arange(sum(samples_of(program, number) for number in numbers))
        loader = torch.utils.data.DataLoader(samples, batch_size=BATCH)
        options: dict[str, Any] = {
            "none": {}, "groups": {"groups": 2}, "sharded": {"sharded_update": True},
        }[program["options"]]  # fmt: skip
        self._batches = fd.GlobalBatch(loader, self.model, *self.optimizers, **options)
        self._left = iter(self._batches)

    def rows(self, number: int) -> slice:  # noqa: ARG002
        mine = next(self._left)
        first = int(mine[0]) % BATCH if len(mine) else 0
        return slice(first, first + len(mine))

    def scaled(self, loss: Any) -> Any:
        kind = "sum" if self.program["loss"] == "sum" else "mean"
        self._told.append(float(self._batches.scale_loss(loss.detach(), kind)))
        return self._batches.scale_loss(loss, kind)

    def close(self) -> None:
        assert next(self._left, None) is None

    def mean_of(self, losses: list[float]) -> list[float]:  # noqa: ARG002
        import torch

        told = torch.tensor(self._told, dtype=torch.float64)
        return self.fd.allreduce(told, op=self.fd.Average).tolist()


def by(kind: type[Setting]) -> Callable[[Program, bool], Result]:
    return lambda program, parallel: train((kind if parallel else Setting)(program))


# ---- the table ----

COLUMNS: dict[str, list[str]] = {
    "model": list(MODELS),
    "loss": list(LOSSES),
    "touch": list(TOUCHES),
    "weights": list(ACTIONS),
    "optimizer": ["sgd", "momentum", "groups", "adam", "adam_foreach", "adam_fused", "two",
                  "closure"],
    "hooks": ["none", *(f"{kind}_{when}" for kind in HOOKS for when in ("before", "after"))],
    "accumulate": ["one", "two", "cut", "no_sync"],
    "precision": ["float32", "scaler"],
    "zero": ["none", "zeros"],
    "parts": ["even"],
}  # fmt: skip


def fits(program: Program) -> bool:
    """Whether PyTorch alone can train it, and a front is made for it."""
    has = dict(program.values)
    plain = (
        has["accumulate"] == "one" and has["precision"] == "float32" and has["touch"] == "nothing"
    )
    if has["optimizer"] == "closure" and not plain:
        return False
    if has["model"] == "embedding" and (
        has["optimizer"] not in ("sgd", "groups") or has["precision"] == "scaler"
        or has["touch"] != "nothing" or has["hooks"] != "none"
        or has["weights"] in ("half_and_back", "double", "share_memory")
    ):  # fmt: skip
        return False
    if has["model"] == "odd" and (
        has["weights"] in ("half_and_back", "double") or has["precision"] == "scaler"
        or has["optimizer"] == "adam_fused"
    ):  # fmt: skip
        return False
    if has["weights"] == "unfreeze" and has["model"] not in ("frozen", "nothing_to_train"):
        return False
    if has["weights"] == "assigned" and has["model"] == "tied":  # it unties them
        return False
    # A changed dtype leaves the optimizer with state of another one.
    if has["weights"] == "double" and (has["optimizer"] != "sgd" or has["precision"] == "scaler"):
        return False
    # A scaler has seen the gradients that these replace.
    if has["precision"] == "scaler" and has["touch"] in REPLACING[1:]:
        return False
    # It refuses optimizers without a gradient.
    if has["precision"] == "scaler" and (
        has["model"] == "nothing_to_train" or has["weights"] == "assigned"
    ):
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
    # It refuses a model without gradients by itself.
    if has["model"] == "nothing_to_train":
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


def fsdp_fits(program: Program) -> bool:
    """Gradients and weights are DTensors, which have no memory of their own to be replaced and
    other hooks than the parameters that they stand for, and a scaler sees those of its rank alone.
    """
    has = dict(program.values)
    return (
        has["model"] in ("mlp", "conv", "frozen", "checkpointed", "compiled")
        and has["hooks"] == "none"
        and (has["model"], has["options"]) != ("checkpointed", "layers")
        and has["loss"] != "sum"
        and has["touch"] not in REPLACING
        and has["weights"] in ("nothing", "save_and_load")
        and has["precision"] == "float32"
        and has["accumulate"] != "cut"
        and fits(program)
    )


def global_fits(program: Program) -> bool:
    has = dict(program.values)
    return has["accumulate"] == "one" and has["optimizer"] != "two" and hook_fits(program)


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


def table(*options: str) -> dict[str, list[str]]:
    return {**COLUMNS, "options": list(options)}


FRONTS = {
    "torch.hook": Front(
        "torch", table("none", "groups", "sharded", "in_place", "small", "predivide"), begin_hook,
        by(Hook), hook_fits,
    ),
    "torch.ddp": Front(
        "torch", table("none", "view", "static", "find_unused"), begin_ddp, by(Ddp), ddp_fits
    ),
    "torch.fsdp": Front(
        "torch", table("none", "layers", "keep"), begin_ddp, by(Fsdp), fsdp_fits
    ),
    "torch.global": Front(
        "torch", table("none", "groups", "sharded") | {"parts": ["even", "uneven", "short"]},
        begin_hook, by(Global), global_fits,
    ),
}  # fmt: skip
