"""What is under the collectives of a process group: the engine's group, gloo, and how to run."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from farandole.torch._c10d.fallbacks import note_fallback
from farandole.torch._c10d.meeting import Membership
from farandole.torch._c10d.tensors import Finish, buffer
from farandole.torch._c10d.works import Work, together

Tensors = Sequence[torch.Tensor]
_ProcessGroup: Any = dist.ProcessGroup  # its methods have many forms; ours, the newest


class Defaults:
    """Options of calls that give none."""

    asyncOp = True
    timeout = timedelta(milliseconds=-1)
    reduceOp = dist.ReduceOp.SUM
    rootRank = 0


defaults = Defaults()


class EngineGroup(_ProcessGroup):  # type: ignore[misc]
    """Of the ranks that share a store."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._timeout = timeout
        self._membership: Membership | None = Membership(store, rank, size, timeout)
        self._group = self._membership.group
        self._coalesced: list[Work] | None = None
        # The registered backend names the group and its device for PyTorch, and runs what the
        # engine does not have.
        self._gloo = dist.ProcessGroupGloo(
            PrefixStore(self._membership.name, store), rank, size, timeout
        )
        kind = dist.ProcessGroup.BackendType.GLOO
        self._register_backend(torch.device("cpu"), kind, self._gloo)
        self._set_default_backend(kind)

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
        options = (op, prescale, 1.0, root, None, None, None, self._seconds(opts), counts)
        if getattr(opts, "asyncOp", True) or self._coalesced is not None:
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
        given = [buffer(t) for t in sources]
        same = targets is sources
        taken = given if same else [buffer(t) for t in targets]
        timeout = self._seconds(opts)
        handle = self._group.start_grouped(
            kind, given, taken, None, op, prescale, 1.0, 0, None, None, None, timeout
        )

        def finish() -> None:
            for end in finishes:
                if end is not None:
                    end()

        return self._under_way(Work(handle, result, finish))

    def _under_way(self, work: Work) -> Work:
        # Without a core to spare nobody else brings it on while this thread computes.
        self._group.turn()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _by_gloo(self, kind: str, method: str, *arguments: Any) -> Any:
        note_fallback(kind)
        work = getattr(self._gloo, method)(*arguments)
        if self._coalesced is not None:
            work.wait()  # at the end only our own works are waited for
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        del device
        works, self._coalesced = self._coalesced or [], None
        return together(works)

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._gloo._set_default_timeout(timeout)

    def abort(self) -> None:
        self._group.abort("torch.distributed aborted the process group")

    def shutdown(self) -> None:
        membership, self._membership = self._membership, None
        if membership is not None:
            del self._group
            membership.leave()
