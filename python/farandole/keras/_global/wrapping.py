"""A Keras model with our steps and optimizer in it, and around it an object that is the model to
whoever asks for anything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from farandole._core import InvalidArgument
from farandole.common._reduction import Average, Sum, core_op
from farandole.data._logical import Block
from farandole.data._policy import Policy
from farandole.keras._accumulated import accumulated_of, besides
from farandole.keras._exchange import Alike
from farandole.keras._global import (
    means,
    own_gradients,
    own_steps,
    whole_metrics,
)
from farandole.keras._global.alike import rows_of_alike, weights_alike
from farandole.keras._global.how import Source
from farandole.keras._global.logical import hold_updates
from farandole.keras._global.logical_steps import logical_steps
from farandole.keras._global.losses import share_losses
from farandole.keras._global.metrics import Shown, has_own_step, with_global_state
from farandole.keras._global.normalization import Normalization
from farandole.keras._global.own_gradients import OwnGradients
from farandole.keras._global.shared_steps import shared_steps
from farandole.keras._global.steps import Steps, weigh_loss
from farandole.keras._wrapped import State, distributed_in, state_of
from farandole.keras.optimizer import DistributedOptimizer, state_of_step

_OWN = frozenset(
    (
        "_model", "_block", "_steps", "_seed", "_same", "_options", "_due", "_passes", "_reading",
        "_evaluate", "_op", "_normalization", "_policy", "_looks", "_others",
        "_policies_compared", "_shown", "_of_own", "_own_results",
    )
)  # fmt: skip


class Wrapping:
    """Wraps one model.

    Args:
        block: of logical ranks.
        options: of ``DistributedOptimizer``.
        sync_batch_norm: every layer that normalizes takes the statistics of all ranks' samples.
    """

    def __init__(
        self,
        model: Any,
        seed: int,
        block: Block | None,
        options: Mapping[str, Any],
        *,
        same_batches: bool,
        data_policy: Policy,
        sync_batch_norm: bool,
    ) -> None:
        self._model = model
        self._block = block
        if self._block is not None:
            self._op = Sum  # of parts, each of which weighs as much as it has samples
        self._steps = Steps(self._block)
        self._steps.weighs_gradients = has_own_step(model, "train_step")
        self._steps.adopt = self._adopt_optimizer
        self._others: list[Any] = []  # optimizers of the model's own step
        means.learn()
        whole_metrics.learn()
        own_steps.learn()
        own_gradients.learn()
        if self._steps.weighs_gradients and block is None:
            self._steps.own_gradients = OwnGradients(model, self._steps, self._reduce_own)
        self._of_own: dict[int, State] = {}  # by number: how it reduces gradients of its own step
        self._normalization = Normalization(model, self._steps, every=sync_batch_norm)
        self._normalization.check()
        self._shown = Shown()
        self._seed = seed
        self._same = same_batches
        self._policy: Policy = data_policy
        self._policies_compared = False
        self._options = dict(options)
        self._looks = False  # Keras would look at a batch first, to build the model
        self._due = True  # rank 0's weights for all, before they are next used
        self._passes = 0  # over training data
        self._reading: list[Source] | None = None  # during fit and evaluate
        made = (
            shared_steps(model, self._steps, self._normalization)
            if self._block is None
            else logical_steps(model, self._steps, seed)
        )
        for name, step in made.items():
            setattr(model, name, step)
        self._intercept()
        if model.compiled:
            self._adopt()

    # farandole.strategy overrides these.

    _op = Average
    _reducing = staticmethod(lambda optimizer: optimizer)
    _of_all_ranks = staticmethod(with_global_state)

    def _by_itself(self) -> AbstractContextManager[Any]:
        """Around what this rank alone reads."""
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._model, name, value)

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            "a farandole.keras.Model is neither copied nor pickled\n"
            "  advice: copy or pickle model.model, and put a Model around the copy"
        )

    # ---- as the model is made ----

    def _intercept(self) -> None:
        model = self._model
        own_build, own_result = model._symbolic_build, model._get_metrics_result_or_logs

        def symbolic_build(*args: Any, **kwargs: Any) -> None:
            if self._reading is None:  # else it is built, and does not know batches with a share
                own_build(*args, **kwargs)
            elif self._looks and "iterator" in kwargs:
                self._looks = False
                look_into(kwargs["iterator"])

        def result_or_logs(logs: Any) -> Any:
            if self._reading is None:
                return own_result(logs)
            return self._global_results(own_result, logs)

        self._evaluate, self._own_results = model.evaluate, own_result

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            if self._reading is None or "_use_cached_eval_dataset" in kwargs:  # fit()'s own
                return self._evaluate(*args, **kwargs)
            with self._reads(None):  # a callback's, on this rank's own data
                return self._evaluate(*args, **kwargs)

        model._symbolic_build, model._get_metrics_result_or_logs = symbolic_build, result_or_logs
        model.evaluate = evaluate

    @contextmanager
    def _reads(self, sources: list[Source] | None) -> Iterator[None]:
        before, self._reading = self._reading, sources
        try:
            yield
        finally:
            self._reading = before

    def _global_results(self, own: Callable[[Any], Any], logs: Any) -> Any:
        """Returns the results of all ranks where Keras has this rank's: see Together."""
        raise NotImplementedError

    def _adopt(self) -> None:
        model = self._model
        optimizer = model.optimizer
        if optimizer is not None:
            wrapped = distributed_in(optimizer)
            if wrapped is None:
                DistributedOptimizer(self._reducing(optimizer), op=self._op, **self._options)
                wrapped = distributed_in(optimizer)
            elif self._block is not None:
                raise InvalidArgument(
                    "compile(): the optimizer is a DistributedOptimizer; with logical_ranks, pass "
                    "the Keras optimizer itself"
                )
            elif state_of(wrapped).reduction.op != core_op(self._op):
                raise InvalidArgument(
                    "compile(): the optimizer is a DistributedOptimizer that does not "
                    f"{'average' if self._op == Average else 'sum'}; pass the Keras optimizer "
                    "itself"
                )
            state_of(wrapped).alike = self._alike
            state_of(wrapped).is_early = self._steps.own_gradients is not None
            weigh_loss(optimizer, self._steps)
            if self._block is not None:
                state_of(wrapped).holds = True
                hold_updates(model, self._steps)
        if model._compile_loss is not None:
            share_losses(model._compile_loss, self._steps)
        model.train_function = model.test_function = model.predict_function = None
        self._due = True

    def _adopt_optimizer(self, optimizer: Any) -> None:
        """One that the model was not compiled with."""
        options = {k: v for k, v in self._options.items() if k not in ("name", "groups")}
        DistributedOptimizer(self._reducing(optimizer), op=self._op, **options)
        wrapped = distributed_in(optimizer)
        state_of(wrapped).alike = self._alike
        self._others.append(optimizer)

    def _reduce_own(self, number: int, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Gradients that the model's own step asks for, for the number-th time."""
        optimizer = self._model.optimizer
        if number not in self._of_own:
            options = {k: v for k, v in self._options.items() if k not in ("name", "groups")}
            self._of_own[number] = state_of_step(self._op, **options)
        exchange = self._of_own[number].ready_exchange(optimizer)
        # Later in a step weights may be aside of where they are, and graphs have no order there.
        exchange.compares = number == 1
        return exchange.reduce(gradients, variables)

    def _alike(self, optimizer: Any) -> list[Alike]:
        """Besides the weights that it updates, all ranks have these alike when it does."""
        weights = weights_alike(self._model, self._block, self._normalization)
        return rows_of_alike(optimizer, weights, self._state_of(optimizer))

    def _state_of(self, optimizer: Any) -> list[Any]:
        """Returns those of its variables that all ranks have alike."""
        return besides(optimizer.variables, accumulated_of(optimizer))


def look_into(iterator: Any) -> None:
    """One of Keras' over an epoch, as Keras would to see a batch."""
    _, _, batch = next(iter(iterator))
    if not isinstance(batch, tuple | list):  # on JAX
        next(batch)


def is_built(model: Any) -> bool:
    """Whether Keras would not build it, nor what it was compiled with."""
    compiled = (model._compile_metrics, model._compile_loss) if model.compiled else ()
    parts = [*model._flatten_layers(), *(each for each in compiled if each is not None)]
    return all(each.built for each in parts)
