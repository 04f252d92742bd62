"""A trace that begins and ends while ranks run, as programs ask for it: _trace/timeline.py."""

from __future__ import annotations

import os
from pathlib import Path

from farandole._arguments import explained
from farandole._trace import timeline
from farandole._world import world

__all__ = ["start_timeline", "stop_timeline"]


@explained
def start_timeline(file_path: os.PathLike[str] | str, mark_cycles: bool = False) -> None:  # noqa: ARG001
    """Records from now on where this rank's time goes, until ``stop_timeline()`` or the end.

    Usually every rank calls it. On rank 0 alone, the file shows rank 0 alone.

    Args:
        file_path: a Chrome trace in JSON, for https://ui.perfetto.dev; replaced if it is there.
        mark_cycles: of Horovod's signature. There are no cycles to mark.

    Raises:
        InvalidArgument: a timeline is being written, or ``FARANDOLE_TRACE`` traces the whole run.
        NotInitialized: before ``init()``.
        ResourceError: the directory cannot be written.

    Examples:
        >>> import farandole as fd
        >>> fd.init()
        >>> fd.start_timeline("/tmp/timeline.json")
        >>> fd.barrier()
        >>> fd.stop_timeline()
    """
    timeline.start(world(), Path(file_path).absolute())


def stop_timeline() -> None:
    """Ends what ``start_timeline()`` began, and writes the file.

    Raises:
        InvalidArgument: no timeline was started.
        ResourceError: the file cannot be written.
    """
    timeline.stop()
