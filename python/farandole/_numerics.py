"""How many steps have used a gradient that was NaN or infinite on some rank."""

from __future__ import annotations

_steps = 0


def count_step() -> None:
    global _steps
    _steps += 1


def nonfinite_steps() -> int:
    """How many steps of this process have used gradients to which some rank gave a NaN or an
    infinity: the same number on all ranks that train together.

    Steps that are skipped, as a ``GradScaler`` and Keras' ``LossScaleOptimizer`` do, do not count.
    ``FARANDOLE_NUMERICS`` says what else happens in such a step.

    Examples:
        >>> fd.nonfinite_steps()
        0
    """
    return _steps
