"""Process sets in JAX's programs: their ranks alone take part, beside others and the world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="JAX is not installed")

import jax
import jax.numpy as jnp
from rank_cases import begin_jax_wide, make_tests, on_ranks, refused

import farandole as fd
import farandole.jax as fdj
from farandole.common._process_set import own_group_of


def same(a: Any, b: Any, what: str = "") -> None:
    assert np.array_equal(np.asarray(a), np.asarray(b)), (what, a, b)


def fails(call: Callable[[], Any], words: str) -> None:
    """When the program runs; another order begins after it."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=words):
        jax.block_until_ready(call())
    fdj.recover()


class Set:
    """Registered as long as the block lasts."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks

    def __enter__(self) -> fdj.ProcessSet:
        self.registered = fdj.add_process_set(self.ranks)
        return self.registered

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:  # others would wait
            fdj.remove_process_set(self.registered)


def block(rank: int, rows: int) -> np.ndarray[Any, Any]:
    return np.arange(rows * 2.0).reshape(rows, 2) + 100 * rank


# ---- every function ----


@on_ranks(3, 4)
def every_collective_is_among_the_ranks_of_its_set() -> None:
    for ranks in ([0, 1], [0, 2]):
        with Set(*ranks) as ours:
            if not ours.included():
                continue
            place, blocks = ours.rank(), [block(r, 4) for r in ranks]
            x = jnp.asarray(blocks[place])

            def move(x: Any, ours: Any = ours, root: int = ranks[1]) -> dict[str, Any]:
                fdj.barrier(process_set=ours)
                return {
                    "mean": fdj.allreduce(x, process_set=ours),
                    "grouped": fdj.grouped_allreduce([x, x[0]], "sum", process_set=ours)[1],
                    "root": fdj.broadcast(x, root, process_set=ours),
                    "gathered": fdj.allgather(x, process_set=ours),
                    "uneven": fdj.allgather(
                        x[:3] if ours.rank() else x[:1], [1, 3], process_set=ours
                    ),
                    "scattered": fdj.reducescatter(x, "sum", process_set=ours),
                    "exchanged": fdj.alltoall(x, process_set=ours),
                }

            for wrap in (lambda f: f, jax.jit):
                moved = wrap(move)(x)
                same(moved["mean"], sum(blocks) / 2)
                same(moved["grouped"], sum(blocks)[0])
                same(moved["root"], blocks[1])
                same(moved["gathered"], np.concatenate(blocks))
                same(moved["uneven"], np.concatenate([blocks[0][:1], blocks[1][:3]]))
                same(moved["scattered"], sum(blocks)[2 * place : 2 * place + 2])
                same(moved["exchanged"], np.concatenate([b[2 * place :][:2] for b in blocks]))
            rows, received = fdj.alltoall(x, [1, 3], process_set=ours)
            same(rows, np.concatenate([b[:1] if place == 0 else b[1:] for b in blocks]))
            assert received == [1 + 2 * place] * 2


@on_ranks(3)
def parameters_and_objects_of_a_set_are_its_own() -> None:
    rank = fdj.rank()
    with Set(0, 2) as ends:
        if rank == 1:
            return
        tree = {"w": jnp.full(2, float(rank)), "key": jax.random.key(rank), "step": rank}
        got = fdj.broadcast_parameters(tree, 2, process_set=ends)
        same(got["w"], [2.0, 2.0])
        assert (got["step"], got["key"]) == (2, jax.random.key(2))
        assert fdj.broadcast_object(rank, 2, process_set=ends) == 2
        assert fdj.allgather_object(rank, process_set=ends) == [0, 2]
        with pytest.raises(fd.Mismatch, match=r"rank 0: 'the array' float64\[1\]; rank 2: 'the ar"):
            fdj.broadcast_parameters(jnp.ones(1 + rank), process_set=ends)
        refused(
            lambda: fdj.broadcast_parameters("x" if rank == 2 else 1.0, process_set=ends),
            "on rank 2: 'the array' is a str",
        )


# ---- several sets ----


@on_ranks(3)
def overlapping_sets_and_the_world_share_a_program() -> None:
    rank = fdj.rank()
    with Set(0, 1) as low, Set(1, 2) as high:

        @jax.jit
        def program(x: Any) -> dict[str, Any]:
            results = {"world": fdj.allreduce(x, "sum")}
            for name, each in (("low", low), ("high", high)):
                if each.included():
                    results[name] = fdj.allreduce(x, "sum", process_set=each)
                    x = x + 0 * results[name]
                results[f"after {name}"] = fdj.allreduce(x, "max")
            return results

        right = {"world": 6.0, "low": 3.0, "high": 5.0, "after low": 3.0, "after high": 3.0}
        for n in (3, 50_000):
            for step in range(10):
                results = program(jnp.full(n, (rank + 1.0) * step))
                assert ("low" in results, "high" in results) == (rank < 2, rank > 0)
                for name, result in results.items():
                    same(result, np.full(n, right[name] * step), name)


@on_ranks(4)
def sets_without_common_ranks_do_not_wait_for_each_other() -> None:
    rank = fdj.rank()
    with Set(0, 1) as low, Set(2, 3) as high:
        mine = low if rank < 2 else high
        looped = jax.jit(
            lambda x: jax.lax.scan(
                lambda c, _: (fdj.allreduce(c, process_set=mine), None),
                x,
                None,
                length=5 + rank // 2,
            )[0]
        )
        same(looped(jnp.full(3, float(rank))), np.full(3, 0.5 if rank < 2 else 2.5))


# ---- gradients ----


@on_ranks(3)
def gradients_are_those_of_the_set_s_losses() -> None:
    with Set(0, 2) as ends:
        if fdj.rank() == 1:
            return
        place = ends.rank()
        w = jnp.asarray([3.0, 5.0])[place]
        x = jnp.ones(4) * (1 + place)

        def slope(function: Callable[[Any], Any], jit: bool) -> Any:
            gradient = jax.grad(lambda x: (w * function(x)).sum())
            return (jax.jit(gradient) if jit else gradient)(x)

        for jit in (False, True):
            same(slope(lambda x: fdj.allreduce(x, process_set=ends), jit), np.full(4, 4.0))
            same(slope(lambda x: fdj.allreduce(x, "sum", process_set=ends), jit), np.full(4, 8.0))
            same(slope(lambda x: fdj.allgather(x, process_set=ends), jit), np.full(4, 8.0))
            root = slope(lambda x: fdj.broadcast(x, 2, process_set=ends), jit)
            same(root, np.full(4, 8.0 * place))  # zero elsewhere
            scattered = slope(lambda x: fdj.reducescatter(x, process_set=ends), jit)
            same(scattered, [1.5, 1.5, 2.5, 2.5])
            exchanged = slope(lambda x: fdj.alltoall(x, process_set=ends), jit)
            same(exchanged, [3.0, 3.0, 5.0, 5.0])


@on_ranks(3)
def an_optimizer_of_a_set_steps_by_itself_elsewhere() -> None:
    optax = pytest.importorskip("optax", reason="optax is not installed")
    rank = fdj.rank()
    with Set(0, 2) as ends:
        optimizer = fdj.distributed(optax.sgd(1.0), process_set=ends)
        params = jnp.zeros(3)
        state = optimizer.init(params)
        moves, _ = jax.jit(optimizer.update)(jnp.full(3, rank + 1.0), state, params)
        same(moves, np.full(3, -2.0))  # 1 and 3, or 2 alone
        reduce = lambda: fdj.allreduce_gradients({"w": jnp.full(3, rank + 1.0)}, process_set=ends)  # noqa: E731
        if rank == 1:
            refused(reduce, "rank 1 is not in ProcessSet([0, 2]")
        else:
            same(reduce()["w"], np.full(3, 2.0))
    refused(lambda: fdj.distributed(optax.sgd(1.0), process_set=ends), "not registered")


# ---- refusals ----


@on_ranks(3)
def what_is_not_of_the_set_is_refused() -> None:
    x, unknown = jnp.ones(3), fdj.ProcessSet([0, 1])
    functions = {
        "allreduce": lambda s: fdj.allreduce(x, process_set=s),
        "grouped": lambda s: fdj.grouped_allreduce([x], process_set=s),
        "broadcast": lambda s: fdj.broadcast(x, process_set=s),
        "allgather": lambda s: fdj.allgather(x, process_set=s),
        "uneven": lambda s: fdj.allgather(x, [3, 3], process_set=s),
        "reducescatter": lambda s: fdj.reducescatter(x, process_set=s),
        "alltoall": lambda s: fdj.alltoall(x, process_set=s),
        "splits": lambda s: fdj.alltoall(x, [1, 2], process_set=s),
        "barrier": lambda s: fdj.barrier(process_set=s),
        "parameters": lambda s: fdj.broadcast_parameters(x, process_set=s),
        "object": lambda s: fdj.broadcast_object(1, process_set=s),
        "objects": lambda s: fdj.allgather_object(1, process_set=s),
        "gradients": lambda s: fdj.allreduce_gradients(x, process_set=s),
    }
    with Set(0, 1) as low:
        for call in functions.values():
            refused(lambda call=call: call(unknown), "is not registered; call add_process_set()")
            refused(lambda call=call: call([0, 1]), "process_set=[0, 1] is no ProcessSet")
            if fdj.rank() == 2:
                refused(lambda call=call: call(low), "rank 2 is not in ProcessSet([0, 1]")
        if fdj.rank() < 2:
            refused(lambda: fdj.broadcast(x, 2, process_set=low), "root 2 is not a rank", "[0, 1]")
            refused(lambda: fdj.alltoall(x, process_set=low), "3 rows, which 2 ranks do not divide")
            refused(lambda: fdj.allgather(x, [3] * 3, process_set=low), "for each of 2 ranks")
    same(fdj.allreduce(x, "sum"), np.full(3, 3.0))  # all went on


@on_ranks(3)
def a_difference_within_a_set_is_its_members_affair() -> None:
    rank = fdj.rank()
    with Set(0, 2) as ends:
        if rank != 1:
            x = jnp.ones(2 + rank)
            fails(
                lambda: fdj.allreduce(x, process_set=ends),
                "Mismatch: ranks disagree on the count .* 2 on rank 0; 4 on rank 2",
            )
            assert isinstance(fdj.last_error(), fd.Mismatch)
        same(fdj.allreduce(jnp.ones(2), "sum"), [3.0, 3.0])
        if rank != 1:
            same(fdj.allreduce(jnp.ones(2), "sum", process_set=ends), [2.0, 2.0])


@on_ranks(3)
def calls_of_several_operations_are_refused_whole() -> None:
    """Trees that differ where their names cannot tell: each large array is an operation."""
    members = fdj.rank() != 1
    with Set(0, 2) as ends:
        for process_set in (ends, fdj.global_process_set):
            if not members and process_set is ends:
                continue
            odd = int(fdj.rank() == 2)
            for arrays in ([500_000] * (2 + odd), [500_000, 100 + odd], [9 + odd, 10 - odd]):
                flat = [jnp.ones(n) for n in arrays]

                def exchange(*xs: Any, within: Any = process_set) -> Any:
                    return fdj.grouped_allreduce(list(xs), "sum", name="same", process_set=within)

                call = jax.jit(exchange)
                fails(lambda call=call, xs=flat: call(*xs), "Mismatch")
                size = 2 if process_set is ends else 3
                total = fdj.allreduce(jnp.ones(500_000), "sum", process_set=process_set)
                assert (np.asarray(total) == size).all()


@on_ranks(3)
def a_set_that_has_failed_is_made_anew_in_the_same_world() -> None:
    members = fdj.rank() != 1
    with Set(0, 2) as ends:
        if members:
            own_group_of(ends).abort("by the test")
            fails(lambda: fdj.allreduce(1.0, process_set=ends), "Aborted")
        same(fdj.allreduce(jnp.ones(2), "sum"), [3.0, 3.0])
    with Set(0, 2) as ends:
        if members:
            same(fdj.allreduce(jnp.ones(2), "sum", process_set=ends), [2.0, 2.0])


# ---- sets that come and go ----

GONE = r"process set \[0, 2\], which is not registered"


@on_ranks(3)
def a_program_of_a_removed_set_says_so() -> None:
    members, x = fdj.rank() != 1, jnp.ones(100_000)
    total = jax.jit(lambda x: fdj.allreduce(x, "sum", process_set=ends))
    with Set(0, 2) as ends:
        in_flight = [total(i * x) for i in range(5)] if members else []
    for i, result in enumerate(in_flight):
        same(result, 2 * i * x)
    with Set(0, 1):  # as many ranks
        if members:
            fails(lambda: total(x), GONE)
            refused(lambda: fdj.allreduce(x, process_set=ends), "not registered")
    with Set(0, 2) as ends:
        if members:
            same(total(x), 2 * x)
    same(fdj.allreduce(x, "sum"), 3 * x)


@on_ranks(3)
def a_program_finds_its_set_in_a_later_world() -> None:
    members, x = fdj.rank() != 1, jnp.ones(100_000)
    total = jax.jit(lambda x: fdj.allreduce(x, "sum", process_set=ends))

    def world_of_ends() -> fdj.ProcessSet:
        fdj.shutdown()
        fdj.init()
        return fdj.add_process_set([0, 2])

    ends = world_of_ends()
    if members:
        same(total(x), 2 * x)
    world_of_ends()
    refused(lambda: fdj.allreduce(x, process_set=ends), "not registered")
    if members:
        same(total(x), 2 * x)
        assert total._cache_size() == 1  # nothing was traced again
    fdj.shutdown()
    if members:
        with pytest.raises(jax.errors.JaxRuntimeError, match="NotInitialized"):
            jax.block_until_ready(total(x))
    ends = world_of_ends()
    if members:
        same(total(x), 2 * x)
    fdj.shutdown()
    fdj.init()
    if members:
        fails(lambda: total(x), GONE)


test_on_ranks = make_tests(__name__, "jax", prepare=begin_jax_wide)
