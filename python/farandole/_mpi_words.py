"""Words between ranks of a communicator, as text behind a seal: what others say is never unpickled.
Nothing here waits inside of MPI.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from farandole._core import RendezvousError
from farandole._meeting.sealed import opened, sealed

Words = dict[str, Any]

LOOK = 0.001  # seconds between two looks for what is awaited


class Talk(NamedTuple):
    """Between the ranks of a communicator, who know a secret if they have one. ``look``: called now
    and then while one is awaited; raises what ends the wait."""

    comm: Any
    secret: bytes
    look: Callable[[], None] = lambda: None

    def begin(self, words: Words, rank: int, tag: int, number: str = "") -> Any:
        """To send them; the request is for ``finish``. ``number``: one that the other end has drawn
        or knows by now."""
        text = sealed(self.secret, _purpose(tag, number, self.comm.Get_rank(), rank), words)
        return self.comm.Isend([text.encode(), _mpi().BYTE], rank, tag)

    def hear(
        self, source: int | None, tag: int, until: float, number: str = ""
    ) -> tuple[int, Words] | None:
        """A rank, and its next words: that one's, or any one's. None at the deadline.

        Raises:
            AuthError: they are not as it has said them, at this moment, to this rank.
        """
        mpi = _mpi()
        status = mpi.Status()
        while True:
            message = self.comm.Improbe(mpi.ANY_SOURCE if source is None else source, tag, status)
            if message is not None:
                text = bytearray(status.Get_count(mpi.BYTE))
                message.Recv([text, mpi.BYTE])
                rank: int = status.Get_source()
                purpose = _purpose(tag, number, rank, self.comm.Get_rank())
                words: Words = opened(self.secret, purpose, bytes(text), rank)
                return rank, words
            if time.monotonic() >= until:
                return None
            self.look()
            time.sleep(LOOK)


def _purpose(tag: int, number: str, source: int, rank: int) -> str:
    return f"{number} over MPI with tag {tag} from {source} to {rank}"


def finish(request: Any, until: float, what: str) -> None:
    """Waits without giving up the chance to be interrupted.

    Raises:
        RendezvousError: ``what``, after the deadline.
    """
    while not request.Test():
        if time.monotonic() >= until:
            raise RendezvousError(what)
        time.sleep(LOOK)


def _mpi() -> Any:
    return sys.modules["mpi4py.MPI"]  # any program with a communicator has imported it
