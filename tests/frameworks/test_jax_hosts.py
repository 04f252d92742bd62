"""JAX over two hosts: compiled training steps give the bits that they give on one host."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="JAX is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import optax
from rank_cases import begin_jax
from test_jax_training import difference, mine, train

import farandole as fd
import farandole.jax as fdj
from harness import World, split

Spawn = Callable[..., World]


def digest_of_training(hosts: int) -> str:
    begin_jax()
    assert fd.cross_size() == hosts
    params, _ = train(fdj.distributed(optax.adam(0.05)), mine)
    alone, _ = train(optax.adam(0.05), lambda rows: rows)
    assert difference(params, alone) < 1e-4
    leaves = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    gathered = jax.jit(lambda x: fdj.allgather(x, name="rows"))(np.full((2, 3), fd.rank(), "f4"))
    assert np.asarray(gathered)[::2, 0].tolist() == list(range(fd.size()))
    return hashlib.sha256(leaves).hexdigest()


@pytest.mark.parametrize("parts", ["1,2", "2,2"])
def test_training_has_the_bits_of_one_host(spawn: Spawn, parts: str) -> None:
    size = sum(map(int, parts.split(",")))
    over_hosts = spawn(size, "jax", env=split(parts)).run(digest_of_training, 2)
    assert set(over_hosts) == set(spawn(size, "jax").run(digest_of_training, 1))
