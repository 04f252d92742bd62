"""Whether a program is inside of elastic.run, where all ranks have the same state."""

from __future__ import annotations

from farandole import _elastic
from farandole._core import InvalidArgument


class _State:
    inside = False


def enter() -> None:
    """Ranks of the world have one state now; it stays so after the program's function returns."""
    _State.inside = True


def leave() -> None:
    """Called when that world has ended."""
    _State.inside = False


def require_inside(what: str) -> None:
    """Raises InvalidArgument in an elastic job outside of elastic.run: a rank that is new there
    would wait for the ranks that are inside."""
    if _elastic.is_elastic() and not _State.inside:
        raise InvalidArgument(
            f"{what} outside of elastic.run: this job is elastic (farandole run --min-np), and a "
            "rank that is new would wait for those inside\n"
            "  advice: train in the function that hvd.elastic.run decorates; a state makes an "
            "optimizer's variables by itself"
        )
