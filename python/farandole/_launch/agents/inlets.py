"""Pipes that carry the output of another host's ranks, filled from the agent's frames.

So the reader of a rank's output need not know where the rank runs. The agent sends a stream only as
far as its credit goes, which the launcher renews as the stream is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from farandole._launch.agents.frames import WINDOW, FrameError, Message
from farandole._launch.agents.outbox import Outbox
from farandole._launch.polling import WRITE


class Inlet:
    """The pipe of one stream."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe2(os.O_CLOEXEC)
        self.box = Outbox(writer)
        self.ended = False  # at its source
        self.open = True

    def flush(self) -> int:
        """Writes what fits into the pipe; returns how much."""
        done = self.box.flush()
        if self.ended and not self.box.pending:
            self.close()
        return done

    def close(self) -> None:
        if self.open:
            os.close(self.box.fd)
            self.open = False


class Taken(NamedTuple):
    """The progress of one stream since the last turn."""

    rank: int
    which: int  # 0: stdout, 1: stderr
    size: int  # in bytes, of what its reader took
    shut: bool  # it has no reader any more


class Inlets:
    """The pipes of all ranks of a host."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], Inlet] = {}

    def add(self, rank: int) -> tuple[int, int]:
        """Makes the rank's pipes; returns the read ends of its stdout and stderr."""
        out, err = Inlet(), Inlet()
        self._of[rank, 0], self._of[rank, 1] = out, err
        return out.reader, err.reader

    def take(self, output: Message) -> None:
        rank, which = output.content["rank"], output.content["which"]
        inlet = self._of[rank, which]
        if len(output.data) + inlet.box.pending > WINDOW:
            raise FrameError(f"more output of rank {rank} than was asked for")
        inlet.ended = not output.data
        inlet.box.put(output.data)

    def flush(self) -> Iterator[Taken]:
        for (rank, which), inlet in self._of.items():
            if not inlet.open:
                continue
            size = inlet.flush()
            shut = inlet.box.gone
            if shut:
                inlet.close()
            if size or shut:
                yield Taken(rank, which, size, shut)

    def descriptors(self) -> list[tuple[int, int]]:
        boxes = [inlet.box for inlet in self._of.values() if inlet.open]
        return [(box.fd, WRITE) for box in boxes if box.pending]

    @property
    def pending(self) -> bool:
        """Whether some output still waits for its reader."""
        return any(inlet.open and inlet.box.pending for inlet in self._of.values())

    def end(self) -> None:
        """Marks all streams as complete."""
        for inlet in self._of.values():
            inlet.ended = True

    def close(self) -> None:
        for inlet in self._of.values():
            inlet.close()
