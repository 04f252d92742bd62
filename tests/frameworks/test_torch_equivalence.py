"""N ranks on N parts of a batch get the gradients of one rank on the whole batch.

Every setting is also run without DistributedOptimizer, where the comparison must fail: a
comparison that could not fail would show nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from rank_cases import make_tests, on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import farandole.torch as hvd

WIDTH = 16
PER_RANK = 4


# Models.


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 4)
    )


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
        )
        self.head = nn.Linear(16, 4)
        self.eval()  # statistics of a part are not those of the whole

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x.view(-1, 1, 4, 4)).flatten(1))


class ChannelsLast(Cnn):
    def __init__(self) -> None:
        super().__init__()
        self.to(memory_format=torch.channels_last)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = mlp()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x).tanh())


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_single = nn.Linear(WIDTH, WIDTH)
        self.in_double = nn.Linear(WIDTH, WIDTH).double()
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.in_double(self.in_single(x).tanh().double()).tanh().float())


class Checkpointed(nn.Module):
    """The last layers are computed again in backward: with `reentrant`, by a backward inside."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(
            lambda y: self.second(y.tanh()), self.first(x), use_reentrant=self.reentrant
        )


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, sparse=True)
        self.body = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.table((x.abs() * 3).long().clamp(max=9)[:, 0]))


def frozen() -> nn.Module:
    model = mlp()
    model[2].weight.requires_grad_(False)
    return model


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, **options)


def adam(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.001, eps=1e-3, **options)


# One training step's backward.

Backward = Callable[[nn.Module, Any, torch.Tensor], None]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def plain(model: nn.Module, _: Any, x: torch.Tensor) -> None:
    loss_of(model, x).backward()


def in_two_passes(model: nn.Module, _: Any, x: torch.Tensor) -> None:
    for half in x.view(-1, 2, WIDTH).unbind(1):
        loss_of(model, half).backward()


def with_no_sync(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    first, second = x.view(-1, 2, WIDTH).unbind(1)
    with optimizer.no_sync() if hasattr(optimizer, "no_sync") else nullcontext():
        loss_of(model, first).backward()
    loss_of(model, second).backward()


def clipped(model: nn.Module, _: Any, x: torch.Tensor) -> None:
    loss_of(model, x).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def in_a_thread(model: nn.Module, _: Any, x: torch.Tensor) -> None:
    thread = threading.Thread(target=plain, args=(model, None, x))
    thread.start()
    thread.join()


def scaled(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(loss_of(model, x)).backward()
    scaler.unscale_(optimizer)


@dataclass
class Setting:
    make: Callable[[], nn.Module] = mlp
    optimizer: Callable[..., torch.optim.Optimizer] = sgd
    backward: Backward = plain
    set_to_none: bool = True
    compile: str | None = None
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-5
    options: dict[str, Any] = field(default_factory=dict)


SETTINGS = {
    "an_mlp": Setting(),
    "an_mlp_in_small_buckets": Setting(options={"bucket_bytes": 512, "first_bucket_bytes": 0}),
    "an_mlp_without_overlap": Setting(options={"overlap": False}),
    "a_cnn": Setting(Cnn),
    "a_cnn_in_channels_last": Setting(ChannelsLast),
    "tied_weights": Setting(Tied),
    "unused_parameters": Setting(Unused),
    "parameters_used_twice": Setting(UsedTwice),
    "frozen_parameters": Setting(frozen),
    "mixed_dtypes": Setting(MixedDtypes),
    "bfloat16": Setting(dtype=torch.bfloat16, tolerance=1e-2),
    "float16": Setting(dtype=torch.float16, tolerance=1e-2),
    "two_passes_per_step": Setting(backward=in_two_passes, options={"backward_passes_per_step": 2}),
    "no_sync": Setting(backward=with_no_sync),
    "no_sync_into_zeroed_gradients": Setting(backward=with_no_sync, set_to_none=False),
    "two_means_of_two_passes": Setting(backward=in_two_passes),
    "clipping": Setting(backward=clipped),
    "zeroed_gradients": Setting(set_to_none=False),
    "foreach_sgd": Setting(optimizer=lambda p: sgd(p, foreach=True)),
    "fused_sgd": Setting(optimizer=lambda p: sgd(p, fused=True), set_to_none=False),
    "adamw": Setting(optimizer=adam),
    "foreach_adamw": Setting(optimizer=lambda p: adam(p, foreach=True)),
    "fused_adamw_in_channels_last": Setting(ChannelsLast, lambda p: adam(p, fused=True)),
    "grad_scaler": Setting(backward=scaled),
    "reentrant_checkpoints": Setting(lambda: Checkpointed(True)),
    "checkpoints": Setting(lambda: Checkpointed(False)),
    "backward_in_a_thread": Setting(backward=in_a_thread),
    "sparse_as_dense": Setting(
        Embedded, lambda p: torch.optim.SGD(p, lr=0.05), options={"sparse_as_dense": True}
    ),
    "predivided_gradients": Setting(options={"gradient_predivide_factor": 4.0}),
    "compression": Setting(tolerance=1e-2, options={"compression": hvd.Compression.fp16}),
    "compression_into_zeroed_gradients": Setting(
        set_to_none=False, tolerance=1e-2, options={"compression": hvd.Compression.bf16}
    ),
    "a_compiled_model": Setting(compile="aot_eager"),
}


def make_seeded(setting: Setting) -> nn.Module:
    torch.manual_seed(1)
    return setting.make().to(setting.dtype if setting.dtype != torch.float32 else None)


def largest_error(setting: Setting, *, distributed: bool, **options: Any) -> float:
    """The largest error of any gradient in any step, relative to its largest element."""
    model, whole = make_seeded(setting), make_seeded(setting)
    optimizer, its = (setting.optimizer(m.parameters()) for m in (model, whole))
    if distributed:
        options = setting.options | options
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    run = torch.compile(model, backend=setting.compile) if setting.compile else model
    torch.manual_seed(2)
    error = 0.0
    for _ in range(3):
        batch = torch.randn(PER_RANK * hvd.size(), WIDTH).to(setting.dtype)
        mine = batch[PER_RANK * hvd.rank() : PER_RANK * (hvd.rank() + 1)]
        if setting.tolerance > 1e-5:  # rounding must not add up over the steps
            whole.load_state_dict(model.state_dict())
        for o in (optimizer, its):
            o.zero_grad(set_to_none=setting.set_to_none)
        setting.backward(run, optimizer, mine)
        setting.backward(whole, its, batch)
        for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), f"{name}: {p.grad} and {q.grad}"
            if p.grad is not None and q.grad is not None:
                expected = q.grad.to_dense()
                away = (p.grad.to_dense() - expected).abs().max() / expected.abs().max()
                error = max(error, float(away))
        optimizer.step()
        its.step()
    return error


def _register(name: str, setting: Setting) -> None:
    def equal() -> None:
        error = largest_error(setting, distributed=True)
        assert error <= setting.tolerance, error

    def where_they_lie() -> None:
        error = largest_error(setting, distributed=True, in_place_bytes=256)
        assert error <= setting.tolerance, error

    def different() -> None:
        error = largest_error(setting, distributed=False)
        assert error > 5 * setting.tolerance, f"shows nothing: {error}"

    sizes = (2, 3) if name in ("an_mlp", "unused_parameters", "no_sync") else (2,)
    for function, prefix, on in (
        (equal, "equal", sizes),
        (where_they_lie, "equal_where_they_lie", sizes),
        (different, "differs_alone", (2,)),
    ):
        function.__name__ = f"{prefix}_with_{name}"
        function.__module__ = __name__
        globals()[function.__name__] = on_ranks(*on)(function)


for _name, _setting in SETTINGS.items():
    _register(_name, _setting)

test_on_ranks = make_tests(__name__, "torch")
