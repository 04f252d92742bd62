"""A failure of one rank during the rendezvous is reported on all ranks, and none waits in vain."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import farandole as fd
import harness
from harness import World

Spawn = Callable[..., World]


# ---- a rank that lacks something ----


def join_with_few_descriptors(poor: int, most: int) -> None:
    if int(os.environ["RANK"]) == poor:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    fd.init()


def join_without_room(poor: int) -> None:
    if int(os.environ["RANK"]) == poor:
        limit(64 << 20)
    fd.init()


def limit(more: int) -> None:
    """Limits the address space to its present size plus `more` bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (room, room))


def all_are_told(world: World, poor: int, what: str, advice: str = "") -> None:
    outcomes = world.outcomes()
    told = rf"rank {poor} \(pid {world.pids[poor]} on [^)]+\) could not meet the others: "
    for o in outcomes:
        assert o.error == "ResourceError", o.trace
        assert o.rank == poor
        assert re.match(told + what, o.verdict), o.verdict
        assert o.advice.startswith(advice)
        assert o.text == outcomes[0].text


@pytest.mark.parametrize("poor", [0, 5])
@pytest.mark.parametrize("most", [9, 14, 30])  # descriptors; a rendezvous of 16 ranks needs more
def test_too_few_descriptors_on_one_rank(spawn: Spawn, poor: int, most: int) -> None:
    world = spawn(16)
    world.start(join_with_few_descriptors, poor, most)
    all_are_told(world, poor, rf".*Too many open files \(errno 24\); this process may open {most}$")


@pytest.mark.parametrize("poor", [0, 1])
def test_a_mapping_that_fails_on_one_rank(spawn: Spawn, poor: int) -> None:
    world = spawn(3, env={"FARANDOLE_ARENA_BYTES": "1G"})
    world.start(join_without_room, poor)
    what = (
        r"mmap of the shared segment failed: Cannot allocate memory \(errno 12\); an arena for "
        r"each rank takes \d+ MiB of address space, and ulimit -v \(\d+ MiB\) leaves 6\d MiB; "
        r"raise it$"
    )
    all_are_told(world, poor, what)


def joins_as_advised(poor: int) -> int:
    """Sets the limit to the value that the error names, and joins."""
    if int(os.environ["RANK"]) == poor:
        limit(1 << 30)
    with pytest.raises(fd.ResourceError) as caught:
        fd.init()
    advised = re.search(r"FARANDOLE_ARENA_BYTES=(\d+M) fits$", caught.value.verdict)
    assert advised, caught.value
    os.environ["FARANDOLE_ARENA_BYTES"] = advised[1]
    fd.init()
    assert (fd.all_reduce(np.ones(1 << 20)) == fd.size()).all()
    return int(advised[1][:-1])


def test_a_size_that_fits_a_limit_of_address_space_is_named(spawn: Spawn) -> None:
    sizes = spawn(2).run(joins_as_advised, 1)
    assert sizes[0] == sizes[1]
    assert 256 <= sizes[0] < 512


def joins_within_a_limit() -> int:
    limit(1 << 30)
    fd.init()
    assert (fd.all_reduce(np.ones(1 << 20)) == fd.size()).all()
    return mapped()


def mapped() -> int:
    """MiB of address space that the shared segment takes."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if "memfd:farandole" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in ends) >> 20


def test_arenas_follow_a_limit_of_address_space(spawn: Spawn) -> None:
    sizes = spawn(3).run(joins_within_a_limit)
    assert len(set(sizes)) == 1
    assert 512 <= sizes[0] < 1024


# ---- a rank that ends before it comes ----


def test_a_rank_that_ends_before_init_ends_the_job(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, subprocess, farandole as fd\n"
        "os.environ['RANK'] == '0' and subprocess.Popen(['sleep', '60'])\n"  # is no rank's program
        "os.environ['RANK'] == '1' or fd.init()\n"
    )
    done = harness.launch(3, [sys.executable, script], code=1)
    last = done.stderr.splitlines()[-1]
    expected = r"farandole: rank 1 \(pid \d+\) exited with code 0, and ranks 0, 2 waited for it in"
    assert re.match(expected, last), done.stderr


def test_a_program_that_a_rank_left_behind_may_still_come(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1' and os.fork(): sys.exit()\n"
        "if os.environ['RANK'] == '1': time.sleep(4)\n"  # longer than a rank that ended is awaited
        "import farandole as fd; fd.init(); print(fd.size())\n"
    )
    done = harness.launch(2, [sys.executable, script], "--no-prefix", code=None)
    assert done.stdout.splitlines() == ["2", "2"], done.stderr


# ---- another process in rank 0's place ----


def meeting_point(spawn: Spawn, place: dict[str, str | None]) -> str:
    """The abstract address at which ranks of this job look for rank 0."""
    world = spawn(3, env=place)
    world.start(fd.init, ranks=[0])
    deadline = time.monotonic() + harness.LIMIT
    run_id = str(place["FARANDOLE_RUN_ID"])
    while not (names := harness.traces_of(run_id)):
        assert time.monotonic() < deadline
    world.signal(0, signal.SIGKILL)
    assert world.died(0)
    return "\0" + names[0][1:]


@contextlib.contextmanager
def squatter(address: str, kind: str) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken:
        taken.bind(address)
        if kind != "deaf":
            taken.listen()
        talker = threading.Thread(target=talk, args=(taken,))
        if kind == "garbled":
            talker.start()
        try:
            yield
        finally:
            if kind == "garbled":
                taken.shutdown(socket.SHUT_RDWR)
                talker.join()


def talk(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listener.accept()
            connection.send(b"220 welcome\r\n")
            connection.close()


SQUATTERS = {
    "deaf": "somebody holds the place of this job's first rank on this host and does not listen",
    "silent": "in the place of this job's first rank on this host, and it says nothing",
    "garbled": "in the place of this job's first rank on this host, and it does not say farandole",
}


def test_a_squatted_meeting_point_fails_every_rank_at_once(spawn: Spawn) -> None:
    with contextlib.ExitStack() as stack:
        worlds = {}
        for kind in SQUATTERS:
            place = {"FARANDOLE_RUN_ID": f"{kind}-{os.getpid()}", "MASTER_PORT": "7"}
            stack.enter_context(squatter(meeting_point(spawn, place), kind))
            # No rank waits this long: the test's own limit is shorter.
            worlds[kind] = spawn(3, env={**place, "FARANDOLE_START_TIMEOUT": "3600"})
            worlds[kind].start(fd.init)
        for kind, world in worlds.items():
            first, *others = world.outcomes()
            assert first.error == "RendezvousError", first.trace
            assert "another first rank of the job" in first.verdict
            for r, o in enumerate(others, 1):
                assert o.error == "RendezvousError", o.trace
                assert kind == "deaf" or f"rank {r} found process " in o.verdict
                assert SQUATTERS[kind] in o.verdict


def test_a_place_that_takes_nobody_in_is_left_at_the_deadline(spawn: Spawn) -> None:
    place: dict[str, str | None] = {"FARANDOLE_RUN_ID": f"full-{os.getpid()}", "MASTER_PORT": "7"}
    address = meeting_point(spawn, place)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as taken,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as guest,
    ):
        taken.bind(address)
        taken.listen(0)
        guest.connect(address)  # fills the queue: a blocking connect would wait now
        world = spawn(3, env={**place, "FARANDOLE_START_TIMEOUT": "1"})
        world.start(fd.init, ranks=[1])
        outcome = world.outcome(1)
    assert outcome.error == "RendezvousError", outcome.trace
    assert "its place is held, and takes nobody in" in outcome.verdict
