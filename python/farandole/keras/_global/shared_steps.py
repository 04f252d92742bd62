"""Steps of ranks that each compute one part of a batch; see Note [How a share reaches a step]."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import keras

from farandole.keras._accumulated import besides
from farandole.keras._global.marks import Shared, marked_outputs, of_shared
from farandole.keras._global.metrics import Results, makes_own_logs, of_part
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

    def weighing() -> AbstractContextManager[None]:
        if keras.backend.backend() != "torch":
            return nullcontext()
        if steps.own_gradients is not None:
            steps.own_gradients.prepare()
        return steps.hooked(model.trainable_variables)

    def changed(
        name: str, own: Callable[..., Any], around: Callable[[], Any], shared: Shared
    ) -> Any:
        told: Results | None = None
        kept = _kept_without_samples(model, steps, normalization)
        with steps.of(shared), normalization.joined(), kept:
            with around():
                logs = own(shared.batch)
            if makes_own_logs(model, name):
                told = of_part(logs, model.get_metrics_result, steps)
        return logs if told is None else told()

    def predict_step(shared: Shared) -> Any:
        with steps.of(shared), normalization.joined():
            return marked_outputs(own_predict(shared.batch), shared.share)

    return {
        "train_step": of_shared(partial(changed, "train_step", own_train, weighing), own_train),
        "test_step": of_shared(partial(changed, "test_step", own_test, nullcontext), own_test),
        "predict_step": of_shared(predict_step, own_predict),
    }


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
        if not makes_own_logs(model, name):
            return logs
        states = iter((metrics, kept_metrics(metrics, before)))

        def results() -> Any:
            mapping = list(zip(model.metrics_variables, next(states), strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return model.get_metrics_result()

        ours = of_part(logs, results, steps)
        return logs if ours is None else ours()

    @contextmanager
    def knowing(state: Any) -> Iterator[None]:
        known = [*model.trainable_variables, *model.non_trainable_variables]
        own = steps.own_gradients
        asking = nullcontext() if own is None else own.of_values(state[0])
        with present(known, [*state[0], *state[1]]), asking:
            yield

    def changed(
        name: str, own: Callable[..., Any], around: Callable[[Any], Any], state: Any, shared: Shared
    ) -> Any:
        """`state`: weights, others, in training those of the optimizer, metrics."""
        with steps.of(shared), normalization.joined():
            with around(state):
                logs, (trained, others, *optimizer, metrics) = own(state, shared.batch)
            logs = told(name, logs, metrics, state[-1])
            others, metrics = kept_but_joint(others, state[1]), kept_metrics(metrics, state[-1])
            return logs, (trained, others, *optimizer, metrics)

    def predict_step(state: Any, shared: Shared) -> Any:
        with steps.of(shared), normalization.joined():
            outputs, others = own_predict(state, shared.batch)
        return marked_outputs(outputs, shared.share), others

    return {
        "train_step": of_shared(partial(changed, "train_step", own_train, knowing), own_train),
        "test_step": of_shared(partial(changed, "test_step", own_test, nullcontext), own_test),
        "predict_step": of_shared(predict_step, own_predict),
    }
