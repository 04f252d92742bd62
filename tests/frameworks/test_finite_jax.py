"""A gradient that is NaN or infinite on one rank, by JAX: in programs and outside."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("jax", minversion="0.10", reason="JAX is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rank_cases import make_tests, numerics, on_ranks, told

import farandole as fd
import farandole.jax as fdj


def make(name: str, *, program: bool) -> Callable[[float], Any]:
    """A step, in which a gradient has that number."""
    optimizer = fdj.distributed(optax.sgd(0.5), name=name, bucket_bytes=16)
    params = {"a": jnp.ones(8), "b": jnp.ones((2, 3), jnp.bfloat16), "c": jnp.ones(4)}
    state = optimizer.init(params)

    def step(number: Any) -> Any:
        gradients = {**params, "b": params["b"].at[1, 1].set(number)}
        return optimizer.update(gradients, state, params)[0]

    chosen: Any = jax.jit(step) if program else step
    return lambda number: jax.block_until_ready(chosen(jnp.bfloat16(number)))


def mine(bad: float) -> float:
    return bad if fdj.rank() == fdj.size() - 1 else 1.0


@on_ranks(2, 3)
def it_is_told_once_and_counted() -> None:
    for program in False, True:
        for bad, word in (math.nan, "NaN"), (-math.inf, "infinite"):
            step = make(f"model {program} {word}", program=program)
            before = fd.nonfinite_steps()
            assert np.array_equal(step(1.0)["a"], np.full(8, -0.5))
            step(1.0)
            assert fd.nonfinite_steps() == before
            with told(fdj.rank() in (0, fdj.size() - 1), jax.effects_barrier) as texts:
                for _ in range(3):
                    step(mine(bad))
            assert fd.nonfinite_steps() == before + 3
            for text in texts:
                assert f"rank {fdj.size() - 1} has a gradient that is {word}: '['b']'" in text


@on_ranks(2)
def it_is_an_error_on_every_rank() -> None:
    with numerics("error"):
        for program in False, True:
            step = make(f"wrong model {program}", program=program)
            step(1.0)
            with pytest.raises((fd.NumericsError, jax.errors.JaxRuntimeError)) as caught:
                step(mine(math.nan))
            assert "rank 1 has a gradient that is NaN: '['b']'" in str(caught.value)
    fdj.recover()


@on_ranks(2)
def nobody_looks_where_it_is_off() -> None:
    with numerics("off"), told(0):
        for program in False, True:
            before = fd.nonfinite_steps()
            make(f"any model {program}", program=program)(mine(math.nan))
            assert fd.nonfinite_steps() == before


@on_ranks(2)
def a_step_that_optax_skips_is_none() -> None:
    params = {"a": jnp.ones(8)}
    inner = optax.chain(optax.apply_if_finite(optax.sgd(0.5), 3), optax.scale(1.0))
    optimizer = fdj.distributed(inner, name="skips")
    state = optimizer.init(params)
    before = fd.nonfinite_steps()
    with told(0):
        for update in optimizer.update, jax.jit(optimizer.update):
            given = {"a": params["a"] * mine(math.inf)}
            assert not jax.block_until_ready(update(given, state, params)[0]["a"]).any()
    assert fd.nonfinite_steps() == before


@on_ranks(2)
def halves_overflow_as_their_scaled_losses_do() -> None:
    for asked in False, True:
        with numerics("warn") if asked else contextlib.nullcontext(), told(int(asked)):
            reduce = jax.jit(lambda g: fdj.allreduce_gradients(g, name=f"halves {asked}"))  # noqa: B023
            jax.block_until_ready(reduce(jnp.full(8, mine(math.inf), jnp.float16)))


@on_ranks(2)
def numbers_that_are_finite_are_no_fault() -> None:
    """Though their sums are not, in float32 or at all; opposite infinities are no NaN."""
    with numerics("error"), told(0), jax.enable_x64(True):
        for dtype, number in (jnp.float64, 1e300), (jnp.float64, 1.7e308), (jnp.float32, 3e38):
            given = jnp.full(4, number * (1 - fdj.rank()), dtype)
            for wrap in (lambda f: f, jax.jit):
                reduce = wrap(lambda g, name=f"{number}": fdj.allreduce_gradients(g, name=name))
                assert jnp.isfinite(reduce(given)).all()
    with told(1) as texts:
        step = jax.jit(lambda g: fdj.allreduce_gradients(g, name="opposite"))
        bad = mine(math.inf)
        step(jnp.array([bad, -bad])).block_until_ready()
        jax.effects_barrier()
    assert all("infinite" in text for text in texts)


@on_ranks(2)
def programs_with_derivatives_and_batches_of_a_step_run() -> None:
    def loss(x: Any, name: str) -> Any:
        return fdj.allreduce_gradients({"a": x**2}, name=name)["a"].sum()

    def looped(x: Any, name: str) -> Any:
        body = jax.checkpoint(lambda c, _: (fdj.allreduce_gradients(c, name=name), None))
        return jax.lax.scan(body, x**2, None, length=2)[0].sum()

    for program, wrap in enumerate((lambda f: f, jax.jit)):
        for form, function in enumerate((loss, jax.checkpoint(loss, static_argnums=1), looped)):
            name = f"slope {program} {form}"
            slope = wrap(jax.grad(lambda x, f=function, name=name: f(x, name)))
            before = fd.nonfinite_steps()
            assert slope(jnp.ones(3)).tolist() == [2.0] * 3
            jax.block_until_ready(slope(jnp.full(3, mine(math.nan))))
            assert fd.nonfinite_steps() > before
        batch = wrap(jax.vmap(lambda x, name=f"batch {program}": loss(x, name)))
        before = fd.nonfinite_steps()
        assert batch(jnp.ones((4, 3))).tolist() == [3.0] * 4
        jax.block_until_ready(batch(jnp.ones((4, 3)).at[1, 1].set(mine(math.nan))))
        assert fd.nonfinite_steps() == before + 1


@on_ranks(2)
def a_program_that_looks_is_one_that_jax_keeps() -> None:
    optimizer = fdj.distributed(optax.sgd(0.5), name="kept")
    params = {"a": jnp.ones(8)}
    state = optimizer.init(params)
    text = jax.jit(optimizer.update).lower(params, state).as_text()
    assert "farandole_gradients" in text
    assert "callback" not in text


test_on_ranks = make_tests(__name__, "jax")
