"""How process groups over farandole begin and end: stores, launchers, worlds, ranks that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from harness import World, listen, split, tell

Spawn = Callable[..., World]


# ---- on ranks ----


def begin(store: str = "", timeout: float = 30.0) -> Any:
    """Makes the default group; through a file if there is one, else by the environment."""
    import torch
    import torch.distributed as dist

    import farandole.torch.distributed  # noqa: F401

    torch.set_num_threads(1)
    options: dict[str, Any] = {}
    if store:
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        options = {"init_method": f"file://{store}", **place}
    dist.init_process_group("farandole", timeout=timedelta(seconds=timeout), **options)
    return dist


def total() -> float:
    import torch
    import torch.distributed as dist

    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x.item()


def come_and_go(folder: str) -> tuple[list[float], list[bool]]:
    """Several groups, one after the other, by environment and by file."""
    import farandole as fd

    totals, worlds = [], []
    for store in ("", f"{folder}/one", "", f"{folder}/two"):
        dist = begin(store)
        ends = sorted({0, dist.get_world_size() - 1})
        sub = dist.new_group(ends)
        if dist.get_rank() in ends:
            dist.barrier(sub)
        totals.append(total())
        worlds.append(fd.is_initialized())
        dist.destroy_process_group()
        worlds.append(fd.is_initialized())
    return totals, worlds


def within_a_world() -> tuple[float, int, float]:
    """A world that was there before stays afterwards."""
    import numpy as np

    import farandole as fd

    fd.init()
    dist = begin()
    found = total()
    dist.destroy_process_group()
    return found, fd.size(), float(fd.all_reduce(np.float32(1)))


def destroys(late: str) -> None:
    """The last rank destroys a group; rank 0 still uses it."""
    import torch

    import farandole as fd

    dist = begin()
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    x = torch.ones(3)
    calls: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda group: dist.all_reduce(x, group=group),
        "work": lambda group: dist.all_reduce(x, group=group, async_op=True).wait(),
        "backward": lambda group: backward_of(group),
        "recv": lambda group: dist.recv(x, group=group),
    }
    group = dist.new_group([0, last])
    if rank in (0, last):
        dist.all_reduce(x, group=group)
        dist.barrier(group)
    if rank == last:
        dist.destroy_process_group(group)
    if rank == 0:
        begun = time.monotonic()
        with pytest.raises(fd.EarlyExit) as caught:
            calls[late](group)
        assert time.monotonic() - begun < 1.5
        ranks = "ranks 0-1" if last == 1 else f"ranks 0, {last}"
        assert f"closed the group of {ranks} before" in caught.value.verdict
        assert caught.value.rank == last
        dist.destroy_process_group(group)
    again = dist.new_group([0, last])
    if rank in (0, last):
        x = torch.ones(3)
        dist.all_reduce(x, group=again)
        assert x.tolist() == [2.0] * 3
    assert total() == (last + 1) * (last + 2) / 2
    dist.destroy_process_group()


def ends_by_an_exception() -> None:
    """The last rank destroys all groups while it handles one; the others wait for it."""
    import torch

    import farandole as fd

    dist = begin()
    try:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("bad sample")
        with pytest.raises(fd.RemoteError) as caught:
            dist.all_reduce(torch.ones(3))
        assert "ValueError: bad sample" in str(caught.value)
    except ValueError:
        dist.destroy_process_group()


def backward_of(group: Any) -> None:
    import torch
    import torch.distributed as dist

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda grad: dist.all_reduce(grad, group=group))
    (2 * weight).sum().backward()  # type: ignore[no-untyped-call]


def with_half_a_world(store: str) -> None:
    import farandole as fd

    if os.environ["RANK"] == "0":
        fd.init(0, 1)
    begin(store)


def across_two_jobs(store: str) -> tuple[float, float, dict[str, int]]:
    """Each rank is a job with a world of its own; a group joins them, as trainers do with servers
    of their model."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    import farandole.torch.distributed

    rank = int(os.environ["RANK"])
    timeout = timedelta(seconds=30)
    dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
    shared = dist.PrefixStore("both", dist.FileStore(store, 2))
    group, _ = c10d._new_process_group_helper(
        2, rank, [], "farandole", shared, group_name="both", timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(2)}
    x = torch.tensor([float(rank + 1)])
    dist.all_reduce(x, group=group)
    alone = total()
    return x.item(), alone, farandole.torch.distributed.fallbacks()


def groups_of_different_names(store: str) -> list[str]:
    """PyTorch names a group by how many the rank has made before."""
    import logging

    from farandole.torch._c10d import meeting

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("farandole").addHandler(handler)
    dist = begin(store)
    meeting._PATIENCE = timedelta(seconds=0.2)
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    try:
        limit = timedelta(seconds=0.6)
        dist.new_group([0, 1], use_local_synchronization=True, timeout=limit)
    except Exception as error:
        said.append(str(error))
    return said


def all_but_the_last(store: str) -> None:
    if os.environ["RANK"] != "2":
        begin(store, timeout=1.0)


def wait_for_the_dead(how: str) -> None:
    dist = begin()
    import torch

    x = torch.ones(1000)
    dist.all_reduce(x)
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    tell("ready")
    if dist.get_rank() == 2:
        listen()
    if how == "wait":
        dist.all_reduce(x)
    elif how == "work":
        dist.all_reduce(x, async_op=True).wait()
    elif how == "future":
        dist.all_reduce(x, async_op=True).get_future().wait()
    elif how == "backward":
        ddp(torch.ones(2, 4)).sum().backward()
    elif how == "recv":
        dist.recv(x, 2)


# ---- the tests ----


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("parts", [None, "1,{}"])
@pytest.mark.parametrize("late", ["all_reduce", "work", "backward", "recv"])
def test_a_group_that_one_rank_has_destroyed(
    spawn: Spawn, late: str, parts: str | None, size: int
) -> None:
    env = split(parts.format(size - 1)) if parts else {}
    spawn(size, "torch", env=env).run(destroys, late)


@pytest.mark.parametrize("parts", [None, "2,1"])
def test_an_exception_comes_before_the_groups_that_it_closes(
    spawn: Spawn, parts: str | None
) -> None:
    spawn(3, "torch", env=split(parts) if parts else {}).run(ends_by_an_exception)


@pytest.mark.parametrize("size", [1, 3])
def test_groups_come_and_go_in_one_process(spawn: Spawn, tmp_path: Path, size: int) -> None:
    world = spawn(size, "torch")
    for totals, worlds in world.run(come_and_go, str(tmp_path)):
        assert totals == [size * (size + 1) / 2] * 4
        assert worlds == [True, False] * 4


def test_a_world_that_was_there_is_used_and_stays(spawn: Spawn) -> None:
    assert spawn(2, "torch").run(within_a_world) == [(3.0, 2, 2.0)] * 2


def test_ranks_of_different_worlds_are_told_so(spawn: Spawn, tmp_path: Path) -> None:
    world = spawn(2, "torch")
    world.start(with_half_a_world, str(tmp_path / "store"))
    for outcome in world.outcomes():
        assert outcome.error == "RendezvousError"
        assert "rank 1 in none" in outcome.text


def test_a_group_over_two_jobs_is_gloos(spawn: Spawn, tmp_path: Path) -> None:
    found = spawn(2, "torch").run(across_two_jobs, str(tmp_path / "store"))
    for rank, (both, alone, counted) in enumerate(found):
        assert both == 3
        assert alone == 1, rank
        assert counted == {"a group over several farandole worlds": 1}


def test_a_group_that_does_not_come_together_says_so(spawn: Spawn, tmp_path: Path) -> None:
    for said in spawn(2, "torch").run(groups_of_different_names, str(tmp_path / "store")):
        assert len(said) == 2
        for words in said:
            assert "1 of 2 ranks came" in words or "rank 0 has opened no round" in words
            assert "equally many" in words


def test_ranks_that_do_not_come_are_named(spawn: Spawn, tmp_path: Path) -> None:
    world = spawn(3, "torch")
    world.start(all_but_the_last, str(tmp_path / "store"))
    for outcome in world.outcomes([0, 1]):
        assert outcome.error == "RendezvousError"
        assert "2 of 3 ranks" in outcome.text
        assert "missing: rank 2" in outcome.text


@pytest.mark.parametrize("how", ["wait", "work", "future", "backward", "recv"])
def test_survivors_name_the_killed_rank(spawn: Spawn, how: str) -> None:
    world = spawn(3, "torch")
    world.start(wait_for_the_dead, how)
    for r in range(3):
        assert world.hear(r) == "ready"
    time.sleep(0.1)  # most often they are inside by then; it is right if not
    world.signal(2, signal.SIGKILL)
    for outcome in world.outcomes([0, 1]):
        assert outcome.error == "PeerLost", outcome.trace
        assert "rank 2" in outcome.verdict


PROGRAM = """
import os, sys
import torch, torch.distributed as dist
import farandole.torch.distributed
torch.set_num_threads(1)
again = 2 if "TORCHELASTIC_RUN_ID" in os.environ else 0  # its store outlives the groups
for _ in range(again):
    dist.init_process_group("farandole")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.all_reduce(x.int(), dist.ReduceOp.BXOR)  # gloo's
    dist.destroy_process_group()
dist.init_process_group("farandole")
torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
for _ in range(3):
    ddp(torch.ones(2, 8) * (dist.get_rank() + 1)).square().sum().backward()
# One write: torchrun does not keep the ranks' lines apart.
sys.stdout.write(f"norm {ddp.module.weight.grad.norm():.4f} of {dist.get_world_size()}\\n")
sys.stdout.flush()
pending = dist.irecv(torch.empty(3), src=1 - dist.get_rank()).get_future()
assert sum(farandole.torch.distributed.fallbacks().values()) == again
"""


@pytest.mark.parametrize("launcher", ["farandole run", "torchrun"])
def test_a_program_runs_under_either_launcher_and_may_just_end(
    tmp_path: Path, launcher: str
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    start = {
        "farandole run": ["farandole", "run", "-np", "2", "--no-prefix", "--", sys.executable],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    }[launcher]
    done = subprocess.run(
        [sys.executable, "-m", *start, str(program)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = [line for line in done.stdout.splitlines() if line.startswith("norm")]
    assert len(lines) == 2
    assert len(set(lines)) == 1
    for sign in ("Traceback", "terminate called", "Fatal"):
        assert sign not in done.stderr, done.stderr


FOUND_BY_NAME = """
import sys, torch, torch.distributed as dist
assert not [name for name in sys.modules if name.startswith("farandole.torch")], "import is cheap"
dist.init_process_group("farandole", store=dist.HashStore(), rank=0, world_size=1)
assert type(dist.group.WORLD).__name__ == "FarandoleProcessGroup"
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def test_the_backend_is_found_by_its_name() -> None:
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "_import_device_backends"):
        pytest.skip("PyTorch before 2.5 looks for no backends")
    done = subprocess.run(
        [sys.executable, "-c", FOUND_BY_NAME], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
