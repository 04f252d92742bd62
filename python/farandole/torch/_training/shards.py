"""Parameters and gradients of a sharded update: in buckets that all ranks map.

Parameters become views of buckets, so that the rank that updates a part can store it to all; where
a program has moved one since, step() copies it in and out. After backward a gradient is a view of
its bucket too, and still this rank's own: ranks meet in step().
Where parameters lie on a device both stay there, and go by copies (device_shards.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

import torch

from farandole import _core, _world
from farandole._core import Error, InvalidArgument
from farandole._limits import Limits
from farandole._numerics import Found
from farandole._world import Group
from farandole.common._reduction import Reduction
from farandole.torch._tensors import dtype_name
from farandole.torch._training.buckets import Bytes, Place, view_of
from farandole.torch._training.device_shards import (
    DeviceShards,
    changed_since,
    moved_away,
    read_by_torch,
)
from farandole.torch._training.finite import OwnGradients
from farandole.torch._training.gradients import part_of_a_graph, reshaped
from farandole.torch._training.hooked import Hooked
from farandole.torch._training.layouts import lay_out_alike
from farandole.torch._training.passes import Pass, graph_task, has_no_end, untraced
from farandole.torch._training.watched import has_changed, unheard, watch
from farandole.torch._training.weighing import not_weighed
from farandole.torch._training.weights import checksums_of
from farandole.torch._training.wrapped import refuse_unmanaged, too_many_passes

Settings = Callable[[], list[_core.HyperParameters]]  # by param group


class Shards(Hooked):
    """Collective: every rank makes one, with the same parameters in the same order.

    Args:
        group: the ranks.
        named: the parameters in the order in which their gradients become ready. They move.
        weights: all parameters of the optimizer, in the model's order, whose values are compared.
        hyper_group: by parameter, which of the optimizer's parameter groups it belongs to.
        rule: the core's name of the optimizer.
        slots: how many numbers of state an element has.

    Raises:
        InvalidArgument: a parameter that cannot be updated; none has moved.
        Mismatch: the ranks' parameters or options differ; says which.
    """

    def __init__(
        self,
        group: Group,
        named: Sequence[tuple[str, torch.Tensor]],
        weights: Sequence[tuple[str, torch.Tensor]],
        hyper_group: Sequence[int],
        rule: str,
        slots: int,
        reduction: Reduction,
        *,
        passes_per_step: int,
        limits: Limits,
    ) -> None:
        super().__init__(named, weights)
        self.passes_per_step = passes_per_step
        self._sparse_as_dense = reduction.sparse_as_dense
        self._refuse_shared_memory()
        self.update = _core.ShardedUpdate(
            group,
            [(name, p.numel(), dtype_name(p.dtype, f"parameter '{name}'")) for name, p in named],
            list(hyper_group),
            rule,
            slots,
            reduction.op,
            reduction.prescale,
            reduction.postscale,
            limits.bucket_bytes,
            limits.first_bucket_bytes,
        )
        self.places = [Place(*place) for place in self.update.places]
        self._strides = lay_out_alike(group, named)
        self._map_gradients()
        self._map_values()
        self._there = DeviceShards(self.update, named, self._strides)
        for i, (p, home) in enumerate(zip(self.parameters, self._homes, strict=True)):
            if not self._there.has[i]:
                home.copy_(p.detach())
                p.data = home
        self._lie = [p.data_ptr() for p in self.parameters]
        self._moved: list[int] = []  # parameters that lie elsewhere in this step
        self._factor = 1.0  # that clipping has put on the gradients
        self._passes = 0  # since the last step
        self._brought: set[int] = set()  # parameters whose gradient came by backward since then
        self._finite = OwnGradients(named, reduction.process_set)
        self._watch_weights()
        self._endless = -1  # the last backward whose end is not called back
        self.hear()

    def _watch_weights(self) -> None:
        self.compared.watch(self.update)

    def _map_values(self) -> None:
        """Makes the views of parameters in the buckets."""
        self._values = Bytes()
        buckets = range(len(self.update.buckets))
        self._homes = self.views([self._values.whole(b, self.update.values) for b in buckets])

    def _map_gradients(self) -> None:
        """Makes the views of the buckets. No program gets one: see Note [Who has a view of a
        bucket]."""
        self._mapped = Bytes()
        buckets = range(len(self.update.buckets))
        self._gradients = [self._mapped.whole(b, self.update.memory) for b in buckets]
        self._views = self.views(self._gradients)
        self._addresses = [view.data_ptr() for view in self._views]
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [memory._version for memory in self._gradients]

    def views(self, buckets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """By parameter: the view of its bytes in the buckets, in its shape."""
        return [
            view_of(buckets[place.bucket][place.offset :], p, p.dtype, strides)
            for place, p, strides in zip(self.places, self.parameters, self._strides, strict=True)
        ]

    def _refuse_shared_memory(self) -> None:
        owner: dict[int, str] = {}
        for name, p in zip(self.names, self.parameters, strict=True):
            other = owner.setdefault(p.data_ptr(), name)
            if other != name:
                raise InvalidArgument(
                    f"parameters '{other}' and '{name}' share memory, which a sharded update would "
                    "part\n  advice: tie them by registering one Parameter twice"
                )

    # Backward.

    def on_gradient(self, i: int, *, final: bool) -> None:
        with self._entering:  # the update has one thread at a time
            present = self._entered()
            try:
                self._refuse_pass()
                if final:  # else step() takes it
                    self._take(i)
                    if self.parameters[i].grad is not None:
                        self._brought.add(i)
            except BaseException:
                if present is not None:  # now, since the traceback may keep the pass alive
                    present.fail()
                raise

    def _entered(self) -> Pass | None:
        """The running pass, which may begin now; None where nobody tells its end."""
        graph = graph_task()
        present = self.present_pass()
        if present is None:
            self.silence.over = True
            if not self._mapped.standing():
                self._map_gradients()
            ends = not has_no_end(graph)
            if ends or graph != self._endless:
                self._passes += 1
                self._endless = graph
            if ends:
                present = Pass(self)
                self._pass = weakref.ref(present)
        if present is not None:
            present.enter(graph)
        return present

    def _refuse_pass(self) -> None:
        if self._factor != 1:
            raise InvalidArgument(
                "backward() between clip_grad_norm_() and step(): clipped gradients cannot be "
                "added to\n  advice: clip once, when all gradients are there"
            )
        if 1 < self.passes_per_step < self._passes:
            raise too_many_passes(self.passes_per_step)

    def end(self, *, failed: bool) -> None:
        """The end of a backward."""
        unweighed = not failed and self.lacks_weight()
        self._pass = None
        if not failed and not unweighed:
            return
        for p in self.parameters:
            p.grad = None
        self.note_zero_grad()
        self._abandon()
        if unweighed:
            raise not_weighed()

    def _abandon(self) -> None:
        """Tells the other ranks that there is no step, without waiting for them."""
        with suppress(Error):  # of a group that has failed: the next call will say it
            self.update.abandon()

    @unheard
    def _take(self, i: int) -> None:
        """Moves a gradient to its bucket, unless it is there already, or a hook of the program has
        cleared it."""
        p = self.parameters[i]
        grad = p.grad
        if grad is None:
            return
        if grad.requires_grad:
            raise part_of_a_graph(self.names[i])
        if grad.shape != p.shape:
            raise reshaped(self.names[i], grad.shape, p.shape)
        if grad.is_neg():  # lazily: memory has other numbers
            grad = grad.resolve_neg()
        if grad.is_sparse:
            if not self._sparse_as_dense:
                raise InvalidArgument(
                    f"the gradient of '{self.names[i]}' is sparse; sparse reduction is not "
                    "supported yet, pass sparse_as_dense=True"
                )
            grad = grad.to_dense()
        if self._there.has[i]:
            p.grad = grad = self._there.bring(i, grad)
            watch(grad)
            return
        if not grad.is_cpu:
            raise self._there.misplaced(i, grad)
        view = self._views[i]
        if p.dtype != view.dtype:
            raise moved_away(self.names[i])
        address = grad.data_ptr()
        if address != self._addresses[i]:
            if grad.stride() != self._strides[i] or grad.dtype != view.dtype:
                view.copy_(grad)
            else:
                self.update.take(i, address)
            p.grad = grad = view.detach()
        watch(grad)
        bucket = self.places[i].bucket
        self._versions[bucket] = self._gradients[bucket]._version

    def note_zero_grad(self) -> None:
        self._factor = 1.0
        self._begin_step()
        self._there.forget()

    def _begin_step(self) -> None:
        """What a program does to gradients that stand now is its own affair."""
        self._passes = 0
        self._brought.clear()
        self._note_versions()

    # The step.

    @untraced
    def step(self, settings: Settings, unmanaged: Sequence[torch.Tensor]) -> None:
        """Updates all parameters, by param group with `settings()`."""
        self.check_alive()
        with self._abandoning():
            refuse_unmanaged(unmanaged)
            self.silence.refuse()
            present, groups = self._present(), settings()
            self._bring_values()
            self.compared.show(self.update)
            mine = self._finite.found() if self._finite.looks else None
        if self._finite.looks and self._finite.numerics.is_error:
            self._require_finite(present, groups, mine)
        with self._abandoning():
            self._there.bring_values()
        self.update.begin("update", present, groups, self._factor)
        self._factor = 1.0
        self._begin_step()
        self.update.wait()
        self._there.end()
        for i in self._moved:
            self.parameters[i].detach().copy_(self._homes[i])
        if self._finite.looks and not self._finite.numerics.is_error:
            self._finite.judge(mine)  # now, when it is known that all ranks have taken the step

    def _require_finite(
        self, present: bytes, groups: list[_core.HyperParameters], mine: Found | None
    ) -> None:
        """Before weights change. By the norm of all ranks' gradients, which hears of ranks that
        refuse the step."""
        self.update.begin("norm inf", present, groups, 1.0)
        self.update.wait()
        if not self.update.norm < float("inf"):
            self._finite.report(mine)

    def refuse(self, why: InvalidArgument) -> NoReturn:
        self.check_alive()
        with self._abandoning():
            raise why

    @untraced
    def clip(self, max_norm: float, kind: str, settings: Settings, strict: bool) -> float:
        """Scales the gradients as torch's clip_grad_norm_; gives the norm of before."""
        self.check_alive()
        with self._abandoning():
            present, groups = self._present(), settings()
            self.compared.show(self.update)
        self.update.begin(f"norm {kind}", present, groups, 1.0)
        self.update.wait()
        total = self.update.norm * self._factor
        if strict and not total < float("inf"):  # the same on every rank
            raise RuntimeError(
                f"the total norm of the gradients is {total}, so they cannot be clipped; pass "
                "error_if_nonfinite=False to scale by it anyway"
            )
        self._factor *= min(max_norm / (total + 1e-6), 1.0)
        return total

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """Tells the other ranks when this rank refuses a step on its own."""
        self.update.drain()  # of a step that was given up
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    @unheard
    def _present(self) -> bytes:
        """A byte per parameter: whether it has a gradient, which then stands in its bucket."""
        for i in sorted(self._brought):
            if self._was_overwritten(i):
                raise changed_since(self.names[i])
        if not self._mapped.standing():
            self._map_gradients()
        present = bytearray(len(self.parameters))
        for i, p in enumerate(self.parameters):
            grad = p.grad
            if grad is None:
                continue
            if i not in self._brought and self._has_changed(i, grad):
                self._take(i)  # no hook has seen it
            present[i] = 1
        return bytes(present)

    def _bring_values(self) -> None:
        """Copies parameters that a program has moved to where the update reads them. They stay
        where they are, since others may read them there."""
        rows = enumerate(zip(self.parameters, self._lie, strict=True))
        self._moved = [i for i, (p, address) in rows if p.data_ptr() != address]
        if self._moved and not self._values.standing():
            self._map_values()
        for i in self._moved:
            p, home = self.parameters[i], self._homes[i]
            alike = p.shape == home.shape and p.dtype == home.dtype and p.is_cpu
            if self._there.has[i] or not alike:
                raise moved_away(self.names[i])
            home.copy_(p.detach())

    def _was_overwritten(self, i: int) -> bool:
        """Whether a program has put other numbers into the gradient since backward brought it, or
        into one that shares its bucket. It may have dropped it, or moved it."""
        grad, bucket = self.parameters[i].grad, self.places[i].bucket
        if grad is None:
            return False
        if self._gradients[bucket]._version != self._versions[bucket]:
            return True
        if self._stands(i, grad) or self._there.has[i]:
            return self._has_changed(i, grad)
        return checksums_of([grad]) != checksums_of([self._views[i]])

    def _has_changed(self, i: int, grad: torch.Tensor) -> bool:
        """Whether that gradient is another than the one in the bucket, or may have been."""
        return grad.is_sparse or not self._stands(i, grad) or has_changed(grad)

    @unheard
    def is_due(self) -> bool:
        """Whether gradients stand that no step has used. After it they may be read, for a log."""
        if graph_task() >= 0 or not _world.is_initialized() or self.epoch != _world.epoch():
            return False
        moved = [m._version for m in self._gradients] != self._versions
        rows = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        return any(moved or i in self._brought or self._has_changed(i, grad) for i, grad in rows)

    def reduce_now(self) -> None:
        self.refuse(read_by_torch())

    def _stands(self, i: int, grad: torch.Tensor) -> bool:
        """Whether the gradient is in its bucket."""
        if self._there.has[i]:
            return self._there.stands(i, grad)
        return grad.data_ptr() == self._addresses[i]

    # The optimizer's state.

    def gather(self, slot: int) -> list[torch.Tensor]:
        """By parameter, that number of every element's state. Collective."""
        self.update.drain()
        wholes = [torch.empty_like(memory) for memory in self._gradients]
        for b, whole in enumerate(wholes):
            self.update.gather_state(b, slot, whole.data_ptr())
        return [view.clone() for view in self.views(wholes)]

    def scatter(self, slot: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Takes this rank's part of gather()'s list; None is zeros."""
        wholes = [torch.zeros_like(memory) for memory in self._gradients]
        for view, tensor in zip(self.views(wholes), tensors, strict=True):
            if tensor is not None:
                view.copy_(tensor)
        for b, whole in enumerate(wholes):
            self.update.set_state(b, slot, whole.data_ptr())
