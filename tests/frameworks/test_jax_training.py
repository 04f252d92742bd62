"""Training with optax over ranks against the same training on one rank with the joined batch."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax", minversion="0.10", reason="JAX is not installed")
pytest.importorskip("optax", reason="optax is not installed")

import jax
import jax.numpy as jnp
import optax
from rank_cases import begin_jax, make_tests, on_ranks

import elastic_worlds
import farandole as fd
import farandole.jax as fdj
from elastic_worlds import Worlds
from farandole.jax._verdicts import verdict_first
from harness import World, listen, tell

STEPS, BATCH = 4, 24


def network() -> dict[str, Any]:
    """Nothing of JAX: compiling the many small programs of its random numbers takes seconds."""
    generator = np.random.default_rng(1)
    params: dict[str, Any] = {}
    for i, shape in enumerate([(6, 16), (16, 16), (16, 1)]):
        weights = generator.standard_normal(shape) * 0.4
        params[f"layer_{i}"] = {
            "w": weights.astype(np.float32),
            "b": np.zeros(shape[1], np.float32),
        }
    return params


def loss_of(params: dict[str, Any], x: Any, y: Any) -> Any:
    for name in ("layer_0", "layer_1"):
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
    return ((x @ params["layer_2"]["w"] + params["layer_2"]["b"] - y) ** 2).mean()


def batches() -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    generator = np.random.default_rng(0)
    xs = generator.standard_normal((STEPS, BATCH, 6)).astype(np.float32)
    return [(x, x[:, :1] * x[:, 1:2]) for x in xs]


def train(optimizer: Any, part: Callable[[Any], Any]) -> tuple[dict[str, Any], list[float]]:
    params = network()
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    losses = []
    for x, y in batches():
        params, state, loss = step(params, state, part(x), part(y))
        losses.append(float(loss))
    return params, losses


def mine(rows: Any) -> Any:
    return rows[fdj.rank() :: fdj.size()]


def difference(a: Any, b: Any) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(np.abs(np.asarray(x) - np.asarray(y)).max()) for x, y in pairs)


def require_equal_ranks(params: Any) -> None:
    rows = fdj.allgather_object([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)])
    assert all(row == rows[0] for row in rows)


OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-2),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9)),
}


@on_ranks(2, 4)
def training_equals_one_rank_with_the_joined_batch() -> None:
    for name, make in OPTIMIZERS.items():
        serial, _ = train(make(), lambda rows: rows)
        ours, _ = train(fdj.distributed(make()), mine)
        assert difference(serial, ours) < 2e-5, name
        require_equal_ranks(ours)


def train_by_loss(optimizer: Any, part: Callable[[Any], Any]) -> Any:
    """An optimizer that is told the loss, and makes smaller steps where it grows."""
    params = network()
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    for x, y in batches():
        params, state = step(params, state, part(x), part(y))
    return params, state[1].scale


@on_ranks(2)
def an_optimizer_that_is_told_the_loss_is_told_that_of_all_ranks() -> None:
    def make() -> Any:
        return optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))

    serial, scale = train_by_loss(make(), lambda rows: rows)
    ours, our_scale = train_by_loss(fdj.distributed(make()), mine)
    assert 0 < float(scale) == float(our_scale) < 1
    assert difference(serial, ours) < 2e-5
    require_equal_ranks(ours)


@on_ranks(2)
def gradients_of_single_samples_and_numbers_that_jax_cuts_are_refused() -> None:
    params, (x, y) = network(), batches()[0]
    optimizer = fdj.distributed(optax.sgd(0.1))
    state = optimizer.init(params)
    each = jax.vmap(jax.grad(loss_of), (None, 0, 0))(params, mine(x), mine(y))
    with pytest.raises(fd.InvalidArgument, match=r"has shape \(\d+, .*gradients of single samples"):
        optimizer.update(each, state, params)
    with pytest.raises(fd.InvalidArgument, match="numbers beyond those of int32"):
        fdj.broadcast_parameters({"seen": np.array([2**40 + 5])})


def train_several(optimizer: Any, part: Callable[[Any], Any]) -> Any:
    """Models beside each other, in one step."""
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf, 2 * leaf]), network())
    state = jax.vmap(optimizer.init)(params)

    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(loss_of)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    program = jax.jit(jax.vmap(step, in_axes=(0, 0, None, None)))
    for x, y in batches():
        params, state = program(params, state, part(x), part(y))
    return params


def train_to_learn(optimizer: Any, part: Callable[[Any], Any], compiled: bool) -> Any:
    """By the derivative of two steps (MAML: Finn, Abbeel and Levine 2017)."""

    def after_two_steps(params: Any, x: Any, y: Any) -> Any:
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(jax.grad(loss_of)(params, x, y), state, params)
            params = optax.apply_updates(params, updates)
        return loss_of(params, x, y)

    slope = jax.grad(after_two_steps)
    if compiled:
        slope = jax.jit(slope)
    params = network()
    for x, y in batches():
        slopes = fdj.allreduce(slope(params, part(x), part(y)), "mean")
        params = jax.tree.map(lambda leaf, by: leaf - 0.1 * by, params, slopes)
    return params


@on_ranks(2)
def steps_that_are_differentiated_train_as_on_one_rank() -> None:
    for compiled in (False, True):
        serial = train_to_learn(optax.sgd(0.1), lambda rows: rows, compiled)
        ours = train_to_learn(fdj.distributed(optax.sgd(0.1)), mine, compiled)
        assert difference(serial, ours) < 2e-5
        require_equal_ranks(ours)


@on_ranks(2)
def models_beside_each_other_train_as_on_one_rank() -> None:
    serial = train_several(optax.adam(1e-2), lambda rows: rows)
    ours = train_several(fdj.distributed(optax.adam(1e-2)), mine)
    assert difference(serial, ours) < 2e-5
    require_equal_ranks(ours)


@on_ranks(2)
def buckets_do_not_change_bits_and_compression_little() -> None:
    whole, _ = train(fdj.distributed(optax.sgd(0.1)), mine)
    single, _ = train(fdj.distributed(optax.sgd(0.1), bucket_bytes=0), mine)
    assert difference(whole, single) == 0
    packed, _ = train(fdj.distributed(optax.sgd(0.1), compression=fdj.Compression.bf16), mine)
    assert 0 < difference(whole, packed) < 2e-2
    require_equal_ranks(packed)


@on_ranks(2)
def several_passes_accumulate_and_reduce_once() -> None:
    serial, _ = train(optax.MultiSteps(optax.sgd(0.1), 2), lambda rows: rows)
    ours, _ = train(optax.MultiSteps(fdj.distributed(optax.sgd(0.1)), 2), mine)
    assert difference(serial, ours) < 2e-5
    require_equal_ranks(ours)


@on_ranks(2)
def gradients_reduce_outside_programs_too() -> None:
    x, y = batches()[0]
    gradients = jax.jit(jax.grad(loss_of))(network(), mine(x), mine(y))
    whole = jax.jit(jax.grad(loss_of))(network(), x, y)
    assert difference(fdj.allreduce_gradients(gradients), whole) < 1e-6
    half = fdj.allreduce_gradients(gradients, op="sum", compression=fdj.Compression.fp16)
    assert difference(jax.tree.map(lambda g: g / fdj.size(), half), whole) < 1e-2
    assert fdj.allreduce_gradients({"a": None}) == {"a": None}
    with pytest.raises(fd.InvalidArgument, match="op 'max'"):
        fdj.distributed(optax.sgd(0.1), op="max")
    with pytest.raises(fd.InvalidArgument, match="compression is 'fp16'"):
        fdj.distributed(optax.sgd(0.1), compression="fp16")


test_on_ranks = make_tests(__name__, "jax")


# ---- faults ----


def train_until_told_otherwise() -> str:
    """Steps for ever; returns what ended them."""
    begin_jax()
    step = jax.jit(lambda x: fdj.allreduce(x * 0.5, "sum", name="weights"))
    x = step(jnp.ones(1000))
    tell("running")
    try:
        while True:
            x = step(x)
            x.block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        found = fdj.last_error()
        assert isinstance(found, fd.PeerLost)
        assert found.rank == 1
        return str(error)


def test_the_survivors_of_a_killed_rank_name_it(
    spawn: Callable[..., World],
) -> None:
    world = spawn(3, "jax")
    world.start(train_until_told_otherwise)
    assert world.hear_all() == ["running"] * 3
    world.signal(1, signal.SIGKILL)
    for rank in (0, 2):
        outcome = world.outcome(rank)
        assert outcome.error is None, outcome.trace
        assert "PeerLost: rank 1" in outcome.value, outcome.value
        assert "'weights float32[1000]'" in outcome.value


def start_steps_until_one_fails() -> str:
    """Many are in flight, and fail one behind the other."""
    begin_jax()

    @jax.jit
    def step(x: Any) -> Any:
        for _ in range(8):
            x = fdj.allreduce(jnp.tanh(x @ x), name="weights")
        return x

    x = step(jnp.ones((300, 300)))
    x.block_until_ready()
    tell("running")
    if fdj.rank() == 1:
        listen()  # for ever

    def go_on(x: Any) -> None:
        for i in range(1000):
            x = step(x)
            if i == 4:
                tell("steps are in flight")
        x.block_until_ready()

    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        go_on(x)
    return str(caught.value)


def test_the_verdict_is_the_first_that_a_user_reads(spawn: Callable[..., World]) -> None:
    world = spawn(2, "jax")
    world.start(start_steps_until_one_fails)
    assert world.hear_all() == ["running"] * 2
    assert world.hear(0) == "steps are in flight"
    world.signal(1, signal.SIGKILL)
    outcome = world.outcome(0)
    assert outcome.error is None, outcome.trace
    first = outcome.value.splitlines()[0]
    assert re.match("(UNAVAILABLE: )?PeerLost: rank 1 ", first), outcome.value
    assert "SIGKILL" in first
    assert outcome.value.count("Error dispatching computation") <= 1, outcome.value


def test_programs_that_fail_one_behind_the_other_are_told_after_the_verdict() -> None:
    verdict = "UNAVAILABLE: PeerLost: rank 1 is gone\n  evidence: seen"
    dispatching = "Error dispatching computation: "
    told = verdict_first("INTERNAL: " + dispatching * 30 + verdict)
    assert told.startswith(verdict + "\n")
    assert told.count("Error dispatching computation") == 1
    assert verdict_first(verdict) == verdict
    assert verdict_first("INTERNAL: " + dispatching * 2 + "no memory") == (
        "INTERNAL: " + dispatching * 2 + "no memory"
    )


def leave_with_a_step_in_flight() -> None:
    fd.init()  # not farandole.jax.init(): what that makes besides is made inside a program, too
    step = jax.jit(lambda x: fdj.allreduce(x, "sum"))
    results = [step(jnp.full(200_000, float(i))) for i in range(5)]
    fdj.shutdown()  # other ranks have the same steps in flight
    assert [float(r[0]) for r in results] == [2.0 * i for i in range(5)]


def test_leaving_waits_for_programs_in_flight(spawn: Callable[..., World]) -> None:
    world = spawn(2, "jax")
    world.start(leave_with_a_step_in_flight)
    for outcome in world.outcomes():
        assert outcome.error is None, outcome.trace


def in_worlds(present: Sequence[int]) -> list[tuple[float, float]]:
    """Results of the same programs in each world: a mean, and the gradient of a broadcast."""
    elastic_worlds.begin(elastic=False)
    fdj.init()
    mean = jax.jit(lambda x: fdj.allreduce(x))
    gradient = jax.jit(jax.grad(lambda x: fdj.broadcast(x, root=0)))
    found = []
    for number in present:
        if number != present[0]:
            fd.shutdown()
            fd.init() if number == 1 else fdj.init()
        x = jnp.float32(fdj.rank())
        found.append((float(mean(x)), float(gradient(x))))
    fdj.shutdown()
    return found


def test_programs_go_on_in_worlds_of_other_sizes(spawn: Callable[..., World]) -> None:
    ranks = spawn(4, "jax")
    worlds = Worlds(ranks)
    members = [[0, 1, 2], [1, 2], [2, 1], [1, 2, 3]]
    for rank in range(4):
        present = [number for number, those in enumerate(members) if rank in those]
        ranks.start(in_worlds, present, ranks=[rank])
    for those in members:
        worlds.form(*those)
    for rank, outcome in enumerate(ranks.outcomes()):
        assert outcome.error is None, outcome.trace
        there = [those for those in members if rank in those]
        for those, (mean, gradient) in zip(there, outcome.value, strict=True):
            assert mean == (len(those) - 1) / 2
            assert gradient == (len(those) if those[0] == rank else 0)
