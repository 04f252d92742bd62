"""A model cut into stages, one on each rank of a pipeline, with micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from farandole import _world
from farandole._arguments import shown
from farandole._core import InvalidArgument
from farandole._one_world import refuse_in_elastic_jobs
from farandole.common._reduction import Average, Reduction
from farandole.data._order import DEFAULT_SEED
from farandole.pipeline._places import (
    Place,
    check_count,
    check_root,
    groups_of,
    norms_of_stages,
    place_of,
    prepared,
)
from farandole.pipeline._report import Reported, Times
from farandole.pipeline._runner import Runner
from farandole.pipeline._schedules import forwards, schedule_of
from farandole.torch._entries import entry
from farandole.torch._pipeline import optimizer_state
from farandole.torch._pipeline import state as _state
from farandole.torch._pipeline.costs import bounds_of, check_budget, check_split
from farandole.torch._pipeline.layers import Layer, layers_of, stage_of
from farandole.torch._pipeline.outputs import over_all_ranks
from farandole.torch._pipeline.refusals import check_devices, refuse_shared, refuse_synchronized
from farandole.torch._pipeline.replicas import ReplicaGradients, share_first_replica
from farandole.torch._pipeline.tensors import TorchTensors
from farandole.torch._pipeline.work import LossWork, Stage, StageWork, TrainWork
from farandole.torch._training.finite import OwnGradients
from farandole.torch.compression import Compression, Compressor

Layers = nn.Sequential | Sequence[nn.Module | Callable[[], nn.Module]]


class Pipeline(Reported):
    """A model whose layers are cut into stages, one on each rank, with micro-batches in flight.

    A step gives the loss, the gradients and so the weights of one process that computes the whole
    batch, up to rounding. Ranks are stages times replicas: rank r has stage ``r % stages`` of
    replica ``r // stages``. Replicas share each batch, and gradients of a stage are averaged over
    its replicas. Collective, as are all methods that say so: every rank calls it alike.

    Args:
        model: an ``nn.Sequential``; Sequentials in it count as their layers. Or a list of modules
            and of functions that make one, as ``functools.partial(nn.Linear, 10, 10)``: a rank
            makes its own layers only. So it does of modules on the meta device. Layers that ranks
            make draw their first values from ``seed`` plus their number.
        loss_fn: of what the last layer makes of a micro-batch, and its targets, to a tensor of one
            number.
        stages: default: as many as there are ranks; a divisor of that.
        micro_batches: that a batch is cut into, along the first dimension; default: four for each
            stage. The more, the smaller the bubble, and the smaller the matrices. A batch of fewer
            samples leaves some empty.
        schedule: "1f1b": at most as many micro-batches in flight as there are stages from this one
            on; "gpipe": all of them.
        split: where stages begin. "parameters": the largest stage has as few as can be; "layers":
            so with layers; "time": so with the seconds that rank 0 measures on ``example``, layer
            by layer; or a list of the first layer of each stage but the first.
        example: for ``split="time"``: the inputs of a micro-batch.
        budget: bytes that the parameters of a stage may take, at most: more is an error, before
            any layer is made here, which says how many stages would do. Gradients take as much
            again, and what an optimizer keeps.
        reduction: what loss_fn does over samples: "mean", or "sum".
        count: of targets, what a mean loss over them is divided by, where that is not their
            number, as the number of tokens that are not padding.
        compression: of gradients between replicas, as in ``DistributedOptimizer``.
        dynamic_shapes: what stages send may have other shapes in each micro-batch. False: that is
            an error, but for the first dimension, the samples.
        seed: of layers that are made here.

    Raises:
        InvalidArgument: an argument is wrong, on this rank or on another; on every rank.
        Mismatch: the ranks' arguments or models differ; on every rank.

    Examples:
        >>> import torch, farandole.torch as fd
        >>> fd.init()
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> pipeline = fd.Pipeline(model, loss_fn=nn.functional.mse_loss, micro_batches=2)
        >>> optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        >>> for _ in range(2):
        ...     optimizer.zero_grad()
        ...     loss = pipeline.step(torch.ones(6, 4), torch.zeros(6, 1))
        ...     optimizer.step()
        >>> pipeline.predict(torch.ones(3, 4)).shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        model: Layers,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        stages: int | None = None,
        micro_batches: int | None = None,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
        split: Literal["parameters", "layers", "time"] | Sequence[int] = "parameters",
        example: Any = None,
        budget: int | None = None,
        reduction: Literal["mean", "sum"] = "mean",
        count: Callable[[Any], Any] | None = None,
        compression: type[Compressor] = Compression.none,
        dynamic_shapes: bool = False,
        seed: int = DEFAULT_SEED,
    ) -> None:
        refuse_in_elastic_jobs(
            "Pipeline", "a rank that is lost takes the layers of its stage with it"
        )

        def prepare() -> tuple[Place, int, list[Layer], list[int] | None]:
            place = place_of(stages)
            m = 4 * place.stages if micro_batches is None else micro_batches
            check_count("micro_batches", m)
            _check_functions(loss_fn, reduction, count)
            if budget is not None:
                check_count("budget", budget)
            schedule_of(schedule)
            layers = layers_of(model, seed)
            check_split(split, example, len(layers), place.stages)
            # Where nothing is measured, no rank waits for another.
            bounds = None if split == "time" else bounds_of(split, layers, place.stages, example)
            if bounds is not None:
                check_budget(budget, layers, bounds)
            return place, m, layers, bounds

        place, m, layers, bounds = prepared(
            prepare,
            lambda made: [
                f"stages={made[0].stages}", f"micro_batches={made[1]}",
                f"schedule={schedule!r}".lower(), f"split={split!r}", f"reduction={reduction!r}",
                f"dynamic_shapes={dynamic_shapes}", f"budget={budget}", f"seed={seed}",
                "a loss_fn" if loss_fn else "no loss_fn", "a count" if count else "no count",
                f"{len(made[2])} layers", *(str(each.outline) for each in made[2]),
            ],
        )  # fmt: skip
        if bounds is None:
            bounds = bounds_of(split, layers, place.stages, example)
            check_budget(budget, layers, bounds)
        self._place, self._micro_batches, self._schedule = place, m, str(schedule).lower()
        self._outlines = [each.outline for each in layers]
        self._bounds = bounds

        def make() -> tuple[nn.Sequential, list[nn.Module]]:
            refuse_shared(model, bounds, [each.name for each in self._outlines])
            made = stage_of(layers[bounds[place.stage] : bounds[place.stage + 1]])
            refuse_synchronized(made[0])
            check_devices(made[0].state_dict())
            return made

        self._module, modules = prepared(make, lambda _: [])
        groups = groups_of(place)
        self._group = groups.everyone
        replicas = None
        if groups.replicas is not None:
            share_first_replica(self._module, groups.replicas)
            reduction_of = Reduction(Average, compression=compression, process_set=groups.replicas)
            replicas = ReplicaGradients(self._module, reduction_of)
        finite = OwnGradients([*self._module.named_parameters()][::-1])
        self._stage = Stage(
            place, self._module, modules, m, loss_fn, reduction, count, replicas, finite
        )
        self._runner = Runner(self._group, place, TorchTensors(), dynamic_shapes=dynamic_shapes)
        nbytes = sum(p.nbytes for p in self._module.parameters())
        self._begin_to_report(Times(_world.size()), bounds, nbytes)

    # ---- this rank's stage ----

    @property
    def module(self) -> nn.Sequential:
        """This rank's layers, under the names that they have in the model of one process."""
        return self._module

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank computes on inputs."""
        return self._place.is_first

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self._place.is_last

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a batch."""
        return self._micro_batches

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, for an optimizer of any kind; each rank has its own."""
        return self._module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same, with the names of the model of one process."""
        return self._module.named_parameters()

    def train(self, mode: bool = True) -> Pipeline:
        """As ``nn.Module.train``, of this rank's layers: call it on every rank."""
        self._module.train(mode)
        return self

    def eval(self) -> Pipeline:
        """As ``nn.Module.eval``, of this rank's layers: call it on every rank."""
        return self.train(False)

    # ---- steps ----

    @entry()
    def step(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Forward and backward of a batch. Collective.

        When it returns, ``p.grad`` has, added to what was there, the gradient of the whole batch,
        the same on all replicas: clip it with ``clip_grad_norm_``, and step.

        Args:
            inputs: the batch of all replicas, as of one process; a tensor, or dicts, tuples and
                lists of them, whose first dimension is the samples. Ranks that have no first stage
                may pass None.
            targets: likewise; ranks that have no last stage may pass None.

        Returns:
            The loss of the whole batch, on every rank, without a graph.

        Raises:
            InvalidArgument: an argument is wrong, ranks have other batches, or shapes changed; or
                the loss of the whole batch has no gradient, on every rank.
            NumericsError: by ``FARANDOLE_NUMERICS=error``, on every rank: some rank's gradients
                are not finite. All gradients are dropped then, and the next step works.
            RemoteError: another rank's stage has raised; says which, and what. On that rank, its
                own error. All gradients are dropped then, and the next step works.
        """
        first = not any(self._times.activations)
        work = TrainWork(self._stage, inputs, targets, measures=first)
        place = self._place
        actions = schedule_of(self._schedule)(place.stages, place.stage, self._micro_batches)
        rows = self._runner.run(actions, work)
        work.check(rows)
        self._times.add(rows)
        return torch.tensor(sum(row.loss for row in rows))

    @entry()
    def evaluate(self, inputs: Any, targets: Any) -> torch.Tensor:
        """The loss of a batch, forward only. Collective. Layers like dropout do what ``eval()`` or
        ``train()`` has said. Arguments, result and errors as in ``step``."""
        rows = self._forward(LossWork(self._stage, inputs, targets))
        return torch.tensor(sum(row.loss for row in rows))

    @entry()
    def predict(self, inputs: Any) -> Any:
        """The last layer's outputs of a batch, on every rank, in the order of the samples; forward
        only, without gradients. Collective. Arguments and errors as in ``step``."""
        work = StageWork(self._stage, inputs, None)
        rows = self._forward(work)
        parts = [work.outputs[k] for k in sorted(work.outputs)]
        return over_all_ranks(parts, [int(row.samples) for row in rows], self._group, self._place)

    def _forward(self, work: StageWork) -> Any:
        return self._runner.run(forwards(self._micro_batches), work)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, with the norm of the gradients of all stages.
        Collective.

        Returns:
            That norm, before clipping; the same on every rank.
        """
        norm_of = torch.linalg.vector_norm
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        norms = [norm_of(each, norm_type).double() for each in gradients]
        mine = float(norm_of(torch.stack(norms), norm_type)) if norms else 0.0
        of_stages = torch.from_numpy(norms_of_stages(mine, self._group, self._place))
        total: torch.Tensor = norm_of(of_stages, norm_type)
        factor = min(1.0, max_norm / (float(total) + 1e-6))  # PyTorch's own
        for each in gradients:
            each.mul_(factor)
        return total

    # ---- state ----

    def state_dict(self, *, root_rank: int | None = 0) -> dict[str, Any]:
        """The whole model's state, as of one process. Collective: also where rank 0 alone saves it.

        Args:
            root_rank: the rank that gets it, others get an empty one; None: all.
        """
        check_root(root_rank)
        return _state.gathered(self._module.state_dict(), self._group, self._place, root_rank)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Takes this rank's part of the whole model's state, as of one process, or of
        ``state_dict`` of any number of stages. Call it on every rank.

        Returns:
            ``missing_keys`` and ``unexpected_keys``, of the whole model.

        Raises:
            InvalidArgument: there are such keys, and ``strict``; or a tensor has another shape.
        """
        missing, unexpected = _state.load(self._module, self._outlines, state_dict, strict=strict)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer | None, *, root_rank: int | None = 0
    ) -> dict[str, Any]:
        """The optimizers' state of all stages, as ``state_dict`` of one process' optimizer gives
        it, which loads it. Collective.

        Args:
            optimizer: this rank's, of all its parameters; None on a stage without any.
            root_rank: as of ``state_dict``.

        Raises:
            InvalidArgument: the optimizers of stages have other options, as one of one process
                cannot; on every rank.
        """
        check_root(root_rank)
        return optimizer_state.gathered_state(optimizer, self._group, self._place, root_rank)

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer | None, state_dict: Mapping[str, Any]
    ) -> None:
        """Takes this rank's part of an optimizer's state, as of one process, or of
        ``optimizer_state_dict`` of any number of stages. Collective: every rank passes the whole.

        Raises:
            InvalidArgument: it is of other parameters.
        """
        optimizer_state.load(optimizer, state_dict, self._place)

    def __repr__(self) -> str:
        names = [each.name for each in self._outlines]
        mine = names[self._bounds[self.stage] : self._bounds[self.stage + 1]]
        return (
            f"Pipeline({self._place}, layers '{mine[0]}' to '{mine[-1]}' of {len(names)}, "
            f"{self._micro_batches} micro-batches, {self._schedule})"
        )


def _check_functions(loss_fn: Any, reduction: Any, count: Any) -> None:
    for name, value in (("loss_fn", loss_fn), ("count", count)):
        if value is not None and not callable(value):
            raise InvalidArgument(f"{name} is {shown(value)}; it is a function")
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(
            f"reduction is {shown(reduction)}; it is 'mean' or 'sum', as loss_fn does over samples"
        )
    if count is not None and reduction == "sum":
        raise InvalidArgument("count with reduction='sum': a sum is divided by nothing")
