"""The collectives in JAX's programs against numpy: values, gradients, order, refusals."""

from __future__ import annotations

import doctest
import importlib
import threading
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="JAX is not installed")

import jax
import jax.numpy as jnp
import ml_dtypes
from rank_cases import begin_jax_wide, make_tests, on_ranks, refused

import farandole as fd
import farandole.jax as fdj
from wrong_arguments import problems_in

DTYPES = [
    "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64",
]  # fmt: skip
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1000,), (40_001,)]


def prepare() -> None:
    jax.config.update("jax_num_cpu_devices", 2)  # one that collectives run on, and another
    begin_jax_wide()


def dtype_named(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def numbers(shape: tuple[int, ...], dtype: str, rank: int | None = None) -> np.ndarray[Any, Any]:
    """Small integers: every sum and product of four is exact in every dtype."""
    generator = np.random.default_rng(17 * (fdj.rank() if rank is None else rank) + 1)
    return generator.integers(0, 3, shape).astype(dtype_named(dtype))


def everything(rank: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
    return {f"{d} {s}": numbers(s, d, rank) for d in DTYPES for s in SHAPES}


def same(a: Any, b: Any, what: str = "") -> None:
    a, b = np.asarray(a), np.asarray(b)
    assert a.dtype == b.dtype, (what, a.dtype, b.dtype)
    assert a.shape == b.shape, (what, a.shape, b.shape)
    assert a.tobytes() == b.tobytes(), (what, a, b)


# ---- values ----


@on_ranks(1, 3)
def allreduce_is_right_for_every_dtype_and_op() -> None:
    mine, ranks = everything(), [everything(r) for r in range(fdj.size())]
    for op, fold in {
        "sum": np.sum, "min": np.min, "max": np.max, "product": np.prod, "mean": None
    }.items():  # fmt: skip
        results = jax.jit(lambda tree, op=op: fdj.allreduce(tree, op))(mine)
        for key, result in results.items():
            whole = np.stack([theirs[key] for theirs in ranks])
            if fold is not None:
                right = fold(whole.astype(np.float64), axis=0).astype(whole.dtype)
                same(result, right, f"{op} of {key}")
            else:
                right = fd.all_reduce(mine[key], op="mean")
                same(result, right, f"mean of {key}")
        for key, value in mine.items():  # nobody wrote into what was given
            same(value, numbers(value.shape, key.split()[0]), key)


@on_ranks(1, 3)
def factors_booleans_and_numbers_work_at_once_and_in_programs() -> None:
    total = sum(range(1, fdj.size() + 1))
    x = jnp.full(5, fdj.rank() + 1.0)
    for wrap in (lambda f: f, jax.jit):
        scaled = wrap(lambda x: fdj.allreduce(x, "sum", prescale=2.0, postscale=0.5))(x)
        same(scaled, np.full(5, float(total)))
        true = wrap(lambda x: fdj.allreduce(x, "max"))(jnp.asarray([fdj.rank() == 0, False]))
        same(true, np.array([True, False]))
    assert float(fdj.allreduce(fdj.rank() + 1.0)) == total / fdj.size()
    assert float(fdj.allreduce({"loss": 1, "hits": 2.5}, "sum")["hits"]) == 2.5 * fdj.size()
    listed = fdj.grouped_allreduce([x, [x, 1]], "sum")
    same(listed[1][0], np.full(5, float(total)))
    assert fdj.allreduce({}, "sum") == {}


@on_ranks(1, 3)
def rows_move_as_numpy_moves_them() -> None:
    size, rank = fdj.size(), fdj.rank()
    for dtype in ("float32", "int8", "bfloat16"):
        blocks = [numbers((2 * size, 3), dtype, r) for r in range(size)]
        mine = blocks[rank]

        @jax.jit
        def move(x: Any) -> dict[str, Any]:
            return {
                "gathered": fdj.allgather(x),
                "number": fdj.allgather(x.sum().astype(jnp.int32)),
                "scattered": fdj.reducescatter(x, "sum"),
                "exchanged": fdj.alltoall(x),
                "last": fdj.broadcast(x, fdj.size() - 1),
                "several": fdj.broadcast({"a": x, "b": x[:1]}, 0),
            }

        moved = move(mine)
        same(moved["gathered"], np.concatenate(blocks))
        assert moved["number"].shape == (size,)
        same(moved["scattered"], sum(blocks)[2 * rank : 2 * rank + 2].astype(mine.dtype))
        same(moved["exchanged"], np.concatenate([b[2 * rank : 2 * rank + 2] for b in blocks]))
        same(moved["last"], blocks[-1])
        same(moved["several"]["b"], blocks[0][:1])
    rows, received = fdj.alltoall(jnp.arange(size) + 10 * rank, splits=[1] * size)
    assert rows.tolist() == [rank + 10 * r for r in range(size)]
    assert received == [1] * size
    fdj.barrier()


@on_ranks(1, 3)
def differently_many_rows_are_gathered() -> None:
    size, rank = fdj.size(), fdj.rank()
    for counts in ([3, 0, 5][:size], [0] * size, [1] * size):
        for dtype in ("float32", "int8", "bool"):
            blocks = [numbers((n, 2), "int8", r).astype(dtype) for r, n in enumerate(counts)]
            gather = jax.jit(lambda x, counts=counts: fdj.allgather({"x": x}, counts)["x"])
            same(gather(blocks[rank]), np.concatenate(blocks))

    counts = [2, 1, 3][:size]
    weights = jnp.arange(1.0, sum(counts) + 1)
    # The derivative of the sum of all ranks' losses: every rank adds the weight of each row.
    slope = jax.grad(lambda x: (fdj.allgather(x, counts) * weights).sum())(jnp.ones(counts[rank]))
    begin = sum(counts[:rank])
    same(slope, size * np.asarray(weights)[begin : begin + counts[rank]])
    refused(lambda: fdj.allgather(jnp.ones(counts[rank] + 1), counts), "rows, and counts says")
    refused(lambda: fdj.allgather(jnp.ones(2), [2] * (size + 1)), f"for each of {size} ranks")


@on_ranks(2)
def counts_that_differ_between_ranks_are_an_error_on_all() -> None:
    counts = [2, 1] if fdj.rank() == 0 else [2, 2]
    with pytest.raises(Exception, match=r"Mismatch: ranks disagree on the name .*\[2, 1\] rows"):
        jax.block_until_ready(fdj.allgather(jnp.ones(2), counts))
    fdj.recover()


@on_ranks(3)
def many_arrays_of_all_sizes_travel_in_one_call() -> None:
    generator = np.random.default_rng(5)
    counts = [int(n) for n in generator.integers(0, 3000, 200)] + [32_768, 1_000_003, 65_536]
    trees = [
        [np.random.default_rng(100 * r + i).standard_normal(n).astype(np.float32)
         for i, n in enumerate(counts)]
        for r in range(fdj.size())
    ]  # fmt: skip
    results = jax.jit(lambda tree: fdj.allreduce(tree, "mean"))(trees[fdj.rank()])
    for i, result in enumerate(results):
        same(result, fd.all_reduce(trees[fdj.rank()][i], op="mean"), f"array {i}")


@on_ranks(3)
def donated_and_kept_arrays_are_right() -> None:
    def step(x: Any, y: Any) -> tuple[Any, Any]:
        return fdj.allreduce(x, "sum") + y, fdj.allreduce(y, "sum")

    donating = jax.jit(step, donate_argnums=(0, 1))
    for n in (3, 100_000):
        x = jnp.full(n, float(fdj.rank()))
        z = x * 2
        first, second = donating(x + 0.0, z + 0.0)
        third, fourth = jax.jit(step)(x, z)
        same(first, third)
        same(second, fourth)
        same(x, np.full(n, float(fdj.rank())))


# ---- order ----


@on_ranks(1, 3)
def calls_behind_unequal_work_keep_their_order() -> None:
    """16 calls of different sizes whose operands become ready in any order, 40 times."""
    count, size = 16, fdj.size()
    work = [jnp.full((64 + 48 * (i * 7 % 5),) * 2, 0.01, jnp.float32) for i in range(count)]

    @jax.jit
    def program(work: list[Any]) -> list[Any]:
        results = []
        for i in range(count):
            y = work[i]
            for _ in range((i + 3 * fdj.rank()) * 5 % 4 + 1):
                y = jnp.tanh(y @ work[i])
            results.append(fdj.allreduce(y.sum() * 0 + jnp.full((i + 1,), float(i)), "sum"))
        return results

    wrong = 0
    for _ in range(40):
        results = program(work)
        wrong += sum(not np.array_equal(r, np.full(i + 1, size * i)) for i, r in enumerate(results))
    assert wrong == 0


@on_ranks(3)
def programs_keep_the_order_in_which_they_are_started() -> None:
    """Equal calls of programs that share no data, the first of which has more to do before."""
    heavy = jax.jit(lambda w, x: fdj.allreduce(x + 0 * (w @ w @ w @ w).sum(), "sum", name="x"))
    light = jax.jit(lambda x: fdj.allreduce(x, "sum", name="x"))
    w = jnp.ones((400, 400))
    for i in range(20):
        a, b = heavy(w, jnp.full(4, float(i))), light(jnp.full(4, -1.0))
        same(a, np.full(4, float(i * fdj.size())))
        same(b, np.full(4, -1.0 * fdj.size()))


@on_ranks(3)
def control_flow_and_nested_programs_work() -> None:
    size = fdj.size()

    def total(x: Any) -> Any:
        return fdj.allreduce(x, "sum", name="x")

    x = jnp.arange(4.0)
    inner = jax.jit(lambda x: total(x).sum())
    cases = {
        "scan": (lambda x: jax.lax.scan(lambda c, _: (total(c), None), x, None, length=3)[0]),
        "fori": (lambda x: jax.lax.fori_loop(0, 3, lambda _, c: total(c), x)),
        "while": (lambda x: jax.lax.while_loop(lambda c: c.sum() < 6 * size**3, total, x)),
    }
    for name, program in cases.items():
        same(jax.jit(program)(x), np.arange(4.0) * size**3, name)
    chosen = jax.jit(lambda x: jax.lax.cond(x.sum() > 0, total, lambda x: x, x))
    same(chosen(x), np.arange(4.0) * size)
    same(chosen(-x), -np.arange(4.0))
    twice = jax.jit(lambda x: inner(x) + inner(x + 1))
    assert float(twice(x)) == 16 * size
    assert float(jax.jit(lambda x: inner(x) * 2)(x)) == 12 * size
    compiled = jax.jit(total).lower(x).compile()
    same(compiled(x), np.arange(4.0) * size)
    shape = jax.eval_shape(total, x)  # runs nothing
    assert shape.shape == (4,)


@on_ranks(3)
def programs_without_jit_work() -> None:
    size = fdj.size()
    with jax.disable_jit():
        same(fdj.allreduce(jnp.ones(3), "sum"), np.full(3, float(size)))
        total = jax.jit(lambda x: fdj.allreduce({"x": x}, "sum")["x"].sum())
        assert float(total(jnp.ones(3))) == 3 * size
        same(jax.grad(total)(jnp.ones(3)), np.full(3, float(size)))
    same(fdj.allreduce(jnp.ones(3), "sum"), np.full(3, float(size)))


@on_ranks(3)
def numpy_s_collectives_mix_with_programs() -> None:
    step = jax.jit(lambda x: fdj.allreduce(x, "sum"))
    for i in range(10):
        in_flight = step(jnp.full(50_000, 1.0))
        assert float(fd.all_reduce(np.float64(i))) == i * fdj.size()
        same(in_flight, np.full(50_000, float(fdj.size())))


# ---- gradients ----


@on_ranks(3)
def gradients_are_those_of_the_sum_of_all_losses() -> None:
    """Against the same function of all ranks' arrays, joined and differentiated by JAX alone."""
    size, rank = fdj.size(), fdj.rank()
    weights = [jnp.asarray(np.random.default_rng(r).random((2 * size, 2))) for r in range(size)]
    inputs = jnp.stack([jnp.asarray(numbers((2 * size, 2), "float64", r)) for r in range(size)])

    def parts(rows: Any, r: int) -> Any:
        return rows[2 * r : 2 * r + 2]

    joined = {  # what rank r gets of all ranks' xs
        "sum": lambda xs, _: 0.5 * (2 * xs).sum(0),
        "mean": lambda xs, _: xs.mean(0),
        "broadcast": lambda xs, _: xs[1],
        "gather": lambda xs, _: xs.reshape(-1, 2),
        "scatter": lambda xs, r: parts(xs.mean(0), r),
        "exchange": lambda xs, r: jnp.concatenate([parts(x, r) for x in xs]),
    }
    ours = {
        "sum": lambda x: fdj.allreduce(x, "sum", prescale=2.0, postscale=0.5),
        "mean": lambda x: fdj.allreduce(x),
        "broadcast": lambda x: fdj.broadcast(x, 1),
        "gather": fdj.allgather,
        "scatter": fdj.reducescatter,
        "exchange": fdj.alltoall,
    }

    def loss(result: Any, r: int) -> Any:
        w = jnp.concatenate([weights[r]] * size)[: result.shape[0]]
        return (w * result**2).sum()

    for name, function in ours.items():
        mine = jax.jit(jax.grad(lambda x, f=function: loss(f(x), rank)))(inputs[rank])
        of_all = jax.grad(
            lambda xs, f=joined[name]: sum(loss(f(xs, r), r) for r in range(size))
        )(inputs)  # fmt: skip
        np.testing.assert_allclose(mine, of_all[rank], rtol=1e-12, err_msg=name)


@on_ranks(3)
def gradients_go_through_loops_remat_and_trees() -> None:
    size = fdj.size()

    def total(x: Any) -> Any:
        return fdj.allreduce(x, "sum")

    def looped(x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (total(c), None), x, None, length=3)[0].sum()

    x = jnp.arange(4.0)
    for wrap in (lambda f: f, jax.jit):
        same(wrap(jax.grad(looped))(x), np.full(4, float(size**6)) / size**3)
        kept = wrap(jax.grad(jax.checkpoint(lambda x: (total(x) ** 2).sum())))(x)
        same(kept, 2.0 * size**2 * np.arange(4.0))
        tree = wrap(jax.grad(lambda t: fdj.allreduce(t, "sum")["a"].sum(), allow_int=True))(
            {"a": x, "n": jnp.arange(2), "unused": x}
        )
        same(tree["a"], np.full(4, float(size)))
        same(tree["unused"], np.zeros(4))


@on_ranks(2)
def complex_numbers_are_summed_and_broadcast() -> None:
    me = fdj.rank()
    for wrap in (lambda f: f, jax.jit):
        x = {"a": jnp.full((2, 1), 1 + 2j * me), "b": jnp.complex64(me), "c": jnp.ones(2)}
        mean = wrap(fdj.allreduce)(x)
        same(mean["a"], np.full((2, 1), 1 + 1j))
        same(mean["b"], np.complex64(0.5))
        same(wrap(lambda t: fdj.broadcast(t, 1))(x)["a"], np.full((2, 1), 1 + 2j))
        gradient = wrap(jax.grad(lambda z: fdj.allreduce(z, "sum").imag.sum()))(x["a"])
        same(gradient, np.full((2, 1), complex(0, -2)))
    shared = fdj.broadcast_parameters(x, root=1)
    same(shared["a"], np.full((2, 1), 1 + 2j))
    same(shared["b"], np.complex64(1))


# ---- refusals ----


@on_ranks(1, 3)
def bad_input_is_refused_while_tracing() -> None:
    x = jnp.ones((fdj.size() + 1, 2))
    refused(lambda: fdj.allreduce(x.astype(jnp.complex64), "max"), "complex64", "float32")
    refused(lambda: fdj.allgather(x.astype(jnp.complex64)), "complex64", "float32")
    refused(lambda: jax.jit(fdj.allreduce)({"a": {"b": x.astype(jnp.int4)}}), "['a']['b']", "int4")
    refused(lambda: fdj.allreduce(jax.random.key(0)), "key<")
    refused(lambda: fdj.allreduce(x > 0), "booleans")
    refused(lambda: fdj.allreduce("text"), "str")
    refused(lambda: fdj.allreduce(x, "average"), "'average'", "mean")
    refused(lambda: fdj.allreduce(x, name=3), "name=3")
    refused(lambda: fdj.broadcast(x, fdj.size()), "not a rank")
    refused(lambda: fdj.reducescatter(jnp.float32(1)), "no dimension")
    refused(lambda: fdj.reducescatter(x, "max"), "'max'")
    refused(lambda: jax.jit(lambda x: fdj.alltoall(x, splits=[1]))(x), "splits", "jit")
    refused(lambda: jax.jit(fdj.broadcast_parameters)(x), "traced")
    refused(lambda: fdj.grouped_allreduce(x), "list")
    refused(lambda: jax.grad(lambda x: fdj.allreduce(x, "max").sum())(x), "'max'", "no gradient")
    if fdj.size() > 1:
        refused(lambda: fdj.alltoall(x), "rows", "do not divide")
    same(fdj.allreduce(x, "max"), np.ones((fdj.size() + 1, 2)))  # all went on


@on_ranks(1)
def examples_in_docstrings_work() -> None:
    import optax

    known = {"fdj": fdj, "jnp": jnp, "optax": optax}
    for name in ("_order", "ops", "functions", "optimizer", "elastic"):
        module = importlib.import_module(f"farandole.jax.{name}")
        results = doctest.testmod(module, extraglobs=known)
        assert results.failed == 0, name
        assert results.attempted > 0, name


@on_ranks(1)
def other_devices_are_refused() -> None:
    original = jax.default_backend
    try:
        jax.default_backend = lambda: "tpu"
        refused(fdj.init, "tpu", "JAX_PLATFORMS=cpu")
    finally:
        jax.default_backend = original


@on_ranks(2)
def several_devices_are_refused() -> None:
    first, second = jax.devices()
    mesh = jax.sharding.Mesh(np.array([first, second]), ("data",))
    halves = jax.sharding.PartitionSpec("data")
    x = jnp.ones((2, 3))
    for wrap in (lambda f: f, jax.jit):
        mapped = wrap(jax.shard_map(fdj.allreduce, mesh=mesh, in_specs=halves, out_specs=halves))
        words = ("all_reduce", "shard_map (axis data)", "one rank per device")
        refused(lambda mapped=mapped: mapped(x), *words)
    refused(lambda: jax.pmap(lambda x: fdj.allreduce(x, name="p"), axis_name="i")(x), "'p float64")
    refused(lambda: jax.pmap(lambda _: fdj.broadcast(np.ones(2)))(x), "inside pmap")
    elsewhere = jax.device_put(x, second)
    refused(lambda: fdj.allreduce({"a": elsewhere}), "['a'] is on cpu:1", "cpu:0", "devices()[0]")
    sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, halves))
    refused(lambda: fdj.allgather(sharded), "is on cpu:0, cpu:1", "device_put")
    same(fdj.allreduce(jax.device_put(elsewhere, first), "sum"), np.full((2, 3), 2.0))


@on_ranks(1)
def without_init_nothing_is_traced() -> None:
    fdj.shutdown()
    with pytest.raises(fd.NotInitialized):
        fdj.allreduce(jnp.ones(1))
    fdj.init()
    assert float(fdj.allreduce(1.0)) == 1.0


# ---- disagreement ----


@on_ranks(3)
def ranks_that_disagree_get_mismatch_and_recover() -> None:
    rank = fdj.rank()
    programs = {
        "name": lambda x: fdj.allreduce(x, name="mine" if rank else "yours"),
        "shape": lambda x: fdj.allreduce(x[: 3 - (rank == 1)], name="shape"),
        "layout": lambda x: fdj.allreduce(x.reshape((2, 2) if rank else (4, 1)), name="layout"),
        "op": lambda x: fdj.allreduce(x, "sum" if rank else "max", name="op"),
        "kind": lambda x: fdj.allreduce(x) if rank else fdj.broadcast(x),
        "tree": lambda x: fdj.allreduce({"a": x, ("b" if rank else "c"): x}, name="tree"),
        "a tree of one": lambda x: fdj.allreduce({"b" if rank else "c": x}, name="tree"),
    }
    for what, program in programs.items():
        with pytest.raises(jax.errors.JaxRuntimeError, match="Mismatch: ranks disagree") as caught:
            jax.block_until_ready(jax.jit(program)(jnp.ones(4)))
        error = fdj.last_error()
        assert isinstance(error, fd.Mismatch), what
        assert error.verdict in str(caught.value)
        assert sorted(r for ranks in error.values.values() for r in ranks) == list(
            range(fdj.size())
        )
        with pytest.raises((jax.errors.JaxRuntimeError, fd.InvalidArgument)):  # until recover()
            jax.block_until_ready(fdj.allreduce(jnp.ones(4)))
        fdj.recover()
        same(jax.jit(lambda x: fdj.allreduce(x, "sum"))(jnp.ones(4)), np.full(4, float(fdj.size())))


def summed(x: Any) -> Any:
    return fdj.allreduce(x, "sum")


@on_ranks(2)
def programs_that_ranks_run_in_another_order_are_a_mismatch() -> None:
    """Their collectives are alike in all but where they stand."""
    x = jnp.ones(4)

    def first(x: Any) -> Any:
        return fdj.allreduce(x, "sum")

    def second(x: Any) -> Any:
        return fdj.allreduce(x, "sum")

    def third(x: Any) -> Any:
        return summed(x)

    def fourth(x: Any) -> Any:
        return summed(x)

    def fifth(x: Any) -> Any:
        return fdj.allreduce_gradients({"w": x})["w"]

    def sixth(x: Any) -> Any:
        return fdj.allreduce_gradients({"w": x})["w"]

    pairs: list[tuple[Any, Any, list[str]]] = [
        (first, second, ["in first", "in second", "test_jax_ops.py:"]),
        (third, fourth, ["in summed", "of jit_third", "of jit_fourth"]),
        (jax.grad(lambda x: third(x).sum()), fourth, ["_lambda", "of jit_fourth"]),
        (fifth, sixth, ["gradients, bucket 0", "in fifth", "in sixth"]),
        (fdj.allreduce, lambda x: fdj.allreduce(x), ["as call 1 of jit_allreduce", "_lambda"]),
    ]
    for one, other, words in pairs:
        programs = [jax.jit(one), jax.jit(other)]
        if fdj.rank() == 1:
            programs.reverse()
        with pytest.raises(jax.errors.JaxRuntimeError, match="Mismatch: ranks disagree") as caught:
            jax.block_until_ready([program(x) for program in programs])
        for word in words:
            assert word in str(caught.value), (word, caught.value)
        fdj.recover()


@on_ranks(2)
def a_place_is_of_the_program_and_not_of_who_calls_it() -> None:
    step = jax.jit(summed)
    whole = jax.jit(fdj.allreduce)
    x = jnp.full(3, float(fdj.rank()))
    if fdj.rank() == 0:
        first, second = step(x), whole(x)
    else:
        first = step(x)
        second = whole(x)
    same(first, np.ones(3))
    same(second, np.full(3, 0.5))
    if fdj.rank() == 0:  # a name says that two lines are one call
        named = jax.jit(lambda x: fdj.allreduce(x, "sum", name="named"))(x)
    else:
        named = jax.jit(lambda x: fdj.allreduce(x, "sum", name="named"))(x)
    same(named, np.ones(3))
    long = jax.jit(lambda x: fdj.allgather({"a" * 300: x, "b": x}, [3, 3])["b"])
    assert long(x).shape == (6,)


def say_and_wait() -> None:
    fd.send(np.ones(1), 0)
    fd.barrier()


@on_ranks(2)
def another_world_begins_anew_after_a_failure() -> None:
    rank = fdj.rank()
    total = jax.jit(lambda x: fdj.allreduce(x, "sum"))
    tree = {"large": jnp.ones(500_000), "odd": jnp.ones(100 + rank)}
    for late in (False, True):
        same(total(jnp.ones(2)), np.full(2, 2.0))
        if not late:
            with pytest.raises(jax.errors.JaxRuntimeError, match="Mismatch"):
                jax.block_until_ready(jax.jit(fdj.allreduce)(tree))
            fdj.recover()  # all operations of the call were refused together
            same(total(jnp.ones(2)), np.full(2, 2.0))
            if rank == 0:
                fd.recv(np.empty(1), source=1)  # rank 1 has all that went before
                fd.world().abort("by the test")
            else:
                with pytest.raises(fd.Aborted):
                    say_and_wait()
            with pytest.raises(fd.Aborted):
                fdj.recover()
        fdj.shutdown()
        if late:
            with pytest.raises(Exception, match="NotInitialized"):
                jax.block_until_ready(total(jnp.ones(2)))
        fdj.init()
        same(total(jnp.ones(2)), np.full(2, 2.0))
        same(fdj.allreduce(jnp.ones(2), "sum"), np.full(2, 2.0))
    before = total._cache_size()
    fdj.shutdown()
    fdj.init()
    assert total._cache_size() == before > 0  # where nothing has failed, programs stay


# ---- parameters and objects ----


@on_ranks(1, 3)
def parameters_and_objects_of_the_root_are_everyone_s() -> None:
    rank, root = fdj.rank(), fdj.size() - 1

    def tree(seed: int) -> dict[str, Any]:
        return {
            "w": jnp.full((3, 2), float(seed)),
            "half": jnp.full(5, seed, jnp.bfloat16),
            "key": jax.random.key(seed),
            "none": None,
            "step": seed,
            "list": [np.float32(seed), jnp.zeros((0, 4))],
        }

    got, right = fdj.broadcast_parameters(tree(rank), root), tree(root)
    same(got["w"], right["w"])
    same(got["half"], right["half"])
    assert got["key"] == right["key"]
    assert got["step"] == root
    assert got["none"] is None
    assert got["list"][1].shape == (0, 4)
    assert fdj.broadcast_object({"rank": rank}, root) == {"rank": root}
    assert fdj.allgather_object("x" * rank) == ["x" * r for r in range(fdj.size())]
    if fdj.size() > 1:
        with pytest.raises(fd.Mismatch, match=r"\['b'\]' float64\[2\]") as caught:
            fdj.broadcast_parameters({"a": jnp.ones(1), "b": jnp.ones(2 + (rank == 0))})
        assert "float64[3]" in str(caught.value)


@on_ranks(3)
def what_one_rank_cannot_send_is_an_error_on_all() -> None:
    rank = fdj.rank()
    lock = threading.Lock() if rank == 1 else None
    refused(lambda: fdj.broadcast_object(lock, 1), "on rank 1", "lock", "pickled")
    refused(lambda: fdj.allgather_object(lock, name="it"), "'it' on rank 1", "lock")
    for odd, word in (("s", "is a str"), (jnp.ones(2, jnp.int4), "int4")):
        tree = {"a": jnp.ones(2), "b": odd if rank == 1 else jnp.ones(2)}
        refused(lambda tree=tree: fdj.broadcast_parameters(tree), "on rank 1: '['b']'", word)
    refused(lambda: fdj.broadcast_parameters(jnp.ones(2), 3 if rank == 1 else 0), "rank 1: root 3")
    refused(lambda: fdj.broadcast_object(1, "0"), "root '0' is not a rank")
    assert fdj.broadcast_object(lambda x: x + rank)(1) == 1  # by cloudpickle
    same(fdj.broadcast_parameters(jnp.full(2, rank), 2), np.full(2, 2))


@on_ranks(2)
def a_wrong_argument_is_an_error_of_ours() -> None:
    import optax

    right = {
        "tree": jnp.ones(2), "trees": [jnp.ones(2)], "x": jnp.ones(2), "gradients": jnp.ones(2),
        "obj": 1, "optimizer": optax.sgd(0.1), "process_set": lambda: [0], "ranks_or_comm": [0],
    }  # fmt: skip
    problems = problems_in(fdj, right, apart=["init", "shutdown"])
    assert problems == [], "\n".join(problems)
    for wrong in ("2", None, [1.0]):  # a program is compiled when the call has returned
        with pytest.raises(fd.InvalidArgument, match="prescale is"):
            jax.jit(lambda x, wrong=wrong: fdj.allreduce(x, "sum", prescale=wrong))(jnp.ones(2))
    with pytest.raises(fd.InvalidArgument, match=r"allreduce\(\): tree is .* it is an array, or a"):
        fdj.allreduce(2**70)
    assert fdj.allreduce(jnp.ones(2), "sum").tolist() == [2, 2]


test_on_ranks = make_tests(__name__, "jax", prepare=prepare)
