"""One backward pass of autograd: when it begins, ends and fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import torch
from torch._dynamo import compiled_autograd as _compiled_autograd

_F = TypeVar("_F", bound=Callable[..., Any])

graph_task = torch._C._current_graph_task_id  # -1 outside of a backward
_running_node = torch._C._current_autograd_node


def untraced(function: _F) -> _F:
    """Hides a function of hooks and optimizers from Dynamo, which would trace into the engine."""
    disable: Any = torch.compiler.disable
    return cast(_F, disable(function))


def has_no_end(graph: int) -> bool:
    """Whether autograd makes no call when the running backward ends. Compiled autograd calls hooks,
    but drops callbacks queued for the end: gradients are reduced by step() then."""
    return graph < 0 or bool(getattr(_compiled_autograd, "in_compiled_autograd_region", False))


# Note [The end of backward]
#
# The wait stands at the end of backward, before unscaling, clipping and step: autograd calls what
# was queued in a graph task when that task is done. Three things make that harder than it sounds:
#
# * A backward that raises never makes the call. But it destroys the queued object: a Pass that
#   dies uncalled is a backward that failed, and is known before the exception reaches the user.
# * A reentrant backward (activation checkpointing) is a graph task inside another. Its end is not
#   the end: the Pass moves on to the task around it, by a hook on the node that runs there.
# * Gradients of several optimizers become ready in one backward. Each launches everything before
#   any waits, or ranks could wait for one another crosswise.


class HearsEnd(Protocol):
    def end(self, *, failed: bool) -> None: ...


class Launches(HearsEnd, Protocol):
    reducing: bool

    def present_pass(self) -> Pass | None: ...
    def launch_rest(self) -> None: ...


class Pass:
    """One backward, as the graph tasks that take part in it see it; they alone keep it alive."""

    def __init__(self, exchange: HearsEnd) -> None:
        self._exchange = exchange
        self._graphs: set[int] = set()
        self._over = False

    def enter(self, graph: int) -> None:
        """Asks to be called at the end of this graph task, which is the running one."""
        if graph in self._graphs:
            return
        self._graphs.add(graph)
        torch.autograd.Variable._execution_engine.queue_callback(self)

    def takes_part_in(self, graph: int) -> bool:
        """Whether that graph task is one of it."""
        return graph in self._graphs

    def __call__(self) -> None:
        if self._over:
            return
        around = _running_node()
        if around is not None:
            self._move_on(around)
            return
        self._over = True
        graph = graph_task()
        try:
            for other in list(running):
                beside = other.present_pass()
                if beside is not None and beside.takes_part_in(graph) and other.reducing:
                    other.launch_rest()
        except BaseException:
            self._exchange.end(failed=True)
            raise
        self._exchange.end(failed=False)

    def _move_on(self, node: Any) -> None:
        handles: list[Any] = []

        def after(*_: Any) -> None:
            handles.pop().remove()
            self.enter(graph_task())

        handles.append(node.register_hook(after))

    def fail(self) -> None:
        if not self._over:
            self._over = True
            self._exchange.end(failed=True)

    def __del__(self) -> None:
        self.fail()


running: weakref.WeakSet[Launches] = weakref.WeakSet()  # with a pass that is not over
