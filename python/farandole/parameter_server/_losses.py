"""The error that a worker raises when a server is gone."""

from __future__ import annotations

from pathlib import Path

from farandole._core import Error, PeerLost


class ServerLost(PeerLost):
    """A server has ended or failed, and with it its part of the variables.

    Attributes:
        rank: the server's, in the world.
        snapshot: the last file that it wrote, as a Path; None if it wrote none.
    """

    snapshot: Path | None = None

    @classmethod
    def because(
        cls, server: int, rank: int, error: Error, snapshot: Path | None, otherwise: str
    ) -> ServerLost:
        """`otherwise`: what to do without a snapshot."""
        known, again = otherwise, ""
        if snapshot is not None:
            known = f"its last snapshot is {snapshot}"
            again = "; start all again, and they go on from it"
        verdict = f"server {server} (rank {rank}) is lost: {error.verdict}"
        lost = cls(f"{verdict}\n  evidence: {error.evidence}\n  advice: {known}{again}")
        lost.evidence, lost.advice = error.evidence, known + again  # verdict: the first line
        lost.rank, lost.snapshot = rank, snapshot
        lost.pid, lost.signal, lost.host = error.pid, error.signal, error.host
        return lost
