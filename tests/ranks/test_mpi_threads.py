"""An MPI that few threads may call: what goes over it, who calls it, and what is refused."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_mpi import FORCED, over, world
from test_tcp import by_name_in_any_order, many_at_once, messages

import farandole as fd
import grid
import mpis
from mpis import Mpi


@pytest.fixture(params=mpis.NAMES if grid.full() else mpis.NAMES[:1])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    return mpis.find(request.param)


def from_a_thread(act: Callable[[], Any]) -> Any:
    """Returns or raises what `act` does, on another thread than the main one."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(act).result()


def threads_of_ours() -> list[str]:
    tasks = Path("/proc/self/task").iterdir()
    return [name for task in tasks if (name := (task / "comm").read_text().strip()) == "farandole"]


def with_few_threads(level: str) -> None:
    import mpi4py

    mpi4py.rc.thread_level = level
    fd.init(comm=world())
    rank, size = fd.rank(), fd.size()
    total = size * (size + 1) / 2
    assert threads_of_ours() == [], "it would call MPI while nobody waits"
    many_at_once()
    by_name_in_any_order()
    messages()
    large = np.full(300_007, rank + 1.0)
    handle = from_a_thread(lambda: fd.all_reduce(large, async_op=True))
    time.sleep(0.1 * rank)
    assert (handle.wait() == total).all()
    handle = fd.all_reduce(large, async_op=True, algorithm="mpi", level="fast")
    time.sleep(0.1 * rank)
    assert (handle.wait() == total).all()
    if level == "serialized":
        assert (from_a_thread(lambda: fd.all_reduce(large)) == total).all()
    else:
        for call in (lambda: fd.all_reduce(large), lambda: fd.recv(large, 1 - rank)):
            with pytest.raises(fd.InvalidArgument, match="only the main thread can"):
                from_a_thread(call)
        assert (fd.all_reduce(large) == total).all()
    world().Barrier()  # the program's own
    fd.shutdown()


@pytest.mark.parametrize("level", ["single", "funneled", "serialized"])
@pytest.mark.parametrize("parts", ["", "1,1"])
def test_an_mpi_of_few_threads_is_called_by_those_that_may(
    mpi: Mpi, level: str, parts: str
) -> None:
    mpi.run(2, with_few_threads, level, env=over(parts) | {"FARANDOLE_PROGRESS": "thread"})


def by_frameworks() -> str:
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    fd.init(comm=world())
    with pytest.raises(fd.InvalidArgument) as found:
        importlib.import_module("farandole.jax").allreduce(np.ones(3))
    assert (fd.all_reduce(np.ones(3)) == fd.size()).all()
    return found.value.verdict


def test_what_needs_a_thread_of_ours_is_refused_then(mpi: Mpi) -> None:
    pytest.importorskip("jax", reason="JAX is not installed")
    for verdict in mpi.run(2, by_frameworks, env=FORCED):
        assert "a program of JAX" in verdict
        assert "MPI_THREAD_MULTIPLE" in verdict


def on_a_thread_of_its_own() -> str:
    import mpi4py

    mpi4py.rc.thread_level = "funneled"
    comm = world()
    with pytest.raises(fd.RendezvousError) as found:
        from_a_thread(lambda: fd.init(comm=comm))
    assert not fd.is_initialized()
    return found.value.verdict


def test_init_on_a_thread_that_may_not_call_mpi_is_refused(mpi: Mpi) -> None:
    for verdict in mpi.run(2, on_a_thread_of_its_own, env=FORCED):
        assert "another thread than the one that initialized MPI" in verdict
