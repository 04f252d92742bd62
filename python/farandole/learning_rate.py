"""The learning rate of a global batch: scaled with it, warmed up step by step, and decayed.

One class for PyTorch, Keras and optax; no framework is imported before it is asked for.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from farandole._arguments import shown
from farandole._core import InvalidArgument

__all__ = ["LearningRate", "ramp", "scaled"]

Scaling = Literal["linear", "sqrt", "none"]
Decay = Literal["none", "linear", "cosine"]


def scaled(base: float, factor: float, scaling: Scaling = "linear") -> float:
    """The rate for batches that are `factor` times as large.

    Args:
        scaling: "linear": the rate grows as the batch (Goyal et al., 2017: SGD); "sqrt": as its
            square root (usual with Adam); "none".

    Raises:
        InvalidArgument: there is no such scaling.

    Examples:
        >>> scaled(0.1, 4), scaled(0.1, 4, "sqrt")
        (0.4, 0.2)
    """
    if scaling not in get_args(Scaling):
        raise InvalidArgument(f"scaling is {shown(scaling)}; it is 'linear', 'sqrt' or 'none'")
    return base * {"linear": factor, "sqrt": math.sqrt(factor), "none": 1.0}[scaling]


def ramp(done: Any, begin: float, end: float) -> Any:
    """A straight line from `begin`, where nothing is done, to `end`, where 1 is.

    Args:
        done: a number or an array.
    """
    return begin + (end - begin) * done


class LearningRate:
    """The learning rate by step (the number of updates so far). In warmup it grows from ``base`` to
    the rate of the global batch, step by step; then it stays, or decays.

    optax takes it as it is, as a schedule; ``for_torch`` and ``for_keras`` make what PyTorch and
    Keras take.

    Args:
        base: that is right for batches of ``base_batch_size``.
        batch_size: samples of all ranks in a batch.
        base_batch_size: for which ``base`` was found. Default: ``batch_size``.
        scaling: "linear", "sqrt" or "none": how the rate grows with the batch.
        warmup_steps: until the full rate; 0: no warmup.
        warmup_from: the rate of the first step; default ``base``.
        decay: after warmup: "none", "linear" or "cosine", down to ``end`` at ``total_steps``.
        total_steps: of training, with warmup; needed to decay.
        end: the last rate.

    Raises:
        InvalidArgument: an argument is wrong.

    Examples:
        >>> rate = LearningRate(0.1, batch_size=1024, base_batch_size=256, warmup_steps=100)
        >>> rate(0), rate(50), rate(100), rate(5000)
        (0.1, 0.25, 0.4, 0.4)
    """

    def __init__(
        self,
        base: float,
        *,
        batch_size: int,
        base_batch_size: int | None = None,
        scaling: Scaling = "linear",
        warmup_steps: int = 0,
        warmup_from: float | None = None,
        decay: Decay = "none",
        total_steps: int | None = None,
        end: float = 0.0,
    ) -> None:
        self._config: dict[str, Any] = {
            "base": base, "batch_size": batch_size, "base_batch_size": base_batch_size,
            "scaling": scaling, "warmup_steps": warmup_steps, "warmup_from": warmup_from,
            "decay": decay, "total_steps": total_steps, "end": end,
        }  # fmt: skip
        _check(self._config)
        self.base = float(base)
        self.peak = scaled(self.base, batch_size / (base_batch_size or batch_size), scaling)
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self._from = self.base if warmup_from is None else float(warmup_from)
        self._decay, self._end = decay, float(end)

    def __call__(self, step: Any) -> Any:
        """The rate of that step: a float for a number, an array for an array of NumPy or JAX."""
        jax = sys.modules.get("jax")
        if jax is not None and isinstance(step, jax.Array):
            return self._at(step, jax.numpy)
        rates = self._at(np.asarray(step, np.float64), np)
        return float(rates) if np.ndim(step) == 0 else rates

    def _at(self, step: Any, ops: Any) -> Any:
        """With the functions of NumPy, JAX or Keras."""
        rate = self._after(step, ops)
        if self.warmup_steps == 0:
            return rate
        warming = ramp(step / self.warmup_steps, self._from, self.peak)
        return ops.where(step < self.warmup_steps, warming, rate)

    def _after(self, step: Any, ops: Any) -> Any:
        if self._decay == "none":
            return ops.full_like(step, self.peak, dtype="float32" if ops is not np else None)
        assert self.total_steps is not None
        done = (step - self.warmup_steps) / (self.total_steps - self.warmup_steps)
        done = ops.clip(done, 0.0, 1.0)
        if self._decay == "cosine":
            done = (1 - ops.cos(math.pi * done)) / 2
        return ramp(done, self.peak, self._end)

    def config(self) -> dict[str, Any]:
        """The arguments: ``LearningRate(**config)`` is the same."""
        return dict(self._config)

    def for_torch(self, optimizer: Any) -> Any:
        """A ``torch.optim.lr_scheduler`` of the optimizer; call its ``step()`` after every update.
        Parameter groups with a rate of their own keep its ratio to ``base``.

        Args:
            optimizer: a ``torch.optim.Optimizer``, of rate ``base``.

        Raises:
            InvalidArgument: the optimizer has another rate.
        """
        from torch.optim.lr_scheduler import LambdaLR

        rates = [float(g.get("initial_lr", g["lr"])) for g in optimizer.param_groups]
        if not any(math.isclose(rate, self.base, rel_tol=1e-6) for rate in rates):
            raise InvalidArgument(
                f"the optimizer's learning rate is {rates[0]:g}, and the base of this one "
                f"{self.base:g}\n  advice: make the optimizer with lr={self.base:g}"
            )
        return LambdaLR(optimizer, lambda step: self(step) / self.base)

    def for_keras(self) -> Any:
        """A ``keras.optimizers.schedules.LearningRateSchedule``, which an optimizer takes as its
        ``learning_rate``, and which is saved and loaded with the model."""
        return keras_schedule()(**self._config)

    def plot(self, path: str | os.PathLike[str], steps: int | None = None) -> None:
        """Draws the rate over the steps into a file.

        Args:
            path: its name ends in .svg, or in .png, which needs matplotlib.
            steps: how many; default: ``total_steps``, or twice the warmup.

        Raises:
            InvalidArgument: the file cannot be written, or steps is wrong.
        """
        from farandole import _draw
        from farandole._draw.curve import draw_curve

        last = steps if steps is not None else self.total_steps or 2 * self.warmup_steps or 100
        if isinstance(last, bool) or not isinstance(last, int) or last < 1:
            raise InvalidArgument(f"plot(): steps is {shown(steps)}; it is a whole number above 0")
        where = np.unique(np.round(np.linspace(0, last, min(last, 300) + 1)))
        points = list(zip(where.tolist(), self(where).tolist(), strict=True))
        try:
            _draw.save(draw_curve(points, "Learning rate", "step", self._words()), Path(path))
        except _draw.DrawError as error:
            raise InvalidArgument(f"plot(): {error}") from None

    def _words(self) -> str:
        size, before = self._config["batch_size"], self._config["base_batch_size"]
        words = f"batch {size}: {self.peak:g}"
        if before is not None and before != size:
            words += f" ({self._config['scaling']} from {self.base:g} at {before})"
        return words + (f", warmup of {self.warmup_steps} steps" if self.warmup_steps else "")

    def __repr__(self) -> str:
        given = ", ".join(f"{key}={value!r}" for key, value in self._config.items())
        return f"LearningRate({given})"


def _check(config: dict[str, Any]) -> None:
    for name, least in [("base", 0.0), ("warmup_from", 0.0), ("end", 0.0)]:
        value = config[name]
        fits = isinstance(value, int | float) and least <= value < math.inf
        if (not fits or (name == "base" and value == 0)) and (value is not None or name == "base"):
            raise InvalidArgument(f"LearningRate(): {name} is {shown(value)}; it is a rate")
    for name, least in [
        ("batch_size", 1), ("base_batch_size", 1), ("warmup_steps", 0), ("total_steps", 1),
    ]:  # fmt: skip
        value = config[name]
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
        if not fits and (value is not None or name in ("batch_size", "warmup_steps")):
            raise InvalidArgument(
                f"LearningRate(): {name} is {shown(value)}; it is a whole number of at least "
                f"{least}"
            )
    if config["decay"] not in get_args(Decay):
        raise InvalidArgument(
            f"LearningRate(): decay is {shown(config['decay'])}; it is 'none', 'linear' or 'cosine'"
        )
    if config["decay"] != "none" and (config["total_steps"] or 0) <= config["warmup_steps"]:
        raise InvalidArgument(
            f"LearningRate(): total_steps is {config['total_steps']}; to decay, it is more than "
            f"warmup_steps, {config['warmup_steps']}"
        )


@functools.cache
def keras_schedule() -> Callable[..., Any]:
    """Its class for Keras, which then knows it in saved models."""
    import keras

    @keras.saving.register_keras_serializable("farandole", "LearningRate")
    class Schedule(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
        def __init__(self, **config: Any) -> None:
            self.rate = LearningRate(**config)

        def __call__(self, step: Any) -> Any:
            return self.rate._at(keras.ops.cast(step, "float32"), keras.ops)

        def get_config(self) -> dict[str, Any]:
            return self.rate.config()

    return Schedule
