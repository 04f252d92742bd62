"""farandole for JAX: collectives inside ``jit``, ``grad`` and ``scan``, and gradients for optax.

>>> import farandole.jax as fdj
>>> fdj.init()
>>> params = fdj.broadcast_parameters(params, root=0)
>>> optimizer = fdj.distributed(optax.adam(1e-3))

One process per rank, arrays on the CPU. docs/jax.md says what is guaranteed. Examples are of one
rank, behind ``import jax.numpy as jnp, optax, farandole.jax as fdj`` and ``fdj.init()``.
"""

from __future__ import annotations

from farandole import _watch
from farandole.common._basics import (
    ProcessSet,
    add_process_set,
    cross_rank,
    cross_size,
    global_process_set,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from farandole.common._needs import jax as _jax  # noqa: F401 - or how to get it
from farandole.jax import elastic
from farandole.jax._order import init, last_error, recover
from farandole.jax.functions import allgather_object, broadcast_object, broadcast_parameters
from farandole.jax.ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allreduce,
    reducescatter,
)
from farandole.jax.optimizer import Compression, allreduce_gradients, distributed
from farandole.learning_rate import LearningRate

_watch.libraries |= {"jax", "jaxlib"}

__all__ = [
    "Compression",
    "LearningRate",
    "ProcessSet",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_gradients",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "distributed",
    "elastic",
    "global_process_set",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "last_error",
    "local_rank",
    "local_size",
    "rank",
    "recover",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
]
