"""The steps of a pipeline on one rank: how they are made ready, and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common._numerics import Numerics
from farandole.keras._pipeline.apart import check_at_first_use, refuse_own_metrics
from farandole.keras._pipeline.computing import Computing, reduction_of
from farandole.keras._pipeline.gradients import engine_of
from farandole.keras._pipeline.replicas import Replicas
from farandole.keras._pipeline.results import Results, outputs_of_all
from farandole.keras._pipeline.tensors import Arrays
from farandole.keras._pipeline.work import LossWork, Stage, StageWork, TrainWork, count_of
from farandole.keras._wrapped import distributed_in
from farandole.pipeline._places import Groups, Place, norms_of_stages
from farandole.pipeline._report import Times
from farandole.pipeline._runner import Runner
from farandole.pipeline._schedules import forwards, schedule_of


class Stepping:
    """The steps of one rank.

    Args:
        module: this rank's layers.
    """

    def __init__(
        self, module: Any, place: Place, groups: Groups, micro_batches: int, schedule: str
    ) -> None:
        self.module, self._place = module, place
        self._group, self._replicas = groups.everyone, Replicas(groups.replicas)
        self._replicas.share_first(module.variables)
        self._replicas.learn(module.trainable_variables)
        names = [each.path for each in module.trainable_variables]
        self._numerics = Numerics("gradients of a Pipeline", names)
        self._micro_batches = micro_batches
        self._actions = schedule_of(schedule)(place.stages, place.stage, micro_batches)
        self._runner = Runner(self._group, place, Arrays(), dynamic_shapes=False)
        self.times = Times(_world.size())
        self.sample: Callable[[], Any] | None = None  # makes a batch as KerasTensors
        self._results: Results | None = None
        self._stage: Stage | None = None
        self._reduction, self._ready = "mean", False

    @property
    def _cuts_batches(self) -> bool:
        return self._micro_batches * self._place.replicas > 1

    def compile(self, optimizer: Any, loss: Any, **options: Any) -> None:
        """Raises InvalidArgument."""
        optimizer = keras.optimizers.get(optimizer)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise InvalidArgument("compile(): a LossScaleOptimizer does not work in a Pipeline")
        if distributed_in(optimizer) is not None:
            raise InvalidArgument(
                "compile(): the optimizer is a DistributedOptimizer; pass the Keras optimizer "
                "itself, whose gradients a Pipeline adds up over replicas"
            )
        self._reduction = reduction_of(loss)
        if self._cuts_batches:
            refuse_own_metrics([options.get("metrics"), options.get("weighted_metrics")])
        if self._place.is_last:
            options["loss"] = loss
        else:
            options |= {"metrics": None, "weighted_metrics": None, "loss_weights": None}
        self.module.compile(optimizer=optimizer, jit_compile=False, **options)
        self._ready, self._stage = False, None
        self._results = Results(self.module, self._place, self._group, self._replicas)

    def results(self, what: str) -> Results:
        """Losses and metrics so far. Raises InvalidArgument before compile()."""
        if self._results is None:
            raise InvalidArgument(f"{what}: the model is not compiled; call compile() before")
        return self._results

    def _made_ready(self) -> Stage:
        """The stage of a compiled model. Its first batch makes it, once."""
        module, last = self.module, self._place.is_last
        if self.sample is not None and not self._ready:
            sample = self.sample()
            if last:
                n = count_of(sample)
                x = keras.tree.map_structure(
                    lambda t: keras.KerasTensor((n, *t.shape[1:]), t.dtype), module._inputs_struct
                )
                module._symbolic_build(data_batch=(x, *sample[1:]))
                if self._cuts_batches:
                    check_at_first_use(module)
            elif module.trainable_variables:
                module.optimizer.build(module.trainable_variables)
            self._ready, self._stage = True, None
        if self._stage is None:
            computing = Computing(module, self._reduction, is_last=last)
            if self._ready and last:
                computing.follow_losses()
            self._stage = Stage(self._place, module, engine_of(computing), self._micro_batches)
        return self._stage

    def train(self, batch: Sequence[Any]) -> None:
        """Collective: trains on the batch of all replicas: inputs, targets, weights."""
        looks = self._numerics.looks
        work = TrainWork(self._place, self._replicas, self._made_ready, batch, looks=looks)
        rows = self._runner.run(self._actions, work)
        self.times.add(rows)
        if not all(row.is_finite for row in rows):
            self._numerics.report(work.found)
        gradients = self._clipped(work.gradients)
        pairs = zip(gradients, self.module.trainable_variables, strict=True)
        found = [(gradient, v) for gradient, v in pairs if gradient is not None]
        if found:
            self.module.optimizer.apply(*map(list, zip(*found, strict=True)))
        self.results("fit()").note_loss(sum(row.loss for row in rows), count_of(batch))

    def test(self, batch: Sequence[Any]) -> None:
        """Collective."""
        work = LossWork(self._place, self._replicas, self._made_ready, batch)
        rows = self._runner.run(forwards(self._micro_batches), work)
        self.results("evaluate()").note_loss(sum(row.loss for row in rows), count_of(batch))

    def predict(self, batch: Sequence[Any]) -> list[Any]:
        """Collective: the flat outputs of all replicas."""
        work = StageWork(self._place, self._replicas, self._made_ready, batch[:1])
        rows = self._runner.run(forwards(self._micro_batches), work)
        parts = [work.outputs[k] for k in sorted(work.outputs)]
        samples = [int(row.samples) for row in rows]
        return outputs_of_all(parts, samples, self._group, self._place)

    def _clipped(self, gradients: list[Any]) -> list[Any]:
        """Clips gradients by the norm over all stages, as one process does. The rank's optimizer
        leaves them alone then, since their own norm is no larger."""
        most = getattr(self.module.optimizer, "global_clipnorm", None)
        if most is None:
            return gradients
        ops = keras.ops
        squares = [ops.sum(ops.square(each)) for each in gradients if each is not None]
        mine = float(ops.convert_to_numpy(sum(squares))) if squares else 0.0
        norm = float(np.sqrt(norms_of_stages(mine, self._group, self._place).sum()))
        if norm <= most:
            return gradients
        return [None if each is None else each * (most / norm) for each in gradients]
