"""Steps of several logical ranks in one process; see Note [Same bits for any number of ranks]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np

from farandole import _world
from farandole.data._logical import fold
from farandole.keras._exchange import dense
from farandole.keras._global.logical import seed_states
from farandole.keras._global.marks import Shared, marked_outputs, of_shared
from farandole.keras._global.normalization import own_states, spectral_layers
from farandole.keras._global.steps import Steps
from farandole.keras._global.sums import sum_over_ranks
from farandole.keras._present import present

_Values = list[Any]
_SPREAD = 40503  # between the seeds of logical ranks
_TRAINING, _TEST = "parts of a training step", "parts of a test step"  # on the wire


class _State(NamedTuple):
    """The results of one part of a batch, or of all parts."""

    gradients: _Values  # None where there is none
    metrics: _Values
    others: _Values  # values of variables that the model does not train
    extra: dict[str, Any]  # numbers that a step of the user's own returns besides metrics


class _Roles:
    """The variables that a step changes besides the weights: seeds, and those to average. And the
    weights that it changes before there are gradients: every part begins with the same kernels."""

    def __init__(self, model: Any, untrained: list[Any]) -> None:
        self.untrained = untrained
        seeds = set(map(id, seed_states(model)))
        others = list(enumerate(untrained))
        self._seeds = {i for i, v in others if id(v) in seeds}
        self.averaged = [
            i for i, v in others if i not in self._seeds and keras.backend.is_float_dtype(v.dtype)
        ]
        spectral = spectral_layers(model)
        self.kernels = [layer.kernel for layer in spectral if layer.built]
        states = {id(v) for layer in spectral for v in layer.non_trainable_variables}
        changing = own_states(model) | states
        self.kept = [i for i in self.averaged if id(others[i][1]) not in changing]

    def moved(self, others: _Values, part: Any, sign: int) -> _Values:
        """The values with a part's own seeds (sign 1), or with the common ones again (sign -1)."""
        return [
            value + sign * _shift(part, value.dtype) if i in self._seeds else value
            for i, value in enumerate(others)
        ]


def _shift(part: Any, dtype: Any) -> Any:
    """A part's offset to the state of a seed, which is a seed and a count."""
    part = keras.ops.cast(part, dtype)
    return keras.ops.stack([part * keras.ops.cast(_SPREAD, dtype), keras.ops.zeros_like(part)])


# A model's own step: from a batch, others and metrics to logs, new others and new metrics.
_Call = Callable[[Any, _Values, _Values], tuple[Any, _Values, _Values]]


class _Parts:
    """A step on all parts of a batch, from values of the model's variables to new ones. It is
    the same on all backends."""

    def __init__(self, model: Any, steps: Steps, seed: int) -> None:
        assert steps.block is not None
        self.model, self.steps, self.block, self.seed = model, steps, steps.block, seed
        self._told: dict[str, list[str] | None] = {}  # by label: names of what its steps log
        self._begun = 0  # steps
        self.roles = _Roles(model, [])
        self._known: tuple[list[Any], set[str]] = [], set()  # metrics; their names in logs

    def find_roles(self) -> None:
        """As a step begins: a layer may have been frozen, or built, since the last one."""
        untrained = self.model.non_trainable_variables
        if not _are_same(self.roles.untrained, untrained):
            self.roles = _Roles(self.model, untrained)

    def state(
        self, call: _Call, shared: Shared, part: Any, others: _Values, metrics: _Values, label: str
    ) -> _State:
        """The results of one part.

        Args:
            others, metrics: the model's, as the step begins.
        """
        zeros = [keras.ops.zeros_like(v) for v in metrics]
        with self.steps.holding(shared) as held:
            logs, new, added = call(shared.batch, self.roles.moved(others, part, 1), zeros)
            gradients = [dense(g) for g in held[-1]] if held else []
            self._told[label] = list(logs) if isinstance(logs, dict) else None
            known = self._names(metrics)
            extra = {k: logs[k] for k in self._told[label] or () if k not in known}
            state = _State(gradients, added, self.roles.moved(new, part, -1), extra)
            return self._counted(state, others)

    def _counted(self, state: _State, before: _Values) -> _State:
        """A part without samples changes no statistics; seeds, which all parts draw from alike."""
        where, counts = keras.ops.where, self.steps.counts
        others = list(state.others)
        for i in self.roles.kept:
            others[i] = where(counts, others[i], before[i])
        count, total = self.steps.count_and_total()
        weight = count / total

        def or_zero(value: Any) -> Any:
            return None if value is None else where(counts, value, keras.ops.zeros_like(value))

        return _State(
            [or_zero(g) for g in state.gradients],
            [or_zero(v) for v in state.metrics],
            others,
            {k: or_zero(_number(v) * weight) for k, v in state.extra.items()},
        )

    def sum(self, states: list[_State], metrics: _Values, label: str) -> _State:
        """Collective: adds up all parts; of gradients this rank's, which the optimizer sums."""
        first, averaged = states[0], self.roles.averaged
        rows = [[*s.metrics, *(s.others[i] for i in averaged), *s.extra.values()] for s in states]
        sums = [fold(values, _add) for values in zip(*rows, strict=True)]
        sums = _summed_over_ranks(sums, label)
        added, means = sums[: len(metrics)], sums[len(metrics) :]
        after = list(first.others)
        for i, total in zip(averaged, means, strict=False):
            after[i] = total * keras.ops.cast(1.0 / self.block.parts, total.dtype)
        return _State(
            [fold(values, _add) for values in zip(*(s.gradients for s in states), strict=True)],
            [old + new for old, new in zip(metrics, added, strict=True)],
            after,
            dict(zip(first.extra, means[len(averaged) :], strict=True)),
        )

    def results(self, metrics: _Values) -> dict[str, Any]:
        """The results of the model's metrics in this state."""
        mapping = list(zip(self.model.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            known: dict[str, Any] = self.model.get_metrics_result()
        return known

    def _names(self, metrics: _Values) -> set[str]:
        """The names of metrics, kept: on PyTorch every part would compute the metrics anew."""
        if self._known[0] != self.model.metrics:
            self._known = self.model.metrics, set(self.results(metrics))
        return self._known[1]

    def logs(self, state: _State, label: str) -> Any:
        """The logs that the model's own step would return for the whole batch."""
        known = self.results(state.metrics)
        told = self._told[label]
        names = known if told is None else told
        return {name: known[name] if name in known else state.extra[name] for name in names}

    def begin(self) -> None:
        self._begun += 1

    def of(self, shared: Shared) -> Iterator[tuple[int, Shared]]:
        """This rank's parts of a batch, by number."""
        for i, (part, batch) in enumerate(zip(self.block.mine, shared.batch, strict=True)):
            yield part, Shared(batch, shared.share[i : i + 1])

    @contextmanager
    def drawing(self, part: int) -> Iterator[None]:
        """Seeds PyTorch, whose layers may draw without a seed of their own, by step and part."""
        import torch

        seed = np.random.SeedSequence([self.seed, self._begun, part]).generate_state(1)[0]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(seed))
            yield


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return list(map(id, some)) == list(map(id, others))


def _number(value: Any) -> Any:
    """A logged value, cut off from the graph that it may carry on PyTorch."""
    return keras.ops.stop_gradient(keras.ops.cast(value, "float32"))


def _add(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _summed_over_ranks(values: _Values, label: str) -> _Values:
    """Collective: sums over ranks, in one operation for each dtype."""
    if _world.size() == 1:
        return values
    by_dtype: dict[str, list[int]] = {}
    for i, value in enumerate(values):
        by_dtype.setdefault(keras.backend.standardize_dtype(value.dtype), []).append(i)
    result = list(values)
    for dtype, places in by_dtype.items():
        flat = [keras.ops.reshape(values[i], (-1,)) for i in places]
        whole = sum_over_ranks(keras.ops.concatenate(flat), f"{label} {dtype}")
        begin = 0
        for i, each in zip(places, flat, strict=True):
            end = begin + each.shape[0]
            result[i] = keras.ops.reshape(whole[begin:end], values[i].shape)
            begin = end
    return result


def logical_steps(model: Any, steps: Steps, seed: int) -> dict[str, Callable[..., Any]]:
    """The methods that replace the model's own steps; on JAX also those that make its functions."""
    parts = _Parts(model, steps, seed)
    if keras.backend.backend() == "jax":
        return _jax_steps(model, parts)
    return _steps(model, parts, on_torch=keras.backend.backend() == "torch")


def _steps(model: Any, parts: _Parts, *, on_torch: bool) -> dict[str, Callable[[Any], Any]]:
    """TensorFlow, PyTorch: a step reads and writes the model's variables."""
    own_train, own_test, own_predict = model.train_step, model.test_step, model.predict_step

    def read(variables: _Values) -> _Values:
        if on_torch:
            return [v.value.detach().clone() for v in variables]
        import tensorflow as tf

        return [tf.identity(v.value) for v in variables]

    def write(others: _Values, metrics: _Values) -> None:
        put([*model.non_trainable_variables, *model.metrics_variables], [*others, *metrics])

    def put(variables: _Values, values: _Values) -> None:
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def step(own: Callable[[Any], Any], shared: Shared, label: str) -> _State:
        others, metrics = read(model.non_trainable_variables), read(model.metrics_variables)
        parts.find_roles()
        kernels = parts.roles.kernels
        begun = read(kernels)
        states = []
        parts.begin()
        for part, each in parts.of(shared):

            def call(batch: Any, others: _Values, metrics: _Values, part: int = part) -> Any:
                write(others, metrics)
                put(kernels, begun)
                with parts.drawing(part) if on_torch else nullcontext():
                    logs = own(batch)
                return logs, read(model.non_trainable_variables), read(model.metrics_variables)

            states.append(parts.state(call, each, part, others, metrics, label))
        state = parts.sum(states, metrics, label)
        write(state.others, state.metrics)
        return state

    def update(gradients: _Values) -> None:
        if not on_torch:
            model.optimizer.apply(gradients, model.trainable_weights)
            return
        import torch

        with torch.no_grad():
            model.optimizer.apply(gradients, model.trainable_weights)

    def train_step(shared: Shared) -> Any:
        state = step(own_train, shared, _TRAINING)
        if state.gradients:
            update(state.gradients)
        return parts.logs(state, _TRAINING)

    def test_step(shared: Shared) -> Any:
        return parts.logs(step(own_test, shared, _TEST), _TEST)

    def predict_step(shared: Shared) -> Any:
        return marked_outputs([own_predict(batch) for batch in shared.batch], shared.share)

    return {
        "train_step": of_shared(train_step, own_train),
        "test_step": of_shared(test_step, own_test),
        "predict_step": of_shared(predict_step, own_predict),
    }


class _Programs:
    """Functions that are compiled anew whenever Keras makes one of its own."""

    def __init__(self) -> None:
        self._functions: list[Callable[..., Any]] = []
        self._run: list[Callable[..., Any]] = []

    def add(self, function: Callable[..., Any]) -> Callable[..., Any]:
        place = len(self._functions)
        self._functions.append(function)
        self._run.append(function)
        return lambda *values: self._run[place](*values)

    def renew(self, *, compiled: bool) -> None:
        import jax

        # A new function, since the program that JAX keeps of the old one has the old optimizer.
        self._run = [
            jax.jit(partial(function)) if compiled else function for function in self._functions
        ]


def _jax_steps(model: Any, parts: _Parts) -> dict[str, Callable[..., Any]]:
    """JAX: a step is a function of the state, which is lists of the variables' values. It is not
    one program, but several: one for each part, one that sums, and one that updates."""
    own_train, own_test, own_predict = model.train_step, model.test_step, model.predict_step
    programs = {name: _Programs() for name in ("train", "test", "predict")}

    def of_part(own: Callable[..., Any], label: str, state: Any, shared: Shared, part: Any) -> Any:
        trained, others, *optimizer, metrics = state
        parts.find_roles()

        def call(batch: Any, others: _Values, metrics: _Values) -> Any:
            logs, (_, new, *_, added) = own((trained, others, *optimizer, metrics), batch)
            return logs, new, added

        return parts.state(call, shared, part, others, metrics, label)

    def of_all(label: str, states: list[_State], metrics: _Values) -> tuple[_State, Any]:
        parts.find_roles()
        state = parts.sum(states, metrics, label)
        return state, parts.logs(state, label)

    train_part = programs["train"].add(partial(of_part, own_train, _TRAINING))
    test_part = programs["test"].add(partial(of_part, own_test, _TEST))
    sum_of_training = programs["train"].add(partial(of_all, _TRAINING))
    sum_of_test = programs["test"].add(partial(of_all, _TEST))

    @programs["predict"].add
    def predict_part(state: Any, batch: Any) -> Any:
        return own_predict(state, batch)[0]

    @programs["train"].add
    def update(optimizer: Any, gradients: _Values, trained: Any, others: Any) -> Any:
        with present(model.non_trainable_variables, others):
            return model.optimizer.stateless_apply(optimizer, gradients, trained)

    def states(run: Callable[..., _State], state: Any, shared: Shared) -> list[_State]:
        return [run(state, each, part) for part, each in parts.of(shared)]

    def train_step(state: Any, shared: Shared) -> Any:
        trained, _, optimizer, metrics = state
        after, logs = sum_of_training(states(train_part, state, shared), metrics)
        if after.gradients:
            trained, optimizer = update(optimizer, after.gradients, trained, after.others)
        return logs, (trained, after.others, optimizer, after.metrics)

    def test_step(state: Any, shared: Shared) -> Any:
        trained, _, metrics = state
        after, logs = sum_of_test(states(test_part, state, shared), metrics)
        return logs, (trained, after.others, after.metrics)

    def predict_step(state: Any, shared: Shared) -> Any:
        outputs = [predict_part(state, batch) for batch in shared.batch]
        return marked_outputs(outputs, shared.share), state[1]

    def in_parts(name: str) -> Callable[..., Any]:
        """Keeps Keras from compiling a function of its own around ours."""
        make = getattr(model, f"make_{name}_function")

        def made(force: bool = False) -> Any:
            told = model.jit_compile
            if force or getattr(model, f"{name}_function") is None:
                programs[name].renew(compiled=bool(told) and not model.run_eagerly)
            model.jit_compile = False
            try:
                return make(force)
            finally:
                model.jit_compile = told

        return made

    return {
        "train_step": of_shared(train_step, own_train),
        "test_step": of_shared(test_step, own_test),
        "predict_step": of_shared(predict_step, own_predict),
        **{f"make_{name}_function": in_parts(name) for name in programs},
    }
