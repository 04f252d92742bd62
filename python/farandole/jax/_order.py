"""The order of collectives: a token that each call takes and gives back.

XLA runs what does not depend on each other in any order, and ranks must not differ in theirs. So
every collective has one operand and one result more, the token, which lives in a ``jax.Ref``: JAX
itself turns a Ref into operands and results of everything around it (``jit``, ``scan``, ``cond``,
``grad``), and of one program after the other. Collectives then run in the order in which they were
traced, and a program's in the order of its dispatch. The token counts calls, so that the core
notices what comes out of order all the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from farandole import _elastic, _world
from farandole._core import Error, InvalidArgument
from farandole._core import jax as _native
from farandole.common._process_set import (
    ProcessSet,
    global_process_set,
    group_of,
    own_group_of,
    registered_sets,
    when_sets_change,
)
from farandole.jax._verdicts import come_first

TARGET = "farandole_collective"
PLATFORMS = ("cpu", "gpu", "cuda")  # JAX calls CUDA's devices "gpu"


class _Order:
    """The token of this process, and its world. Worlds come and go; compiled programs keep the Ref
    that they were made with."""

    def __init__(self) -> None:
        self.ref: Any = None
        self.device: Any = None  # where the token lies
        self.registered = False
        self.epoch = 0  # of the world that the core is attached to
        self.place = (0, 1)  # rank and size in that world, which programs are made for
        self.left = False  # a world, since the last look whether the token is there

    def begin(self) -> None:
        """Makes a new token. Programs that were traced before have the old one."""
        with jax.ensure_compile_time_eval():
            start = jnp.zeros(1, jnp.uint32)
            self.ref = jax.new_ref(start)
        (self.device,) = start.devices()


_order = _Order()


def token() -> Any:
    """The Ref that holds the token."""
    if _order.ref is None:
        _require_platform()
        _order.begin()
        _world.before_leaving(_leave)
        _world.after_joining(_follow_world)
    return _order.ref


def device() -> Any:
    """The one device that collectives run on: the token's."""
    token()
    return _order.device


def key_of(process_set: ProcessSet) -> str:
    """The key of a set in programs: its ranks, so that they work in a later world that has it."""
    return "" if process_set is global_process_set else str(process_set.ranks)


def group_of_calls(process_set: ProcessSet) -> _world.Group:
    """The ranks that a collective is among. Raises NotInitialized, InvalidArgument."""
    world_of_calls()
    return own_group_of(process_set)


def world_of_calls() -> _world.Group:
    """The world that collectives traced from now on are for. Raises NotInitialized."""
    group = _world.world()
    if not _order.registered:
        for target, handlers in _native.targets().items():
            for platform, handler in handlers.items():
                jax.ffi.register_ffi_target(target, handler, platform=platform)
        when_sets_change(_follow_sets)
        come_first()
        _order.registered = True
    if _order.epoch != _world.epoch():
        _attach(group)
    return group


def _attach(world: _world.Group) -> None:
    groups = {key_of(each): group_of(each) for each in registered_sets()}
    _native.attach(world, {key: group for key, group in groups.items() if group is not None})
    _order.epoch = _world.epoch()
    _order.place = _world.rank(), _world.size()


def _follow_sets() -> None:
    """Programs that were traced before find the sets that there are now; those that have been
    started end first."""
    if _order.ref is not None:
        _settled()
    _attach(_world.world())


def init(rank: int | None = None, size: int | None = None, **place: Any) -> None:
    """Joins the other ranks of the job; a second call without ``shutdown()`` does nothing.

    Where a collective has failed before ``shutdown()``, where this process has another rank or the
    world another size than before, and in elastic jobs, this clears JAX's caches, as ``recover()``
    does: functions are traced and compiled anew when they are called next.

    Args:
        rank: as for ``farandole.init``; by default what the launcher has set.
        size: likewise.
        place: its other arguments.

    Raises:
        InvalidArgument: JAX's default device is neither the CPU nor on CUDA.
        RendezvousError: ranks are missing, duplicate, or disagree about the world.

    Examples:
        >>> import farandole.jax as fdj
        >>> fdj.init()
        >>> fdj.rank(), fdj.size()
        (0, 1)
    """
    _require_platform()
    _world.init(rank, size, **place)
    world_of_calls()
    token()


def _require_platform() -> None:
    device = jax.config.jax_default_device
    platform = getattr(device, "platform", device) or jax.default_backend()
    if platform not in PLATFORMS:
        raise InvalidArgument(
            f"JAX's default device is a {platform}; farandole.jax works on the CPU and on CUDA\n"
            "  advice: set JAX_PLATFORMS=cpu"
        )


def _settled() -> bool:
    """Waits for the collectives of all programs so far. False: one has failed, and left no
    token."""
    try:
        _order.ref[...].block_until_ready()
    except Exception:
        return False
    return True


def _leave() -> None:
    """Programs run behind Python's back: those that have been started end before this rank leaves.

    Not when a collective has failed: there is nothing to wait for then."""
    _settled()
    _order.left = True


def _follow_world() -> None:
    """Another one, however it was joined. Programs that were traced before go on in it, unless they
    were made for another. In an elastic job all ranks trace anew, as those do that are new."""
    before = _order.place
    world_of_calls()
    if _order.left and (_elastic.is_elastic() or _order.place != before or not _settled()):
        _begin_anew()
    _order.left = False


def last_error() -> Error | None:
    """Why a collective of a program failed on this rank, the last time; None if none has.

    JAX reports failures as ``JaxRuntimeError`` with the same text; this is the error itself, of
    one of farandole's classes and with its fields.

    Examples:
        >>> fdj.last_error() is None
        True
    """
    return _native.last_error()


def recover() -> None:
    """Makes collectives work again after one has failed, in a world that still stands.

    A failed collective leaves no token, and every later one would fail with the same error. After
    ``Mismatch`` (the world goes on) call this on every rank. It clears JAX's caches: functions are
    traced and compiled anew when they are called next, and what ``lower().compile()`` gave is of
    no use any more.

    Raises:
        NotInitialized: there is no world.
        Error: the world has failed; the verdict.

    Examples:
        >>> fdj.recover()
    """
    group = world_of_calls()
    group.check()
    _begin_anew()


def _begin_anew() -> None:
    _native.begin_anew()
    jax.clear_caches()
    _order.begin()
