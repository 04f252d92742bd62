"""The mixin that DistributedOptimizer puts before a Keras optimizer's own class.

Note [Where gradients are reduced]

Every backend passes one of three points, in the optimizer that `compile()` holds:

    apply(gradients, variables)         TensorFlow, PyTorch, JAX without fit
    stateless_apply(…)                  JAX under fit
    _clip_gradients(gradients)          with gradient_accumulation_steps: in the pass that updates

The first reduces, and sets `inside`, since stateless_apply may call apply, and apply clips.
Reduction comes before clipping, and before a LossScaleOptimizer looks for infinities: then all
ranks clip by the same norm, and all ranks skip a step or none does.

compile() puts a LossScaleOptimizer *around* ours where the policy is mixed_float16. It looks at the
gradients before we see them. So its class is taught, once, to let the optimizer inside reduce
first; one that holds any other optimizer is as before.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import keras

from farandole import _world
from farandole._core import InvalidArgument
from farandole.common import _wrapped
from farandole.common._inside import require_inside
from farandole.keras._exchange import Alike, AloneExchange, Exchange, times
from farandole.keras._global.loss_kinds import follows_from
from farandole.keras._global.steps import running
from farandole.keras._present import present
from farandole.keras._reduction import Reduction

_states: weakref.WeakSet[State] = weakref.WeakSet()


def _end_exchanges() -> None:
    """Ends all exchanges, since each belongs to one world."""
    for state in list(_states):
        exchange, state.exchange = state.exchange, None
        if exchange is not None:
            exchange.end()


_world.before_leaving(_end_exchanges)


class State:
    """The state that a wrapped optimizer has besides its own.

    Args:
        name: in errors and traces, and of its operations.
        number: counts the optimizers of that name.
        make: the class of the backend's exchanges.
    """

    def __init__(self, name: str, number: int, reduction: Reduction, make: Any) -> None:
        self.name = name  # alike on all ranks
        self.label = numbered(name, number)  # the first rank's, from the first gradients on
        self.reduction = reduction
        self.local: set[Any] = set()  # the optimizer's keys of variables that are not shared
        self.inside = False  # a call whose gradients are reduced already
        self.holds = False  # gradients of one backward are not all that is reduced
        self.is_early = False  # each backward's are reduced, though the optimizer may accumulate
        self.updating: Sequence[Any] = ()  # the variables whose accumulated gradients are clipped
        self.reduced: Sequence[Any] = ()  # the gradients, in the pass that updates
        # Set by a farandole.keras.Model: further variables that are equal on its ranks.
        self.alike: Callable[[Any], list[Alike]] | None = None
        self.exchange: Exchange | None = None  # from the first gradients on, in each world
        self._make = make
        _states.add(self)

    def reduce(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Collective: the gradients as the optimizer is to have them. Those of variables that are
        not shared stay this rank's own; some are reduced already (own_gradients.py)."""
        exchange = self.ready_exchange(optimizer)
        steps = running()
        done = set[int]() if steps is None else steps.reduced
        if not self.local and not done:
            return exchange.reduce(gradients, variables)
        result = list(gradients)
        if steps is not None:
            self._average_changed(steps, result, variables)
        shared = []
        for i, variable in enumerate(variables):
            if self.local and optimizer._var_key(variable) in self.local:
                result[i] = exchange.local(result[i])
            elif id(variable) in done:
                result[i] = times(result[i], self.reduction.passes_factor)
            else:
                shared.append(i)
        common = [variables[i] for i in shared]
        reduced = exchange.reduce([result[i] for i in shared], common)
        for i, gradient in zip(shared, reduced, strict=True):
            result[i] = gradient
        return result

    @staticmethod
    def _average_changed(steps: Any, gradients: list[Any], variables: Sequence[Any]) -> None:
        """What a step has made of reduced gradients may differ between ranks."""
        given = steps.given_back
        changed = [
            i
            for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if given and gradient is not None and id(variable) in steps.reduced
            if id(gradient) not in given and not follows_from(gradient, given)
        ]
        if changed:
            theirs = [variables[i] for i in changed]
            averaged = steps.own_gradients.again([gradients[i] for i in changed], theirs)
            for i, gradient in zip(changed, averaged, strict=True):
                gradients[i] = gradient

    def ready_exchange(self, optimizer: Any) -> Exchange:
        """Collective, once in each world. `optimizer`: None of a step that reduces by itself."""
        if self.exchange is None:
            require_inside(f"a step of {self.label}")
            self.prepare(optimizer)
            self.exchange = self._first_exchange(optimizer)
        self.exchange.skips = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        return self.exchange

    def prepare(self, optimizer: Any) -> None:
        """Called when the optimizer has its variables, in each world."""
        del optimizer  # AutoGraph takes no function without a statement

    def _first_exchange(self, optimizer: Any) -> Exchange:
        if not self._make.has_others(self.reduction):
            return AloneExchange(self.label, self.reduction)
        self.label = self._make.agreed_label(self.name, self.label, self.reduction.process_set)
        every = [] if optimizer is None else optimizer._trainable_variables
        made: Exchange = self._make(
            self.label,
            self.reduction,
            [v for v in every if optimizer._var_key(v) not in self.local],
            at_update=self.holds or (reduces_at_update(optimizer) and not self.is_early),
        )
        if self.alike is not None and not self.local:
            made.compare_also(self.alike(optimizer))
        return made

    def after(self, gradients: Sequence[Any]) -> AbstractContextManager[Any]:
        return nullcontext() if self.exchange is None else self.exchange.updating(gradients)

    def around(self, gradients: Sequence[Any], call: Callable[[], Any]) -> Any:
        """Calls the optimizer's own method, with gradients that are reduced."""
        self.inside = True
        self.reduced = gradients
        _updating.append(self)
        try:
            return call()
        finally:
            _updating.pop()
            self.inside = False
            self.reduced = ()
            if self.exchange is not None:
                self.exchange.stepped()


_updating: list[State] = []


def is_updating() -> bool:
    """Whether an optimizer is called whose gradients are reduced already."""
    return bool(_updating)


def numbered(name: str, number: int) -> str:
    """The first one has the name itself."""
    return name if number == 1 else f"{name}.{number}"


def state_of(optimizer: Any) -> State:
    state: State | None = vars(optimizer).get("_farandole")
    if state is None:
        raise InvalidArgument(
            f"this {type(optimizer).__name__} was made from the class of a DistributedOptimizer; "
            "put DistributedOptimizer(…) around it"
        )
    return state


def distributed_in(thing: Any) -> Any:
    """The optimizer that reduces: this one, the one that it scales losses for, or the model's.
    None: there is none."""
    optimizer = getattr(thing, "optimizer", None) if isinstance(thing, keras.Model) else thing
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if isinstance(each, Distributed):
            return each
    return None


def reduces_at_update(optimizer: Any) -> bool:
    """Whether the optimizer accumulates gradients itself. (One that scales losses passes them on to
    one that may, but has looked at them before.)"""
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


class Distributed:
    """The mixin; see Note [Where gradients are reduced]."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        own = super().apply  # type: ignore[misc]
        if state_of(self).inside:
            return own(grads, trainable_variables)
        grads = _weighed(self, grads, trainable_variables)
        if reduces_at_update(self):
            return own(grads, trainable_variables)
        return apply_reduced(self, state_of(self), own, grads, trainable_variables)

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        """Keras on TensorFlow calls it in a strategy's scope. Gradients are reduced already, by
        `apply` or, where the optimizer accumulates, by `_clip_gradients`."""
        return grads_and_vars

    def stateless_apply(
        self, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        own = super().stateless_apply  # type: ignore[misc]
        if state_of(self).inside or reduces_at_update(self):  # it calls apply
            with _knowing(self, optimizer_variables, trainable_variables):
                return own(optimizer_variables, grads, trainable_variables)
        return stateless_apply_reduced(
            self,
            state_of(self),
            own,
            optimizer_variables,
            _weighed(self, grads),
            trainable_variables,
        )

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        state_of(self).updating = trainable_variables
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Any) -> Any:
        state = state_of(self)
        if reduces_at_update(self) and not state.inside:
            grads = _reduce_accumulated(self, state, grads)
        return super()._clip_gradients(grads)  # type: ignore[misc]

    # Methods that change variables without using a gradient. Steps are counted as Keras does, also
    # one that finds no more data.

    def _apply_weight_decay(self, variables: Any) -> None:
        state = state_of(self)
        with state.after(state.reduced):
            super()._apply_weight_decay(variables)  # type: ignore[misc]

    def _backend_reset_gradient_accumulators(self) -> None:
        state = state_of(self)
        with state.after(state.reduced):
            super()._backend_reset_gradient_accumulators()  # type: ignore[misc]
        state.reduced = ()

    @classmethod
    def from_config(cls, config: Any, **others: Any) -> Any:
        """A plain optimizer: what reduces is not in the config."""
        plain = cls.__mro__[cls.__mro__.index(Distributed) + 1]
        return plain.from_config(config, **others)  # type: ignore[attr-defined]

    def register_local_var(self, var: Any) -> None:
        """The variable's gradients stay this rank's own."""
        state = state_of(self)
        if state.exchange is not None:
            raise InvalidArgument(
                f"register_local_var('{getattr(var, 'path', var)}') after the first step: the "
                "ranks have agreed on what they share"
            )
        state.local.add(self._var_key(var))  # type: ignore[attr-defined]


def _weighed(optimizer: Any, gradients: Any, variables: Any = None) -> Any:
    """Weights gradients by this rank's samples, in a user's own step of a farandole.keras.Model.

    Args:
        variables: of which they are; None: of all that the optimizer has.
    """
    steps, state = running(), state_of(optimizer)
    if steps is None:
        return gradients
    of = optimizer._trainable_variables if variables is None else list(variables)
    if steps.own_gradients is not None and keras.backend.backend() == "torch":
        gradients = steps.own_gradients.after_passes(list(gradients), of, state.exchange)
    if state.exchange is None or not state.exchange.has_reduced:
        return steps.weighed(gradients, of)
    if state.is_early and reduces_at_update(optimizer):  # those that backward has brought
        steps.reduced |= {id(v) for v in of if v.value.grad is not None}
    return gradients


def apply_reduced(
    optimizer: Any, state: State, own: Any, grads: Any, trainable_variables: Any
) -> Any:
    gradients = list(grads)
    if not gradients or (trainable_variables is None and not optimizer.built):
        return own(gradients, trainable_variables)  # does nothing, or says what is wrong
    variables = optimizer._trainable_variables
    if trainable_variables is not None:
        variables = list(trainable_variables)
        if not optimizer.built:
            with keras.name_scope(optimizer.name, caller=optimizer):
                optimizer.build(variables)
    if len(gradients) != len(variables):
        return own(gradients, trainable_variables)  # says so
    reduced = state.reduce(optimizer, gradients, variables)
    return state.around(reduced, lambda: own(reduced, trainable_variables))


def stateless_apply_reduced(
    optimizer: Any, state: State, own: Any, optimizer_variables: Any, grads: Any, values: Any
) -> Any:
    gradients = list(grads)
    if not optimizer.built or len(gradients) != len(optimizer._trainable_variables):
        return own(optimizer_variables, gradients, values)  # says what is wrong
    variables = optimizer._trainable_variables
    with _knowing(optimizer, optimizer_variables, values):
        reduced = state.reduce(optimizer, gradients, variables)
    return state.around(reduced, lambda: own(optimizer_variables, reduced, values))


def _knowing(optimizer: Any, own: Iterable[Any], trained: Iterable[Any]) -> Any:
    """A context, in which its variables and those that it trains have these values."""
    variables = [*optimizer.variables, *optimizer._trainable_variables]
    return present(variables, [*own, *trained])


def _reduce_accumulated(optimizer: Any, state: State, gradients: Any) -> list[Any]:
    exchange, variables = state.ready_exchange(optimizer), list(state.updating)
    reduced = exchange.at_update(
        optimizer, list(gradients), lambda ours: state.reduce(optimizer, ours, variables)
    )
    exchange.stepped()
    state.reduced = reduced
    return reduced


def _teach(scaling: Any) -> None:
    """LossScaleOptimizer; see Note [Where gradients are reduced]."""
    own_apply, own_stateless = scaling.apply, scaling.stateless_apply

    def waits(self: Any) -> bool:
        inner = self.inner_optimizer
        return isinstance(inner, Distributed) and not state_of(inner).inside

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        own = own_apply.__get__(self)
        if not waits(self):
            return own(grads, trainable_variables)
        state = state_of(self.inner_optimizer)
        grads = _weighed(self.inner_optimizer, grads, trainable_variables)
        return apply_reduced(self, state, own, grads, trainable_variables)

    def stateless_apply(
        self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
    ) -> Any:
        own = own_stateless.__get__(self)
        if not waits(self):
            return own(optimizer_variables, grads, trainable_variables)
        state = state_of(self.inner_optimizer)
        grads = _weighed(self.inner_optimizer, grads)
        return stateless_apply_reduced(
            self, state, own, optimizer_variables, grads, trainable_variables
        )

    scaling.apply, scaling.stateless_apply = apply, stateless_apply


@cache
def child_of(own: Any) -> Any:
    """The optimizer's class with ours before it, under its name: files name the plain class, so
    that plain Keras can load them."""
    _learn(keras.optimizers.LossScaleOptimizer)
    child = _wrapped.child_of(own, Distributed)
    for names in _name_tables():
        if own in names:
            names[child] = names[own]
    return child


@cache
def _learn(scaling: Any) -> None:
    _teach(scaling)


def _name_tables() -> list[dict[Any, str]]:
    """Keras' tables of public and of registered names. They are private: without them files name
    the class by its module, which loads as well."""
    tables = []
    try:
        from keras.src.api_export import REGISTERED_OBJS_TO_NAMES

        tables.append(REGISTERED_OBJS_TO_NAMES)
    except ImportError:
        pass
    try:
        from keras.src.saving.object_registration import GLOBAL_CUSTOM_NAMES

        tables.append(GLOBAL_CUSTOM_NAMES)
    except ImportError:
        pass
    return tables
