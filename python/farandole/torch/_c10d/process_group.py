"""The process group that ``init_process_group("farandole")`` and ``new_group`` make."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from farandole.torch._c10d.arguments import one
from farandole.torch._c10d.engine_group import Tensors, defaults
from farandole.torch._c10d.moving import Moving
from farandole.torch._c10d.reducing import Reducing
from farandole.torch._c10d.tensors import Finish, buffer, received, sent
from farandole.torch._c10d.works import Work
from farandole.torch._entries import entry, operation_range


class FarandoleProcessGroup(Reducing, Moving):
    """Used through the functions of ``torch.distributed``, whose options, tensors and results it
    takes and gives."""

    # ---- between two ranks ----

    @entry("c10d::send")
    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Any:
        tensor = sent(one(tensors, "send"))
        return self._between("send", tensor, to, tag, list(tensors), None)

    @entry("c10d::recv_")
    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Any:
        target, finish = received(one(tensors, "recv"))
        return self._between("recv", target, source, tag, list(tensors), finish)

    @entry("c10d::recv_any_source_")
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        target, finish = received(one(tensors, "recv"))
        with operation_range("recv", target):
            handle = self._group.start_from_any(buffer(target), tag, None, self._seconds(defaults))
            return self._message(Work(handle, list(tensors), finish))

    def _between(
        self, kind: str, tensor: torch.Tensor, peer: int, tag: int, result: Any,
        finish: Finish | None,
    ) -> Work:  # fmt: skip
        with operation_range(kind, tensor):
            handle = self._group.start_between(
                kind, buffer(tensor), peer, tag, None, None, self._seconds(defaults)
            )
            return self._message(Work(handle, result, finish, source=peer))

    def _message(self, work: Work) -> Work:
        """Within a coalescing block too it begins at once: it waits for no rank but its other."""
        if self._coalesced is not None:
            self._coalesced.append((work, None))
        return self._under_way(work)

    # ---- barriers ----

    @entry("c10d::barrier")
    def barrier(self, opts: Any = defaults) -> Any:
        nothing = torch.empty(0, dtype=torch.uint8)
        return self._run("barrier", nothing, nothing, opts, [])

    @entry("c10d::monitored_barrier_")
    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Names all ranks that are missing, whatever `wait_all_ranks` says."""
        del wait_all_ranks
        self._group.barrier("monitored_barrier", (timeout or self._timeout).total_seconds())
