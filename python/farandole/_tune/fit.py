"""The model's numbers from measured times. Everything here takes values and returns values.

A path over shared memory takes ``start + byte * passes * bytes``; a schedule what
``csrc/schedule/planners.h`` says. Both are linear in the numbers that are sought, so those that
leave the least *relative* error are found by least squares; a number that the times say nothing
about stays at its default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from farandole import _core

PATHS = tuple(path["name"] for path in _core.tuning.paths())
LINKS = ("network_round", "network_byte")
MPI = ("mpi_round", "mpi_byte")  # its own all-reduce
CHANNELS = ("channel_round", "channel_message", "channel_byte", "channel_folded_byte")

_PULL = 1e-6  # towards the default: decides only where times do not
_LEAST = 1e-3  # of the default: times are noisy, and nothing takes no time


@dataclass(frozen=True)
class Sample:
    """One operation's time: `bytes` of one rank's input, from when the last rank has come until the
    last has left; and how much its slow readings exceeded the quick ones."""

    collective: str
    algorithm: str  # path or planner
    bytes: int
    ranks: int
    seconds: float
    noise: float = 0.0

    @property
    def is_path(self) -> bool:
        return self.algorithm in PATHS


@dataclass(frozen=True)
class Link:
    """The costs of a link between hosts, in seconds: those of the slowest pair."""

    network_round: float
    network_byte: float
    noise: float  # by how much its slow readings exceeded the quick ones


@dataclass(frozen=True)
class Fit:
    """The numbers, and the relative errors |predicted / measured - 1| by family of samples."""

    seconds: dict[str, float]
    errors: dict[str, list[float]]

    def medians(self) -> dict[str, float]:
        return {family: round(median(errors), 4) for family, errors in self.errors.items()}


def noise(samples: Sequence[Sample]) -> float:
    """The noise of a measurement: 0.05 is a quiet host, 0.5 one that did something else, too."""
    return round(median(sample.noise for sample in samples), 4)


def fit(samples: Sequence[Sample]) -> Fit:
    """The table that explains the samples best."""
    seconds = dict(_core.tuning.numbers())
    errors: dict[str, list[float]] = {}
    families = {path: (f"{path}_start", f"{path}_byte") for path in PATHS} | {"schedules": CHANNELS}
    for family, names in families.items():
        mine = [s for s in samples if (s.algorithm if s.is_path else "schedules") == family]
        if not mine:
            continue
        features = np.array([_features(s) for s in mine], np.float64)
        times = np.array([s.seconds for s in mine])
        found = solve(features, times, np.array([seconds[name] for name in names]))
        seconds.update(zip(names, found.tolist(), strict=True))
        errors[family] = np.abs(features @ found / times - 1).tolist()
    return Fit(seconds, errors)


def solve(
    features: NDArray[np.float64], times: NDArray[np.float64], defaults: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Numbers x, all positive, for which `features @ x` is nearest to `times` relatively.

    `features` is (samples, numbers), `times` (samples,) in seconds, `defaults` (numbers,).
    """
    scaled = features * defaults / times[:, None]  # unknown: by how much each default is wrong
    pull = np.sqrt(_PULL) * np.eye(len(defaults))
    rows = np.vstack([scaled, pull])
    wanted = np.concatenate([np.ones(len(times)), np.full(len(defaults), np.sqrt(_PULL))])
    factors = np.ones(len(defaults))
    free = np.ones(len(defaults), bool)
    while free.any():
        rest = wanted - rows[:, ~free] @ factors[~free]
        factors[free] = np.linalg.lstsq(rows[:, free], rest, rcond=None)[0]
        low = free & (factors < _LEAST)
        if not low.any():
            break
        factors[low] = _LEAST
        free &= ~low
    found: NDArray[np.float64] = defaults * factors
    return found


def _features(sample: Sample) -> tuple[float, ...]:
    if sample.is_path:
        traffic = _core.tuning.traffic(sample.algorithm, sample.collective, sample.ranks)
        return (1.0, traffic * sample.bytes)
    lanes, segments = _core.tuning.split(sample.bytes)
    rows = _core.schedule.planners(sample.ranks, sample.bytes, lanes, segments, 1)
    cost = next(
        row
        for row in rows
        if (row["collective"], row["name"]) == (sample.collective, sample.algorithm)
    )
    return (cost["rounds"], cost["messages"], cost["bytes"], cost["folds"])
