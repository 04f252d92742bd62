"""The collectives on tensors, with Horovod's names and signatures.

Operations are keyed by name: ranks submit them in any order, and one runs when all ranks of its
process set have submitted that name. Without a name, the n-th nameless call of a kind meets the
n-th of the other ranks. The forms that end in ``_`` work in place, those with ``_async`` return a
handle for ``synchronize()``. Only the plain forms (``allreduce``, ``allgather``, ``alltoall``,
``broadcast``, ``reducescatter`` and the grouped ones) are differentiable.

Every function raises ``InvalidArgument`` (a ``ValueError``) before anything is sent for a tensor
that cannot be sent (sparse, not contiguous, not on the CPU, of an unsupported dtype), for a name
that is in flight already, and on ranks outside the process set. ``Mismatch`` says on every rank how
the ranks' calls differ: nothing has been reduced, and the next call works.
"""

from __future__ import annotations

from farandole.common._process_set import ProcessSet, global_process_set
from farandole.torch._entries import public
from farandole.torch._operations import allreduce as _allreduce
from farandole.torch._operations import calls as _calls
from farandole.torch._operations import movements as _movements
from farandole.torch._operations import reducescatter as _reducescatter
from farandole.torch._operations.allreduce import *  # noqa: F403
from farandole.torch._operations.handles import done, wait
from farandole.torch._operations.movements import *  # noqa: F403
from farandole.torch._operations.reducescatter import *  # noqa: F403
from farandole.torch._training.join import join

__all__ = [
    *_allreduce.__all__,
    *_movements.__all__,
    *_reducescatter.__all__,
    "barrier",
    "join",
    "poll",
    "synchronize",
]

synchronize = wait


@public
def poll(handle: int) -> bool:
    """Whether ``synchronize(handle)`` would return at once.

    Raises:
        InvalidArgument: the handle is unknown, or was synchronized already.
    """
    return done(handle)


@public
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    wait(_calls.barrier(process_set))
