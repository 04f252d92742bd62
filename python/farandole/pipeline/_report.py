"""Times of a pipeline's steps, and the memory of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from farandole.common._objects import allgather_object
from farandole.pipeline._places import Place, Placed
from farandole.pipeline._runner import Fared
from farandole.pipeline._schedules import bubble, most_in_flight, schedule_of

_MIB = 1 << 20


class RankReport(NamedTuple):
    """The report of one rank.

    Attributes:
        rank: its number.
        stage: which it computes.
        replica: of which copy of the model.
        layers: the first and the last of its stage.
        parameter_bytes: of its parameters; their gradients take as much again.
        in_flight: micro-batches whose activations it keeps at a time, at most.
        activation_bytes: of so many micro-batches: what it receives, and the outputs of its
            layers. What layers keep beside these is not counted. 0 before the first step.
        idle: the share of the steps' time in which it waited for others, messages included.
    """

    rank: int
    stage: int
    replica: int
    layers: tuple[int, int]
    parameter_bytes: int
    in_flight: int
    activation_bytes: int
    idle: float


@dataclass(frozen=True)
class PipelineReport:
    """The result of ``Pipeline.report()``; ``str()`` of it is a table.

    Attributes:
        schedule: its name.
        micro_batches: of a step.
        stages: of the model.
        replicas: of each stage.
        steps: that were counted; the first one, in which shapes are agreed, is not.
        seconds: of a step, on average.
        bubble: the share of a step in which a stage has nothing to do where all take equally long:
            (p - 1) / (m + p - 1).
        idle: the measured share, the mean over all ranks. It has the bubble, stages of unequal
            cost, and messages.
        ranks: a ``RankReport`` of each.
    """

    schedule: str
    micro_batches: int
    stages: int
    replicas: int
    steps: int
    seconds: float
    bubble: float
    idle: float
    ranks: tuple[RankReport, ...]

    def __str__(self) -> str:
        head = (
            f"{self.schedule}: {self.stages} stages x {self.replicas} replicas, "
            f"{self.micro_batches} micro-batches\n"
        )
        if self.steps:
            head += (
                f"bubble {self.bubble:.1%} of a step in theory; idle {self.idle:.1%} measured over "
                f"{self.steps} steps of {self.seconds * 1000:.1f} ms\n"
            )
        else:
            head += f"bubble {self.bubble:.1%} of a step in theory; not measured yet\n"
        rows = ["rank  stage  replica  layers   parameters  in flight  activations   idle"]
        for r in self.ranks:
            layers = f"{r.layers[0]}-{r.layers[1]}"
            rows.append(
                f"{r.rank:4}  {r.stage:5}  {r.replica:7}  {layers:7}"
                f"{r.parameter_bytes / _MIB:8.2f} MiB  {r.in_flight:9}"
                f"{r.activation_bytes / _MIB:9.2f} MiB  {r.idle:5.1%}"
            )
        return head + "\n".join(rows)


def ranks_of(
    place: Place, schedule: str, micro_batches: int, bounds: Sequence[int], sizes: Sequence[int]
) -> list[RankReport]:
    """The reports of all ranks, before a step.

    Args:
        place: of any rank.
        bounds: of the stages.
        sizes: bytes of parameters, by rank.
    """
    make = schedule_of(schedule)
    found = []
    for rank, size in enumerate(sizes):
        each = place.of_rank(rank)
        layers = bounds[each.stage], bounds[each.stage + 1] - 1
        ahead = most_in_flight(make(each.stages, each.stage, micro_batches))
        found.append(RankReport(rank, each.stage, each.replica, layers, size, ahead, 0, 0.0))
    return found


class Times:
    """Times of training steps, summed over them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self.activations = [0] * ranks  # bytes of a micro-batch
        self._first = True
        self.reset()

    def reset(self) -> None:
        self.steps, self._seconds = 0, 0.0
        self._idle = [0.0] * self._ranks

    def add(self, rows: Sequence[Fared]) -> None:
        pairs = zip(self.activations, rows, strict=True)
        self.activations = [max(before, int(row.activations)) for before, row in pairs]
        if self._first:  # forms are agreed, memory is made
            self._first = False
            return
        self.steps += 1
        self._seconds += rows[0].seconds
        self._idle = [a + row.idle for a, row in zip(self._idle, rows, strict=True)]

    @property
    def seconds(self) -> float:
        return self._seconds / self.steps if self.steps else 0.0

    def idle(self, rank: int) -> float:
        return self._idle[rank] / self._seconds if self._seconds else 0.0


def report(
    schedule: str, micro_batches: int, stages: int, times: Times, ranks: Sequence[RankReport]
) -> PipelineReport:
    """The report of the steps so far.

    Args:
        ranks: their reports, without measurements.
    """
    told = tuple(
        each._replace(
            activation_bytes=times.activations[each.rank] * each.in_flight,
            idle=times.idle(each.rank),
        )
        for each in ranks
    )
    return PipelineReport(
        schedule=schedule,
        micro_batches=micro_batches,
        stages=stages,
        replicas=len(ranks) // stages,
        steps=times.steps,
        seconds=times.seconds,
        bubble=bubble(stages, micro_batches),
        idle=sum(each.idle for each in told) / len(told),
        ranks=told,
    )


class Reported(Placed):
    """The report that every pipeline gives of its steps."""

    _micro_batches: int
    _schedule: str
    _times: Times
    _ranks: list[RankReport]

    def _begin_to_report(self, times: Times, bounds: Sequence[int], nbytes: int) -> None:
        """Collective. `nbytes`: of this rank's parameters."""
        sizes = allgather_object(nbytes, "parameters of the stages")
        self._times = times
        self._ranks = ranks_of(self._place, self._schedule, self._micro_batches, bounds, sizes)

    def report(self, *, reset: bool = False) -> PipelineReport:
        """Each rank's layers, memory and idle time in training steps; the same on every rank.

        Args:
            reset: begin to measure anew.
        """
        told = report(self._schedule, self._micro_batches, self.stages, self._times, self._ranks)
        if reset:
            self._times.reset()
        return told
