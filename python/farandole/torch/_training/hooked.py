"""Hooks on the gradients of parameters; of each parameter only the newest optimizer has one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from farandole import _world
from farandole._core import InvalidArgument, NotInitialized
from farandole.torch._training import watched
from farandole.torch._training.passes import Pass, graph_task, has_no_end, untraced
from farandole.torch._training.silence import Silence
from farandole.torch._training.weighing import last_weighed
from farandole.torch._training.weights import BROADCAST, Compared, Rest


class Hooked:
    """Hooks every gradient of its parameters, until it dies or a newer one takes over one of them:
    two that reduce the same gradient would reduce it twice, and overwrite each other's."""

    taken: str | None = None  # the first parameter that a newer one has
    weighed_only = False  # backward passes must be of losses with their weight
    open = False  # more micro-batches of the global batch come

    _pass: weakref.ref[Pass] | None = None

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        weights: Sequence[tuple[str, torch.Tensor]],
        line: str = BROADCAST,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.epoch = _world.epoch()  # of the world it was made in
        self.silence = Silence(self.names, self.parameters)
        self.compared = Compared(weights, line)
        # Autograd calls the hooks of each device's gradients from a thread of that device's.
        self._entering = threading.Lock()

    def compare_also(self, rest: Rest) -> None:
        """Adds to what ranks compare. Collective, between steps."""
        self.compared.rest = rest
        self._watch_weights()

    def _watch_weights(self) -> None:
        """Makes the steps that come compare the tensors."""

    def present_pass(self) -> Pass | None:
        return self._pass() if self._pass is not None else None

    def lacks_weight(self) -> bool:
        """Whether the loss of the present pass should have a weight, and none was seen so far."""
        present = self.present_pass() if self.weighed_only else None
        return present is not None and not present.takes_part_in(last_weighed())

    def refuse(self, why: InvalidArgument) -> NoReturn:
        """Raises it in place of a step, and tells the other ranks, which may have begun one."""
        raise NotImplementedError

    def entered(self, i: int, *, final: bool) -> Pass | None:
        """The running pass, which may begin with this gradient; None where nobody tells its end."""
        graph = graph_task()
        present = self.present_pass()
        if present is None:
            self.silence.over = True
            ends = not has_no_end(graph)
            self.begin_backward(i, graph, final=final, ends=ends)
            if not ends:
                return None
            present = Pass(self)
            self._pass = weakref.ref(present)
        present.enter(graph)
        return present

    def begin_backward(self, i: int, graph: int, *, final: bool, ends: bool) -> None:
        """A gradient has come outside of a pass. `ends`: whether autograd tells the end."""
        raise NotImplementedError

    def end(self, *, failed: bool) -> None:
        """The end of a pass."""
        raise NotImplementedError

    def on_gradient(self, i: int, *, final: bool) -> None:
        """Autograd has accumulated the gradient of parameter i. Unless it is `final`, hooks of the
        program come after this one, in this backward, and may change it."""
        raise NotImplementedError

    def make_last(self, i: int) -> bool:
        """Moves our hook behind those of the program, for the next backward. Returns whether it is
        the last in this one."""
        hooks: dict[int, Any] = self.parameters[i]._post_accumulate_grad_hooks
        if len(hooks) == 1:
            return True
        mine = self._hooks[i].id
        if next(reversed(hooks)) == mine:
            return True
        hooks[mine] = hooks.pop(mine)  # PyTorch goes by the order of insertion
        return False

    def is_due(self) -> bool:
        """Whether gradients may stand that are not reduced and should be before they are read
        (readers.py)."""
        return False

    def reduce_now(self) -> None:
        """Collective: reduces them, where they are due."""

    def note_alike(self) -> None:
        """The program has changed gradients in a way that is the same on all ranks."""

    def managed(self) -> list[torch.Tensor]:
        """The parameters whose gradients it reduces, also those of which it has not heard yet."""
        return self.parameters

    def hear(self) -> None:
        """Registers the hooks. Called once, when all ranks have agreed to it."""
        take_over(self.parameters)
        self._hooks: list[Any] = []
        self._hook_rest()
        hearing.add(self)

    def hear_also(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Registers hooks on more parameters."""
        take_over(p for _, p in named)
        self.names += [name for name, _ in named]
        self.parameters += [p for _, p in named]
        self._hook_rest()

    def _hook_rest(self) -> None:
        me = weakref.ref(self)  # nothing is reduced any more when the optimizer is gone
        register: Any = torch.Tensor.register_post_accumulate_grad_hook
        for i in range(len(self._hooks), len(self.parameters)):
            p = self.parameters[i]
            is_frozen = not p.requires_grad  # since an elastic job's former world
            if is_frozen:
                p.requires_grad_(True)  # PyTorch registers no hook otherwise
            self._hooks.append(register(p, partial(_on_gradient, me, i)))
            if is_frozen:
                p.requires_grad_(False)

    def __del__(self) -> None:
        for hook in getattr(self, "_hooks", ()):
            hook.remove()

    def give_up(self, name: str) -> None:
        """Removes the hooks, as a newer one has that parameter."""
        self.taken = name
        for hook in self._hooks:
            hook.remove()

    def end_hearing(self) -> None:
        """Removes the hooks, as the world has ended; an optimizer made later has its own."""
        hearing.discard(self)
        for hook in self._hooks:
            hook.remove()

    def check_alive(self) -> None:
        """Raises InvalidArgument where a newer one has taken over, NotInitialized where its world
        is not that of now."""
        if _world.is_initialized() and self.epoch != _world.epoch():
            raise NotInitialized(
                "the world that this DistributedOptimizer was made in has ended, and this is "
                "another one\n  advice: make the DistributedOptimizer again after init(), around a "
                "new optimizer"
            )
        if self.taken is not None:
            raise InvalidArgument(
                f"parameter '{self.taken}' is in a DistributedOptimizer that was made later, which "
                "reduces its gradient now; this one reduces nothing any more\n"
                "  advice: step with the later one; or, where losses share parameters, give all "
                "parameters to one DistributedOptimizer"
            )


def take_over(parameters: Iterable[torch.Tensor]) -> None:
    """Removes the hooks of each `Hooked` that has one of these parameters."""
    mine = {id(p) for p in parameters}
    for other in list(hearing):
        shared = (n for n, p in zip(other.names, other.parameters, strict=True) if id(p) in mine)
        taken = next(shared, None)
        if taken is not None:
            hearing.discard(other)
            other.give_up(taken)


@untraced
def _on_gradient(hooked: weakref.ref[Hooked], i: int, _: torch.Tensor) -> None:
    present = hooked()
    if present is not None:
        present.on_gradient(i, final=present.make_last(i))


hearing: weakref.WeakSet[Hooked] = weakref.WeakSet()


def _every_gradient() -> list[torch.Tensor | None]:
    return [p.grad for each in hearing for p in each.managed()]


watched.every_gradient = _every_gradient
