"""Children forked from a rank: calls are refused, and the parent's death is still seen."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
import harness
from farandole import _core
from harness import World

Spawn = Callable[..., World]


def in_a_child(work: Callable[[], str]) -> str:
    """The result of `work` in a forked child, or how the child ended."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    status = os.waitpid(child, 0)[1]
    return answer if status == 0 else f"ended with status {status}"


CALLS: dict[str, Callable[[Any], Any]] = {
    "all_reduce": lambda _: fd.all_reduce(np.ones(3)),
    "async": lambda _: fd.all_gather(np.ones(3), async_op=True),
    "broadcast": lambda _: fd.broadcast(np.ones(3)),
    "reduce_scatter": lambda _: fd.reduce_scatter(np.ones(3)),
    "barrier": lambda _: fd.barrier(),
    "split": lambda _: fd.split(0),
    "allocate": lambda _: fd.allocate(3),
    "init": lambda _: fd.init(),
    "abort": lambda _: fd.world().abort("from a child"),
    "check": lambda _: fd.world().check(),
    "wait": lambda handle: handle.wait(),
}


def every_call() -> None:
    fd.init()
    pending = fd.all_reduce(np.ones(100_000), async_op=True) if fd.rank() == 0 else None
    for name, call in CALLS.items():
        if name == "wait" and pending is None:
            continue
        answer = in_a_child(lambda c=call: str(c(pending)))  # type: ignore[misc]
        assert answer.startswith("ForkedEngine: this process (pid "), f"{name}: {answer}"
        assert "advice: " in answer
    if pending is None:
        pending = fd.all_reduce(np.ones(100_000), async_op=True)
    assert (pending.wait() == fd.size()).all(), "the parent is not affected"
    assert not _core.in_child()


def test_every_call_in_a_child_is_refused(spawn: Spawn) -> None:
    spawn(2).run(every_call)


def reads_and_drops() -> None:
    fd.init()
    holder = {"array": fd.allocate(10_000), "group": fd.split(0)}
    array = np.asarray(holder["array"])
    array[:] = 5
    fd.all_reduce(array, out=array)
    wanted = 5 * fd.size()

    def read_then_drop() -> str:
        seen = set(array.tolist())
        holder.clear()
        sys.modules["farandole._world"]._state.group = None  # type: ignore[attr-defined]
        fd.shutdown()
        gc.collect()
        return str(seen)

    assert in_a_child(read_then_drop) == str({float(wanted)})

    def drop_array() -> str:
        nonlocal array
        holder.clear()
        array = np.empty(0)
        gc.collect()
        return "dropped"

    assert in_a_child(drop_array) == "dropped"
    assert (array == wanted).all(), "a child that drops the array leaves the parent's data"
    group: Any = holder["group"]
    assert (fd.all_reduce(array, group=group) == wanted * fd.size()).all()


def test_a_child_may_read_and_drops_without_harm(spawn: Spawn) -> None:
    spawn(2).run(reads_and_drops)


def array_outlives_world() -> None:
    fd.init()
    array = fd.allocate(10_000)
    array[:] = 3
    fd.shutdown()

    def drop() -> str:
        nonlocal array
        array = np.empty(0)
        return "dropped"

    assert in_a_child(drop) == "dropped"
    assert (array == 3).all()


def test_an_array_that_outlives_its_world_survives_children(spawn: Spawn) -> None:
    spawn(2).run(array_outlives_world)


def exits_normally() -> None:
    """The child runs the interpreter's whole end, atexit and all."""
    fd.init()
    if fd.rank() == 0:
        child = os.fork()
        if child == 0:
            import atexit

            atexit._run_exitfuncs()
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert (fd.all_reduce(np.ones(5)) == fd.size()).all(), "the child's end is not the parent's"


def test_the_end_of_a_child_is_not_the_end_of_its_parent(spawn: Spawn) -> None:
    spawn(3).run(exits_normally)


def forks_and_waits() -> int:
    fd.init()
    fd.barrier()
    if fd.rank() == 1:
        child = os.fork()
        if child == 0:
            signal.pause()
        harness.tell(child)
        signal.pause()
    harness.tell(0)
    fd.barrier()
    return 0


def assert_the_death_of_rank_1_is_seen(world: World, child: int) -> None:
    try:
        world.signal(1, signal.SIGKILL)
        for o in world.outcomes([0, 2]):
            assert o.error == "PeerLost", o.trace
            assert (o.rank, o.signal) == (1, signal.SIGKILL)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_living_child_does_not_hide_its_parents_death(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(forks_and_waits)
    assert_the_death_of_rank_1_is_seen(world, child=world.hear_all()[1])


# ---- children by vfork: in the parent's memory until they exec, and no fork handler runs ----


def start_popen() -> int:
    assert subprocess._USE_VFORK  # type: ignore[attr-defined]
    return subprocess.Popen(["sleep", "60"], close_fds=False).pid


def start_posix_spawn() -> int:
    return os.posix_spawnp("sleep", ["sleep", "60"], os.environ)


def start_fork() -> int:
    """A Python function between fork and exec rules out vfork."""
    return subprocess.Popen(["sleep", "60"], close_fds=False, preexec_fn=lambda: None).pid


STARTS = {"popen": start_popen, "posix_spawn": start_posix_spawn, "fork": start_fork}


def of_ours(process: int) -> list[str]:
    """The open files and mapped memory of an engine that a process has."""
    files = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this folder, in the caller's own
            files.append(str(link.readlink()))
    maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    return [line for line in files + maps if "farandole" in line or "[pidfd]" in line]


def await_exec(child: int) -> None:
    """Waits for the child's exec. posix_spawn and vfork return after it, fork maybe before."""
    deadline = time.monotonic() + 30
    while not Path(f"/proc/{child}/cmdline").read_text().startswith("sleep"):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def starts_programs(how: str) -> None:
    fd.init()
    array = fd.allocate(100_000)
    array[:] = 1
    handles = [fd.all_reduce(np.ones(200_000), async_op=True) for _ in range(4)]
    child = STARTS[how]()
    try:
        await_exec(child)
        assert of_ours(os.getpid())
        assert of_ours(child) == []
        assert not _core.in_child()
        for handle in handles:
            assert (handle.wait() == fd.size()).all(), "what was in flight goes on"
        fd.all_reduce(array, out=array)
        assert (array == fd.size()).all()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (fd.all_reduce(array) == fd.size() ** 2).all(), "the child's end is not the parent's"


@pytest.mark.parametrize("how", STARTS)
def test_programs_started_by_a_rank_have_nothing_of_it(spawn: Spawn, how: str) -> None:
    spawn(2).run(starts_programs, how)


def starts_and_waits(how: str) -> None:
    fd.init()
    fd.barrier()
    if fd.rank() == 1:
        child = STARTS[how]()
        await_exec(child)
        harness.tell(child)
        signal.pause()
    harness.tell(0)
    fd.barrier()


@pytest.mark.parametrize("how", STARTS)
def test_a_program_that_outlives_its_rank_does_not_hide_its_death(spawn: Spawn, how: str) -> None:
    world = spawn(3)
    world.start(starts_and_waits, how)
    assert_the_death_of_rank_1_is_seen(world, child=world.hear_all()[1])


def starts_many() -> None:
    """Starts programs, and children whose exec fails, while operations run."""
    fd.init()
    for step in range(30):
        handle = fd.all_reduce(np.full(50_000, step), async_op=True)
        subprocess.run(["true"], check=True, close_fds=False)
        with pytest.raises(FileNotFoundError):
            subprocess.run(["/no/such/program"], check=True)
        with pytest.raises(FileNotFoundError):
            os.posix_spawn("/no/such/program", ["program"], os.environ)
        assert (handle.wait() == step * fd.size()).all(), step
    assert not _core.in_child()


def test_a_vfork_that_fails_leaves_the_rank_as_it_was(spawn: Spawn) -> None:
    spawn(2).run(starts_many)


def worker_pool() -> None:
    import multiprocessing

    fd.init()
    with multiprocessing.get_context("fork").Pool(3) as pool:
        for step in range(20):
            parts = pool.map(abs, range(-8, 0))
            total = fd.all_reduce(np.array(parts, np.float64))
            assert total.sum() == 36 * fd.size(), step


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_worker_processes_beside_training(spawn: Spawn) -> None:
    spawn(2).run(worker_pool)


def starts_after_fork() -> str:
    """A child that is forked before init or after shutdown is a process like any other."""
    fd.init()
    fd.shutdown()

    def own_world() -> str:
        fd.init(rank=0, size=1, job=f"child of {os.getpid()}")
        return str(fd.all_reduce(np.ones(2)).tolist())

    return in_a_child(own_world)


def test_a_child_forked_after_shutdown_has_a_world_of_its_own(spawn: Spawn) -> None:
    assert spawn(2).run(starts_after_fork) == ["[1.0, 1.0]"] * 2
