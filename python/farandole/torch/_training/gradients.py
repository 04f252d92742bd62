"""The gradients of some parameters: handed to the reducer one by one, and shown when reduced."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from farandole import _core
from farandole._core import Error, InvalidArgument
from farandole.torch import _devices
from farandole.torch._training.buckets import Buckets
from farandole.torch._training.finite import FiniteGradients
from farandole.torch._training.layouts import Strides, in_order_of
from farandole.torch._training.on_device import OnDevices
from farandole.torch._training.sparse_gradients import SparseGradients
from farandole.torch._training.watched import has_changed, unheard, unwatch, watch
from farandole.torch.compression import Compression, Compressor

# Bytes of a gradient. Of smaller ones, on average, a bucket is looked at as a whole: a look costs
# some microseconds, in which a core reads as much. Larger ones are read while a cache has them.
_SMALL = 128 << 10


# Versions of the buckets, and by number of gradients that lie elsewhere.
Stamp = tuple[dict[int, int], dict[int, int]]


class Gradients:
    """``p.grad`` becomes a view of the bucket, except where gradients are compressed, and where
    large ones are reduced as they lie, and where the program holds them by another way (held.py),
    to which the reduced ones are copied, and where they are sparse: then the first step reduces
    them as dense ones, and later ones gather their entries, or, with `sparse_as_dense`, do the same
    again; users see sparse ones. What lies on a device stays there: it is reduced where it lies, or
    by way of the buckets.

    Args:
        wires: of each parameter what is sent of no elements of it, and the context.
        strides: of each parameter's gradient; the same on all ranks.
        finite: looks at them; its flag is the last parameter.
    """

    def __init__(
        self,
        reducer: _core.Reducer,
        named: Sequence[tuple[str, torch.Tensor]],
        wires: Sequence[tuple[torch.Tensor, Any]],
        strides: Sequence[Strides],
        sparse: SparseGradients,
        on_devices: OnDevices,
        finite: FiniteGradients,
        *,
        compression: type[Compressor],
        sparse_as_dense: bool,
    ) -> None:
        self._reducer = reducer
        self._names = [name for name, _ in named]
        self._parameters = [p for _, p in named]
        self._shapes = [p.shape for p in self._parameters]
        self._dtypes = [wire.dtype for wire, _ in wires]
        self._contexts = [context for _, context in wires]
        self._compression = None if compression is Compression.none else compression
        self._sparse_as_dense = sparse_as_dense
        self._sparse = sparse
        self._on_devices = on_devices
        self._there = on_devices.has
        self._finite = finite
        self._strides = strides
        self._buckets = Buckets(reducer, self._parameters, self._dtypes, strides)
        self.learn_places()
        self._marked = bytearray(len(named))  # in this pass
        self._lent: dict[int, torch.Tensor] = {}  # reduced where autograd left them, in this pass
        self._taken = [0] * len(named)  # by parameter: address of what take() has shown
        self._homes: dict[int, torch.Tensor] = {}  # where the program holds gradients of this pass
        self._becoming: dict[int, int] = {}  # what this step found to be sparse
        self._shown = [0] * len(named)  # addresses of the reduced gradients that users see
        self._shown_sparse: dict[int, weakref.ref[torch.Tensor]] = {}

    def retire(self) -> None:
        """Drains the reducer, as a successor with its own follows."""
        self._sparse.drain()
        self._reducer.drain()
        self.forget_places()

    def forget_places(self) -> None:
        """Forgets the buckets. Gradients that users see stay."""
        self._buckets.forget()

    def learn_places(self) -> None:
        self._sparse.dims = self._reducer.left_out
        self._alone = [self._reducer.in_place(i) for i in range(len(self._parameters))]
        self._buckets.learn(
            i
            for i, alone in enumerate(self._alone)
            if (not alone or self._compression is not None)
            and i not in self._sparse.dims
            and not self._there[i]
        )
        compressed = self._compression is not None
        rows = enumerate(zip(self._alone, self._there, strict=True))
        self._apart = [i for i, at in rows if any(at) or compressed or i in self._sparse.dims]
        self._learn_looks()

    def _learn_looks(self) -> None:
        """Decides which gradients are looked at one by one, and which together: those of a bucket,
        before the last one completes it and its reduction begins."""
        finite, self._places = self._finite, self._buckets.places
        places = self._places
        self._looks = [finite.looks and p is not finite.flag for p in self._parameters]
        self._together: dict[int, list[int]] = {}
        if finite.looks and not finite.is_there:
            for i, (bucket, _) in enumerate(places[:-1]):
                if not (self._alone[i] or self._there[i] or i in self._sparse.dims):
                    self._together.setdefault(bucket, []).append(i)
        flags = places[-1].bucket if self._together else -1
        for bucket, members in list(self._together.items()):
            size = self._buckets.whole(members[0]).nbytes
            if bucket != flags and (len(members) == 1 or size > _SMALL * len(members)):
                del self._together[bucket]
        for i in (i for members in self._together.values() for i in members):
            self._looks[i] = False
        # The flag's bucket is complete when all gradients are there.
        self._expected = {b: len(m) + (b == flags) for b, m in self._together.items()}
        self._awaited = dict(self._expected)

    # To the reducer.

    def begin(self) -> None:
        """Begins a pass that reduces."""
        self._sparse.drain()  # of a pass that failed
        self._reducer.drain()
        if self._reducer.has_better_plan:
            self.forget_places()
            self._reducer.take_better_plan()
            self.learn_places()
        elif not self._buckets.standing():
            self.learn_places()
        self._marked = bytearray(len(self._marked))
        self._lent.clear()
        self._homes.clear()
        self._taken = [0] * len(self._taken)
        self._on_devices.forget()
        self._finite.begin()
        self._awaited = dict(self._expected)

    def missing(self) -> list[int]:
        """Parameters with a gradient that this pass did not bring."""
        rows = enumerate(zip(self._marked, self._parameters, strict=True))
        return [i for i, (marked, p) in rows if not marked and p.grad is not None]

    def take(self, i: int) -> None:
        """Hands the gradient in, if there is one: a hook of the program may have cleared it."""
        p = self._parameters[i]
        grad = p.grad
        if grad is None:
            return
        unwatch(grad)
        if (
            not self._there[i]
            and grad.is_cpu
            and grad.layout == torch.strided
            and self._buckets.is_held(i, grad)
        ):
            self._homes[i] = grad
        grad = as_it_is_taken(self._names[i], grad, self._shapes[i])
        dims = 0
        if grad.is_sparse:
            dims = grad.sparse_dim()
            if dims == 0 or i not in self._sparse.dims:
                grad = grad.to_dense()
        if i in self._sparse.dims:
            if dims > 0:
                self._look(i, grad._values())
                self._sparse.start(i, grad)
            self._mark_ready(i, 0, dims)
            return
        if self._there[i]:
            self._bring(i, grad, dims)
            return
        if not grad.is_cpu:
            raise self._on_devices.misplaced(i, grad)
        if self._compression is not None:
            p.grad = grad
            view = self._buckets.view(i)
            wire = self._compress(i, grad)
            self._look(i, wire)
            view.copy_(wire)
            if self._completes(i):
                self._look_at_bucket(i)
            self._mark_ready(i, view.data_ptr(), dims)
            return
        self._look(i, grad)
        alike = grad.stride() == self._strides[i] and grad.dtype == self._dtypes[i]
        pointer = grad.data_ptr()
        if alike and self._alone[i] and (dims == 0 or self._sparse_as_dense):
            p.grad = grad  # where a sparse one became dense
            self._homes.pop(i, None)
            self._reducer.lend(i, pointer, grad, dims)
            self._lent[i] = grad.detach()
            self._taken[i] = pointer
            self._marked[i] = 1
            return
        alias = self._buckets.alias(i)
        address = self._buckets.addresses[i]
        last = self._completes(i)
        if not alike or (last and pointer != address):
            alias.copy_(grad.clone() if pointer == address else grad)
            pointer = address
        if last:
            self._look_at_bucket(i)
        self._mark_ready(i, pointer, dims)
        self._taken[i] = address
        p.grad = alias

    def _bring(self, i: int, grad: torch.Tensor, dims: int) -> None:
        """Hands in a gradient on a device. Users see their own until the end if compressed."""
        wire = grad if self._compression is None else self._compress(i, grad)
        if wire.stride() != self._strides[i] or wire.dtype != self._dtypes[i]:
            wire = _devices.laid_out(wire, self._strides[i], self._dtypes[i])
        self._look(i, wire)
        self._on_devices.bring(i, wire, dims)
        self._marked[i] = 1
        if self._compression is None:
            self._parameters[i].grad = wire

    def _look(self, i: int, values: torch.Tensor) -> None:
        if self._looks[i]:
            self._finite.look(i, values)

    def _completes(self, i: int) -> bool:
        """Whether the bucket, which is looked at together, has all gradients with this one."""
        bucket = self._places[i].bucket
        if bucket not in self._awaited:
            return False
        self._awaited[bucket] -= 1
        return self._awaited[bucket] == 0

    def _look_at_bucket(self, i: int) -> None:
        """Looks at the bucket of gradient i, which holds i and all marked ones. Where other
        gradients are missing, it holds older numbers."""
        if self._finite.is_up or self._finite.are_finite(self._buckets.whole(i)):
            return
        for other in self._together[self._places[i].bucket]:
            if self._marked[other] or other == i:
                self._finite.look(other, self._buckets.view(other))

    def _mark_ready(self, i: int, pointer: int, sparse_dims: int) -> None:
        self._reducer.mark_ready(i, pointer, sparse_dims)
        self._marked[i] = 1

    def _compress(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        assert self._compression is not None
        wire: torch.Tensor
        wire, self._contexts[i] = self._compression.compress(grad)
        if wire.dtype != self._dtypes[i] or wire.numel() != grad.numel():
            raise InvalidArgument(
                f"compression of '{self._names[i]}' gave {wire.numel()} x {wire.dtype} where "
                f"{grad.numel()} x {self._dtypes[i]} were announced"
            )
        return wire.reshape(grad.shape)

    def launch(self) -> None:
        """Launches the rest, once all have been taken. May be called again, and does not wait."""
        if self._finite.looks and not self._marked[-1]:
            self._raise_flag()
        self._reducer.launch_rest()
        self._sparse.start_rest()

    def _raise_flag(self) -> None:
        flag = len(self._parameters) - 1
        if self._there[flag]:
            self._finite.raise_there()
            self.take(flag)
            return
        for bucket, members in self._together.items():
            if self._awaited[bucket] > 0:
                marked = next((i for i in members if self._marked[i]), None)
                if marked is not None:
                    self._look_at_bucket(marked)
        self._buckets.view(flag).fill_(self._finite.is_up)
        self._mark_ready(flag, self._buckets.addresses[flag], 0)

    def abandon(self) -> None:
        """Tells the other ranks that there is no step, and forgets all gradients: they are
        incomplete, and their memory is another step's."""
        if self._reducer.step_open:
            with suppress(Error):  # of a group that has failed: the next call will say it
                self._sparse.start_rest()  # the other ranks wait for this one's entries
        self.drop()
        if self._reducer.step_open:
            with suppress(Error):  # likewise
                self._reducer.abandon()

    def drop(self) -> None:
        self._lent.clear()
        self._on_devices.forget()
        for p in self._parameters:
            p.grad = None

    # To the user.

    def show(self) -> list[int]:
        """Shows the user the reduced gradients. Returns the parameters that no rank used, whose
        gradients stay as they are."""
        left_out = self._reducer.left_out if self._reducer.has_better_plan else {}
        self._becoming = {i: left_out[i] for i in left_out.keys() - self._sparse.dims.keys()}
        used: list[int] = []
        unused: list[int] = []
        flags = int(self._finite.looks)
        for i in range(len(self._parameters) - flags):
            (used if self._reducer.used(i) else unused).append(i)
        there = flags and self._there[-1]
        self._on_devices.take_back([*used, len(self._parameters) - 1] if there else used)
        for i in used:
            self._show(i)
        self._lent.clear()
        self._sparse.drain()  # of what no rank used
        if flags:
            flag = len(self._parameters) - 1
            self._finite.note_reduced(self._reduced(flag) if there else self._buckets.view(flag))
        return unused

    def _show(self, i: int) -> None:
        p = self._parameters[i]
        if i in self._sparse.dims:
            self._show_sparse(i, self._sparse.finish(i))
            return
        if self._there[i] or self._compression is not None:
            wire = self._reduced(i)
            if self._compression is not None:
                wire = self._compression.decompress(wire, self._contexts[i])
            p.grad = wire
        elif p.grad is None or p.grad.data_ptr() != self._taken[i]:
            # This rank had none, or a hook has replaced it since.
            p.grad = self._lent[i] if i in self._lent else self._buckets.alias(i)
        grad = p.grad
        assert grad is not None
        if i in self._homes:
            p.grad = self._homes[i].copy_(grad)
            grad = self._homes[i]
        elif grad.stride() != p.stride():
            p.grad = grad = in_order_of(p, grad)
        self._shown[i] = grad.data_ptr()
        dims = self._reducer.sparse_dims(i) if self._sparse_as_dense else self._becoming.get(i, 0)
        if dims > 0:
            self._show_sparse(i, grad.to_sparse(dims))

    def _reduced(self, i: int) -> torch.Tensor:
        """The reduced gradient in the form that was sent, where the parameter lies."""
        if not self._there[i]:
            return self._buckets.alias(i)
        there = self._on_devices.taken(i)
        if there is None:  # this rank had no gradient
            there = _devices.copied_to(self._parameters[i], self._buckets.view(i))
        return there

    def _show_sparse(self, i: int, grad: torch.Tensor) -> None:
        p = self._parameters[i]
        p.grad = None  # its layout may be another
        p.grad = grad
        self._shown_sparse[i] = weakref.ref(grad)

    @unheard
    def stamp(self) -> Stamp:
        """Of the gradients that stand, for have_changed()."""
        grads = ((i, self._parameters[i].grad) for i in (*self._apart, *self._homes))
        return self._buckets.versions(), {i: g._version for i, g in grads if g is not None}

    def watch(self) -> None:
        """From now on have_changed() also sees what no counter counts; see watched.py."""
        for p in self._parameters:
            watch(p.grad)

    def unwatch(self) -> None:
        for p in self._parameters:
            unwatch(p.grad)

    @unheard
    def have_changed(self, since: Stamp) -> bool:
        """Whether a gradient stands that a program has set or written into."""
        in_buckets, apart = self.stamp()
        if in_buckets != since[0] or any(since[1].get(i) != v for i, v in apart.items()):
            return True
        rows = [(i, p.grad) for i, p in enumerate(self._parameters) if p.grad is not None]
        return any(not self.still_stands(i) or has_changed(grad) for i, grad in rows)

    @unheard
    def still_stands(self, i: int) -> bool:
        """Whether the gradient of parameter i is the one that was shown, perhaps added to."""
        grad = self._parameters[i].grad
        if grad is None or grad.is_sparse:
            shown = self._shown_sparse.get(i)
            return grad is not None and shown is not None and shown() is grad
        return grad.data_ptr() == self._shown[i]


def as_it_is_taken(name: str, grad: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Raises InvalidArgument for a gradient that no step may have. `shape`: the parameter's."""
    if grad.requires_grad:
        raise part_of_a_graph(name)
    if grad.shape != shape:  # with more or fewer elements the engine would reach into other memory
        raise InvalidArgument(
            f"the gradient of '{name}' has shape {tuple(grad.shape)}, and its parameter has "
            f"{tuple(shape)}\n  advice: give a gradient the shape of its parameter"
        )
    if grad.is_neg() or grad.is_conj():  # lazily: memory has other numbers
        grad = grad.resolve_conj().resolve_neg()
    return grad


def part_of_a_graph(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"the gradient of '{name}' is part of a graph (create_graph=True), which "
        "DistributedOptimizer does not support; use torch.autograd.grad"
    )
