"""All-reduce and tensor fusion for data-parallel training.

>>> import farandole as fd
>>> fd.init()                       # joins the ranks that `farandole run` or torchrun started
>>> fd.all_reduce(array, op="mean")

Names are loaded when first used, so that ``farandole run`` starts without numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farandole._collectives import *  # noqa: F403
    from farandole._core import __version__ as __version__
    from farandole._core import trace_span as trace_span
    from farandole._errors import *  # noqa: F403
    from farandole._memory import *  # noqa: F403
    from farandole._metrics import *  # noqa: F403
    from farandole._numerics import nonfinite_steps as nonfinite_steps
    from farandole._run import *  # noqa: F403
    from farandole._timeline import *  # noqa: F403
    from farandole._world import *  # noqa: F403

_HOME = {
    "_core": ["__version__", "trace_span"],
    "_world": (
        "Group init shutdown is_initialized rank size local_rank local_size cross_rank cross_size "
        "split world"
    ).split(),
    "_collectives": (
        "Handle all_reduce reduce reduce_scatter broadcast barrier all_gather gather scatter "
        "all_to_all send recv grouped_all_reduce grouped_reduce_scatter grouped_all_gather "
        "grouped_broadcast"
    ).split(),
    "_memory": ["allocate"],
    "_metrics": ["metrics"],
    "_numerics": ["nonfinite_steps"],
    "_run": ["RanksFailed", "run"],
    "_timeline": ["start_timeline", "stop_timeline"],
    "_errors": (
        "Error InvalidArgument NotInitialized PeerLost PeerHung Stalled Deadlock Mismatch "
        "RemoteError EarlyExit RendezvousError VersionMismatch AuthError LinkError ResourceError "
        "NumericsError ForkedEngine MembershipChanged Aborted InternalError DeviceError"
    ).split(),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF.keys() - {"__version__"})


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'farandole' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"farandole.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
