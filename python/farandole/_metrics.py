"""This rank's counters, for programs that log them."""

from __future__ import annotations

from farandole import _core
from farandole._arguments import explained
from farandole._live import pages
from farandole._live.openmetrics import METRICS
from farandole._world import world

__all__ = ["metrics"]


@explained
def metrics() -> dict[str, float]:
    """Counts what this rank has done since ``init()``, as `farandole run --metrics` serves it.

    Returns:
        By name: ``operations`` (collectives that have ended), ``input_bytes`` (of those that have
        begun), ``steps`` (training steps, of hooks that know them), ``waited_for_ranks_seconds``
        and ``waited_for_data_seconds`` (waits shorter than some microseconds are not counted),
        ``processor_seconds``, ``waits_seconds`` (of the present wait), ``step_age_seconds``,
        ``failed``, ``stopped``, ``joined_timestamp_seconds`` (since the epoch).

    Raises:
        NotInitialized: before ``init()``.

    Examples:
        >>> import farandole as fd
        >>> fd.init()
        >>> before = fd.metrics()["operations"]
        >>> fd.barrier()
        >>> fd.metrics()["operations"] > before
        True
    """
    status = pages.of_this_process(_core.status_page(world()))
    return {metric.name: float(metric.value(status)) for metric in METRICS}
