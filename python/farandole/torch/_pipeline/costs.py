"""The cost of layers: counted, or measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from farandole import _world
from farandole._arguments import is_whole, shown
from farandole._core import InvalidArgument
from farandole.common._objects import made_by_first
from farandole.data._tree import leaves, map_leaves
from farandole.pipeline import _partition
from farandole.torch._pipeline.layers import Layer

_TIMES = 3  # a layer is run; the fastest counts

Split = Any  # "parameters", "layers", "time", or whole numbers


def check_split(split: Split, example: Any, layers: int, stages: int) -> None:
    """Raises InvalidArgument."""
    if layers < stages:
        raise InvalidArgument(
            f"stages={stages}, and the model has {layers} layers; every stage has one at least"
        )
    if split == "time":
        if example is None and _world.rank() == 0:
            raise InvalidArgument(
                "split='time' without example: the inputs of a micro-batch, on which rank 0 "
                "measures what layers take"
            )
    elif isinstance(split, str):
        if split not in ("parameters", "layers"):
            raise InvalidArgument(
                f"split is {shown(split)}; it is 'parameters', 'layers', 'time' or a list of the "
                "first layer of each stage but the first"
            )
    elif isinstance(split, Sequence) and all(map(is_whole, split)):
        _partition.at(split, layers, stages)
    else:
        raise InvalidArgument(
            f"split is {shown(split)}; it is 'parameters', 'layers', 'time' or a list of whole "
            "numbers"
        )


def bounds_of(split: Split, layers: Sequence[Layer], stages: int, example: Any) -> list[int]:
    """The bounds of the stages. Collective where costs are measured.

    Raises:
        InvalidArgument: rank 0 could not measure; on every rank.
    """
    if not isinstance(split, str):
        return _partition.at(split, len(layers), stages)
    if split == "time":
        return _partition.balanced(_seconds_of_rank_0(layers, example), stages)
    if split == "layers":
        return _partition.balanced([1.0] * len(layers), stages)
    # Layers without parameters cost something, too: of equal cuts, the one by layers.
    count = sum(each.outline.parameters for each in layers) or 1
    little = count / len(layers) * 1e-3
    return _partition.balanced([each.outline.parameters + little for each in layers], stages)


def check_budget(budget: int | None, layers: Sequence[Layer], bounds: Sequence[int]) -> None:
    """Raises InvalidArgument where the parameters of a stage take more bytes."""
    if budget is None:
        return
    sizes = [each.outline.bytes for each in layers]
    for stage, (begin, end) in enumerate(pairwise(bounds)):
        if sum(sizes[begin:end]) <= budget:
            continue
        least = sum(sizes[begin:end])
        for stages in range(len(bounds), len(layers) + 1):
            cuts = pairwise(_partition.balanced([float(n) for n in sizes], stages))
            if max(sum(sizes[a:b]) for a, b in cuts) <= budget:
                advice = f"{stages} stages, which is enough"
                break
        else:
            advice = "smaller layers: the largest takes more than the budget by itself"
        raise InvalidArgument(
            f"stage {stage} of {len(bounds) - 1} has parameters of {least} bytes, and budget is "
            f"{budget}\n  advice: {advice}"
        )


def _seconds_of_rank_0(layers: Sequence[Layer], example: Any) -> list[float]:
    return made_by_first(
        "what layers of a Pipeline take",
        lambda: measured(layers, example),
        "rank 0 could not measure what layers take",
    )


def measured(layers: Sequence[Layer], x: Any) -> list[float]:
    """Seconds of forward and backward of each layer, one after the other. Of the layers that are
    made here, one exists at a time."""
    costs = []
    for layer in layers:
        try:
            module = layer.make()
            seconds, x = min((_run(module, x) for _ in range(_TIMES)), key=lambda each: each[0])
        except Exception as error:
            raise InvalidArgument(f"{layer.outline}: {type(error).__name__}: {error}") from error
        costs.append(seconds)
    return costs


def _run(module: torch.nn.Module, x: Any) -> tuple[float, Any]:
    state = {key: each.clone() for key, each in module.named_buffers()}
    random = torch.random.get_rng_state()
    x = map_leaves(_begun, x)
    began = time.perf_counter()
    made = module(x)
    ends = [each for each in leaves(made) if isinstance(each, torch.Tensor) and each.requires_grad]
    if ends:
        inputs = [each for each in leaves(x) if each.requires_grad]
        inputs += [p for p in module.parameters() if p.requires_grad]
        ones = [torch.ones_like(each) for each in ends]
        torch.autograd.grad(ends, inputs, ones, allow_unused=True)
    seconds = time.perf_counter() - began
    torch.random.set_rng_state(random)
    for key, each in module.named_buffers():
        if key in state:
            each.data.copy_(state[key])
    return seconds, map_leaves(lambda leaf: leaf.detach(), made)


def _begun(leaf: torch.Tensor) -> torch.Tensor:
    leaf = leaf.detach().clone()
    # Not a leaf of the graph, so that layers may change it in place, as they do in a pipeline.
    return leaf.requires_grad_().clone() if leaf.is_floating_point() else leaf
