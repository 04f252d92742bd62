"""Parameters that start different, or come to be: named on every rank, in programs and outside."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="JAX is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp
import optax
from rank_cases import checking_weights, make_tests, on_ranks

import farandole as fd
import farandole.jax as fdj
from farandole.common._weights import compares

Params = dict[str, Any]


def make(seed: int = 3) -> Params:
    noise = np.random.default_rng(seed)
    return {
        "bias": noise.standard_normal(3).astype(np.float16),
        "kernel": noise.standard_normal((2, 3)).astype(np.float32),
        "steps": np.int32(4),
    }


def one_bit_off(params: Params) -> Params:
    bits = params["kernel"].view(np.int32).copy()
    bits[1, 2] ^= 1
    return params | {"kernel": bits.view(np.float32)}


def gradients_of(params: Params) -> Params:
    return {name: jnp.ones_like(value) for name, value in params.items()}


Step = Callable[[Params], Params]


def step_with(optimizer: Any) -> Step:
    state = optimizer.init(make())

    def step(params: Params) -> Params:
        updates, _ = optimizer.update(gradients_of(params), state, params)
        return optax.apply_updates(params, updates)

    return step


def steps_of(**options: Any) -> dict[str, Step]:
    def make_step() -> Step:
        return step_with(fdj.distributed(optax.sgd(0.25), **options))

    return {"outside": make_step(), "inside": jax.jit(make_step())}


def refused(call: Callable[[], Any]) -> str:
    """Returns the verdict, which is the same on all ranks. They go on afterwards."""
    with pytest.raises((fd.Mismatch, jax.errors.JaxRuntimeError)) as caught:
        jax.block_until_ready(call())
    error = caught.value
    if not isinstance(error, fd.Mismatch):
        known = fdj.last_error()
        assert isinstance(known, fd.Mismatch)
        assert known.verdict in str(error).partition("\n")[0]
        error = known
        fdj.recover()
    assert len(set(fdj.allgather_object(error.verdict))) == 1
    assert "fdj.broadcast_parameters(params, root=0)" in error.advice
    return str(error.verdict)


@on_ranks(2)
def programs_compare_in_the_same_steps_as_python() -> None:
    steps = np.array([*range(50), 1999, 2000, 2001, 4000], np.uint32)
    for every in (1, 2, 3, 7, 49, 2000, math.inf):
        program = jax.jit(functools.partial(compares, period=every))
        assert program(steps).tolist() == [compares(int(each), every) for each in steps]


@on_ranks(2, 3)
def a_forgotten_broadcast_is_named_in_the_first_step() -> None:
    for kind, step in steps_of().items():
        told = refused(lambda: step(make(seed=fdj.rank())))  # noqa: B023
        assert told.startswith("ranks start from different weights: '['bias']' has"), (kind, told)
        assert told.endswith("2 of 3 weights differ")


@on_ranks(2)
def the_line_that_it_advises_is_the_cure() -> None:
    for step in steps_of().values():
        params: Any = make(seed=fdj.rank())
        refused(lambda: step(params))  # noqa: B023
        params = fdj.broadcast_parameters(params, root=0)
        for _ in range(3):
            params = step(params)
        jax.block_until_ready(params)


@on_ranks(2, 3)
def one_bit_on_the_last_rank_is_enough() -> None:
    for kind, step in steps_of().items():
        params = make()
        if fdj.rank() == fdj.size() - 1:
            params = one_bit_off(params)
        told = refused(lambda: step(params))  # noqa: B023
        assert "'['kernel']' has checksum" in told, (kind, told)
        assert told.endswith("1 of 3 weights differs")


@on_ranks(2)
def later_steps_are_compared_every_k_steps_alone() -> None:
    for when in ("first", "3"):
        with checking_weights(when):
            for kind, step in steps_of().items():
                params: Any = make()
                for _ in range(5):
                    params = step(params)
                if fdj.rank() == 1:
                    params = one_bit_off({k: np.asarray(v) for k, v in params.items()})
                params = step(params)
                if when == "first":
                    jax.block_until_ready(step(params))
                    continue
                told = refused(lambda: step(params))  # noqa: B023
                assert "before step 4, and differ before step 7: '['kernel']'" in told, (kind, told)


@on_ranks(2)
def ranks_that_update_apart_are_found_in_the_second_step() -> None:
    for kind, step in steps_of().items():
        params: Any = step(make())
        if fdj.rank() == 1:
            params = one_bit_off({k: np.asarray(v) for k, v in params.items()})
        told = refused(lambda: step(params))  # noqa: B023
        assert "before step 1, and differ before step 2: '['kernel']'" in told, (kind, told)


@on_ranks(2)
def steps_inside_one_program_count() -> None:
    with checking_weights("3"):
        step = step_with(fdj.distributed(optax.sgd(0.25)))

        def steps(params: Params) -> Any:
            def body(i: Any, params: Params) -> Params:
                off = jnp.where(i == 4, fdj.rank(), 0)
                return step(params | {"kernel": params["kernel"] + off})

            return jax.lax.fori_loop(0, 9, body, params)

        told = refused(lambda: jax.jit(steps)(jax.tree.map(jnp.asarray, make())))
        assert "differ before step 7" in told


@on_ranks(2)
def nothing_is_compared_where_it_is_off_or_there_are_no_parameters() -> None:
    with checking_weights("off"):
        for step in steps_of().values():
            jax.block_until_ready(step(make(seed=fdj.rank())))
    optimizer = fdj.distributed(optax.sgd(0.25))
    state = optimizer.init(make())
    updates, _ = jax.jit(optimizer.update)(gradients_of(make()), state)
    jax.block_until_ready(updates)


@on_ranks(2)
def a_program_that_compares_nothing_has_nothing_of_it() -> None:
    def program() -> str:
        return str(jax.jit(step_with(fdj.distributed(optax.sgd(0.25)))).lower(make()).as_text())

    assert "farandole_checksums" in program()
    with checking_weights("off"):
        assert "farandole_checksums" not in program()


@on_ranks(3)
def a_process_set_is_compared_by_itself() -> None:
    pair = fdj.add_process_set([0, 2])
    for step in steps_of(process_set=pair).values():
        jax.block_until_ready(step(make(seed=fdj.rank() % 2)))  # equal in the set alone
    for step in steps_of(process_set=pair).values():
        params = make(seed=fdj.rank())
        if not pair.included():
            jax.block_until_ready(step(params))
            continue
        with pytest.raises((fd.Mismatch, jax.errors.JaxRuntimeError), match="on rank 2"):
            jax.block_until_ready(step(params))
    fdj.recover()
    fd.barrier()
    fdj.remove_process_set(pair)


test_on_ranks = make_tests(__name__, "jax")
