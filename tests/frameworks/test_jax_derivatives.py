"""Derivatives and batches of JAX's collectives, against the same function of all ranks' arrays in
one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="JAX is not installed")

import jax
import jax.numpy as jnp
from rank_cases import begin_jax_wide, make_tests, on_ranks

import farandole as fd
import farandole.jax as fdj


def rows_of(rank: int, columns: int = 2) -> np.ndarray[Any, Any]:
    """As many as ranks, so that they can be cut."""
    return np.random.default_rng(rank).random((fdj.size(), columns)) + 0.5


def everyone() -> Any:
    return jnp.stack([jnp.asarray(rows_of(r)) for r in range(fdj.size())])


OURS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: fdj.allreduce(x, "sum", prescale=2.0, postscale=0.25),
    "mean": lambda x: fdj.allreduce(x),
    "broadcast": lambda x: fdj.broadcast(x, 1),
    "gather": lambda x: fdj.allgather(x),
    "scatter": lambda x: fdj.reducescatter(x),
    "exchange": lambda x: fdj.alltoall(x),
}


def joined(name: str, xs: Any, r: int) -> Any:
    """The result on rank r, from the xs of all ranks."""
    return {
        "sum": lambda: 0.5 * xs.sum(0),
        "mean": lambda: xs.mean(0),
        "broadcast": lambda: xs[1],
        "gather": lambda: xs.reshape(-1, xs.shape[-1]),
        "scatter": lambda: xs.mean(0)[r : r + 1],
        "exchange": lambda: xs[:, r],
    }[name]()


def loss(name: str, x: Any) -> Any:
    return (OURS[name](x**2) ** 3).sum()


def loss_of_all(name: str, xs: Any) -> Any:
    return sum((joined(name, xs**2, r) ** 3).sum() for r in range(fdj.size()))


def near(a: Any, b: Any, what: str) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-10, err_msg=what)


@on_ranks(2, 3)
def tangents_are_those_of_all_ranks_arrays() -> None:
    rank, xs = fdj.rank(), everyone()
    mine, tangents = xs[rank], jnp.sin(xs)
    for name, function in OURS.items():
        right = jax.jvp(lambda xs, name=name: joined(name, xs**2, rank), (xs,), (tangents,))

        def forward(x: Any, t: Any, f: Any = function) -> Any:
            return jax.jvp(lambda x: f(x**2), (x,), (t,))

        for wrap in (lambda f: f, jax.jit):
            near(wrap(forward)(mine, tangents[rank])[1], right[1], name)
        linear = jax.linearize(lambda x, f=function: f(x**2), mine)[1]
        near(linear(tangents[rank]), right[1], f"linearized {name}")


@on_ranks(2, 3)
def second_derivatives_are_those_of_the_sum_of_all_losses() -> None:
    """Every rank moves its array along a vector, in whatever way JAX takes derivatives of them."""
    rank, xs = fdj.rank(), everyone()
    along = jnp.cos(xs)
    for name in OURS:
        of_all = jax.grad(lambda xs, name=name: loss_of_all(name, xs))
        near(jax.jit(jax.grad(lambda x, n=name: loss(n, x)))(xs[rank]), of_all(xs)[rank], name)
        right = jax.jvp(of_all, (xs,), (along,))[1][rank]
        slope = jax.grad(lambda x, n=name: loss(n, x))

        def reverse_over_reverse(x: Any, v: Any, slope: Any = slope) -> Any:
            return jax.grad(lambda x: (slope(x) * v).sum())(x)

        def forward_over_reverse(x: Any, v: Any, slope: Any = slope) -> Any:
            return jax.jvp(slope, (x,), (v,))[1]

        def reverse_over_forward(x: Any, v: Any, n: str = name) -> Any:
            return jax.grad(lambda x: jax.jvp(lambda x: loss(n, x), (x,), (v,))[1])(x)

        for way in (reverse_over_reverse, forward_over_reverse, reverse_over_forward):
            near(jax.jit(way)(xs[rank], along[rank]), right, f"{name}, {way.__name__}")
    near(reverse_over_reverse(xs[rank], along[rank]), right, "outside of programs")


@on_ranks(2, 3)
def second_derivatives_go_through_loops_and_remat() -> None:
    size, rank = fdj.size(), fdj.rank()
    xs = everyone()

    def looped(x: Any) -> Any:
        body = jax.checkpoint(lambda c: fdj.allreduce(jnp.sin(c)))
        return (jax.lax.scan(lambda c, _: (body(c), None), x, None, length=3)[0] ** 2).sum()

    def of_all(xs: Any) -> Any:
        for _ in range(3):
            xs = jnp.broadcast_to(jnp.sin(xs).mean(0), xs.shape)
        return (xs[0] ** 2).sum() * size

    def bend(f: Any) -> Any:
        return jax.jit(jax.grad(lambda x: (jax.grad(f)(x) ** 2).sum()))

    near(jax.jit(jax.grad(looped))(xs[rank]), jax.grad(of_all)(xs)[rank], "slope")
    near(bend(looped)(xs[rank]), bend(of_all)(xs)[rank], "bend")
    forward = jax.jvp(looped, (xs[rank],), (xs[rank],))[1]
    near(forward, jax.jvp(lambda xs: of_all(xs) / size, (xs,), (xs,))[1], "forward")


@on_ranks(2, 3)
def batches_are_one_call_with_an_axis_more() -> None:
    size, rank = fdj.size(), fdj.rank()
    batch = jnp.asarray(np.random.default_rng(5).random((size, 4, size, 2)))  # of every rank
    mine = batch[rank]
    kinds: dict[str, Any] = {**OURS, "max": lambda x: fdj.allreduce(x, "max")}
    for name, function in kinds.items():
        right = jnp.stack(
            [
                batch[:, i].max(0) if name == "max" else joined(name, batch[:, i], rank)
                for i in range(4)
            ]
        )
        for wrap in (lambda f: f, jax.jit):
            near(wrap(jax.vmap(function))(mine), right, name)
            moved = jnp.moveaxis(mine, 0, 1)
            near(wrap(jax.vmap(function, in_axes=1))(moved), right, f"{name}, second axis")
    tree = jax.vmap(lambda a, b: fdj.allreduce([a, b], "sum"), in_axes=(0, None))(mine, mine[0])
    near(tree[0], batch.sum(0), "batched")
    near(tree[1], jnp.broadcast_to(batch[:, 0].sum(0), mine.shape), "the same for all")
    for name in OURS:
        slopes = jax.jit(jax.vmap(jax.grad(lambda x, n=name: loss(n, x))))(mine)
        of_all = jax.grad(lambda b, n=name: sum(loss_of_all(n, b[:, i]) for i in range(4)))(batch)
        near(slopes, of_all[rank], f"gradients of {name} in a batch")
    rows = jax.jit(jax.jacrev(lambda x: fdj.allreduce(x, "sum")[:, 0]))(mine[0])
    assert rows.shape == (size, size, 2)
    near(rows.sum(), size * size, "a Jacobian")


@on_ranks(2)
def what_has_no_derivative_says_so() -> None:
    x = jnp.ones(2)
    for op in ("min", "max", "product"):
        bound = jax.jit(lambda x, op=op: fdj.allreduce(x, op).sum())
        for derivative in (jax.grad(bound), lambda x, b=bound: jax.jvp(b, (x,), (x,))):
            with pytest.raises(fd.InvalidArgument, match=f"'{op}' has no gradient") as caught:
                derivative(x)
            assert "stop_gradient" in str(caught.value)
        still = jax.grad(lambda x, b=bound: (x * b(jax.lax.stop_gradient(x))).sum())(x)
        near(still, np.full(2, 2.0), op)


test_on_ranks = make_tests(__name__, "jax", prepare=begin_jax_wide)
