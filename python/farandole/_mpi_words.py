"""Words between ranks of a communicator, as text: what others say is never unpickled. Nothing here
waits inside of MPI.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from farandole import _json
from farandole._core import RendezvousError

Words = dict[str, Any]

LOOK = 0.001  # seconds between two looks for what is awaited


def begin(comm: Any, words: Words, rank: int, tag: int) -> Any:
    """To send them; the request is for ``finish``."""
    return comm.Isend([json.dumps(words).encode(), _mpi().BYTE], rank, tag)


def finish(request: Any, until: float, what: str) -> None:
    """Waits without giving up the chance to be interrupted.

    Raises:
        RendezvousError: ``what``, after the deadline.
    """
    while not request.Test():
        if time.monotonic() >= until:
            raise RendezvousError(what)
        time.sleep(LOOK)


def hear(comm: Any, source: int | None, tag: int, until: float) -> Words | None:
    """The next words of that rank, or of any; None at the deadline."""
    mpi = _mpi()
    status = mpi.Status()
    while True:
        message = comm.Improbe(mpi.ANY_SOURCE if source is None else source, tag, status)
        if message is not None:
            text = bytearray(status.Get_count(mpi.BYTE))
            message.Recv([text, mpi.BYTE])
            words: Words = _json.read(text)
            return words
        if time.monotonic() >= until:
            return None
        time.sleep(LOOK)


def _mpi() -> Any:
    return sys.modules["mpi4py.MPI"]  # any program with a communicator has imported it
