"""farandole.jax in programs for this rank's device, by XLA's calls for CUDA: collectives beside
numpy, trainings beside the same training in one process. Cases of cases.py."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from cases import Skipped, asked, compared, main, my_device, needs

import farandole as fd

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # ranks share the device

STEPS, ROWS, WIDE = 4, 8, 48
TOLERANCE = 1e-5  # XLA fuses a program with collectives otherwise than one without
SERIAL = "training in one process"


def begin() -> None:
    needs("jax")
    import jax

    if asked.host:
        jax.config.update("jax_platforms", "cpu")
    if not asked.host and jax.default_backend() != "gpu":
        raise Skipped("this JAX sees no device")
    jax.config.update("jax_default_matmul_precision", "highest")
    import farandole.jax as fdj

    fd.init()
    devices = jax.local_devices()
    jax.config.update("jax_default_device", devices[my_device(len(devices))])
    fdj.init()


# ---- collectives ----


def numbers(rank: int, count: int) -> Any:
    """Small integers, of which every sum is exact."""
    drawn = np.random.default_rng(rank).integers(-9, 9, (count, 2))
    return drawn.astype(np.float32)


def collectives() -> str:
    """In one program, one after the other; also long ones, and in a loop of the program's."""
    import jax

    import farandole.jax as fdj

    size, rank = fd.size(), fd.rank()

    @jax.jit
    def program(x: Any) -> Any:
        total = fdj.allreduce(x, op="sum")
        again, _ = jax.lax.scan(lambda c, _: (fdj.allreduce(c, op="max"), None), x, None, length=3)
        return {
            "sum": total,
            "max": again,
            "broadcast": fdj.broadcast(x, size - 1),
            "gather": fdj.allgather(x),
            "scatter": fdj.reducescatter(x, op="sum"),
            "turn": fdj.alltoall(x),
        }

    found = ""
    for count in (size, 60 * size, 50_000 * size):
        parts = [numbers(r, count) for r in range(size)]
        total, share = sum(parts[1:], parts[0]), count // size
        mine = slice(rank * share, (rank + 1) * share)
        wanted = {
            "sum": total,
            "max": np.maximum.reduce(parts),
            "broadcast": parts[-1],
            "gather": np.concatenate(parts),
            "scatter": total[mine],
            "turn": np.concatenate([part[mine] for part in parts]),
        }
        leaves = jax.tree.leaves(program(parts[rank]))
        found = compared(leaves, jax.tree.leaves(wanted), 0.0, "numpy's results")
    return found


# ---- training ----


def network() -> Any:
    generator = np.random.default_rng(1)
    shapes = [(WIDE, 128), (128, 130), (130, 3)]
    return [0.1 * generator.standard_normal(shape).astype(np.float32) for shape in shapes]


def loss_of(params: Any, x: Any) -> Any:
    import jax.numpy as jnp

    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return ((x @ params[-1] - 1) ** 2).mean()


def batch(step: int, rank: int) -> Any:
    drawn = np.random.default_rng(100 * step + rank).standard_normal((ROWS, WIDE))
    return drawn.astype(np.float32)


def train(by_optax: bool) -> str:
    import jax

    import farandole.jax as fdj

    update, state = _optimizer(by_optax)

    @jax.jit
    def step(params: Any, state: Any, x: Any) -> Any:
        gradients = jax.grad(loss_of)(params, x)
        if not by_optax:
            gradients = fdj.allreduce_gradients(gradients)
        return update(gradients, state, params)

    params = network()
    for i in range(STEPS):
        params, state = step(params, state, batch(i, fd.rank()))
    return compared(params, _alone(), TOLERANCE, SERIAL)


def _optimizer(by_optax: bool) -> tuple[Any, Any]:
    """SGD with momentum: how parameters and state come of gradients, and the state."""
    import jax

    import farandole.jax as fdj

    if not by_optax:
        zeros = jax.tree.map(np.zeros_like, network())
        return _by_hand, zeros
    needs("optax")
    import optax

    optimizer = fdj.distributed(optax.sgd(0.3, momentum=0.9))

    def update(gradients: Any, state: Any, params: Any) -> Any:
        moves, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, moves), state

    return update, optimizer.init(network())


def _by_hand(gradients: Any, state: Any, params: Any) -> Any:
    import jax

    state = jax.tree.map(lambda g, m: g + 0.9 * m, gradients, state)
    return jax.tree.map(lambda p, m: p - 0.3 * m, params, state), state


def _alone() -> Any:
    import jax

    gradient = jax.jit(jax.grad(loss_of))
    params = network()
    state = jax.tree.map(np.zeros_like, params)
    for i in range(STEPS):
        parts = [gradient(params, batch(i, rank)) for rank in range(fd.size())]
        mean = jax.tree.map(lambda *each: sum(each[1:], each[0]) / len(each), *parts)
        params, state = _by_hand(mean, state, params)
    return params


CASES = {
    "collectives in a program": collectives,
    "training": lambda: train(by_optax=False),
    "training by optax": lambda: train(by_optax=True),
}

if __name__ == "__main__":
    sys.exit(main(CASES, begin, fd.shutdown))
