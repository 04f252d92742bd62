"""The gradients of PyTorch parameters on their way through the reducer: hooks and views."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any

import torch

from farandole._core import Error, InvalidArgument
from farandole._hooks import GradientExchange, Parameter, exchanges
from farandole._world import Group
from farandole.common._process_set import ProcessSet, global_process_set
from farandole.torch._tensors import dtype_name
from farandole.torch._training.hooked import Hooked
from farandole.torch._training.passes import Pass, graph_task, has_no_end, running, untraced
from farandole.torch._training.silence import Silence
from farandole.torch._training.sparse_gradients import SparseGradients
from farandole.torch._training.weights import BROADCAST, checksums_of, watch_weights
from farandole.torch.compression import Compression, Compressor


class TorchExchange(Hooked, GradientExchange):
    """The gradients of some parameters. ``p.grad`` becomes a view of the bucket, except where
    gradients are compressed, and where large ones are reduced as they lie, and where they are
    sparse: then the first step reduces them as dense ones, and later ones gather their entries, or,
    with `sparse_as_dense`, do the same again; users see sparse ones.

    Args:
        group: the ranks; this is one of them.
        weights: all parameters of the optimizer, in the model's order, whose values are compared.
        groups: by a parameter's id, which it is launched together with.
        process_set: what the group is called.
        line: of a program, that makes weights equal.
    """

    def __init__(
        self,
        group: Group,
        named: Sequence[tuple[str, torch.Tensor]],
        *,
        weights: Sequence[tuple[str, torch.Tensor]],
        line: str = BROADCAST,
        compression: type[Compressor],
        sparse_as_dense: bool,
        op: str,
        prescale: float,
        postscale: float,
        groups: Mapping[int, int] = MappingProxyType({}),
        process_set: ProcessSet = global_process_set,
        **options: Any,
    ) -> None:
        self.parameters = [p for _, p in named]
        self._compression = None if compression is Compression.none else compression
        self._sparse_as_dense = sparse_as_dense
        empty = [compression.compress(p.detach().new_empty(0)) for p in self.parameters]
        dtypes = [wire.dtype for wire, _ in empty]
        self._contexts = [context for _, context in empty]
        super().__init__(
            group,
            [
                Parameter(
                    name, p.numel(), dtype_name(dtype, f"parameter '{name}'"), groups.get(id(p), -1)
                )
                for (name, p), dtype in zip(named, dtypes, strict=True)
            ],
            op=op,
            prescale=prescale,
            postscale=postscale,
            sparse_as_dense=sparse_as_dense,
            **options,
        )
        self._sparse = SparseGradients(
            f"gradients {self.reducer.key:x}",
            named,
            process_set,
            compression=compression,
            prescale=prescale,
            postscale=postscale / group.size if op == "mean" else postscale,
        )
        self._weights = [tensor for _, tensor in weights]
        watch_weights(self.reducer, weights, line)
        self._becoming: dict[int, int] = {}  # what this step found to be sparse
        self._dtypes = dtypes
        self._strides = [_dense_strides(p) for p in self.parameters]
        self.learn_places()
        self._shown = [0] * len(named)  # addresses of the reduced gradients that users see
        self._shown_sparse: dict[int, weakref.ref[torch.Tensor]] = {}
        self._lie = bytearray(len(named))  # reduced where autograd left them, in this pass
        self._pass: weakref.ref[Pass] | None = None
        # By parameter, the stamp of a gradient whose backward had no end; and that backward.
        self._left: dict[int, tuple[int, int] | None] = {}
        self._left_graph = -1
        self.silence = Silence(self.names, self.parameters)
        self.hear()

    def give_up(self, name: str) -> None:
        super().give_up(name)
        exchanges.discard(self)  # who joins does not answer for it

    # The buckets.

    def forget_places(self) -> None:
        self._views.clear()
        self._bytes_of.clear()

    def learn_places(self) -> None:
        self._places = self.places()
        self._sparse.dims = self.reducer.left_out
        self._bytes_of: dict[int, torch.Tensor] = {}  # by bucket
        self._alone = [self.reducer.in_place(i) for i in range(len(self.parameters))]
        self._views: list[torch.Tensor | None] = [None] * len(self.parameters)
        for i, alone in enumerate(self._alone):
            if (not alone or self._compression is not None) and i not in self._sparse.dims:
                self._view(i)  # now: not in the middle of a step

    def _view(self, i: int) -> torch.Tensor:
        """Parameter i's part of its bucket; that of a large one is made when it is needed."""
        view = self._views[i]
        if view is None:
            bucket, offset = self._places[i]
            if bucket not in self._bytes_of:
                # torch.frombuffer holds the memory object, which holds the memory.
                memory = self.reducer.memory(bucket)
                self._bytes_of[bucket] = torch.frombuffer(memory, dtype=torch.uint8)
            view = _view(self._bytes_of[bucket][offset:], self.parameters[i], self._dtypes[i])
            self._views[i] = view
        return view

    # The pass.

    def _begin(self, *, reducing: bool) -> None:
        self.check_alive()
        self._left.clear()
        if reducing:
            self._sparse.drain()  # of a pass that failed
        super()._begin(reducing=reducing)

    def launch_rest(self) -> None:
        super().launch_rest()
        self._sparse.start_rest()

    def fail_pass(self) -> None:
        if self.reducing and self.reducer.step_open:
            with suppress(Error):  # of a group that has failed: the next call will say it
                self._sparse.start_rest()  # the other ranks wait for this one's entries
        super().fail_pass()

    def present_pass(self) -> Pass | None:
        return self._pass() if self._pass is not None else None

    def on_gradient(self, i: int) -> None:
        graph = graph_task()
        present = self.present_pass()
        if present is None:
            self.silence.over = True
            if has_no_end(graph):
                self._leave_to_step(i, graph)
                return
            self.begin_pass()
            present = Pass(self)
            self._pass = weakref.ref(present)
            running.add(self)
        present.enter(graph)
        if not self.reducing:
            return
        try:
            self.take(i)
        except BaseException:
            present.fail()  # now, since the traceback may keep the pass alive
            raise

    def _leave_to_step(self, i: int, graph: int) -> None:
        """The pass is one that only accumulates."""
        if graph != self._left_graph or not self._left:
            self.begin_pass(ends=False)
            self._left_graph = graph
        self._left[i] = _stamp(self.parameters[i].grad)

    def _refuse_changes(self) -> None:
        """Of what was left to step(): clipping, say, that took it for the mean."""
        for i, stamp in self._left.items():
            if _stamp(self.parameters[i].grad) != stamp:
                self.refuse_pass(
                    InvalidArgument(
                        f"the gradient of '{self.names[i]}' was changed after backward(), which "
                        "does not reduce gradients under compiled autograd\n  advice: call "
                        "optimizer.synchronize() after backward(), before clipping and unscaling"
                    )
                )

    def end(self, *, failed: bool) -> None:
        self._pass = None
        running.discard(self)
        if failed:
            self.fail_pass()
        else:
            self.finish_pass()

    # The gradients.

    def has_gradient(self, i: int) -> bool:
        return self.parameters[i].grad is not None

    def still_stands(self, i: int) -> bool:
        grad = self.parameters[i].grad
        if grad is None or grad.is_sparse:
            shown = self._shown_sparse.get(i)
            return grad is not None and shown is not None and shown() is grad
        return grad.data_ptr() == self._shown[i]

    def take(self, i: int) -> None:
        p = self.parameters[i]
        grad = p.grad
        assert grad is not None
        self.refuse_second_sum(i)
        if grad.requires_grad:
            raise InvalidArgument(
                f"the gradient of '{self.names[i]}' is part of a graph (create_graph=True), which "
                "DistributedOptimizer does not support; use torch.autograd.grad"
            )
        dims = 0
        if grad.is_sparse:
            dims = grad.sparse_dim()
            if dims == 0 or i not in self._sparse.dims:
                grad = grad.to_dense()
        if i in self._sparse.dims:
            if dims > 0:
                self._sparse.start(i, grad)
            self.mark_ready(i, 0, dims)
            return
        if self._compression is not None:
            p.grad = grad
            view = self._view(i)
            view.copy_(self._compress(i, grad))
            self.mark_ready(i, view.data_ptr(), dims)
            return
        alike = grad.stride() == self._strides[i] and grad.dtype == self._dtypes[i]
        self._lie[i] = alike and self._alone[i] and (dims == 0 or self._sparse_as_dense)
        if self._lie[i]:
            p.grad = grad  # where a sparse one became dense
            self.lend(i, grad.data_ptr(), grad, dims)
            return
        view = self._view(i)
        if not alike:
            view.copy_(grad)
        self.mark_ready(i, grad.data_ptr() if alike else view.data_ptr(), dims)
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

    def checksums(self) -> list[int]:
        return checksums_of(self._weights)

    def show_reduced(self) -> None:
        left_out = self.reducer.left_out if self.reducer.has_better_plan else {}
        self._becoming = {i: left_out[i] for i in left_out.keys() - self._sparse.dims.keys()}
        super().show_reduced()
        self._sparse.drain()  # of what no rank used

    def show(self, i: int) -> None:
        p = self.parameters[i]
        if i in self._sparse.dims:
            self._show_sparse(i, self._sparse.finish(i))
            return
        if self._compression is not None:
            p.grad = self._compression.decompress(self._view(i), self._contexts[i])
        elif not self._lie[i]:
            p.grad = self._view(i)
        self._lie[i] = False
        assert p.grad is not None
        self._shown[i] = p.grad.data_ptr()
        dims = self.reducer.sparse_dims(i) if self._sparse_as_dense else self._becoming.get(i, 0)
        if dims > 0:
            self._show_sparse(i, p.grad.to_sparse(dims))

    def _show_sparse(self, i: int, grad: torch.Tensor) -> None:
        p = self.parameters[i]
        p.grad = None  # its layout may be another
        p.grad = grad
        self._shown_sparse[i] = weakref.ref(grad)

    def drop_gradients(self) -> None:
        self._lie = bytearray(len(self._lie))
        for p in self.parameters:
            p.grad = None

    @untraced
    def refuse_silence(self) -> None:
        """Of the optimizer, before its step."""
        why = self.silence.check()
        if why is not None:
            self.refuse_pass(why)

    @untraced
    def synchronize(self) -> None:
        self.check_alive()
        self._refuse_changes()
        super().synchronize()

    note_step = untraced(GradientExchange.note_step)

    @untraced
    def note_zero_grad(self) -> None:
        super().note_zero_grad()
        self._left.clear()


def _stamp(grad: torch.Tensor | None) -> tuple[int, int] | None:
    """Another one when the gradient has changed."""
    if grad is None:
        return None
    return 0 if grad.is_sparse else grad.data_ptr(), grad._version


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
