"""PyTorch programs: by DistributedOptimizer, DDP and FSDP2 over our backend, and GlobalBatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import programs
from programs import BATCH, STEPS, Front, Program, Result
from torch_parts import (
    ACTIONS,
    CLEARS,
    CLOSURES,
    HOOKS,
    LOSSES,
    MODELS,
    OPTIMIZERS,
    SCHEDULES,
    TOUCHES,
    Averaging,
    optimizers_of,
    schedules_of,
)

# ---- one loop for all fronts ----


class Setting:
    """How a front trains: what it makes of the model, the optimizer and the data."""

    def __init__(self, program: Program) -> None:
        import torch

        torch.manual_seed(0)
        self.program = program
        self.model = MODELS[program["model"]]()
        self.rank, self.size = 0, 1
        self.make_optimizers()
        self.hook("before")

    def make_optimizers(self) -> None:
        self.optimizers = optimizers_of(self.program, self.model)
        self.schedules: list[Any] = []
        if self.program["schedule"].endswith("_before"):
            self.make_schedules()

    def make_schedules(self) -> None:
        self.schedules = schedules_of(self.program, self.model, self.optimizers)

    def advance(self, losses: list[float]) -> None:
        """Schedules, after a step of those losses."""
        goes_by_loss = self.program["schedule"] == "plateau"
        told = [sum(self.mean_of(losses))] if goes_by_loss else []
        for schedule in self.schedules:
            schedule.step(*told)

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

    def parts(self, number: int) -> Iterator[slice]:
        """Samples of a batch that this rank computes at once, one after the other."""
        yield programs.rows_of(self.rank, self.size, samples_of(self.program, number))

    def synchronize(self) -> None:
        """Before code of the program's own reads gradients of a window that ends early."""

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
    if not setting.schedules:
        setting.make_schedules()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=program["precision"] == "scaler")
    names = {"remove_duplicate": False}  # an action may untie what was tied
    before = {n: setting.whole(p).clone().numpy() for n, p in model.named_parameters(**names)}
    losses: list[float] = []
    clear = CLEARS[program["zero"]](model, optimizers)

    def window(numbers: list[int]) -> Any:
        for number in numbers:
            with setting.accumulating() if number != numbers[-1] else nullcontext():
                for rows in setting.parts(number):
                    loss = loss_of(setting, number, rows)
                    scaled = scaler.scale(setting.scaled(loss))
                    scaled.backward(create_graph=program["backward"] == "create_graph")
                losses.append(float(loss.detach()))
        if program["touch"] != "nothing":
            if program["touch"] == "clamp":
                setting.synchronize()
            for optimizer in optimizers:
                scaler.unscale_(optimizer)
            TOUCHES[program["touch"]](model)
        return loss

    for step, numbers in enumerate(windows(program)):
        if step == 2:
            ACTIONS[program["weights"]](model, optimizers)
        if program["optimizer"] in CLOSURES:
            [only] = optimizers
            only.step(lambda n=numbers, only=only: (only.zero_grad(), window(n))[1])
            setting.advance(losses[-1:])
            continue
        window(numbers)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        setting.advance(losses[-len(numbers) :])
        clear()
    for schedule in setting.schedules:
        if isinstance(schedule, Averaging):
            schedule.end()
    after = {n: setting.whole(p).numpy() for n, p in model.named_parameters(**names)}
    buffers = {n: b.numpy() for n, b in model.named_buffers() if b.is_floating_point()}
    told = [each if math.isfinite(each) else -1.0 for each in setting.mean_of(losses)]
    setting.close()
    before |= {n: b * 0 for n, b in buffers.items()}
    return Result(before, programs.copied(after | buffers), told)


def loss_of(setting: Setting, number: int, rows: slice) -> Any:
    import torch

    program = setting.program
    x, y = (torch.from_numpy(each[rows]) for each in programs.batch(number))
    weights = torch.arange(BATCH, dtype=torch.float32)[rows] / BATCH
    kind = next(p.dtype for p in setting.model.parameters() if p.is_floating_point())
    with torch.autocast("cpu", torch.bfloat16, enabled=program["precision"] == "autocast"):
        out = setting.forward(x.to(kind)).to(kind)
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
            self.make_optimizers()
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

    def synchronize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.synchronize()

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
        if program["model"] in ("odd", "experts") or program["options"] == "find_unused":
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
        self.make_optimizers()

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
            self.make_optimizers()
        self.rank = fd.rank()
        self.lay_out()
        self._told: list[float] = []  # losses, each with its weight
        numbers = [number for window in windows(program) for number in window]
        samples = torch.arange(sum(samples_of(program, number) for number in numbers))
        loader = torch.utils.data.DataLoader(samples, batch_size=BATCH)
        options: dict[str, Any] = {
            "none": {}, "groups": {"groups": 2}, "sharded": {"sharded_update": True},
            "micro": {"micro_batch_size": 2}, "logical": {"logical_ranks": 4},
        }[program["options"]]  # fmt: skip
        self._batches = fd.GlobalBatch(loader, self.model, *self.optimizers, **options)
        self._left = iter(self._batches)

    def parts(self, number: int) -> Iterator[slice]:  # noqa: ARG002
        self._told.append(0.0)
        while True:
            mine = next(self._left)
            first = int(mine[0]) % BATCH if len(mine) else 0
            yield slice(first, first + len(mine))
            if self._batches.sync_gradients:
                return

    def scaled(self, loss: Any) -> Any:
        kind = "sum" if self.program["loss"] == "sum" else "mean"
        self._told[-1] += float(self._batches.scale_loss(loss.detach(), kind))
        return self._batches.scale_loss(loss, kind)

    def close(self) -> None:
        assert next(self._left, None) is None

    def mean_of(self, losses: list[float]) -> list[float]:
        import torch

        told = torch.tensor(self._told[-len(losses) :], dtype=torch.float64)
        op = self.fd.Sum if self.program["options"] == "logical" else self.fd.Average
        return self.fd.allreduce(told, op=op).tolist()


def by(kind: type[Setting]) -> Callable[[Program, bool], Result]:
    return lambda program, parallel: train((kind if parallel else Setting)(program))


# ---- the table ----

COLUMNS: dict[str, list[str]] = {
    "model": list(MODELS),
    "loss": list(LOSSES),
    "touch": list(TOUCHES),
    "weights": list(ACTIONS),
    "optimizer": list(OPTIMIZERS),
    "schedule": ["none", *SCHEDULES],
    "backward": ["plain", "create_graph"],
    "hooks": ["none", *(f"{kind}_{when}" for kind in HOOKS for when in ("before", "after"))],
    "accumulate": ["one", "two", "cut", "no_sync"],
    "precision": ["float32", "scaler", "autocast"],
    "zero": list(CLEARS),
    "parts": ["even"],
}  # fmt: skip


ADAMS = "adam,adam_foreach,adam_fused,adam_tensor,amsgrad,adamw,nadam,radam,adafactor,muon,two"
SIGNS = f"{ADAMS},rmsprop,rprop,adagrad,lbfgs"
DENSE = f"{ADAMS.removesuffix(',two')},rmsprop,rprop,asgd,nesterov"

BY_PYTORCH = {  # what PyTorch alone does not train
    "the signs of small gradients, which some optimizers follow, are rounding in bfloat16": [
        f"precision=autocast optimizer={SIGNS}",
    ],
    "its steps grow, and rounding in bfloat16 with them": [
        "precision=autocast model=embedding,padded,max_norm",
    ],
    "not every CPU has recurrent layers in bfloat16": ["precision=autocast model=lstm,gru"],
    "complex numbers have no order": ["model=odd touch=clip_values"],
    "the gradient of one number is a sum that cancels, and bfloat16 has rounded its terms": [
        "precision=autocast model=odd",
    ],
    "whole numbers cannot be unfrozen": ["model=integer weights=unfreeze"],
    "LBFGS has one group of parameters": ["optimizer=lbfgs weights=added"],
    "GradScaler does not see what overflows in a parameter that no optimizer has": [
        "weights=leave_out precision=scaler",
    ],
    "GradScaler refuses closures": ["optimizer=closure,lbfgs precision=scaler"],
    "GradScaler refuses an optimizer that has no gradient": [
        "model=nothing_to_train precision=scaler", "weights=assigned precision=scaler",
    ],
    "GradScaler and fused optimizers refuse complex gradients": [
        "model=odd precision=scaler", "model=odd optimizer=adam_fused",
    ],
    "LBFGS refuses gradients of other layouts and parameters of whole numbers": [
        "optimizer=lbfgs model=channels_last,integer", "optimizer=lbfgs weights=other_layout",
    ],
    "they refuse sparse gradients": [
        f"model=embedding optimizer={DENSE}", "model=embedding touch=clip,clip_values,clip_layers",
    ],
    "SparseAdam refuses dense gradients": ["model=padded,max_norm optimizer=sparse_adam"],
    "OneCycleLR refuses optimizers without momentum": [
        "schedule=one_cycle,one_cycle_before optimizer=rprop,asgd,adagrad,adafactor,lbfgs",
    ],
    "an optimizer's state keeps its dtype": [
        f"weights=double optimizer={ADAMS},rmsprop,rprop,asgd,lbfgs",
    ],
    "gradients that are replaced are not cleared by what the program has kept of them": [
        "zero=flat,kept touch=data,set,cast", "zero=flat,kept backward=create_graph",
        "zero=flat,kept weights=double,half_and_back,share_memory,other_layout,unfreeze,assigned",
        "zero=flat,kept model=embedding", "zero=flat,kept optimizer=closure,lbfgs",
    ],
}  # fmt: skip
HOOKED_EXPERTS = {
    "a hook on what has accumulated runs on the ranks that have called the layer": [
        "model=experts hooks=accumulated_before,accumulated_after accumulate!=one",
    ],
}
OWN_STATISTICS = {
    "running statistics that no SyncBatchNorm takes are those of each rank": [
        "model=instance_norm",
    ],
}
GLOBAL = (
    BY_PYTORCH
    | HOOKED_EXPERTS
    | {
        "a hook on what has accumulated sees each part of a batch": [
            "options=micro,logical hooks=accumulated_before,accumulated_after",
        ],
        "each pass through the model iterates its spectral norm": [
            "options=micro model=spectral_norm",
        ],
        "GlobalBatch has one optimizer": ["optimizer=two,overlapping,muon,sparse_adam"],
        "each rank keeps running statistics of its own samples, of which a warning tells": [
            "model=instance_norm options!=logical",
        ],
    }
)
BY_HOOK = BY_PYTORCH | OWN_STATISTICS | HOOKED_EXPERTS
BY_DDP = BY_HOOK | {  # each is the same over gloo
    "DDP averages the gradients of ranks": ["loss=sum"],
    "DDP's statistics are those of each rank": ["model=batch_norm"],
    "each rank scales the rows that it reads": ["model=max_norm"],
    "DDP refuses a model without gradients": ["model=nothing_to_train"],
    "DDP loses its hooks where a parameter gets another dtype": ["weights=double,half_and_back"],
    "DDP's buckets keep the layouts that parameters had": ["weights=other_layout"],
    "DDP knows the parameters that it has seen": [
        "weights=added", "weights=unfreeze model=frozen",
    ],
    "a gradient that is a view of its bucket is not what the optimizer reads once it is replaced": [
        "options=view touch=data,set,cast", "options=view zero=flat,kept",
    ],
    "DDP refuses create_graph=True": ["backward=create_graph"],
    "DDP takes a parameter of two reentrant backwards only in a static graph": [
        "model=reentrant options!=static",
    ],
    "static_graph=True knows the parameters of the first step": ["options=static model=experts"],
    "static_graph=True has no no_sync()": ["options=static accumulate!=one"],
}  # fmt: skip
BY_FSDP = BY_PYTORCH | OWN_STATISTICS | {  # each is the same over gloo
    "FSDP2 averages the gradients of ranks": ["loss=sum"],
    "FSDP2's statistics are those of each rank": ["model=batch_norm"],
    "each rank scales its part of the rows that it reads": ["model=max_norm"],
    "FSDP2 waits for the gradients of a layer that another rank has not called": ["model=experts"],
    "each rank would draw noise for its part": ["touch=noise"],
    "FSDP2 refuses parameters of no dimension, of other layouts, and sparse gradients": [
        "model=odd,channels_last,embedding", "weights=other_layout",
    ],
    "a DTensor has no memory to replace": [
        "touch=data,set", "weights=double,share_memory", "zero=flat,kept",
    ],
    "FSDP2 refuses deepcopy()": ["weights=averaged", "schedule=swa"],
    "a DTensor has no place for what they write into it": ["optimizer=rprop,adafactor,muon"],
    "LBFGS flattens gradients, which uneven shards refuse": ["optimizer=lbfgs"],
    "FSDP2 knows the parameters that it has seen": ["weights=added"],
    "FSDP2 does not share layers between groups, nor between reentrant backwards": [
        "model=tied,reentrant options=layers",
    ],
    "FSDP2 has a gradient once a window, and calls its hook then": [
        "hooks=accumulated_after accumulate!=one", "hooks=accumulated_after model=reentrant",
    ],
    "FSDP2's gradients do not pass through a parameter's own hooks": [
        "hooks=gradient_before,gradient_after,accumulated_before",
    ],
}  # fmt: skip


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
        by(Hook), BY_HOOK,
    ),
    "torch.ddp": Front(
        "torch", table("none", "view", "static", "find_unused"), begin_ddp, by(Ddp), BY_DDP
    ),
    "torch.fsdp": Front(
        "torch", table("none", "layers", "keep"), begin_ddp, by(Fsdp), BY_FSDP
    ),
    "torch.global": Front(
        "torch",
        table("none", "groups", "sharded", "micro", "logical")
        | {"parts": ["even", "uneven", "short"]},
        begin_hook, by(Global), GLOBAL,
    ),
}  # fmt: skip
