"""Starting and ending: ranks that do not fit together or are missing, jobs side by side."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import farandole as fd
import harness
import namespaces
from harness import World, split

Spawn = Callable[..., World]


def join() -> float:
    fd.init()
    return float(fd.all_reduce(np.ones(10))[0])


def starting() -> float:
    harness.tell("starting")
    return join()


# ---- ranks that do not fit together ----

MISFITS = {
    "duplicate rank": ([{"RANK": "0"}, {"RANK": "1"}, {"RANK": "1"}], "two processes are rank 1"),
    "rank beyond the world": ([{"RANK": "0"}, {"RANK": "7"}], "rank 7 does not exist"),
    "negative rank": ([{"RANK": "-1"}], "rank -1 does not exist"),
    "not a number": ([{"RANK": "one"}], "RANK=one, which is not a number"),
    "no world size": ([{"WORLD_SIZE": None, "LOCAL_WORLD_SIZE": None}], "WORLD_SIZE is not"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_misfits_are_refused_with_the_reason(spawn: Spawn, name: str) -> None:
    each, reason = MISFITS[name]
    dialled_in = 3 if name == "duplicate rank" else len(each)
    size = 3 if name == "duplicate rank" else 2
    env = {"FARANDOLE_START_TIMEOUT": "1.5"}
    world = spawn(size, env=env, each=each)
    world.start(join)
    outcomes = world.outcomes()
    assert len(outcomes) == dialled_in
    assert all(o.error == "RendezvousError" for o in outcomes), [o.trace for o in outcomes]
    assert any(reason in o.verdict for o in outcomes), [o.verdict for o in outcomes]
    if name == "duplicate rank":
        assert all(reason in o.verdict for o in outcomes)
        assert all(str(pid) in outcomes[0].verdict for pid in world.pids[1:])


def test_an_algorithm_that_nothing_has_is_refused_at_init(spawn: Spawn) -> None:
    world = spawn(2, env={"FARANDOLE_ALGORITHM": "rign"})
    world.start(join)
    for o in world.outcomes():
        assert o.error == "InvalidArgument", o.trace
        assert "FARANDOLE_ALGORITHM=rign is not an algorithm; did you mean ring?" in o.text
        assert "one of: ll, one_shot, " in o.text
        assert "halving_doubling" in o.text


def asks_for_an_algorithm() -> None:
    fd.init()
    with pytest.raises(fd.InvalidArgument, match="does not exist for all_reduce") as refused:
        fd.all_reduce(np.ones(10), algorithm="rign")
    assert "ring" in str(refused.value)
    assert "; over shared memory: ll, one_shot, mapped, " in str(refused.value)
    with pytest.raises(fd.InvalidArgument, match="does not exist for broadcast") as refused:
        fd.broadcast(np.ones(10), algorithm="rign")
    assert "; over shared memory: ll, one_shot, " in str(refused.value)
    assert "mapped" not in str(refused.value)


def test_an_unknown_algorithm_is_refused_with_all_that_there_are(spawn: Spawn) -> None:
    spawn(2).run(asks_for_an_algorithm)


@pytest.mark.parametrize("name", ["ring", "cico", "schedule"])
def test_an_algorithm_for_all_operations(spawn: Spawn, name: str) -> None:
    env = {"FARANDOLE_ALGORITHM": name, "FARANDOLE_LEVEL": "fast"}
    assert spawn(2, env=env).run(join) == [2.0, 2.0]


def test_a_mistyped_setting_is_said_once(spawn: Spawn) -> None:
    world = spawn(2, env={"FARANDOLE_TIMOUT": "5"})
    assert world.run(join) == [2.0, 2.0]
    warning = "warning: FARANDOLE_TIMOUT is not a setting; did you mean FARANDOLE_TIMEOUT?"
    assert world.output(0).count(warning) == 1
    assert warning not in world.output(1)


def test_two_first_ranks(spawn: Spawn) -> None:
    world = spawn(2, each=[{"RANK": "0"}, {"RANK": "0"}], env={"FARANDOLE_START_TIMEOUT": "1"})
    world.start(join)
    outcomes = world.outcomes()
    assert {o.error for o in outcomes} == {"RendezvousError"}
    assert any("another first rank of the job" in o.verdict for o in outcomes)


SHARED = {
    "LEVEL": ("canonical", "fast"),
    "CHECK_WEIGHTS": ("first", "off"),
    "NUMERICS": ("warn", "error"),
}


@pytest.mark.parametrize("setting", SHARED)
def test_settings_must_agree(spawn: Spawn, setting: str) -> None:
    mine, other = SHARED[setting]
    name = f"FARANDOLE_{setting}"
    world = spawn(2, each=[{name: mine}, {name: other}])
    world.start(join)
    for o in world.outcomes():
        assert o.error == "RendezvousError"
        assert o.verdict == f"ranks disagree on {name}: {mine} on rank 0; {other} on rank 1"


@pytest.mark.parametrize("parts", ["", "1,2"])
def test_all_settings_that_differ_are_named_with_their_ranks(spawn: Spawn, parts: str) -> None:
    fast = {"FARANDOLE_LEVEL": "fast"}
    each = [{}, fast | {"FARANDOLE_NUMERICS": "error"}, fast]
    world = spawn(3, each=each, env=split(parts) if parts else None)
    world.start(join)
    outcomes = world.outcomes()
    assert {o.error for o in outcomes} == {"RendezvousError"}
    assert {o.verdict for o in outcomes} == {
        "ranks disagree on FARANDOLE_LEVEL: canonical on rank 0; fast on ranks 1-2; "
        "on FARANDOLE_NUMERICS: warn on ranks 0, 2; error on rank 1"
    }


def test_the_one_rank_with_another_setting_is_to_blame(spawn: Spawn) -> None:
    world = spawn(3, each=[{}, {}, {"FARANDOLE_LEVEL": "fast"}])
    world.start(join)
    for o in world.outcomes():
        assert (o.rank, o.pid) == (2, world.pids[2]), o.trace


def with_word(word: str) -> None:
    fd.init(agree=word.replace("RANK", os.environ["RANK"]))


def test_words_of_programs_must_agree(spawn: Spawn) -> None:
    same = "x" * 300
    world = spawn(2)
    world.start(with_word, f"{same}RANK")
    for o in world.outcomes():
        assert o.error == "RendezvousError"
        assert f"has agree [{same}" in o.verdict
        assert o.verdict.endswith(f") has [{same}0]")
    world = spawn(3)
    world.start(with_word, f"{same}word")
    assert [o.error for o in world.outcomes()] == [None] * 3


# ---- ranks that are missing ----


def test_missing_ranks_are_listed_on_every_rank_that_came(spawn: Spawn) -> None:
    world = spawn(6, env={"FARANDOLE_START_TIMEOUT": "0.5"})
    world.start(join, ranks=[0, 1, 3])
    for o in world.outcomes([0, 1, 3]):
        assert o.error == "RendezvousError"
        assert o.verdict == "3 of 6 ranks arrived on this host; missing: 2, 4-5"


def test_a_missing_first_rank(spawn: Spawn) -> None:
    world = spawn(2, env={"FARANDOLE_START_TIMEOUT": "0.3"})
    world.start(join, ranks=[1])
    o = world.outcome(1)
    assert o.error == "RendezvousError"
    assert "rank 1 does not reach rank 0 on this host: Connection refused; the job is" in o.verdict


def test_a_rank_that_dies_while_the_others_meet(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(starting, ranks=[1])
    world.hear(1)
    world.start(starting, ranks=[0])
    world.hear(0)
    harness.wait_until(lambda: has_seated_a_guest(world.pids[0]))
    world.signal(1, signal.SIGKILL)
    o = world.outcome(0)
    assert o.error == "RendezvousError", o.trace
    assert o.rank == 1
    assert (
        f"rank 1 (pid {world.pids[1]} on {socket.gethostname()}) left while the ranks met"
        in o.verdict
    )


def has_seated_a_guest(pid: int) -> bool:
    """Rank 0 has a process descriptor of itself, and then one of the guest."""
    return sum("pidfd" in each for each in harness.descriptors(pid)) == 2


def test_a_late_rank_is_waited_for(spawn: Spawn) -> None:
    world = spawn(3)
    world.start(starting, ranks=[0, 1])
    world.hear_all([0, 1])
    world.start(join, ranks=[2])
    assert [o.value for o in world.outcomes()] == [3.0] * 3


# ---- jobs side by side, again and again ----


def test_two_jobs_with_one_master_port(spawn: Spawn) -> None:
    port = {"MASTER_PORT": "29400"}
    worlds = [spawn(2, env=port), spawn(3, env=port)]
    for world in worlds:
        world.start(join)
    assert [o.value for w in worlds for o in w.outcomes()] == [2.0, 2.0, 3.0, 3.0, 3.0]


def test_somebody_else_holds_the_master_port(spawn: Spawn) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        world = spawn(2, env={"MASTER_PORT": str(other.getsockname()[1])})
        world.start(join)
        assert [o.value for o in world.outcomes()] == [2.0] * 2


def test_a_stranger_on_the_socket_is_ignored(spawn: Spawn) -> None:
    world = spawn(2)
    world.start(starting, ranks=[0])
    world.hear(0)
    deadline = time.monotonic() + harness.LIMIT
    while not (names := harness.traces_of(world.run_id)):
        assert time.monotonic() < deadline
    strangers = []
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 600, b"\xff" * 4096):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect("\0" + names[0][1:])
        stranger.send(greeting)
        strangers.append(stranger)
    world.start(join, ranks=[1])
    assert [o.value for o in world.outcomes()] == [2.0] * 2
    for stranger in strangers:
        stranger.close()


def again_and_again(times: int) -> tuple[tuple[int, int], tuple[int, int]]:
    seen = []
    for i in range(times):
        fd.init()
        assert fd.is_initialized()
        world = fd.world()
        fd.init()  # again: nothing happens
        assert fd.world() is world
        assert (fd.all_reduce(np.ones(3000)) == fd.size()).all()
        group = fd.split(0)
        fd.barrier(group=group)
        del world, group
        fd.shutdown()
        fd.shutdown()
        assert not fd.is_initialized()
        if i > 0:
            seen.append((harness.open_files(), harness.mappings()))
    return seen[0], seen[-1]


@pytest.mark.parametrize("size", [1, 3])
def test_init_and_shutdown_leave_nothing_behind(spawn: Spawn, size: int) -> None:
    for first, last in spawn(size).run(again_and_again, 20):
        assert last[0] == first[0], "descriptors"
        assert last[1] <= first[1] + 3, "mappings"


def everything_before_init() -> None:
    calls: list[Callable[[], Any]] = [
        lambda: fd.all_reduce(np.ones(3)),
        lambda: fd.all_gather(np.ones(3)),
        lambda: fd.reduce_scatter(np.ones(3)),
        lambda: fd.broadcast(np.ones(3)),
        lambda: fd.allocate(3),
        fd.barrier,
        fd.rank,
        fd.size,
        fd.local_rank,
        fd.local_size,
        fd.cross_rank,
        fd.cross_size,
        fd.world,
        lambda: fd.split(0),
    ]
    for _ in ("before init", "after shutdown"):
        for call in calls:
            with pytest.raises(fd.NotInitialized, match=r"call farandole\.init"):
                call()
        fd.init()
        assert fd.rank() == fd.local_rank()
        fd.shutdown()


def test_nothing_works_before_init_or_after_shutdown(spawn: Spawn) -> None:
    spawn(2).run(everything_before_init)


def after_a_failure() -> float:
    """A failed world is left and a new one made, in the same processes."""
    fd.init()
    if fd.rank() == 0:
        fd.world().abort("on purpose")
    with pytest.raises(fd.Aborted):
        fd.barrier()
    fd.shutdown()
    return join()


def test_a_new_world_after_a_failed_one(spawn: Spawn) -> None:
    assert spawn(3).run(after_a_failure) == [3.0] * 3


def without_names() -> list[str]:
    fd.init()
    array = fd.allocate(1 << 20)
    fd.all_reduce(array, out=array)
    maps = Path("/proc/self/maps").read_text()
    return [line for line in maps.splitlines() if "/dev/shm" in line or "/tmp/" in line]


def test_shared_memory_has_no_name(spawn: Spawn) -> None:
    for lines in spawn(2).run(without_names):
        assert not [line for line in lines if ".so" not in line and "farandole" in line]
        assert not [line for line in lines if "/dev/shm" in line]


# ---- under other launchers, in small containers ----

TRAINING = """
import farandole as fd, numpy as np, os, sys
fd.init()
import torch.distributed as dist
dist.init_process_group("gloo")
import torch
x = torch.ones(4)
dist.all_reduce(x)
y = fd.all_reduce(torch.ones(4))
assert x.tolist() == y.tolist() == [fd.size()] * 4
dist.destroy_process_group()
os.write(1, f"rank {fd.rank()} of {fd.size()}: {fd.local_rank()}\\n".encode())
"""


@pytest.mark.timeout(180)
def test_torchrun_with_gloo_beside_us(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2: 0", "rank 1 of 2: 1"]


SMALL = """
import farandole as fd, numpy as np, os, shutil
assert shutil.disk_usage("/dev/shm").total <= 64 << 20
fd.init()
x = fd.allocate(30_000_000)  # 120 MB
x[:] = 1
fd.all_reduce(x, out=x)
assert (x == fd.size()).all()
"""


def test_a_small_dev_shm_is_enough() -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed")
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    if subprocess.run([unshare, "-m", "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("this user may not mount a small /dev/shm")
    run_id = f"small-{os.getpid()}"
    ranks = [
        subprocess.Popen(
            [unshare, "-m", "sh", "-c", f'{mount}; exec "$0" -c "$1"', sys.executable, SMALL],
            env={**os.environ, "RANK": str(r), "WORLD_SIZE": "2", "FARANDOLE_RUN_ID": run_id},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(2)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], errors


def test_a_rank_whose_master_is_elsewhere_says_what_it_waits_for() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LOCAL_", "FARANDOLE_"))}
    told = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import farandole as fd; fd.init(timeout=0)"],
        env=env | told,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "rank 1 waits for 2 ranks on this host, since LOCAL_WORLD_SIZE is not set" in done.stderr
    assert "MASTER_ADDR=192.0.2.1 is another host" in done.stderr


def test_ranks_of_several_hosts_that_nobody_has_counted_say_so_at_once(spaces: list[str]) -> None:
    """Also on the host of MASTER_ADDR, where all of them might be."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LOCAL_", "FARANDOLE_"))}
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "10.77.3.1", "MASTER_PORT": "29500"}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", space, sys.executable, "-c",
             "import farandole as fd; fd.init(timeout=3)"],
            env=env | told | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True,
        )
        for rank, space in enumerate(spaces)
    ]  # fmt: skip
    for rank, (process, whose) in enumerate(zip(ranks, ("a", "another"), strict=True)):
        said = process.communicate(timeout=60)[1]
        hint = f"rank {rank} waits for 2 ranks on this host, since LOCAL_WORLD_SIZE is not set"
        assert f"{hint}, but MASTER_ADDR=10.77.3.1 is {whose} host" in said


def test_ranks_whose_addresses_a_router_translates_meet(tmp_path: Path) -> None:
    """Rank 0 sees the others at an address that they lack, and they dial one that it lacks."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("3b" * 32)
    script = (
        "import farandole as fd, numpy as np; fd.init(timeout=30)\n"
        "print(fd.all_reduce(np.ones(3))[0], fd.all_reduce(np.ones(1 << 20, np.float32))[-1])"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith(("LOCAL_", "FARANDOLE_"))}
    told = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
    with namespaces.translated() as hosts:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-c", script],
                env=env | told | {
                    "RANK": str(2 * host + local), "LOCAL_RANK": str(local), "MASTER_ADDR": address,
                    "FARANDOLE_SECRET_FILE": str(secret),
                },
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for host, (name, address) in enumerate(hosts)
            for local in range(2)
        ]  # fmt: skip
        said = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert said == ["4.0 4.0\n"] * 4
