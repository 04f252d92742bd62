"""The cost of data-parallel training over training alone: python bench/training_step.py

One training step of a model on every rank, one thread and one core each, with nothing exchanged,
with farandole and with PyTorch's DistributedDataParallel over gloo. All variants live in the same
rank processes and take turns in blocks of steps; everything is compared block by block, and an
interval is that of the median over the blocks (sign test). Afterwards all variants that exchange
must hold equal parameters on every rank, and nearly the same as each other; those that do not
must differ.

A variant that exchanges also waits, in every step, for the last rank. On cores whose speed varies
that is a cost of its own, which no library can save. The variant *in step* exchanges nothing and
waits for all ranks before every update; the cost of a library is its overhead over that one.
Likewise *ddp_none* is DDP, lean, with a communication hook that exchanges nothing. It shows the
cost of DDP's own hooks and copies, whatever reduces its buckets.

Needs torch.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import farandole as fd
from farandole import _launch
from farandole._bench import placement
from farandole._bench.peers.libraries.gloo import name_interface
from farandole._bench.statistics import median, median_interval, ratios
from farandole.cli._terminal import print_table

if TYPE_CHECKING:
    import torch

_BATCHES = 4  # different ones, in turn
_RATE = 1e-3
# Memory that was freed stays with the process: whether malloc gives it back, to be mapped anew in
# every step (4 to 12 ms of the CNN's), depends on what else happens to lie on its heap.
_RANKS = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
}
_CLOSE = 1e-4  # of a parameter vector's largest element, after some hundred steps


# -- models ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model, its batches, and how many steps make a block of a few tenths of a second."""

    name: str
    build: Callable[[], torch.nn.Module]
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]  # input, class of each
    size: str
    steps: int


def _mlp() -> torch.nn.Module:
    from torch import nn

    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


def _cnn() -> torch.nn.Module:
    from torch import nn

    def block(wide: int, deep: int) -> list[nn.Module]:
        return [nn.Conv2d(wide, deep, 3, padding=1), nn.BatchNorm2d(deep), nn.ReLU()]

    return nn.Sequential(
        *block(3, 32), nn.MaxPool2d(2), *block(32, 64), *block(64, 128), nn.MaxPool2d(2),
        *block(128, 128), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128 * 16, 32), nn.ReLU(),
        nn.Linear(32, 10),
    )  # fmt: skip


_WORDS, _LENGTH, _WIDTH = 4920, 64, 256


def _transformer() -> torch.nn.Module:
    import torch
    from torch import nn

    class Transformer(nn.Module):
        """Six encoder layers that guess a word at every place."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(_WORDS, _WIDTH)
            self.places = nn.Parameter(torch.zeros(_LENGTH, _WIDTH))
            layer = nn.TransformerEncoderLayer(
                _WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
            self.head = nn.Linear(_WIDTH, _WORDS)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            guesses: torch.Tensor = self.head(self.layers(self.words(words) + self.places))
            return guesses.flatten(0, 1)

    return Transformer()


def _images(count: int, *shape: int) -> Callable[[Any], tuple[Any, Any]]:
    def batch(seed: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        return (
            torch.randn(count, *shape, generator=seed),
            torch.randint(10, (count,), generator=seed),
        )

    return batch


def _texts(seed: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    words = torch.randint(_WORDS, (8, _LENGTH + 1), generator=seed)
    return words[:, :-1].contiguous(), words[:, 1:].flatten()


MODELS = {
    model.name: model
    for model in (
        Model("mlp", _mlp, _images(64, 784), "batch 64", 10),
        Model("cnn", _cnn, _images(32, 3, 32, 32), "batch 32", 6),
        Model("transformer", _transformer, _texts, "8 x 64 words", 3),
    )
}


# -- variants -------------------------------------------------------------------------------------

Parts = tuple["torch.nn.Module", "torch.optim.Optimizer"]


@dataclass(frozen=True)
class Variant:
    """A way to train on many ranks: what it makes of a model and its optimizer."""

    name: str
    label: str
    wrap: Callable[[Any, Any], Parts]
    needs: str = "torch"
    exchanges: bool = True


def _alone(module: Any, optimizer: Any) -> Parts:
    return module, optimizer


def _in_step(module: Any, optimizer: Any) -> Parts:
    optimizer.register_step_pre_hook(lambda *_: fd.barrier())
    return module, optimizer


def _farandole(**options: Any) -> Callable[[Any, Any], Parts]:
    def wrap(module: Any, optimizer: Any) -> Parts:
        from farandole.torch import DistributedOptimizer

        names = list(module.named_parameters())
        return module, DistributedOptimizer(optimizer, named_parameters=names, **options)

    return wrap


_BACKEND: dict[str, Any] = {}  # the process group of DDP's variants that are not over gloo


def _our_hook() -> Any:
    from farandole.torch import ddp_comm_hook

    return ddp_comm_hook


def _no_exchange() -> Any:
    """A hook that exchanges nothing: the remaining time is DDP's own."""
    import torch

    def at_once(bucket: Any) -> Any:
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    return lambda _, bucket: at_once(bucket)  # DDP reads a hook's annotations


def _ddp(
    *, over: str = "", hook: Callable[[], Any] | None = None, **options: Any
) -> Callable[[Any, Any], Parts]:
    def wrap(module: Any, optimizer: Any) -> Parts:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        group = None
        if over:
            import farandole.torch.distributed  # noqa: F401

            group = _BACKEND[over] = _BACKEND.get(over) or dist.new_group(backend=over)
        with warnings.catch_warnings():  # newer versions have another name for it as well
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            wrapped = DistributedDataParallel(module, process_group=group, **options)
        if hook is not None:
            wrapped.register_comm_hook(None, hook())
        return wrapped, optimizer

    return wrap


_LEAN: dict[str, Any] = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("none", "nothing exchanged", _alone, exchanges=False),
        Variant("in_step", "nothing exchanged, in step", _in_step, exchanges=False),
        Variant("farandole", "farandole", _farandole(), "farandole.torch"),
        Variant(
            "farandole_flat",
            "farandole, overlap=False",
            _farandole(overlap=False),
            "farandole.torch",
        ),
        Variant(
            "farandole_sharded",
            "farandole, sharded update",
            _farandole(sharded_update=True),
            "farandole.torch",
        ),
        Variant(
            "ddp_none",
            "DDP, nothing exchanged, lean",
            _ddp(hook=_no_exchange, **_LEAN),
            exchanges=False,
        ),
        Variant("ddp", "DDP, gloo", _ddp()),
        Variant("ddp_lean", "DDP, gloo, lean", _ddp(**_LEAN)),
        Variant("ddp_hook", "DDP, our hook", _ddp(hook=_our_hook), "farandole.torch"),
        Variant(
            "ddp_hook_lean", "DDP, our hook, lean", _ddp(hook=_our_hook, **_LEAN), "farandole.torch"
        ),
        Variant(
            "ddp_backend", "DDP, our backend", _ddp(over="farandole"), "farandole.torch.distributed"
        ),
        Variant(
            "ddp_backend_lean",
            "DDP, our backend, lean",
            _ddp(over="farandole", **_LEAN),
            "farandole.torch.distributed",
        ),
    )
}


_LEAN_ONES = ("ddp_lean", "ddp_hook_lean", "ddp_backend_lean")


@dataclass
class Trainer:
    """One variant of one model on this rank, and its times."""

    variant: Variant
    module: Any
    optimizer: Any
    batches: list[tuple[Any, Any]]
    memory_mb: float  # by which this process has grown: model, gradients, buckets
    blocks: list[float] = field(default_factory=list)  # milliseconds: medians of this rank's steps

    def train(self, steps: int) -> None:
        """A block; its first step is not timed, for it finds the caches full of another's."""
        import torch

        times = []
        for turn in range(-1, steps):
            words, classes = self.batches[turn % _BATCHES]
            start = time.perf_counter()
            self.optimizer.zero_grad()
            loss: Any = torch.nn.functional.cross_entropy(self.module(words), classes)
            loss.backward()
            self.optimizer.step()
            if turn >= 0:
                times.append(1e3 * (time.perf_counter() - start))
        self.blocks.append(median(times))

    def parameters(self) -> np.ndarray[Any, Any]:
        return np.concatenate([p.detach().numpy().ravel() for p in self.module.parameters()])


# Made anew for every variant; Adam's epsilon keeps rounding from deciding where gradients are tiny.
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: _optim().SGD(p, lr=_RATE),
    "adam": lambda p: _optim().Adam(p, lr=_RATE, eps=1e-3),
    "adam_fused": lambda p: _optim().Adam(p, lr=_RATE, eps=1e-3, fused=True),
}


def _optim() -> Any:
    import torch

    return torch.optim


def trainer_of(variant: Variant, model: Model, optimizer: str) -> Trainer:
    """Made, and warm: a first step makes buckets, a second one has taken up their final plan."""
    import torch

    gc.collect()
    before = _memory_mb()
    torch.manual_seed(7)  # equal on every rank and for every variant
    module = model.build()
    made = OPTIMIZERS[optimizer](module.parameters())
    seed = torch.Generator().manual_seed(100 + fd.rank())
    batches = [model.batch(seed) for _ in range(_BATCHES)]
    trainer = Trainer(variant, *variant.wrap(module, made), batches, 0.0)
    trainer.train(2)
    trainer.blocks.clear()
    trainer.memory_mb = _memory_mb() - before
    return trainer


def _memory_mb() -> float:
    """The PSS of this process without malloc's free memory; it divides what ranks share."""
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1000
    return 0.0


# -- measuring ------------------------------------------------------------------------------------


def measure(
    model: Model, variants: list[Variant], optimizer: str, blocks: int
) -> list[dict[str, Any]]:
    """All variants of one model, taking turns; one row each, the same on every rank."""
    # Torch makes what it makes at first use: nobody's memory.
    trainer_of(VARIANTS["none"], model, optimizer)
    trainers = [trainer_of(variant, model, optimizer) for variant in variants]
    gc.collect()
    gc.disable()
    for block in range(blocks):
        turn = block % len(trainers)
        for trainer in trainers[turn:] + trainers[:turn]:
            fd.barrier()
            trainer.train(model.steps)
    gc.enable()
    verified = _verify(trainers)
    for trainer in trainers:  # the slowest rank's
        trainer.blocks = fd.all_reduce(np.array(trainer.blocks), "max").tolist()
    rows = [_row(model, trainer, trainers, verified) for trainer in trainers]
    return [row | {"optimizer": optimizer} for row in rows]


def _row(
    model: Model, trainer: Trainer, trainers: list[Trainer], verified: dict[str, bool]
) -> dict[str, Any]:
    """One variant's numbers, alone and beside the others'; shares of time, not percent."""
    blocks = {t.variant.name: t.blocks for t in trainers}
    mine, alone = trainer.blocks, blocks["none"]
    over = {name: median_interval([r - 1 for r in ratios(mine, b)]) for name, b in blocks.items()}
    row = {
        "benchmark": "training_step",
        "model": model.name,
        "parameters": trainer.parameters().size,
        "batch": model.size,
        "ranks": fd.size(),
        "variant": trainer.variant.name,
        "blocks": len(mine),
        "p50_ms": median(mine),
        "min_ms": min(mine),
        "memory_mb": float(fd.all_reduce(np.array([trainer.memory_mb]), "max")[0]),
        "overhead": over["none"].median,
        "overhead_low": over["none"].low,
        "overhead_high": over["none"].high,
        "overhead_confidence": over["none"].confidence,
        "over": {name: [i.median, i.low, i.high] for name, i in over.items()},
        "verified": verified[trainer.variant.name],
    }
    if "ddp_lean" in blocks and over["none"].low > 0:
        rows = zip(mine, blocks["ddp_lean"], alone, strict=True)
        share = median_interval([(m - a) / max(lean - a, 1e-9) for m, lean, a in rows])
        row["of_lean"] = [share.median, share.low, share.high]
    return row


def _verify(trainers: list[Trainer]) -> dict[str, bool]:
    """Whether each exchanges what it must: see the head of this file."""
    right = {}
    reference = None
    for trainer in trainers:
        mine = trainer.parameters()
        same = bool(np.array_equal(fd.all_reduce(mine, "min"), fd.all_reduce(mine, "max")))
        if not trainer.variant.exchanges:
            right[trainer.variant.name] = not same or fd.size() == 1
            continue
        reference = mine if reference is None else reference
        error = float(np.abs(mine - reference).max() / np.abs(reference).max())
        right[trainer.variant.name] = same and error < _CLOSE
    return right


def _rank(arguments: argparse.Namespace) -> int:
    """The program of every rank; rank 0 shows the results."""
    is_one_machine = arguments.hosts and arguments.launcher != "ssh"
    place = ("RANK", "WORLD_SIZE") if is_one_machine else ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    core = placement.pin(*(int(os.environ[name]) for name in place))
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    fd.init()
    name_interface()
    dist.init_process_group("gloo")
    pins = fd.all_gather(np.array([-1 if core is None else core])).tolist()
    variants = [VARIANTS[name] for name in arguments.variants]
    placed = placement.describe([None if p < 0 else p for p in pins])
    title = (
        f"training step, {arguments.optimizer}, {fd.size()} ranks, {placed}; "
        f"torch {torch.__version__}"
    )
    rows = []
    for name in arguments.models:
        found = measure(MODELS[name], variants, arguments.optimizer, arguments.blocks)
        rows += found
        if fd.rank() == 0:
            _show(found, title)
    dist.destroy_process_group()
    if fd.rank() == 0 and arguments.json is not None:
        arguments.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return 0 if all(row["verified"] for row in rows) else 1


def _show(rows: list[dict[str, Any]], title: str) -> None:
    """One model's rows as a table."""
    model = f"{rows[0]['model']}, {rows[0]['parameters'] / 1e6:.2f} M, {rows[0]['batch']}"
    cells = []
    for row in rows:
        of_lean = row.get("of_lean") if row["variant"] != "ddp_lean" else None
        cells.append(
            [
                VARIANTS[row["variant"]].label,
                f"{row['p50_ms']:.1f}".rjust(7),
                *(_over(row, name) for name in ("none", "in_step")),
                _over(row, "ddp_none") if row["variant"] in _LEAN_ONES else "",
                f"{of_lean[0]:.2f} ({of_lean[1]:.2f} to {of_lean[2]:.2f})" if of_lean else "",
                f"{row['memory_mb']:.0f}".rjust(6),
                "yes" if row["verified"] else "WRONG",
            ]
        )
    sure = int(100 * rows[0]["overhead_confidence"])
    overhead = f"overhead ({sure} %)"
    columns = [model, "step ms", overhead, "over in step", "over DDP alone", "of lean DDP's"]
    columns += ["MB *", "right"]
    print_table(title, columns, cells)
    for row in rows:
        if row["variant"] == "farandole" and "farandole_flat" in row["over"]:
            print("overlap over no overlap: " + _percent(row["over"]["farandole_flat"]))
    print("* by which a rank's process grew: model, batches, gradients, buckets")
    if any(row["variant"] == "ddp_lean" for row in rows):
        print("lean: broadcast_buffers=False, gradient_as_bucket_view=True")
    if any(row["variant"] == "ddp_none" for row in rows):
        print("over DDP alone: what lean variants cost beside DDP that exchanges nothing")
    print()


def _over(row: dict[str, Any], other: str) -> str:
    return _percent(row["over"][other]) if other in row["over"] and row["variant"] != other else ""


def _percent(interval: list[float]) -> str:
    middle, low, high = (100 * share for share in interval)
    within = f"({low:+.1f} to {high:+.1f})"
    if low <= 0 <= high:
        return f"no difference {within}"
    return f"{middle:+.1f} % {within}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    here = [v.name for v in VARIANTS.values() if _is_here(v.needs)]
    parser.add_argument("-np", type=int, default=2, dest="ranks", help="ranks (2)")
    parser.add_argument("-H", "--hosts", metavar="HOST:RANKS,…", help="instead, on several hosts")
    parser.add_argument(
        "--launcher", default="ssh", choices=_launch.LAUNCHERS, help="how those are reached (ssh)"
    )
    parser.add_argument("--models", default=",".join(MODELS), help="(%(default)s)")
    parser.add_argument("--variants", default=",".join(here), help="(%(default)s)")
    parser.add_argument("--optimizer", default="sgd", choices=OPTIMIZERS, help="(%(default)s)")
    parser.add_argument("--blocks", type=int, default=31, help="per model and variant (31)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    arguments = parser.parse_args()
    arguments.models = _names(parser, "--models", arguments.models, MODELS)
    arguments.variants = _names(parser, "--variants", arguments.variants, VARIANTS)
    if lacking := [v for v in arguments.variants if not _is_here(VARIANTS[v].needs)]:
        parser.error(f"{', '.join(lacking)} cannot run: {VARIANTS[lacking[0]].needs} is not here")
    # Overheads are over this one, so it is always there, and first.
    arguments.variants = ["none", *(v for v in arguments.variants if v != "none")]
    if arguments.ranks < 1 or arguments.blocks < 1:
        parser.error("numbers must be positive")
    try:
        arguments.hosts = _launch.hosts_of(arguments.hosts, None) or ()
    except _launch.LaunchError as error:
        parser.error(str(error))
    return arguments


def _names(
    parser: argparse.ArgumentParser, option: str, text: str, known: dict[str, Any]
) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            parser.error(f"{option}: there is no {name!r}; there are {', '.join(known)}")
    return names


def _is_here(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def main() -> int:
    arguments = _arguments()
    if "RANK" in os.environ:
        return _rank(arguments)
    hosts = arguments.hosts
    job = _launch.Job(
        command=[sys.executable, *sys.argv],
        ranks=sum(host.ranks for host in hosts) if hosts else arguments.ranks,
        prefix=False,
        environment=_RANKS,
        hosts=hosts,
        reach=_launch.Reach(arguments.launcher) if hosts else None,
    )
    return _launch.launch(job)


if __name__ == "__main__":
    sys.exit(main())
