"""An all-reduce of two ranks over one bare TCP connection: the same bytes, and the fold.

Small arrays are exchanged whole. Of others each rank folds one half, piece by piece as it comes,
and sends on what is folded while more is on its way, so both directions are busy all the time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from farandole._bench.layouts import COLLECTIVES, Buffers
from farandole._bench.peers.libraries import Member, Unable, _sockets

_SMALL = 64 << 10
_FOLDED = 256 << 10  # bytes that are folded at once


def join() -> Member:
    rank, ranks, link = _sockets.join()

    def make(ask: dict[str, Any]) -> Buffers:
        if link is None or ask["collective"] != "all_reduce":
            raise Unable("the TCP floor is an all_reduce of two ranks")
        if ask["dtype"] == "bfloat16":
            raise Unable("the TCP floor folds by numpy, which has no bfloat16")
        return _Floor(link, ask, rank, ranks)

    return Member(rank, ranks, "", make, lambda: "halves" if ranks == 2 else "")


class _Floor(Buffers):
    def __init__(self, link: _sockets.Link, ask: dict[str, Any], rank: int, ranks: int) -> None:
        super().__init__(COLLECTIVES[ask["collective"]], ask["bytes"], ask["dtype"], rank, ranks)
        assert self.output is not None
        array, self._link = self.output, link
        middle = array.size // 2
        halves = array[:middle], array[middle:]
        self._mine, self._others = halves[rank], halves[1 - rank]
        self._whole = array
        self._scratch = np.empty_like(array if array.nbytes <= _SMALL else self._mine)
        self.call = self._exchange_whole if array.nbytes <= _SMALL else self._exchange_halves

    def _exchange_whole(self) -> None:
        link = self._link
        out, into = (a.data.cast("B") for a in (self._whole, self._scratch))
        while out or into:
            sent, came = link.send(out), link.receive(into)
            out, into = out[sent:], into[came:]
            link.rest(sent + came, bool(out))
        np.add(self._whole, self._scratch, out=self._whole)

    def _exchange_halves(self) -> None:
        link, item = self._link, self._whole.itemsize
        mine, others, scratch = (
            a.data.cast("B") for a in (self._mine, self._others, self._scratch)
        )
        sent = came = folded = 0  # bytes: of their leaves, then of results
        while sent < len(others) + len(mine) or came < len(mine) + len(others):
            if sent < len(others):
                moved = link.send(others[sent:])
            else:
                moved = link.send(mine[sent - len(others) : folded])
            sent += moved
            if came < len(mine):
                count = link.receive(scratch[came:])
            else:
                count = link.receive(others[came - len(mine) :])
            came += count
            ready = min(came, len(mine))
            if folded < ready and (ready - folded >= _FOLDED or ready == len(mine)):
                piece = slice(folded // item, ready // item)
                np.add(self._mine[piece], self._scratch[piece], out=self._mine[piece])
                folded = piece.stop * item
            can_send = sent < len(others) or sent - len(others) < folded
            link.rest(moved + count, can_send)
