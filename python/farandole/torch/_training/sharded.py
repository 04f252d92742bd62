"""DistributedOptimizer(..., sharded_update=True): every rank updates 1/n of the parameters."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, NoReturn

import torch

from farandole import _core
from farandole._core import InvalidArgument
from farandole._limits import Limits
from farandole._world import Group
from farandole.common._objects import agree
from farandole.common._reduction import Reduction, check_passes
from farandole.torch._tensors import check_tensor
from farandole.torch._training.parameters import Named, gets_gradients
from farandole.torch._training.placeholders import Placeholders
from farandole.torch._training.readers import watch_readers
from farandole.torch._training.shards import IN_NO_GROUP, Settings, Shards
from farandole.torch._training.wrapped import WrappedOptimizer, become


class Rule(NamedTuple):
    """How an optimizer's class is known to the core, and what its state is called in torch."""

    name: str
    slots: tuple[str, ...]
    counts_steps: bool  # state has a "step"
    decoupled: bool = False  # weight decay, where param groups do not say


_RULES: dict[type[torch.optim.Optimizer], Rule] = {
    torch.optim.SGD: Rule("sgd", ("momentum_buffer",), False),
    torch.optim.Adam: Rule("adam", ("exp_avg", "exp_avg_sq"), True),
    torch.optim.AdamW: Rule("adam", ("exp_avg", "exp_avg_sq"), True, decoupled=True),
}


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Raises InvalidArgument for an optimizer that cannot be sharded."""
    rule = _RULES.get(type(optimizer))
    if rule is None:
        raise InvalidArgument(
            f"sharded_update=True does not know {type(optimizer).__name__}; it updates by "
            + ", ".join(known.__name__ for known in _RULES)
        )
    if rule.name == "sgd" and all(group["momentum"] == 0 for group in optimizer.param_groups):
        rule = rule._replace(slots=())
    for group in optimizer.param_groups:
        settings_of(rule, group)
    return rule


def settings_of(rule: Rule, group: dict[str, Any]) -> _core.HyperParameters:
    """A param group's options for the core. Raises InvalidArgument."""
    for option in ("amsgrad", "differentiable"):
        if group.get(option):
            raise InvalidArgument(f"sharded_update=True does not support {option}=True")
    common: dict[str, Any] = {
        "rate": float(group["lr"]),
        "weight_decay": float(group["weight_decay"]),
        "maximize": bool(group["maximize"]),
    }
    if rule.name == "adam":
        beta1, beta2 = group["betas"]
        return _core.HyperParameters(
            **common,
            beta1=float(beta1),
            beta2=float(beta2),
            epsilon=float(group["eps"]),
            decoupled=bool(group.get("decoupled_weight_decay", rule.decoupled)),
        )
    if group["momentum"] != 0 and not rule.slots:
        raise InvalidArgument(
            f"momentum={group['momentum']} after the DistributedOptimizer was made without\n"
            "  advice: make the optimizer with a momentum that is not 0"
        )
    return _core.HyperParameters(
        **common,
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
    )


class ShardedOptimizer(WrappedOptimizer):
    """The class that DistributedOptimizer puts before the optimizer's own."""

    _shards: Shards
    _rule: Rule
    _unmanaged: list[torch.Tensor]  # frozen or empty when the optimizer was wrapped
    _placeholders: Placeholders
    # Makes GradScaler leave unscaling and skipping to step(), which can then refuse it.
    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> Any:
        """Reduces the gradients, updates this rank's part of the parameters, and gives it to all.
        Collective.

        Raises:
            RemoteError: another rank's backward raised, or it refused to step; no parameter has
                changed.
            Mismatch: the ranks' settings or states differ, as learning rates, or their parameters;
                no parameter has changed.
        """
        self._opt_called = True  # as the step of an LR scheduler says, which ours is in place of
        self._refuse_open()
        self._refuse_replaced()
        self._refuse_scaler()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._shards.step(self._settings, self._unmanaged_gradients())
        self._placeholders.put_new(self.state, self._shards.update.steps)
        return loss

    def _unmanaged_gradients(self) -> list[torch.Tensor]:
        unmanaged = [p for p in self._unmanaged if p.grad is not None]
        present = {id(p) for group in self.param_groups for p in group["params"] if unmanaged}
        return [p for p in unmanaged if id(p) in present]

    def prepare_unscale(self) -> None:
        """step() refuses the scaler."""

    def _refuse_scaler(self) -> None:
        """Refuses a GradScaler: it divides gradients in place after some were copied to buckets,
        and one rank alone would skip a step that the others take."""
        of_scaler = [vars(self).pop(name, None) for name in ("grad_scale", "found_inf")]
        if any(value is not None for value in of_scaler):
            self._shards.refuse(
                InvalidArgument(
                    "GradScaler with sharded_update=True: each rank would scale, and leave out "
                    "steps, by its own gradients\n  advice: autocast to bfloat16, which needs no "
                    "scaler, or sharded_update=False"
                )
            )

    def _hooked(self) -> Shards:
        return self._shards

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clips the reduced gradients, as ``torch.nn.utils.clip_grad_norm_`` does. Collective.

        Args:
            max_norm: of the gradients of all parameters in param_groups, as one vector.
            norm_type: 2 or ``inf``.
            error_if_nonfinite: raise RuntimeError where the norm is NaN or infinite.

        Returns:
            The norm before; the step then takes the gradients times max_norm / norm, if that is
            below 1. ``p.grad`` stays as it is.

        Examples:
            >>> loss.backward()                                    # doctest: +SKIP
            >>> norm = optimizer.clip_grad_norm_(1.0)              # doctest: +SKIP
            >>> optimizer.step()                                   # doctest: +SKIP
        """
        kind = {2.0: "2", math.inf: "inf"}.get(float(norm_type))
        if kind is None:
            raise InvalidArgument(f"norm_type is {norm_type}; a sharded update knows 2 and inf")
        norm = self._shards.clip(float(max_norm), kind, self._settings, error_if_nonfinite)
        return torch.tensor(norm)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._shards.note_zero_grad()

    def _settings(self) -> Settings:
        self._heed_resets()
        groups = [settings_of(self._rule, group) for group in self.param_groups]
        group_of: dict[int, int] = {}
        for g, group in enumerate(self.param_groups):
            for p in group["params"]:
                if group_of.setdefault(id(p), g) != g:
                    raise InvalidArgument(
                        f"parameter '{self._parameter_names[p]}' is in two param_groups, "
                        f"{group_of[id(p)]} and {g}\n  advice: put it into one of them"
                    )
        return Settings(groups, [group_of.get(id(p), IN_NO_GROUP) for p in self._shards.parameters])

    # State: whole in dictionaries, 1/n of it here.

    def _heed_resets(self) -> None:
        if reset := self._placeholders.take_removed(self.state):
            self._shards.update.reset_state(reset)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, in torch's format: it loads into the plain optimizer, and the plain
        one's loads here. Collective: every rank calls it, and gets all of it."""
        self._heed_resets()
        slots = [self._shards.gather(s) for s in range(len(self._rule.slots))]
        steps = self._shards.update.steps
        if slots:
            self._require_same_steps(steps)
        for i, p in reversed(list(enumerate(self._shards.parameters))):
            if steps[i] == 0:
                continue
            mine: dict[str, Any] = {}
            if self._rule.counts_steps:
                mine["step"] = torch.tensor(float(steps[i]))
            mine.update(zip(self._rule.slots, (tensors[i] for tensors in slots), strict=True))
            if mine:
                self.state[p] = mine
        try:
            return super().state_dict()
        finally:
            self._placeholders.put(self.state, steps)

    def _require_same_steps(self, steps: list[int]) -> None:
        """Collective. They differ where ranks have reset their states differently."""
        rows = [f"{n} steps of '{name}'" for name, n in zip(self._shards.names, steps, strict=True)]
        agree("the optimizer's state", rows, advice="load or reset it alike on every rank")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes this rank's part of a whole state. Every rank loads the same."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            settings_of(self._rule, group)  # refuses what cannot be updated by
        self.take_state()

    def take_state(self) -> None:
        """Moves the state from `self.state`, where PyTorch loads it, to the shards."""
        mine = [self.state.pop(p, {}) for p in self._shards.parameters]
        for slot, name in enumerate(self._rule.slots):
            self._shards.scatter(slot, [state.get(name) for state in mine])
        self._shards.update.steps = steps = [self._steps_in(state) for state in mine]
        self._placeholders = Placeholders(
            self._shards.names if self._rule.slots else [], self._shards.parameters
        )
        self._placeholders.put(self.state, steps)

    def _steps_in(self, state: dict[str, Any]) -> int:
        if self._rule.counts_steps:
            return int(state.get("step", 0))
        return int(any(state.get(name) is not None for name in self._rule.slots))

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise InvalidArgument(
            "with sharded_update=True an optimizer cannot be copied, as each rank has a part of "
            "its state\n  advice: copy the model without it, or use state_dict() on every rank"
        )

    # Further methods of the plain DistributedOptimizer.

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes only accumulate anyway; ``step()`` reduces."""
        return nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        check_passes(passes)
        self._shards.passes_per_step = passes

    def synchronize(self) -> NoReturn:
        raise InvalidArgument(
            "with sharded_update=True no rank ever has all reduced gradients\n  advice: clip with "
            "optimizer.clip_grad_norm_(), or take sharded_update=False"
        )

    skip_synchronize = synchronize


def distribute(
    optimizer: torch.optim.Optimizer,
    named: Named,
    group: Group,
    reduction: Reduction,
    passes_per_step: int,
    limits: Limits,
) -> None:
    """Collective.

    Args:
        named: the optimizer's parameters in registration order.
    """
    rule = rule_of(optimizer)
    watch_readers()
    for name, p in named:
        check_tensor(p, f"sharded_update=True: '{name}'")
    _refuse_replaced_step(optimizer)
    managed = [(n, p) for n, p in reversed(named) if gets_gradients(p)]
    shards = Shards(
        group,
        managed,
        named,
        rule.name,
        len(rule.slots),
        reduction,
        passes_per_step=passes_per_step,
        limits=limits,
    )
    sharded = become(optimizer, ShardedOptimizer, named)
    child: Any = type(sharded)
    child.step = torch.optim.Optimizer.profile_hook_step(child.step)
    child.step.hooked = True  # step hooks run around it, since torch's own is not called
    sharded._shards = shards
    sharded._rule = rule
    sharded._unmanaged = [p for _, p in named if not gets_gradients(p)]
    sharded.take_state()


def _refuse_replaced_step(optimizer: torch.optim.Optimizer) -> None:
    step: Any = vars(optimizer).get("step")
    own = step.__wrapped__ if hasattr(step, "_wrapped_by_lr_sched") else step  # of a scheduler
    if own not in (None, type(optimizer).step):
        raise InvalidArgument(
            "optimizer.step was replaced, and a sharded update would never run it\n  advice: use "
            "register_step_pre_hook() or register_step_post_hook()"
        )
