"""Reaching other ranks' memory by address: who decides, and what the kernel forbids."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import farandole as fd
import harness
from harness import World

Spawn = Callable[..., World]
COUNT = 200_003  # float32: beyond the small paths

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
PROCESS_VM = {"x86_64": (310, 311), "aarch64": (270, 271)}
EPERM_ANSWER = 0x00050000 | 1
ALLOW_ANSWER = 0x7FFF0000


def reduce(algorithm: str | None = None) -> str:
    """A right all-reduce; the path it took."""
    x = np.full(COUNT, fd.rank() + 1, np.float32)
    assert (fd.all_reduce(x, algorithm=algorithm) == fd.size() * (fd.size() + 1) / 2).all()
    return fd.world().last_path


def what_runs() -> tuple[str, str]:
    """The path chosen, and what a demand for cma is answered with."""
    fd.init()
    chosen = reduce()
    try:
        return chosen, reduce("cma")
    except fd.InvalidArgument as refusal:
        assert reduce() == chosen, "the group has suffered"
        return chosen, str(refusal)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_callers_memory_goes_by_push(spawn: Spawn, size: int) -> None:
    for chosen, forced in spawn(size, env={"FARANDOLE_CMA": "1"}).run(what_runs):
        assert forced == "cma"
        assert chosen == ("cma" if size > 1 else "one_shot")


def test_by_default_the_faster_way_is_taken_by_all(spawn: Spawn) -> None:
    world = spawn(3, env={"FARANDOLE_LOG": "info"})
    answers = world.run(what_runs)
    assert len(set(answers)) == 1
    chosen, forced = answers[0]
    assert forced == "cma", "what is slower is permitted all the same"
    for r in range(3):
        told = "% of the time of copies through shared memory" in world.output(r)
        assert told == (chosen == "cico")


@pytest.mark.parametrize("refusing", [[0], [1], [0, 1, 2]])
def test_one_rank_that_does_not_want_it_decides_for_all(spawn: Spawn, refusing: list[int]) -> None:
    each = [{"FARANDOLE_CMA": "0" if r in refusing else "1"} for r in range(3)]
    answers = spawn(3, each=each).run(what_runs)
    assert len(set(answers)) == 1
    chosen, refusal = answers[0]
    assert chosen == "cico"
    assert f"FARANDOLE_CMA=0 on rank {refusing[0]}" in refusal


def forbid_calls() -> None:
    """A seccomp filter on this process: the two system calls fail with EPERM."""
    import platform

    numbers = PROCESS_VM.get(platform.machine())
    if numbers is None:
        pytest.skip(f"numbers of system calls are not known for {platform.machine()}")
    load_number = struct.pack("HBBI", 0x20, 0, 0, 0)
    is_one = [struct.pack("HBBI", 0x15, len(numbers) - i, 0, n) for i, n in enumerate(numbers)]
    answers = [struct.pack("HBBI", 0x06, 0, 0, a) for a in (ALLOW_ANSWER, EPERM_ANSWER)]
    code = b"".join([load_number, *is_one, *answers])
    program = ctypes.create_string_buffer(code, len(code))
    argument = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program))
    )
    call = ctypes.CDLL(None, use_errno=True).prctl
    assert call(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert call(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, argument, 0, 0) == 0, ctypes.get_errno()


def what_runs_forbidden(forbidden: int) -> tuple[str, str]:
    if os.environ["RANK"] == str(forbidden):
        forbid_calls()
    return what_runs()


@pytest.mark.parametrize("setting", ["auto", "1"])
def test_what_the_kernel_forbids_to_one_rank_no_rank_does(spawn: Spawn, setting: str) -> None:
    world = spawn(3, env={"FARANDOLE_CMA": setting})
    answers = world.run(what_runs_forbidden, 1)
    assert len(set(answers)) == 1
    chosen, refusal = answers[0]
    assert chosen == "cico"
    why = "rank 1 cannot reach the memory of rank 0: Operation not permitted"
    assert why in refusal
    # FARANDOLE_CMA=1 makes the reason a warning; with auto only FARANDOLE_LOG=info shows it.
    assert all((why in world.output(r)) == (setting == "1") for r in range(3))


def reduce_in_halves() -> list[str]:
    fd.init()
    half = fd.split(fd.rank() % 2)
    assert half is not None
    x = np.full(COUNT, 1, np.float32)
    assert (fd.all_reduce(x, group=half) == 2).all()
    return [half.last_path, reduce()]


def test_split_groups_share_the_worlds_answer(spawn: Spawn) -> None:
    world = spawn(4, env={"FARANDOLE_CMA": "1"})
    assert world.run(reduce_in_halves) == [["cma", "cma"]] * 4
    world = spawn(4, each=[{"FARANDOLE_CMA": "0" if r == 3 else "1"} for r in range(4)])
    assert world.run(reduce_in_halves) == [["cico", "cico"]] * 4


PROT_NONE, PROT_READ = 0, 1


def take_memory_away(protection: int) -> Any:
    """Rank 1 makes the part that rank 0 folds unreachable, while the operation is in flight."""
    fd.init()
    fd.barrier()
    pages = 64
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    x = np.frombuffer(memory, np.float32)
    x[:] = 1
    if fd.rank() == 1:
        handle = fd.all_reduce(x, out=x, async_op=True)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert protect(x.ctypes.data, pages // 2 * mmap.PAGESIZE, protection) == 0
        harness.tell("taken")
        handle.wait()
    else:
        assert harness.listen() == "go"
        fd.all_reduce(x, out=x)


@pytest.mark.parametrize(("protection", "verb"), [(PROT_NONE, "read"), (PROT_READ, "written")])
def test_memory_that_is_gone_is_an_error_that_names_its_owner(
    spawn: Spawn, protection: int, verb: str
) -> None:
    world = spawn(2, env={"FARANDOLE_CMA": "1"})
    world.start(take_memory_away, protection)
    world.hear(1)
    world.say(0, "go")
    for o in world.outcomes():
        assert o.error == "ResourceError", o.trace
        assert f"the buffer of rank 1 could not be {verb}" in o.verdict
        assert (o.rank, o.pid) == (1, world.pids[1])
        assert "Bad address" in o.evidence
        assert "do not free" in o.advice
