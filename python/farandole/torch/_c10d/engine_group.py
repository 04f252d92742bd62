"""The base of a process group: holds the engine's group and gloo, and runs operations."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from farandole import _listening, _place, _world
from farandole.torch import _devices
from farandole.torch._c10d.fallbacks import note_fallback
from farandole.torch._c10d.finite import ReductionLooks
from farandole.torch._c10d.meeting import Membership
from farandole.torch._c10d.tensors import Finish, buffer
from farandole.torch._c10d.works import Deferred, Work, together
from farandole.torch._entries import entry, operation_range

Tensors = Sequence[torch.Tensor]
# kind, input, output, result, op, prescale, root, counts
Call = tuple[str, Any, Any, Any, str, float, int, Sequence[int]]
Coalesced = list[tuple[Work, Call | None]]
_ProcessGroup: Any = dist.ProcessGroup  # its methods have many forms; ours, the newest


class Defaults:
    """Options of calls that give none."""

    asyncOp = True
    timeout = timedelta(milliseconds=-1)
    reduceOp = dist.ReduceOp.SUM
    rootRank = 0


defaults = Defaults()


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A gloo group that listens at the address by which other hosts reach this one. By default gloo
    resolves the host's name, which may give a loopback address (127.0.1.1 on Debian)."""
    gloo: Any = dist.ProcessGroupGloo
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo(store, rank, size, timeout)
    address = "127.0.0.1"
    if _world.cross_size() > 1:
        address = _listening.own_addresses(_place.master(os.environ)[0])[0]
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._threads = 2
    options._timeout = timeout
    return gloo(store, rank, size, options)


class EngineGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group of the ranks that share a store."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._timeout = timeout
        self._membership: Membership | None = Membership(store, rank, size, timeout)
        self._group = self._membership.group
        self._looks = ReductionLooks(self._group, self._membership.tells)
        # Within a coalescing block: its works, with the calls of those that begin at its end.
        self._coalesced: Coalesced | None = None
        # The registered backend names the group and its device for PyTorch, and runs what the
        # engine does not have.
        self._gloo = _gloo(PrefixStore(self._membership.name, store), rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        if _devices.knows_cuda():
            self._register_backend(torch.device("cuda"), kind, self._gloo)
        self._set_default_backend(kind)

    @entry()
    def getBackendName(self) -> str:
        return "farandole"

    def _seconds(self, opts: Any) -> float:
        given = opts.timeout.total_seconds()
        return given if given > 0 else self._timeout.total_seconds()

    def _run(
        self,
        kind: str,
        source: torch.Tensor | None,
        target: torch.Tensor | None,
        opts: Any,
        result: Any,
        finish: Finish | None = None,
        *,
        op: str = "sum",
        prescale: float = 1.0,
        root: int = 0,
        counts: Sequence[int] = (),
    ) -> Work:
        given = None if source is None else buffer(source)
        taken = given if target is source else None if target is None else buffer(target)
        asynchronous = getattr(opts, "asyncOp", True)
        if self._coalesced is not None:
            work = Work(Deferred(may_wait=not asynchronous), result, finish)
            call = (kind, given, taken, None, op, prescale, root, counts)
            self._coalesced.append((work, call))
            return work
        options = (op, prescale, 1.0, root, None, None, None, self._seconds(opts), counts)
        with operation_range(kind, target if source is None else source):
            if asynchronous:
                handle = self._group.start(kind, given, taken, None, *options)
                return self._under_way(Work(handle, result, finish))
            self._group.run(kind, given, taken, *options)
        if finish is not None:
            finish()
        return Work(None, result)

    def _run_grouped(
        self, kind: str, sources: Tensors, targets: Tensors, opts: Any, result: Any,
        finishes: Sequence[Finish | None], *, op: str = "sum", prescale: float = 1.0,
    ) -> Work:  # fmt: skip
        if self._coalesced is not None:
            works = [
                self._run(kind, given, taken, opts, None, finish, op=op, prescale=prescale)
                for given, taken, finish in zip(sources, targets, finishes, strict=True)
            ]
            return together(works, result)
        given = [buffer(t) for t in sources]
        same = targets is sources
        taken = given if same else [buffer(t) for t in targets]
        timeout = self._seconds(opts)
        with operation_range(kind, *sources):
            handle = self._group.start_grouped(
                kind, given, taken, None, op, prescale, 1.0, 0, None, None, None, timeout
            )

            def finish_all() -> None:
                for end in finishes:
                    if end is not None:
                        end()

            return self._under_way(Work(handle, result, finish_all))

    @contextlib.contextmanager
    def _block(self, name: str, timeout: float) -> Iterator[None]:
        """Defers the operations called inside, and begins them together at its end: the ranks agree
        on all of them before the first one begins. A nested block joins the outer one."""
        if self._coalesced is not None:
            yield
            return
        self._coalesced = []
        try:
            yield
            coalesced = self._coalesced
        finally:
            self._coalesced = None
        self._begin_together(coalesced, name, timeout)

    def _begin_together(self, coalesced: Coalesced, name: str, timeout: float) -> None:
        deferred = [(work, call) for work, call in coalesced if call is not None]
        if not deferred:
            return
        calls = [call for _, call in deferred]
        with operation_range(calls[0][0]):
            handles = self._group.start_together(calls, name, timeout)
            for (work, _), handle in zip(deferred, handles, strict=True):
                work.begin(handle)
            self._group.turn()

    def _under_way(self, work: Work) -> Work:
        # Without a spare core no other thread makes progress on it while this one computes.
        self._group.turn()
        return work

    def _by_gloo(self, kind: str, method: str, *arguments: Any) -> Any:
        note_fallback(kind)
        work = getattr(self._gloo, method)(*arguments)
        if self._coalesced is not None:
            work.wait()  # at the end only our own works are waited for
        return work

    @entry()
    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._coalesced = []

    @entry()
    def _end_coalescing(self, device: torch.device) -> Any:  # noqa: ARG002
        coalesced, self._coalesced = self._coalesced or [], None
        self._begin_together(coalesced, "coalesced", self._timeout.total_seconds())
        works = [work for work, _ in coalesced]
        return together(works, [work.result() for work in works])

    @entry()
    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._gloo._set_default_timeout(timeout)

    @entry()
    def abort(self) -> None:
        self._group.abort("torch.distributed aborted the process group")

    @entry()
    def shutdown(self) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            del self._group, self._looks
            membership.leave()
