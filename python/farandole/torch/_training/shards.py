"""Parameters and gradients of a sharded update: in buckets that all ranks map.

Parameters become views of buckets, so that the rank that updates a part can store it to all; where
a program has moved one since, step() copies it in and out. After backward a gradient is a view of
its bucket too, and still this rank's own: ranks meet in step(). One that the program holds by
another way (held.py) stays there, and the bucket has a copy.
Where parameters lie on a device both stay there, and go by copies (device_shards.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, NoReturn

import torch

from farandole import _core, _world
from farandole._core import Error, InvalidArgument
from farandole._limits import Limits
from farandole._numerics import Found
from farandole._world import Group
from farandole.common._reduction import Reduction
from farandole.torch._tensors import dtype_name
from farandole.torch._training.buckets import Buckets, Memory
from farandole.torch._training.device_shards import (
    DeviceShards,
    changed_since,
    moved_away,
    read_by_torch,
)
from farandole.torch._training.finite import OwnGradients
from farandole.torch._training.gradients import as_it_is_taken
from farandole.torch._training.hooked import Hooked
from farandole.torch._training.layouts import lay_out_alike
from farandole.torch._training.names import Names
from farandole.torch._training.passes import graph_task, untraced
from farandole.torch._training.watched import has_changed, unheard, watch
from farandole.torch._training.weighing import not_weighed
from farandole.torch._training.weights import checksums_of
from farandole.torch._training.wrapped import refuse_unmanaged, too_many_passes

IN_NO_GROUP = -1  # kNoGroup of the core


class Settings(NamedTuple):
    """An optimizer's options in a step."""

    groups: list[_core.HyperParameters]  # by param group
    group_of: list[int]  # by parameter, the number of its param group, or IN_NO_GROUP


class Shards(Hooked):
    """Collective: every rank makes one, with the same parameters in the same order.

    Args:
        group: the ranks.
        named: the parameters in the order in which their gradients become ready. They move.
        weights: all parameters of the optimizer, in the model's order, whose values are compared.
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
        rule: str,
        slots: int,
        reduction: Reduction,
        *,
        passes_per_step: int,
        limits: Limits,
    ) -> None:
        super().__init__(named, weights)
        self._called = Names(named[::-1])
        self.passes_per_step = passes_per_step
        self._sparse_as_dense = reduction.sparse_as_dense
        self._refuse_shared_memory()
        self.update = _core.ShardedUpdate(
            group,
            [(name, p.numel(), dtype_name(p.dtype, f"parameter '{name}'")) for name, p in named],
            rule,
            slots,
            reduction.op,
            reduction.prescale,
            reduction.postscale,
            limits.bucket_bytes,
            limits.first_bucket_bytes,
        )
        self._strides = lay_out_alike(group, named)
        self._gradients = self._buckets()
        self._values = self._buckets(self.update.values)
        self._note_versions()
        self._there = DeviceShards(self.update, named, self._strides)
        for i, p in enumerate(self.parameters):
            if not self._there.has[i]:
                home = self._values.view(i)
                home.copy_(p.detach())
                p.data = home
        self._lie = [p.data_ptr() for p in self.parameters]
        self._moved: list[int] = []  # parameters that lie elsewhere in this step
        self._factor = 1.0  # that clipping has put on the gradients
        self._passes = 0  # since the last step
        self._copied: dict[int, tuple[int, int]] = {}  # held gradients, with their version
        self._brought: set[int] = set()  # parameters whose gradient came by backward since then
        self._finite = OwnGradients(named, reduction.process_set)
        self._watch_weights()
        self._endless = -1  # the last backward whose end is not called back
        self.hear()

    def _watch_weights(self) -> None:
        self.compared.watch(self.update)

    def _buckets(self, memory: Memory | None = None) -> Buckets:
        dtypes = [p.dtype for p in self.parameters]
        buckets = Buckets(self.update, self.parameters, dtypes, self._strides, memory)
        buckets.learn(range(len(self.parameters)))
        return buckets

    def _map_gradients(self) -> None:
        self._gradients.learn(range(len(self.parameters)))
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = self._gradients.versions()

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
            present = self.entered(i, final=final)
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

    def begin_backward(self, i: int, graph: int, *, final: bool, ends: bool) -> None:  # noqa: ARG002
        if not self._gradients.standing():
            self._map_gradients()
        if ends or graph != self._endless:
            self._passes += 1
            self._endless = graph

    def _refuse_pass(self) -> None:
        if self._factor != 1:
            raise InvalidArgument(
                "backward() between clip_grad_norm_() and step(): clipped gradients cannot be "
                "added to\n  advice: clip once, when all gradients are there"
            )
        if 1 < self.passes_per_step < self._passes:
            raise too_many_passes(self.passes_per_step)

    def end(self, *, failed: bool) -> None:
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
        grad = as_it_is_taken(self.names[i], grad, p.shape)
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
        view = self._gradients.view(i)
        if p.dtype != view.dtype:
            raise moved_away(self.names[i])
        address = grad.data_ptr()
        self._copied.pop(i, None)
        if address != self._gradients.addresses[i]:
            alias = None if self._gradients.is_held(i, grad) else self._gradients.alias(i)
            if grad.stride() != self._strides[i] or grad.dtype != view.dtype:
                view.copy_(grad)
            else:
                self.update.take(i, address)
            if alias is None:
                self._copied[i] = address, grad._version
            else:
                p.grad = grad = alias
        watch(grad)
        bucket = self._gradients.places[i].bucket
        self._versions[bucket] = self._gradients.memory(bucket)._version

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
    def step(self, settings: Callable[[], Settings], unmanaged: Sequence[torch.Tensor]) -> None:
        """Updates all parameters that are in a param group."""
        self.check_alive()
        with self._abandoning():
            refuse_unmanaged(unmanaged)
            self.silence.refuse()
            present, now = self._present(), settings()
            self._bring_values()
            self.compared.show(self.update)
            mine = self._finite.found() if self._finite.looks else None
        if self._finite.looks and self._finite.numerics.is_error:
            self._require_finite(present, now, mine)
        with self._abandoning():
            self._there.bring_values()
        self.update.begin("update", present, *now, self._factor)
        self._factor = 1.0
        self._begin_step()
        self.update.wait()
        self._there.end()
        for i in self._moved:
            self.parameters[i].detach().copy_(self._values.view(i))
        if self._finite.looks and not self._finite.numerics.is_error:
            self._finite.judge(mine)  # now, when it is known that all ranks have taken the step
        self._called.compare_once("names in a sharded update")  # likewise

    def _require_finite(self, present: bytes, now: Settings, mine: Found | None) -> None:
        """Before weights change. By the norm of all ranks' gradients, which hears of ranks that
        refuse the step."""
        self.update.begin("norm inf", present, *now, 1.0)
        self.update.wait()
        if not self.update.norm < float("inf"):
            self._finite.report(mine)

    def refuse(self, why: InvalidArgument) -> NoReturn:
        self.check_alive()
        with self._abandoning():
            raise why

    @untraced
    def clip(
        self, max_norm: float, kind: str, settings: Callable[[], Settings], strict: bool
    ) -> float:
        """Scales the gradients as torch's clip_grad_norm_; gives the norm of before."""
        self.check_alive()
        with self._abandoning():
            present, now = self._present(), settings()
            self.compared.show(self.update)
        self.update.begin(f"norm {kind}", present, *now, 1.0)
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
        if not self._gradients.standing():
            self._map_gradients()
        present = bytearray(len(self.parameters))
        for i, p in enumerate(self.parameters):
            grad = p.grad
            if grad is None:
                continue
            takes = i not in self._brought and self._has_changed(i, grad)
            del grad  # _take() looks who else holds it
            if takes:
                self._take(i)  # no hook has seen it
            present[i] = 1
        return bytes(present)

    def _bring_values(self) -> None:
        """Copies parameters that a program has moved to where the update reads them. They stay
        where they are, since others may read them there."""
        rows = enumerate(zip(self.parameters, self._lie, strict=True))
        self._moved = [i for i, (p, address) in rows if p.data_ptr() != address]
        if self._moved and not self._values.standing():
            self._values.learn(range(len(self.parameters)))
        for i in self._moved:
            p, home = self.parameters[i], self._values.view(i)
            alike = p.shape == home.shape and p.dtype == home.dtype and p.is_cpu
            if self._there.has[i] or not alike:
                raise moved_away(self.names[i])
            home.copy_(p.detach())

    def _was_overwritten(self, i: int) -> bool:
        """Whether a program has put other numbers into the gradient since backward brought it, or
        into one that shares its bucket. It may have dropped it, or moved it."""
        grad, bucket = self.parameters[i].grad, self._gradients.places[i].bucket
        if grad is None:
            return False
        if self._gradients.memory(bucket)._version != self._versions[bucket]:
            return True
        if self._stands(i, grad) or self._there.has[i]:
            return self._has_changed(i, grad)
        return checksums_of([grad]) != checksums_of([self._gradients.view(i)])

    def _has_changed(self, i: int, grad: torch.Tensor) -> bool:
        """Whether that gradient is another than the one in the bucket, or may have been."""
        return grad.is_sparse or not self._stands(i, grad) or has_changed(grad)

    @unheard
    def is_due(self) -> bool:
        """Whether gradients stand that no step has used. After it they may be read, for a log."""
        if graph_task() >= 0 or not _world.is_initialized() or self.epoch != _world.epoch():
            return False
        moved = self._gradients.versions() != self._versions
        rows = [(i, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None]
        return any(moved or i in self._brought or self._has_changed(i, grad) for i, grad in rows)

    def reduce_now(self) -> None:
        self.refuse(read_by_torch())

    def _stands(self, i: int, grad: torch.Tensor) -> bool:
        """Whether the gradient is in its bucket."""
        if self._there.has[i]:
            return self._there.stands(i, grad)
        address = grad.data_ptr()
        copied = self._copied.get(i) == (address, grad._version)
        return copied or address == self._gradients.addresses[i]

    # The optimizer's state.

    def gather(self, slot: int) -> list[torch.Tensor]:
        """By parameter, that number of every element's state. Collective."""
        self.update.drain()
        whole = self._buckets(self._room)
        for b in range(len(self.update.buckets)):
            self.update.gather_state(b, slot, whole.memory(b).data_ptr())
        return [whole.view(i).clone() for i in range(len(self.parameters))]

    def scatter(self, slot: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Takes this rank's part of gather()'s list; None is zeros."""
        whole = self._buckets(self._room)
        for i, tensor in enumerate(tensors):
            if tensor is not None:
                whole.view(i).copy_(tensor)
        for b in range(len(self.update.buckets)):
            self.update.set_state(b, slot, whole.memory(b).data_ptr())

    def _room(self, bucket: int) -> bytearray:
        """For as much as is in a bucket, zeros at first."""
        return bytearray(self._gradients.memory(bucket).nbytes)
