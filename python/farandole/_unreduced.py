"""A world that began with equal weights and reduced no gradient says so at its end.

A program that broadcasts the weights means to train one model. If its optimizer was never wrapped,
each rank trains a model of its own, and nothing else tells: no rank waits for another one.
"""

from __future__ import annotations

import sys

from farandole import _core, _elastic, _world
from farandole._core import Error
from farandole._limits import setting


class _State:
    begun = 0  # reductions of former worlds
    broadcast = ""  # what gave weights to all ranks first, also in a graph before the world began
    rank, size = 0, 1
    is_over = False  # whether the world has ended as programs mean it to


def note_broadcast(by: str) -> None:
    """All ranks have the same weights now, by the function of this name."""
    _state.broadcast = _state.broadcast or by


def note_training() -> None:
    """This world trains by messages: a pipeline's stages, a parameter server."""
    _state.begun = -1


def trains_by_messages() -> bool:
    """Whether note_training() was called in this world."""
    return _state.begun < 0


def is_silent() -> bool:
    """As a world ends: whether it ends as programs mean it to, and has nothing to say here."""
    return _state.is_over and _core.reductions_begun() != _state.begun


def _begin() -> None:
    _state.begun = _core.reductions_begun()


def _leave() -> None:
    """A program that has failed may not have come to its first step."""
    _state.rank, _state.size = _world.rank(), _world.size()
    try:
        _world.world().check()
    except Error:
        _state.is_over = False
    else:
        failing = sys.exc_info()[1] or getattr(sys, "last_exc", None)
        _state.is_over = failing is None and not _elastic.is_elastic()


def _end() -> None:
    """When nothing of this world can begin any more."""
    by, _state.broadcast = _state.broadcast, ""
    if not by or not _state.is_over or _core.reductions_begun() != _state.begun:
        return
    if _state.rank == 0 and _state.size > 1 and setting("FARANDOLE_LOG") != "error":
        print(
            f"farandole rank 0: warning: {by}() gave {_state.size} ranks the same weights, "
            "and no gradient was reduced: where these were trained, each rank has a model of its "
            "own\n  advice: step by a DistributedOptimizer, or reduce the gradients; a program "
            "that only evaluates needs neither",
            file=sys.stderr,
            flush=True,
        )


_state = _State()
_world.after_joining(_begin)
_world.before_leaving(_leave)
_world.after_leaving(_end)
