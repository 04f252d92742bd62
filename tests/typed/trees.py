"""Checks the types of calls on JAX's pytrees; see arrays.py."""

from __future__ import annotations

from typing import Any

from typing_extensions import assert_type

import farandole.jax as fdj
from farandole.typing import ReduceOp


def collectives(tree: Any, gradients: dict[str, int], op: ReduceOp) -> None:
    fdj.allreduce(tree, op)
    rows, received = fdj.alltoall(tree, [1, 2])
    assert_type(received, list[int])
    fdj.broadcast(rows)
    assert_type(fdj.allreduce_gradients(gradients), dict[str, int])


def refused(tree: Any, op: ReduceOp) -> None:
    fdj.allreduce(tree, "average")  # type: ignore[arg-type]
    fdj.reducescatter(tree, op)  # type: ignore[arg-type]
