"""farandole.jax.elastic: pytrees and compiled programs go from one world into the next."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="JAX is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from rank_cases import raises

import elastic_worlds
import farandole as fd
import farandole.jax as fdj
from elastic_worlds import Changes, Worlds
from farandole.jax._kept import Kept
from harness import World, launch

STEPS, SAMPLES, SIDE = 8, 6, 256
GROW = Changes(wanted=True, only_fewer=False)
Spawn = Callable[..., World]


def join(elastic: bool = True) -> None:
    elastic_worlds.begin(elastic)
    fdj.init()


# ---- a training: compiled steps that are given the state away ----


def first(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    w = generator.normal(size=(3, 2)).astype(np.float32)
    return {"layers": [{"w": w, "b": None}], "out": np.ones(2, np.float32)}


def batch(step: int) -> Any:
    x = np.random.default_rng(step).normal(size=(SAMPLES, 3)).astype(np.float32)
    return x, x[:, 0] - x[:, 1]


def loss_of(params: Any, x: Any, y: Any) -> Any:
    return ((jnp.tanh(x @ params["layers"][0]["w"]) @ params["out"] - y) ** 2).mean()


def step_of(optimizer: Any) -> Any:
    def step(params: Any, opt_state: Any, key: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss_of)(params, x, y)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        key, _ = jax.random.split(key)
        return optax.apply_updates(params, updates), opt_state, key

    return jax.jit(step, donate_argnums=(0, 1, 2))


def serial() -> list[Any]:
    optimizer = optax.sgd(0.2, momentum=0.9)
    step, params, key = step_of(optimizer), jax.tree.map(jnp.asarray, first(0)), jax.random.key(0)
    opt_state = optimizer.init(params)
    for number in range(STEPS):
        params, opt_state, key = step(params, opt_state, key, *batch(number))
    return values([params, opt_state, jax.random.key_data(key)])


def values(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def trained(who: int, dies: dict[int, int], hears: dict[int, int]) -> Any:
    """`who`: this process, with parameters of its own; `dies` and `hears`: of which, in which
    step. Sizes of worlds, what was trained, and, by the first one, the same on one rank."""
    join()
    optimizer = fdj.distributed(optax.sgd(0.2, momentum=0.9))
    step, mean = step_of(optimizer), jax.jit(fdj.allreduce)
    params = first(who) if who % 2 else jax.tree.map(jnp.asarray, first(who))
    opt_state = optimizer.init(params)
    state = fdj.elastic.JaxState(
        params=params, opt_state=opt_state, key=jax.random.key(who), step=0, sizes=[]
    )

    @fdj.elastic.run
    def train(state: Any) -> str:
        while state.step < STEPS:
            if dies.get(who) == state.step:
                elastic_worlds.die()
            if hears.get(who) == state.step:
                elastic_worlds.hear(GROW)
            x, y = (rows[fdj.rank() :: fdj.size()] for rows in batch(int(state.step)))
            try:
                state.params, state.opt_state, state.key = step(
                    state.params, state.opt_state, state.key, x, y
                )
            finally:  # its error hides that of the step
                fdj.allreduce(jnp.ones(1), name="outside of programs")
            assert float(mean(jnp.float32(fdj.rank()))) == (fdj.size() - 1) / 2
            state.step = jnp.asarray(state.step) + 1
            state.sizes.append(fdj.size())
            state.commit()
        return "done"

    assert train(state) == "done"
    trees = [state.params, state.opt_state, jax.random.key_data(state.key)]
    return state.sizes, values(trees), serial() if fdj.rank() == 0 else None


def check(ranks: World, left: Sequence[int], sizes: list[int]) -> None:
    ends = [ranks.outcome(who) for who in left]
    assert all(end.error is None for end in ends), [end.trace for end in ends]
    expected = ends[0].value[2]
    for found, mine, _ in (end.value for end in ends):
        assert found == sizes
        for value, first, wanted in zip(mine, ends[0].value[1], expected, strict=True):
            np.testing.assert_array_equal(value, first)
            np.testing.assert_allclose(value, wanted, atol=1e-5)


def test_a_training_goes_on_with_fewer_and_more_ranks(spawn: Spawn) -> None:
    """The rank that has the first parameters is lost, and another one comes."""
    ranks = spawn(4, "jax")
    for who in range(4):
        ranks.start(trained, who, {0: 2}, {1: 4}, ranks=[who])
    worlds = Worlds(ranks)
    worlds.form(0, 1, 2)
    worlds.form(1, 2)
    worlds.form(1, 2, 3)
    check(ranks, (1, 2, 3), [3] * 2 + [2] * 3 + [3] * 3)


def lost_at_the_end(who: int) -> Any:
    """Rank 1 dies in the last step, which nobody has looked at when the function returns."""
    join()

    def add(w: Any, x: Any, z: Any) -> Any:
        y = (x[:, None] * z) @ z
        return w + fdj.allreduce(x) + 0 * y.sum()  # much, for which JAX does not wait

    step = jax.jit(add, donate_argnums=0)
    state = fdj.elastic.JaxState(w=jnp.zeros(SIDE), step=0)

    @fdj.elastic.run
    def train(state: Any) -> None:
        while state.step < 3:
            if who == 1 and state.step == 2:
                elastic_worlds.die()
            state.w = step(state.w, jnp.ones(SIDE), jnp.ones((SIDE, SIDE)))
            state.step += 1
            if state.step < 3:
                state.commit()

    train(state)
    return set(state.w.tolist()), fdj.size()


def test_a_last_step_that_fails_is_taken_again(spawn: Spawn) -> None:
    ranks = spawn(2, "jax")
    for who in range(2):
        ranks.start(lost_at_the_end, who, ranks=[who])
    worlds = Worlds(ranks)
    worlds.form(0, 1)
    worlds.form(0)
    outcome = ranks.outcome(0)
    assert outcome.error is None, outcome.trace
    assert outcome.value == ({3.0}, 1)


# ---- what a state keeps ----


def begin() -> int:
    jax.config.update("jax_num_cpu_devices", 2)
    join(elastic=False)
    return fdj.rank()


def everything(me: float) -> dict[str, Any]:
    arrays = {
        "b": jnp.full((2,), me, jnp.bfloat16),
        "weak": jnp.full((3,), me),
        "count": jnp.asarray(int(me)),
        "none": None,
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.split(jax.random.key(int(me)), 2),
        "complex": jnp.full((1,), me * 1j),
        "bool": jnp.asarray([me == 1]),
        "committed": jax.device_put(np.full(1 << 18, me, np.float32), jax.devices()[0]),
        "host": np.asfortranarray(np.full((2, 3), me)),
        "words": f"of {me}",
        "number": me,
    }
    optimizer = optax.chain(optax.clip(1.0), optax.adam(0.1))
    return {
        "params": arrays,
        "opt_state": optimizer.init({"w": jnp.full((2,), me)}),
        "history": [me] * int(me),
        "odd": {1: me, "b": {2, 3}},
        "order": np.array(["a", me], object),
    }


def told(values: dict[str, Any]) -> list[str]:
    """All about it that a state is to keep."""
    found = [str(jax.tree.structure(values["params"]))]
    for leaf in jax.tree.leaves([values["params"], values["opt_state"], values["order"]]):
        about = repr(type(leaf))
        if isinstance(leaf, jax.Array):
            key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            data: Any = jax.random.key_data(leaf) if key else leaf
            about += f"{leaf.dtype} {data.weak_type} {data.committed} {data.sharding} "
            leaf = np.asarray(data)
        found.append(f"{about}{getattr(leaf, 'dtype', '')} {leaf!r}")
    return [*found, repr(values["history"]), repr(values["odd"])]


def now(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in everything(1.0)}


def states_keep_what_they_are_given() -> None:
    me = float(begin() + 1)
    given = everything(me)
    state = fdj.elastic.JaxState(**given)
    assert told(now(state)) == told(everything(me))
    give_away(state)
    state.restore()
    assert told(now(state)) == told(everything(me))
    give_away(state)  # what was restored, too
    state.restore()
    assert told(now(state)) == told(everything(me))
    state.sync()
    assert told(now(state)) == told(everything(1.0))
    give_away(state)
    state.restore()
    assert told(now(state)) == told(everything(1.0))


def give_away(state: Any) -> None:
    """Every array of JAX, to programs that write to them; others are changed in place."""
    state.params["host"][:] = 9
    state.order[0] = "z"
    state.history.append(9)
    leaves = jax.tree.leaves([state.params, state.opt_state])
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    double = jax.jit(lambda trees: jax.tree.map(doubled, trees), donate_argnums=0)
    jax.block_until_ready(double(arrays))
    assert arrays[0].is_deleted()


def doubled(x: Any) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.vmap(jax.random.fold_in, (0, None))(x, 1)
    return ~x if x.dtype == bool else x * 2


def a_commit_that_fails_leaves_the_former_one() -> None:
    begin()
    state = fdj.elastic.JaxState(a=np.zeros(2), step=0, w=jnp.ones(2))
    jax.jit(lambda w: w + 1, donate_argnums=0)(state.w)
    state.a[:] = 5
    state.step = 1
    with raises(fd.InvalidArgument, "w of the state has been deleted", "donate_argnums"):
        state.commit()
    state.restore()
    assert (state.a.tolist(), state.step, state.w.tolist()) == ([0, 0], 0, [1, 1])
    state.step = jax.new_ref(jnp.ones(1))
    with raises(fd.InvalidArgument, "step of the state is a jax.Ref"):
        state.save()
    with raises(fd.InvalidArgument, "x['y'] of the state is a jax.Ref"):
        fdj.elastic.JaxState(x={"y": jax.new_ref(jnp.ones(1))})
    with raises(fd.InvalidArgument, "x['y'] of the state is", "cannot be copied"):
        fdj.elastic.JaxState(x={"y": (i for i in range(3)), "z": jnp.ones(1)})
    with raises(fd.InvalidArgument, "x of the state is being traced"):
        jax.jit(lambda x: fdj.elastic.JaxState(x=x))(1.0)
    with raises(fd.InvalidArgument, "save is a name of its own"):
        fdj.elastic.JaxState(save=1)
    for what in (3, {"w": jnp.ones(1)}):
        with raises(fd.InvalidArgument, "a state of hvd.elastic"):
            fdj.elastic.run(lambda state: state)(what)
    with raises(fd.InvalidArgument, "3 is no function"):
        fdj.elastic.run(3)  # type: ignore[arg-type]


def trees_that_differ_are_told() -> None:
    rank = begin()
    w = {"w": jnp.ones((2, 3))}
    for mine, theirs, words in (
        (w, {"w": jnp.ones((3, 2))}, ["0: p['w'] float32[2, 3]; rank 1: p['w'] float32[3, 2]"]),
        (w, {"w": jnp.ones((2, 3), jnp.float16)}, ["rank 1: p['w'] float16[2, 3]"]),
        (w, {**w, "x": 1}, ["number 1: rank 0: nothing; rank 1: p['x']"]),
        (w, None, ["rank 0: p['w'] float32[2, 3]; rank 1: nothing"]),
        (None, w, ["rank 1: p['w'] float32[2, 3]"]),
        (w, {"w": jax.random.key(1)}, ["rank 1: p['w'] key<fry>[]"]),
        (jnp.ones(()), jnp.ones((), jnp.int32), ["rank 0: p float32[]; rank 1: p int32[]"]),
    ):  # fmt: skip
        state = fdj.elastic.JaxState(p=[mine, theirs][rank], step=rank)
        with raises(fd.Mismatch, *words, "trees of the same arrays"):
            state.sync()
        assert state.step == rank
    with raises(fd.Mismatch, "names of a JaxState", "rank 0: p; rank 1: q"):
        fdj.elastic.JaxState(**{"pq"[rank]: 1}).sync()
    state = fdj.elastic.JaxState(p=w, f=None)
    if rank == 1:
        state.p = {"w": jax.new_ref(jnp.ones(1))}
    with raises(fd.InvalidArgument, "p['w'] of the state is a jax.Ref"):
        state.sync()
    # A number of Python's is no other thing than an array that is one.
    for mine, theirs in ((jnp.asarray(3), 0), (3, jnp.asarray(0.0)), (np.float64(3), jnp.ones(()))):
        state = fdj.elastic.JaxState(p=[mine, theirs][rank])
        state.sync()
        assert type(state.p) is type(mine)
        assert state.p == 3


def arrays_on_several_devices_stay_there() -> None:
    me = begin() + 1.0
    first, second = jax.devices()
    mesh = jax.make_mesh((2,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    given = {
        "cut": jax.device_put(jnp.full((4,), me), sharding),
        "keys": jax.device_put(jax.random.split(jax.random.key(int(me)), 2), sharding),
        "both": jax.device_put(jnp.full((4,), me), NamedSharding(mesh, PartitionSpec())),
        "second": jax.device_put(jnp.full((4,), me), second),
    }
    with jax.default_device(second):
        given["nowhere"] = jnp.full((4,), me)
    places = {name: (leaf.sharding, leaf.committed) for name, leaf in given.items()}
    state = fdj.elastic.JaxState(p=dict(given))
    for change in (state.restore, state.sync):
        change()
        there = {name: (leaf.sharding, leaf.committed) for name, leaf in state.p.items()}
        assert there == places, (there, places)
    assert np.asarray(state.p["cut"]).tolist() == [1.0] * 4
    assert first in state.p["both"].devices()
    memory = np.zeros(128, np.uint8)
    begins = -memory.ctypes.data % 64  # as JAX would have it
    value = memory[begins : begins + 8].view(np.float32)
    for where in (NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec()), None):
        made = Kept(value, sharding=where).array()
        assert not np.shares_memory(np.asarray(made), value)


@pytest.mark.parametrize(
    "case",
    [
        states_keep_what_they_are_given,
        a_commit_that_fails_leaves_the_former_one,
        trees_that_differ_are_told,
        arrays_on_several_devices_stay_there,
    ],
)
def test_on_two_ranks(case: Callable[[], None], spawn: Spawn) -> None:
    ranks = spawn(2, "jax")
    ranks.start(case)
    Worlds(ranks).form(0, 1)
    for outcome in ranks.outcomes():
        assert outcome.error is None, outcome.trace


# ---- under the launcher ----

PROGRAM = """if True:
    import os, jax, jax.numpy as jnp, numpy as np, farandole.jax as fdj
    fdj.init()
    samples = np.arange(12, dtype=np.float32)

    @jax.jit
    def alone(w, step): return w * 0.5 + jnp.sum(samples * (step + 1))

    def step(w, step, mine): return w * 0.5 + fdj.allreduce(jnp.sum(mine * (step + 1)), "sum")
    step = jax.jit(step, donate_argnums=0)
    state = fdj.elastic.JaxState(w=jnp.zeros(2), step=0)

    @fdj.elastic.run
    def train(state):
        worker = os.environ["FARANDOLE_WORKER"]
        while state.step < 6 or fdj.size() < 2:
            if worker == "0" and state.step == 2: os.kill(os.getpid(), 9)
            state.w = step(state.w, state.step, samples[fdj.rank()::fdj.size()])
            state.step += 1
            state.commit()

    train(state)
    w = jnp.zeros(2)
    for number in range(state.step): w = alone(w, number)
    print("done", state.step, np.allclose(state.w, w, rtol=1e-5), flush=True)
"""


def test_a_job_loses_a_rank_and_takes_in_another(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(PROGRAM)
    quick = ("--blacklist-cooldown-range", "0.1", "1", "--no-prefix")
    env = {"JAX_PLATFORMS": "cpu"}
    done = launch(2, [sys.executable, str(program)], "--min-np=1", *quick, **env)
    ends = [line.split() for line in done.stdout.splitlines() if line.startswith("done")]
    assert len(ends) == 2, done.stdout + done.stderr
    assert ends[0] == ends[1] == ["done", ends[0][1], "True"], done.stdout
    worlds = [line for line in done.stderr.splitlines() if line.startswith("farandole: world")]
    assert worlds[0].endswith(": workers 0, 1"), worlds
    assert worlds[-1].endswith(": workers 1, 2"), worlds
