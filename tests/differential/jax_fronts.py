"""JAX programs with optax: by farandole.jax.distributed and by allreduce_gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import programs
from programs import BATCH, STEPS, WIDTH, Front, Program, Result

# ---- models: parameters by name, and a function from (n, WIDTH) to (n, 2) ----

Parameters = dict[str, Any]
Apply = Callable[[Parameters, Any], Any]


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=shape) * 0.5
    return np.asarray(values, np.float32)


def _layers() -> Parameters:
    return {"w": _normal(WIDTH, 6), "b": np.zeros(6, np.float32), "head": _normal(6, 2, seed=1)}


def mlp() -> tuple[Parameters, Apply]:
    import jax.numpy as jnp

    return _layers(), lambda p, x: jnp.tanh(x @ p["w"] + p["b"]) @ p["head"]


def tied() -> tuple[Parameters, Apply]:
    import jax.numpy as jnp

    parameters = {"w": _normal(WIDTH, WIDTH), "head": _normal(WIDTH, 2, seed=1)}
    return parameters, lambda p, x: jnp.tanh(jnp.tanh(x @ p["w"]) @ p["w"].T) @ p["head"]


def stopped() -> tuple[Parameters, Apply]:
    import jax

    parameters, apply = mlp()
    return parameters, lambda p, x: apply(p | {"w": jax.lax.stop_gradient(p["w"])}, x)


def odd() -> tuple[Parameters, Apply]:
    """Parameters of no dimension, without elements, in a tuple, of half the precision, unused."""
    import jax.numpy as jnp

    parameters, apply = mlp()
    odd = {"scale": np.float32(0.7), "empty": np.zeros((0, 3), np.float32),
           "pair": (np.ones(2, np.float32), np.ones((1, 2), np.float32)),
           "unused": np.ones(3, np.float32)}  # fmt: skip

    def all_of(p: Parameters, x: Any) -> Any:
        out = apply(p["body"], x) * p["scale"] + jnp.sum(p["empty"])
        return out * p["pair"][0] + p["pair"][1]

    return odd | {"body": parameters}, all_of


def turned() -> tuple[Parameters, Apply]:
    """With a complex parameter."""
    parameters, apply = mlp()
    turn = (_normal(2, seed=2) + 1j * _normal(2, seed=3)).astype(np.complex64)
    return parameters | {"turn": turn}, lambda p, x: (apply(p, x) * p["turn"]).real


def integer() -> tuple[Parameters, Apply]:
    """With a parameter of whole numbers, which no gradient reaches."""
    parameters, apply = mlp()
    order = np.array([1, 0], np.int32)
    return parameters | {"order": order}, lambda p, x: apply(p, x)[:, p["order"]]


def scanned() -> tuple[Parameters, Apply]:
    """Layers in one array, computed in a loop and again in the backward pass."""
    import jax
    import jax.numpy as jnp

    parameters = {"layers": _normal(3, WIDTH, WIDTH), "head": _normal(WIDTH, 2, seed=1)}

    def apply(p: Parameters, x: Any) -> Any:
        layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
        return jax.lax.scan(layer, x, p["layers"])[0] @ p["head"]

    return parameters, apply


def nested() -> tuple[Parameters, Apply]:
    """Parameters in tuples, lists and dicts, with places where there is none."""
    import jax.numpy as jnp

    body = ({"kernel": _normal(WIDTH, 6), "bias": None}, [None, {"kernel": _normal(6, 6, seed=2)}])
    parameters = {"w": body, "nothing": None, "head": (_normal(6, 2, seed=1), None)}

    def apply(p: Parameters, x: Any) -> Any:
        first, (_, second) = p["w"]
        return jnp.tanh(jnp.tanh(x @ first["kernel"]) @ second["kernel"]) @ p["head"][0]

    return parameters, apply


def attention() -> tuple[Parameters, Apply]:
    import jax
    import jax.numpy as jnp

    parameters = {"w": _normal(3, 2, 4), "gain": np.ones(4, np.float32), "head": _normal(8, 2)}

    def apply(p: Parameters, x: Any) -> Any:
        q, k, v = jnp.einsum("nsi,tio->tnso", x.reshape(-1, 2, 2), p["w"])
        seen = jax.nn.softmax(jnp.einsum("nso,nto->nst", q, k)) @ v
        normal = jax.nn.standardize(seen, epsilon=1e-2) * p["gain"]
        return normal.reshape(-1, 8) @ p["head"]

    return parameters, apply


def recomputed() -> tuple[Parameters, Apply]:
    import jax

    parameters, apply = mlp()
    return parameters, jax.checkpoint(apply, policy=jax.checkpoint_policies.dots_saveable)


def by_own_rule() -> tuple[Parameters, Apply]:
    """With a derivative of the program's own."""
    import jax

    parameters, apply = mlp()
    halved = jax.custom_vjp(lambda w: w)
    halved.defvjp(lambda w: (w, None), lambda _, g: (g * 0.5,))
    return parameters, lambda p, x: apply(p | {"w": halved(p["w"])}, x)


def rows() -> tuple[Parameters, Apply]:
    """Each sample reads rows of a table."""
    parameters = {"w": _normal(5, 3), "head": _normal(3, 2, seed=1)}

    def apply(p: Parameters, x: Any) -> Any:
        read = (abs(x) * 2).astype(int).clip(0, 4)
        return p["w"][read].sum(1) @ p["head"]

    return parameters, apply


MODELS = {
    each.__name__: each
    for each in (
        mlp, tied, stopped, odd, turned, integer, scanned, nested, attention, recomputed,
        by_own_rule, rows,
    )
}  # fmt: skip

# ---- losses: of outputs, targets and weights of samples ----


def _square(out: Any, y: Any) -> Any:
    return ((out - y) ** 2).mean(1)


LOSSES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "mean": lambda out, y, _: _square(out, y).mean(),
    "sum": lambda out, y, _: _square(out, y).sum() / BATCH,
    "weighted": lambda out, y, w: (_square(out, y) * w).mean(),
    "two": lambda out, y, _: _square(out, y).mean() + 0.1 * abs(out[:, 0] - y[:, 1]).mean(),
}

# ---- optimizers ----


def _labels(parameters: Parameters) -> Parameters:
    import jax

    return {k: jax.tree.map(lambda _, k=k: "slow" if k == "w" else "fast", v)
            for k, v in parameters.items()}  # fmt: skip


def _kernels(parameters: Parameters) -> Parameters:
    import jax

    return jax.tree.map(lambda p: np.ndim(p) > 1, parameters)


def inner_of(program: Program) -> Any:
    import optax
    from optax import contrib

    kinds: dict[str, Callable[[], Any]] = {
        "sgd": lambda: optax.sgd(0.1),
        "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
        "adamw": lambda: optax.adamw(0.02, eps=1e-3, weight_decay=0.05),
        "clip": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.sgd(0.1)),
        "groups": lambda: optax.multi_transform(
            {"slow": optax.sgd(0.01), "fast": optax.sgd(0.1)}, _labels),
        "frozen": lambda: optax.multi_transform(
            {"slow": optax.set_to_zero(), "fast": optax.adam(0.05, eps=1e-3)}, _labels),
        "schedule": lambda: optax.sgd(optax.exponential_decay(0.2, 1, 0.7)),
        "ema": lambda: optax.chain(optax.ema(0.5), optax.sgd(0.1)),
        "lion": lambda: optax.lion(0.02, weight_decay=0.1),
        "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
        "rmsprop": lambda: optax.rmsprop(0.01, eps=1e-3, centered=True, momentum=0.5),
        "muon": lambda: contrib.muon(0.05),
        "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
        "polyak": lambda: optax.polyak_sgd(0.1),
        "plateau": lambda: optax.chain(
            optax.sgd(0.1), contrib.reduce_on_plateau(0.5, patience=1, rtol=0.3)),
        "schedule_free": lambda: contrib.schedule_free_sgd(0.1),
        "masked": lambda: optax.chain(
            optax.masked(optax.add_decayed_weights(0.3), _kernels), optax.sgd(0.1)),
        "adaptive_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.05), optax.sgd(0.1)),
        "clip_values": lambda: optax.chain(
            optax.clip(0.05), optax.scale_by_adam(eps=1e-3), optax.scale_by_learning_rate(
                optax.warmup_cosine_decay_schedule(0.01, 0.1, 2, 6))),
        "centralize": lambda: optax.chain(optax.centralize(), optax.normalize_by_update_norm(),
                                          optax.sgd(0.1)),
        "noise": lambda: optax.noisy_sgd(0.1, eta=0.01, key=3),
        "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.trace(0.5), optax.scale(-0.05)),
        "finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 5),
    }  # fmt: skip
    return kinds[program["optimizer"]]()


class Setting:
    """How a front trains. This one is JAX alone, with the whole batch."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.rank, self.size = 0, 1
        self.sums = program["loss"] == "sum"

    def started(self, parameters: Parameters) -> Parameters:
        return parameters

    def reducing(self, optimizer: Any) -> Any:
        """An optimizer that reduces gradients by itself."""
        return optimizer

    def whole(self, gradients: Any) -> Any:
        """Gradients of all ranks, where the step reduces them."""
        return gradients

    def told(self, loss: Any) -> Any:
        return loss

    def value(self, loss: Any) -> Any:
        """The loss that the optimizer decides by."""
        return self.told(loss)


class Ranks(Setting):
    def __init__(self, program: Program) -> None:
        import farandole.jax as fdj

        super().__init__(program)
        self.fdj, self.rank, self.size = fdj, fdj.rank(), fdj.size()
        self.options: dict[str, Any] = {"op": "sum" if self.sums else "mean"}
        self.options |= {
            "none": {}, "small": {"bucket_bytes": 64}, "named": {"name": "mine"},
        }[program["options"]]  # fmt: skip

    def started(self, parameters: Parameters) -> Parameters:
        import jax

        if self.rank:
            parameters = jax.tree.map(lambda p: p + np.ones_like(p), parameters)
        return self.fdj.broadcast_parameters(parameters, root=0)

    def told(self, loss: Any) -> Any:
        return self.fdj.allreduce(loss, op="sum" if self.sums else "mean")


class Distributed(Ranks):
    def reducing(self, optimizer: Any) -> Any:
        return self.fdj.distributed(optimizer, **self.options)

    def value(self, loss: Any) -> Any:
        return self.told(loss) if self.sums else loss  # of a mean it takes care itself


class ByHand(Ranks):
    def whole(self, gradients: Any) -> Any:
        return self.fdj.allreduce_gradients(gradients, **self.options)


# ---- one program for all fronts ----

Reducing = Callable[[Any], Any]  # makes an optimizer one that reduces gradients by itself


def _partitioned(reducing: Reducing, inner: Any) -> Any:
    """An optimizer for each part of the parameters."""
    import optax

    parts = {label: reducing(inner) for label in ("slow", "fast")}
    return optax.multi_transform(parts, _labels)


def _injected(reducing: Reducing, inner: Any) -> Any:
    """Made anew in each step, of numbers in the state."""
    import optax

    def scaled(scale: Any) -> Any:
        return reducing(optax.chain(inner, optax.scale(scale)))

    return optax.inject_hyperparams(scaled)(scale=optax.linear_schedule(1.0, 0.5, 3))


def _chained(reducing: Reducing, inner: Any) -> Any:
    import optax

    return optax.chain(reducing(inner), optax.add_decayed_weights(-0.01))


AROUND: dict[str, Callable[[Reducing, Any], Any]] = {
    "nothing": lambda reducing, inner: reducing(inner),
    "chain": _chained, "partition": _partitioned, "inject": _injected,
}  # fmt: skip


def optimizer_of(setting: Setting) -> Any:
    import optax

    program = setting.program
    inner = inner_of(program)
    if program["accumulate"] == "inside":
        inner = optax.MultiSteps(inner, 2).gradient_transformation()
    optimizer = optax.with_extra_args_support(AROUND[program["around"]](setting.reducing, inner))
    return optax.MultiSteps(optimizer, 2) if program["accumulate"] == "outside" else optimizer


def touched(program: Program, gradients: Any) -> Any:
    import jax
    import optax

    if program["touch"] == "centralize":
        return optax.centralize().update(gradients, optax.EmptyState())[0]
    if program["touch"] == "scale":
        return jax.tree.map(lambda g: g * 0.5, gradients)
    if program["touch"] == "clip":
        return optax.clip_by_global_norm(0.2).update(gradients, optax.EmptyState())[0]
    return gradients


def batches(setting: Setting) -> Any:
    """Inputs, targets and weights of this rank, by step."""
    rows = programs.rows_of(setting.rank, setting.size)
    data = [programs.batch(step) for step in range(STEPS)]
    x, y = (np.stack([pair[i][rows] for pair in data]) for i in (0, 1))
    if setting.program["optimizer"] == "finite" and rows.start == 0:
        x[1, 0] = np.inf  # on one rank alone
    weights = np.arange(BATCH, dtype=np.float32)[rows] / BATCH
    return x, y, np.stack([weights] * STEPS)


def train(setting: Setting) -> Result:
    import jax
    import optax

    program = setting.program
    parameters, apply = MODELS[program["model"]]()
    half = program["precision"] == "parameters"
    kind = {np.dtype(np.float32): jax.numpy.bfloat16} if half else {}
    before = jax.tree.map(lambda p: np.asarray(p, kind.get(np.asarray(p).dtype)), parameters)
    parameters = jax.tree.map(jax.numpy.asarray, setting.started(before))
    optimizer = optimizer_of(setting)
    loss_of = LOSSES[program["loss"]]

    @jax.jit  # in an eager step, too, whose programs would be one for each operation
    def backward(parameters: Parameters, batch: Any) -> Any:
        x, y, weights = batch

        def of(p: Parameters) -> Any:
            if program["precision"] == "computing":
                p, inputs = jax.tree.map(_halved, (p, x))
                return loss_of(apply(p, inputs).astype(np.float32), y, weights)
            return loss_of(apply(p, x), y, weights)

        loss, gradients = BACKWARDS[program["backward"]](of, parameters)
        return loss, jax.tree.map(_as_optax_takes_it, gradients, parameters)

    def step(carried: Any, batch: Any) -> Any:
        parameters, state = carried
        loss, gradients = backward(parameters, batch)
        gradients = touched(program, setting.whole(gradients))
        value = {"value": setting.value(loss)} if program["optimizer"] in BY_VALUE else {}
        updates, state = optimizer.update(gradients, state, parameters, **value)
        return (optax.apply_updates(parameters, updates), state), setting.told(loss)

    carried = (parameters, optimizer.init(parameters))
    carried, losses = RUNS[program["run"]](step, carried, batches(setting))
    losses = [float(loss) for loss in losses]
    return Result(_by_name(before), _by_name(carried[0]),
                  [loss if np.isfinite(loss) else -1.0 for loss in losses])  # fmt: skip


def _halved(array: Any) -> Any:
    import jax.numpy as jnp

    return array.astype(jnp.bfloat16) if array.dtype == jnp.float32 else array


def _with_aux(of: Any, parameters: Parameters) -> Any:
    import jax

    both = jax.value_and_grad(lambda p: (of(p), {"seen": 1.0}), has_aux=True, allow_int=True)
    (loss, _), gradients = both(parameters)
    return loss, gradients


def _by_vjp(of: Any, parameters: Parameters) -> Any:
    import jax

    loss, back = jax.vjp(of, parameters)
    return loss, back(jax.numpy.ones_like(loss))[0]


def _by_value_and_grad(of: Any, parameters: Parameters) -> Any:
    import jax

    return jax.value_and_grad(of, allow_int=True)(parameters)


BACKWARDS = {"value_and_grad": _by_value_and_grad, "aux": _with_aux, "vjp": _by_vjp}
BY_VALUE = ("polyak", "plateau")


def _as_optax_takes_it(gradient: Any, parameter: Any) -> Any:
    """JAX has conjugated gradients, and of whole numbers none of a dtype that can be added."""
    import jax

    if gradient.dtype == jax.dtypes.float0:
        return jax.numpy.zeros_like(parameter)
    return gradient.conj()


def _one_by_one(step: Any, carried: Any, data: Any) -> Any:
    losses = []
    for batch in zip(*data, strict=True):
        carried, loss = step(carried, batch)
        losses.append(loss)
    return carried, losses


def _jitted(step: Any, carried: Any, data: Any) -> Any:
    import jax

    return _one_by_one(jax.jit(step), carried, data)


def _donated(step: Any, carried: Any, data: Any) -> Any:
    import jax

    return _one_by_one(jax.jit(step, donate_argnums=0), carried, data)


def _scanned(step: Any, carried: Any, data: Any) -> Any:
    import jax

    return jax.jit(lambda carried, data: jax.lax.scan(step, carried, data))(carried, data)


def _compiled(step: Any, carried: Any, data: Any) -> Any:
    import jax

    first = tuple(each[0] for each in data)
    return _one_by_one(jax.jit(step).lower(carried, first).compile(), carried, data)


def _together(step: Any, carried: Any, data: Any) -> Any:
    """Two models at once, of which the second is told."""
    import jax

    both = jax.tree.map(lambda a: jax.numpy.stack([a, a]), carried)
    carried, losses = _jitted(jax.vmap(step, in_axes=(0, None)), both, data)
    return jax.tree.map(lambda a: a[1], carried), [loss[1] for loss in losses]


def _branching(step: Any, carried: Any, data: Any) -> Any:
    """The last step is left out, on all ranks."""
    import jax

    def perhaps(carried: Any, numbered: Any) -> Any:
        number, *batch = numbered
        still = lambda carried, _: (carried, jax.numpy.zeros(()))  # noqa: E731
        return jax.lax.cond(number < STEPS - 1, step, still, carried, batch)

    return _scanned(perhaps, carried, (np.arange(STEPS), *data))


RUNS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "jit": _jitted, "eager": _one_by_one, "donate": _donated, "scan": _scanned,
    "compiled": _compiled, "branching": _branching, "together": _together,
}  # fmt: skip


def _by_name(tree: Any) -> dict[str, np.ndarray]:
    import jax

    return {jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}  # fmt: skip


def by(kind: Callable[[Program], Setting]) -> Callable[[Program, bool], Result]:
    return lambda program, parallel: train((kind if parallel else Setting)(program))


# ---- the table ----

COLUMNS: dict[str, list[str]] = {
    "model": list(MODELS),
    "loss": list(LOSSES),
    "touch": ["nothing", "scale", "centralize", "clip"],
    "optimizer": ["sgd", "momentum", "adamw", "clip", "groups", "frozen", "schedule", "ema",
                  "finite", "lion", "adafactor", "rmsprop", "muon", "lbfgs", "polyak", "plateau",
                  "schedule_free", "masked", "adaptive_clip", "clip_values", "centralize", "noise",
                  "zero_nans"],
    "around": list(AROUND),
    "backward": list(BACKWARDS),
    "precision": ["float32", "parameters", "computing"],
    "accumulate": ["one", "inside", "outside"],
    "run": list(RUNS),
    "options": ["none", "small", "named"],
}  # fmt: skip


BY_JAX = {  # what JAX alone does not train
    "an accumulated infinity stays": ["optimizer=finite accumulate=inside"],
    "MultiSteps as a transformation passes no value on": [
        "optimizer=polyak,plateau accumulate=inside",
    ],
    "complex numbers have no order": ["model=turned optimizer=clip_values"],
    "the first state of L-BFGS has the parameters' buffers": ["optimizer=lbfgs run=donate"],
}
DISTRIBUTED = BY_JAX | {
    "only gradients of the whole batch may be clipped": ["touch=clip"],
    "JAX does not batch a branch with a Ref, in which the order of collectives stands": [
        "accumulate=outside run=together",
    ],
    "reduced gradients would be accumulated, an infinity among them": [
        "optimizer=finite accumulate=outside",
    ],
}
BY_HAND = BY_JAX | {
    "its gradients are reduced before any optimizer sees them": ["accumulate=outside"],
}


def begin() -> None:
    import farandole.jax as fdj

    fdj.init()


FRONTS = {
    "jax.distributed": Front("jax", COLUMNS, begin, by(Distributed), DISTRIBUTED),
    "jax.by_hand": Front("jax", COLUMNS, begin, by(ByHand), BY_HAND),
}
