"""A bare copy over TCP, both ways at once: what the network carries, and no result.

Each of two ranks sends the whole array and receives the other's. An all-reduce of two ranks has to
move as many bytes in each direction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from farandole._bench.layouts import COLLECTIVES, Buffers, Expected, Patterns
from farandole._bench.peers.libraries import Member, Unable, _sockets


def join() -> Member:
    rank, ranks, link = _sockets.join()

    def make(ask: dict[str, Any]) -> Buffers:
        if link is None or ask["collective"] != "all_reduce":
            raise Unable("the TCP copy is between two ranks, and compared with all_reduce")
        return _Copy(link, ask, rank, ranks)

    return Member(rank, ranks, "", make, lambda: "copy")


class _Copy(Buffers):
    def __init__(self, link: _sockets.Link, ask: dict[str, Any], rank: int, ranks: int) -> None:
        super().__init__(COLLECTIVES[ask["collective"]], ask["bytes"], ask["dtype"], rank, ranks)
        assert self.input is not None
        self.output = np.empty_like(self.input)
        self._bytes = self.input.data.cast("B"), self.output.data.cast("B")
        self._link = link
        self.call = self._exchange

    def _expected(self, parts: Patterns, stored: list[NDArray[Any]]) -> Expected:  # noqa: ARG002
        return [(slice(0, None), stored[1 - self._rank], 0)]

    def _exchange(self) -> None:
        link = self._link
        out, into = self._bytes
        while out or into:
            sent, came = link.send(out), link.receive(into)
            out, into = out[sent:], into[came:]
            link.rest(sent + came, bool(out))
