"""Steps of ranks that each compute one part of a batch; see Note [How a share reaches a step]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras

from farandole.keras._accumulated import besides
from farandole.keras._global.marks import marked_outputs, total_of, unmarked
from farandole.keras._global.metrics import Results, has_own_step, of_part
from farandole.keras._global.normalization import Normalization, own_states
from farandole.keras._global.steps import Steps
from farandole.keras._global.whole_metrics import whole_states
from farandole.keras._present import present


def shared_steps(
    model: Any, steps: Steps, normalization: Normalization
) -> dict[str, Callable[..., Any]]:
    """To be put in the place of this model's own; of its class nothing changes."""
    on_jax = keras.backend.backend() == "jax"
    return (_jax_steps if on_jax else _steps)(model, steps, normalization)


def _steps(model: Any, steps: Steps, normalization: Normalization) -> dict[str, Callable[..., Any]]:
    """TensorFlow, PyTorch: a step reads and writes the model's variables."""
    own_train, own_test, own_predict = model.train_step, model.test_step, model.predict_step

    @contextmanager
    def changing(share: Any, batch: Any) -> Iterator[None]:
        kept = _kept_without_samples(model, steps, normalization)
        with steps.of(share, batch=batch), normalization.joined(), kept:
            yield

    def weighing() -> AbstractContextManager[None]:
        if keras.backend.backend() != "torch":
            return nullcontext()
        if steps.own_gradients is not None:
            steps.own_gradients.prepare()
        return steps.hooked(model.trainable_variables)

    def own_logs(logs: Any) -> Results | None:
        return of_part(logs, model.get_metrics_result, steps)

    def train_step(data: Any) -> Any:
        batch, share = unmarked(data)
        if share is None:
            return own_train(data)
        with changing(share, batch):
            with weighing():
                logs = own_train(batch)
            told = own_logs(logs) if has_own_step(model, "train_step") else None
        return logs if told is None else told()

    def test_step(data: Any) -> Any:
        batch, share = unmarked(data)
        if share is None:
            return own_test(data)
        with changing(share, batch):
            logs = own_test(batch)
            told = own_logs(logs) if has_own_step(model, "test_step") else None
        return logs if told is None else told()

    def predict_step(data: Any) -> Any:
        batch, share = unmarked(data)
        if share is None:
            return own_predict(data)
        with steps.of(share), normalization.joined():
            return marked_outputs(own_predict(batch), share)

    return {"train_step": train_step, "test_step": test_step, "predict_step": predict_step}


@contextmanager
def _kept_without_samples(model: Any, steps: Steps, normalization: Normalization) -> Iterator[None]:
    """Metrics and moving averages, where this rank has no samples in the batch; but those that are
    of all ranks' samples."""
    if keras.backend.backend() == "torch" and bool(steps.counts):
        yield
        return
    left = normalization.joint_variables() | own_states(model)
    others = [v for v in model.non_trainable_variables if _is_kept(v, left)]
    variables = [*besides(model.metrics_variables, whole_states(model)), *others]
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        before = [tf.identity(variable.value) for variable in variables]

        def restore() -> Any:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)
            return tf.constant(0)

        yield
        tf.cond(steps.counts, lambda: tf.constant(0), restore)
        return
    before = [variable.value.clone() for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)


def _is_kept(variable: Any, others: set[int]) -> bool:
    """Whether a rank without samples keeps its value: statistics. Whole numbers count steps, or are
    the states of generators of random numbers."""
    return id(variable) not in others and bool(keras.backend.is_float_dtype(variable.dtype))


def _jax_steps(
    model: Any, steps: Steps, normalization: Normalization
) -> dict[str, Callable[..., Any]]:
    """JAX: a step is a function of the state, which is lists of the variables' values."""
    own_train, own_test, own_predict = model.train_step, model.test_step, model.predict_step

    def kept(after: Any, before: Any) -> Any:
        values = zip(after, before, strict=True)
        return [keras.ops.where(steps.counts, new, old) for new, old in values]

    def kept_metrics(after: Any, before: Any) -> Any:
        whole = set(map(id, whole_states(model)))
        values = zip(model.metrics_variables, after, kept(after, before), strict=True)
        return [new if id(v) in whole else either for v, new, either in values]

    def kept_but_joint(after: Any, before: Any) -> Any:
        others = normalization.joint_variables() | own_states(model)
        values = zip(model.non_trainable_variables, after, kept(after, before), strict=True)
        return [either if _is_kept(variable, others) else new for variable, new, either in values]

    def told(name: str, logs: Any, metrics: Any, before: Any) -> Any:
        if not has_own_step(model, name):
            return logs
        states = iter((metrics, kept_metrics(metrics, before)))

        def results() -> Any:
            mapping = list(zip(model.metrics_variables, next(states), strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return model.get_metrics_result()

        ours = of_part(logs, results, steps)
        return logs if ours is None else ours()

    def train_step(state: Any, data: Any) -> Any:
        batch, share = unmarked(data)
        if share is None:
            return own_train(state, data)
        own = steps.own_gradients
        asking = nullcontext() if own is None else own.of_values(state[0])
        known = [*model.trainable_variables, *model.non_trainable_variables]
        with steps.of(share, total_of(data), batch), normalization.joined():
            with present(known, [*state[0], *state[1]]), asking:
                logs, (trained, others, optimizer, metrics) = own_train(state, batch)
            logs = told("train_step", logs, metrics, state[3])
            others, metrics = kept_but_joint(others, state[1]), kept_metrics(metrics, state[3])
            return logs, (trained, others, optimizer, metrics)

    def test_step(state: Any, data: Any) -> Any:
        batch, share = unmarked(data)
        if share is None:
            return own_test(state, data)
        with steps.of(share, total_of(data), batch), normalization.joined():
            logs, (trained, others, metrics) = own_test(state, batch)
            logs = told("test_step", logs, metrics, state[2])
            others, metrics = kept_but_joint(others, state[1]), kept_metrics(metrics, state[2])
            return logs, (trained, others, metrics)

    def predict_step(state: Any, data: Any) -> Any:
        batch, share = unmarked(data)
        if share is None:
            return own_predict(state, data)
        with steps.of(share, total_of(data), batch), normalization.joined():
            outputs, others = own_predict(state, batch)
        return marked_outputs(outputs, share), others

    return {"train_step": train_step, "test_step": test_step, "predict_step": predict_step}
