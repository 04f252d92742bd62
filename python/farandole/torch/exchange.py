"""The gradients of PyTorch parameters on their way through the reducer: hooks, passes, views."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch

from farandole._core import InvalidArgument
from farandole._hooks import GradientExchange, Parameter
from farandole._world import Group
from farandole.torch._tensors import dtype_name
from farandole.torch.compression import Compression, Compressor

_F = TypeVar("_F", bound=Callable[..., Any])

_graph_task = torch._C._current_graph_task_id  # -1 outside of a backward
_running_node = torch._C._current_autograd_node


def _untraced(function: _F) -> _F:
    """What hooks and optimizers reach is not for Dynamo: it would trace into the engine."""
    disable: Any = torch.compiler.disable
    return cast(_F, disable(function))


# Note [The end of backward]
#
# The wait stands at the end of backward, before unscaling, clipping and step: autograd calls what
# was queued in a graph task when that task is done. Three things make that harder than it sounds:
#
# * A backward that raises never makes the call. But it destroys the queued object: a _Pass that
#   dies uncalled is a backward that failed, and is known before the exception reaches the user.
# * A reentrant backward (activation checkpointing) is a graph task inside another. Its end is not
#   the end: the _Pass moves on to the task around it, by a hook on the node that runs there.
# * Gradients of several optimizers become ready in one backward. Each launches everything before
#   any waits, or ranks could wait for one another crosswise.


class _HearsEnd(Protocol):
    def end(self, *, failed: bool) -> None: ...


class _Pass:
    """One backward, as the graph tasks that take part in it see it; they alone keep it alive."""

    def __init__(self, exchange: _HearsEnd) -> None:
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
        return graph in self._graphs

    def __call__(self) -> None:
        if self._over:
            return
        around = _running_node()
        if around is not None:
            self._move_on(around)
            return
        self._over = True
        graph = _graph_task()
        try:
            for other in list(_running):
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
            self.enter(_graph_task())

        handles.append(node.register_hook(after))

    def fail(self) -> None:
        if not self._over:
            self._over = True
            self._exchange.end(failed=True)

    def __del__(self) -> None:
        self.fail()


class TorchExchange(GradientExchange):
    """The gradients of some parameters. ``p.grad`` becomes a view of the bucket, except where
    gradients are compressed, and where large ones are reduced as they lie."""

    def __init__(
        self,
        group: Group,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        compression: type[Compressor],
        sparse_as_dense: bool,
        **options: Any,
    ) -> None:
        self._parameters = [p for _, p in named]
        self._compression = None if compression is Compression.none else compression
        self._sparse_as_dense = sparse_as_dense
        empty = [compression.compress(p.detach().new_empty(0)) for p in self._parameters]
        dtypes = [wire.dtype for wire, _ in empty]
        self._contexts = [context for _, context in empty]
        super().__init__(
            group,
            [
                Parameter(name, p.numel(), dtype_name(dtype, f"parameter '{name}'"))
                for (name, p), dtype in zip(named, dtypes, strict=True)
            ],
            **options,
        )
        self._dtypes = dtypes
        self._strides = [_dense_strides(p) for p in self._parameters]
        self.learn_places()
        self._shown = [0] * len(named)  # addresses of the reduced gradients that users see
        self._lie = bytearray(len(named))  # reduced where autograd left them, in this pass
        self._pass: weakref.ref[_Pass] | None = None
        me = weakref.ref(self)  # nothing is reduced any more when the optimizer is gone
        register: Any = torch.Tensor.register_post_accumulate_grad_hook
        self._hooks = [
            register(p, partial(_on_gradient, me, i)) for i, p in enumerate(self._parameters)
        ]

    def __del__(self) -> None:
        for hook in getattr(self, "_hooks", ()):
            hook.remove()

    # The buckets.

    def forget_places(self) -> None:
        self._views.clear()

    def learn_places(self) -> None:
        self._alone = [self.reducer.in_place(i) for i in range(len(self._parameters))]
        self._views: list[torch.Tensor | None] = [None] * len(self._parameters)
        for i, alone in enumerate(self._alone):
            if not alone or self._compression is not None:
                self._view(i)  # now: not in the middle of a step

    def _view(self, i: int) -> torch.Tensor:
        """Parameter i's part of its bucket; that of a large one is made when it is needed."""
        view = self._views[i]
        if view is None:
            bucket, offset = self.reducer.places[i]
            # torch.frombuffer holds the memory object, which holds the memory.
            memory = torch.frombuffer(self.reducer.memory(bucket), dtype=torch.uint8)
            view = _view(memory[offset:], self._parameters[i], self._dtypes[i])
            self._views[i] = view
        return view

    # The pass.

    def present_pass(self) -> _Pass | None:
        return self._pass() if self._pass is not None else None

    def on_gradient(self, i: int) -> None:
        graph = _graph_task()
        present = self.present_pass()
        if graph < 0:
            # No backward that would tell its end (compiled autograd): step() does the rest.
            if not self.reducing:
                self.begin_pass()
        else:
            if present is None:
                self.begin_pass()
                present = _Pass(self)
                self._pass = weakref.ref(present)
                _running.add(self)
            present.enter(graph)
        if not self.reducing:
            return
        try:
            self.take(i)
        except BaseException:
            # Now, since the traceback may keep the pass alive.
            if present is not None:
                present.fail()
            else:
                self.end(failed=True)
            raise

    def end(self, *, failed: bool) -> None:
        self._pass = None
        _running.discard(self)
        if failed:
            self.fail_pass()
        else:
            self.finish_pass()

    # The gradients.

    def has_gradient(self, i: int) -> bool:
        return self._parameters[i].grad is not None

    def still_stands(self, i: int) -> bool:
        grad = self._parameters[i].grad
        return grad is not None and not grad.is_sparse and grad.data_ptr() == self._shown[i]

    def take(self, i: int) -> None:
        p = self._parameters[i]
        grad = p.grad
        assert grad is not None
        self.refuse_second_sum(i)
        if grad.requires_grad:
            raise InvalidArgument(
                f"the gradient of '{self.names[i]}' is part of a graph (create_graph=True), which "
                "DistributedOptimizer does not support; use torch.autograd.grad"
            )
        if grad.is_sparse:
            if not self._sparse_as_dense:
                raise InvalidArgument(
                    f"the gradient of '{self.names[i]}' is sparse; sparse reduction is not "
                    "supported yet, pass sparse_as_dense=True"
                )
            grad = grad.to_dense()
        if self._compression is not None:
            p.grad = grad
            view = self._view(i)
            view.copy_(self._compress(i, grad))
            self.mark_ready(i, view.data_ptr())
            return
        alike = grad.stride() == self._strides[i] and grad.dtype == self._dtypes[i]
        self._lie[i] = alike and self._alone[i]
        if self._lie[i]:
            p.grad = grad  # where a sparse one became dense
            self.lend(i, grad.data_ptr(), grad)
            return
        view = self._view(i)
        if not alike:
            view.copy_(grad)
        self.mark_ready(i, grad.data_ptr() if alike else view.data_ptr())
        p.grad = view

    def _compress(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        assert self._compression is not None
        wire, self._contexts[i] = self._compression.compress(grad)
        if wire.dtype != self._dtypes[i] or wire.numel() != grad.numel():
            raise InvalidArgument(
                f"compression of '{self.names[i]}' gave {wire.numel()} x {wire.dtype} where "
                f"{grad.numel()} x {self._dtypes[i]} were announced"
            )
        return wire.reshape(grad.shape)

    def show(self, i: int) -> None:
        p = self._parameters[i]
        if self._compression is not None:
            p.grad = self._compression.decompress(self._view(i), self._contexts[i])
        elif not self._lie[i]:
            p.grad = self._view(i)
        self._lie[i] = False
        assert p.grad is not None
        self._shown[i] = p.grad.data_ptr()

    def drop_gradients(self) -> None:
        self._lie = bytearray(len(self._lie))
        for p in self._parameters:
            p.grad = None

    synchronize = _untraced(GradientExchange.synchronize)
    note_step = _untraced(GradientExchange.note_step)
    note_zero_grad = _untraced(GradientExchange.note_zero_grad)


_running: weakref.WeakSet[TorchExchange] = weakref.WeakSet()  # with a pass that is not over


@_untraced
def _on_gradient(exchange: weakref.ref[TorchExchange], i: int, _: torch.Tensor) -> None:
    present = exchange()
    if present is not None:
        present.on_gradient(i)


def _view(memory: torch.Tensor, p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The begin of `memory` as a gradient of the parameter."""
    flat = memory[: p.numel() * dtype.itemsize].view(dtype)
    return torch.as_strided(flat, p.shape, _dense_strides(p))


def _dense_strides(p: torch.Tensor) -> tuple[int, ...]:
    """The parameter's strides if they leave no gaps, as autograd's gradients have them; else those
    of a contiguous tensor of its shape."""
    expected = 1
    for stride, extent in sorted(zip(p.stride(), p.shape, strict=True)):
        if extent != 1 and stride != expected:
            return torch.empty(p.shape, device="meta").stride()
        expected *= extent
    return p.stride()
