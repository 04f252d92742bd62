"""Gradients in a training step of the user's own, reduced where the framework gives them.

Such a step may clip them by their norm, add them up, or leave a step out by what they are. As in
one process it is to see those of the whole batch. So frameworks are taught, once: where a step of a
shared model asks for gradients of trainable variables, it gets the mean over the ranks, and
optimizers then take what they are given.

    TensorFlow   tf.GradientTape.gradient
    JAX          jax.grad and jax.value_and_grad, by the first argument
    PyTorch      backward() itself reduces what it accumulates; torch.autograd.grad

It is the optimizer that reduces, as in a step of Keras' own, where the step asks inside a loop, a
branch, a function of its own or a map over samples: others may not ask as often. So it is, too,
where the loss is not known to be of the whole part: it may be of single samples.

What the step makes of gradients that are reduced is the same on all ranks, if it adds nothing of
its own. Where that is not seen in a graph, the optimizer averages it once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any

import keras

from farandole._core import InvalidArgument
from farandole.keras._exchange import Exchange
from farandole.keras._global.loss_kinds import Kind
from farandole.keras._global.passes import Passes, is_made_of
from farandole.keras._global.steps import Steps, running
from farandole.keras._wrapped import distributed_in, state_of

# From a number, its gradients and their variables, how often the step has asked before.
Reduce = Callable[[int, list[Any], list[Any]], list[Any]]


class OwnGradients:
    """Those of one model.

    Args:
        reduce: makes the mean of gradients that have their weight.
    """

    def __init__(self, model: Any, steps: Steps, reduce: Reduce) -> None:
        self._model, self._steps, self._reduce = model, steps, reduce
        self._asked = 0  # by the step that runs or is traced
        self._step: Any = None  # its share
        self._passes = Passes()
        self._hooked: Exchange | None = None
        self._values: dict[int, Any] = {}  # on JAX: variables by the ids of their values

    @contextmanager
    def of_values(self, values: list[Any]) -> Iterator[None]:
        """A context for a step on JAX, in which trainable variables have these values."""
        variables = self._model.trainable_variables
        self._values = {id(v): each for v, each in zip(values, variables, strict=True)}
        try:
            yield
        finally:
            self._values = {}

    def prepare(self) -> None:
        """PyTorch: the first backward() reduces as later ones do. Every rank calls it."""
        optimizer = distributed_in(self._model)
        if optimizer is not None and optimizer.built:
            self._hooked = state_of(optimizer).ready_exchange(optimizer)

    def are_of_batch(self, losses: Sequence[Any]) -> bool:
        """PyTorch, collective: whether they are made of losses of all samples of each rank's part.
        A rank whose part is one sample cannot tell by itself."""
        known = self._steps.known_losses()
        return self._passes.ask(is_of_batch=all(is_made_of(loss, known) for loss in losses))

    def begin_pass(self, exchange: Exchange) -> None:
        """PyTorch: a backward() whose gradients this exchange reduces has begun."""
        self._passes.begin(self._steps.share, exchange)

    def after_passes(
        self, gradients: list[Any], variables: list[Any], exchange: Exchange | None
    ) -> list[Any]:
        """PyTorch, collective: the gradients that an optimizer gets, once all ranks have come to
        it. `exchange`: the optimizer's, if it has one by now."""
        if len(gradients) != len(variables):
            return gradients  # Keras says so
        if exchange is not None and exchange.hears_backward:
            if self._passes.lacks_one(self._steps.share):
                given = self._steps.weighed(gradients, variables)
                gradients = exchange.reduce_in_backward(given, variables)
            self._passes.know(exchange)
        of = [v.value for v in variables]
        plain = [g is p.grad for g, p in zip(gradients, of, strict=True)]
        self._passes.finish(changed=not all(plain) or self._passes.have_changed())
        pairs = zip(gradients, of, plain, strict=True)
        after = [p.grad if is_plain else g for g, p, is_plain in pairs]
        for i, variable in enumerate(variables):
            if id(variable) in self._steps.hooks.unweighed:
                after[i] = self._steps.one_weighed(after[i], None)
        return after

    @property
    def are_reduced(self) -> bool:
        """PyTorch: whether backward() has reduced them."""
        return self._hooked is not None and self._hooked.has_reduced

    def variables_of(self, sources: Sequence[Any]) -> list[Any] | None:
        """The trainable variables that the sources are; None if one is none."""
        known = dict(self._values)
        if not known:
            variables = self._model.trainable_variables
            known = {id(each): v for v in variables for each in (v, v._value)}
        found = [known.get(id(source)) for source in sources]
        return None if not found or any(each is None for each in found) else found

    def reduced(self, gradients: list[Any], variables: list[Any], kind: Kind | None) -> list[Any]:
        """Collective."""
        steps = self._steps
        if self._step is not steps.share:
            self._step, self._asked = steps.share, 0
        steps.tell_of_loss(kind)
        weighed = [steps.one_weighed(gradient, kind) for gradient in gradients]
        self._asked += 1
        made = self._reduce(self._asked, weighed, variables)
        steps.reduced |= set(map(id, variables))
        steps.given_back |= {id(each): each for each in made if each is not None}
        return made

    def again(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """Collective: the mean of what the step has made of reduced gradients."""
        self._asked += 1
        return self._reduce(self._asked, gradients, variables)


def learn() -> None:
    """Teaches the framework; see above."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        _learn_of_tapes()
    elif backend == "jax":
        _learn_of_jax()
    else:
        _learn_of_torch()


def _own_step() -> Steps | None:
    """The step of a user's own that runs."""
    steps = running()
    is_own = steps is not None and steps.share is not None and steps.weighs_gradients
    return steps if is_own else None


@cache
def _learn_of_tapes() -> None:
    import tensorflow as tf

    own = tf.GradientTape.gradient

    @wraps(own)
    def gradient(self: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        given = own(self, target, sources, *args, **kwargs)
        steps = _own_step()
        if steps is None:
            return given
        losses, gradients = tf.nest.flatten(target), tf.nest.flatten(given)
        own_gradients, variables = steps.own_gradients, None
        kind, flows = steps.kind_of(losses), [*args[:1], kwargs.get("output_gradients")]
        if own_gradients is not None and _is_the_steps_own(tf, steps.share):
            variables = own_gradients.variables_of(tf.nest.flatten(sources))
        is_whole = steps.is_of_batch(kind) and all(each is None for each in flows)
        if variables is None or not is_whole:
            steps.see(losses, gradients)
            return given
        reduced = own_gradients.reduced(gradients, variables, kind)
        return tf.nest.pack_sequence_as(given, reduced, expand_composites=False)

    tf.GradientTape.gradient = tf.autograph.experimental.do_not_convert(gradient)


def _is_the_steps_own(tf: Any, share: Any) -> bool:
    """Whether the graph is the one that the step is traced in, and none of a loop, a branch or a
    map over samples."""
    if tf.executing_eagerly():
        return not hasattr(share, "graph")
    graph = tf.compat.v1.get_default_graph()
    scopes = graph.get_name_scope().split("/")  # pfor traces its body in the same graph
    is_mapped = any(each.startswith("loop_body") for each in scopes)
    return graph is getattr(share, "graph", None) and not is_mapped


@cache
def _learn_of_jax() -> None:
    import jax

    def taught(make: Callable[..., Any], of: Callable[[Any, bool, Any], Any]) -> Any:
        @wraps(make)
        def made(
            fun: Any, argnums: Any = 0, has_aux: bool = False, *args: Any, **kwargs: Any
        ) -> Any:
            own = make(fun, argnums, has_aux, *args, **kwargs)

            @wraps(own)
            def call(*given: Any, **named: Any) -> Any:
                result = own(*given, **named)
                if argnums != 0 or not given:
                    return result
                return of(result, has_aux, given[0])

            return call

        return made

    def of_grad(result: Any, has_aux: bool, weights: Any) -> Any:
        if not has_aux:
            return _reduced_on_jax(result, weights)
        return _reduced_on_jax(result[0], weights), result[1]

    def of_value_and_grad(result: Any, has_aux: bool, weights: Any) -> Any:  # noqa: ARG001
        return result[0], _reduced_on_jax(result[1], weights)

    jax.grad = taught(jax.grad, of_grad)
    jax.value_and_grad = taught(jax.value_and_grad, of_value_and_grad)


def _reduced_on_jax(gradients: Any, weights: Any) -> Any:
    from jax import tree

    steps = _own_step()
    if steps is None:
        return gradients
    sources, (leaves, form) = tree.leaves(weights), tree.flatten(gradients)
    if steps.own_gradients is None:
        steps.see([], leaves)
        return gradients
    variables = steps.own_gradients.variables_of(sources)
    is_whole = variables is not None and steps.is_of_batch(None)
    if not is_whole or not all(map(_are_traced_alike, sources, leaves)):
        return gradients
    reduced = steps.own_gradients.reduced(leaves, variables, steps.kind_of([]))
    return tree.unflatten(form, reduced)


def _are_traced_alike(value: Any, gradient: Any) -> bool:
    """Whether the gradient is of the program that has the value, and of no loop or map in it."""
    return type(value) is type(gradient) and (
        getattr(value, "_trace", None) is getattr(gradient, "_trace", None)
    )


@cache
def _learn_of_torch() -> None:
    import torch
    from torch.autograd.graph import GradientEdge

    own = torch.autograd.grad

    def listed(given: Any) -> list[Any]:
        is_one = torch.is_tensor(given) or isinstance(given, GradientEdge)  # which is a tuple
        return [given] if is_one else list(given)

    def parameter_of(source: Any) -> Any:
        is_edge = isinstance(source, GradientEdge)
        return getattr(source.node, "variable", source) if is_edge else source

    @wraps(own)
    def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        steps = _own_step()
        if steps is None or steps.own_gradients is None:
            return own(outputs, inputs, grad_outputs, *args, **kwargs)
        ours: OwnGradients = steps.own_gradients
        is_named = isinstance(inputs, dict)
        losses, sources = listed(outputs), listed(inputs.values() if is_named else inputs)
        variables = ours.variables_of([parameter_of(source) for source in sources])
        with nullcontext() if variables is None else steps.hooks.asking():
            given = own(losses, sources, grad_outputs, *args, **kwargs)
        if variables is not None:
            if grad_outputs is None and ours.are_of_batch(losses):
                creates_graph = (args[1:2] or [kwargs.get("create_graph")])[0]
                given = _reduced_on_torch(ours, given, variables, creates_graph=creates_graph)
            else:
                steps.hooks.unweighed |= set(map(id, variables))
        return dict(zip(inputs, given, strict=True)) if is_named else given

    torch.autograd.grad = grad


def _reduced_on_torch(
    ours: OwnGradients, gradients: Sequence[Any], variables: list[Any], *, creates_graph: Any
) -> tuple[Any, ...]:
    if creates_graph:
        raise InvalidArgument(
            "a train_step() asks for gradients of trainable variables by "
            "torch.autograd.grad(create_graph=True): those of the whole batch are part of no "
            "rank's graph\n  advice: no create_graph; gradients of inputs have a graph, as "
            "those of a gradient penalty"
        )
    return tuple(ours.reduced(list(gradients), variables, None))
