"""Data over MPI, under the mpiexec of each: the same results and bits, and how jobs end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
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
from test_collectives import DTYPES, FOLDING, KINDS, check, ops_of
from test_tcp import (
    by_name_in_any_order,
    check_sizes,
    groups_side_by_side,
    many_at_once,
    messages,
    sum_of_random_numbers,
)

import farandole as fd
import grid
import harness
import mpis
from farandole import _core, _mpi_meeting
from farandole._tune import kept
from farandole.common._basics import init as horovods_init
from farandole.common._basics import mpi_enabled
from harness import World
from mpis import Mpi

Spawn = Callable[..., World]
ROOT = Path(__file__).resolve().parents[2]
BY_MPI: dict[str, Any] = {"algorithm": "mpi", "level": "fast"}  # its own all-reduce
FORCED = {"FARANDOLE_TRANSPORT": "mpi", "FARANDOLE_START_TIMEOUT": "60"}


def over(parts: str) -> dict[str, str]:
    """All data over MPI, on one host or on several; no secret and no MASTER_ADDR is given."""
    return FORCED | ({"FARANDOLE_SPLIT_HOSTS": parts} if parts else {})


# All have one interface, but for the size of their handles.
@pytest.fixture(params=mpis.NAMES if grid.full() else mpis.NAMES[:1])
def mpi(request: pytest.FixtureRequest) -> Mpi:
    return mpis.find(request.param)


def world() -> Any:
    """MPI_COMM_WORLD."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


# ---- what moves data ----


def everything() -> tuple[list[str], int, tuple[int, ...], str]:
    fd.init()
    paths = check_sizes(False) | check_sizes(True)
    for dtype in DTYPES:
        for kind in KINDS:
            for op in ops_of(dtype) if kind in FOLDING else ["sum"]:
                check(kind, dtype, 303, op)
    many_at_once()
    groups_side_by_side()
    by_name_in_any_order()
    messages()
    refused_by_agreement()
    by_mpis_own_all_reduce()
    large = np.full((65 << 20) // 4 + 1, fd.rank() + 1, np.float32)
    assert (fd.all_reduce(large) == fd.size() * (fd.size() + 1) / 2).all()
    sums = b"".join(sum_of_random_numbers(n, "canonical") for n in (5, 300_007))
    place = (fd.local_rank(), fd.local_size(), fd.cross_rank(), fd.cross_size())
    return sorted(paths), fd.size(), place, hashlib.sha256(sums).hexdigest()


def refused_by_agreement() -> None:
    with pytest.raises(fd.Mismatch):
        fd.all_reduce(np.ones(3 + fd.rank()))
    assert (fd.all_reduce(np.ones(3)) == fd.size()).all()


def by_mpis_own_all_reduce() -> None:
    for dtype in ("float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint64"):
        for op in ops_of(dtype):
            if dtype.startswith("float") and op in ("min", "max"):
                continue
            for count, in_place in ((0, False), (1, True), (3001, False), (70_001, True)):
                way = check(
                    "all_reduce", dtype, count, op, in_place=in_place, algorithm="mpi", level="fast"
                )
                assert way == "mpi"
    x = np.full(5001, fd.rank() + 1.0)
    scaled = fd.all_reduce(x, "mean", prescale=2, postscale=3, **BY_MPI)
    assert (scaled == 3 * (fd.size() + 1)).all()
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("'canonical' promises bits", {"level": "canonical"}), ("a NaN in a max", {"op": "max"}),
        ("another group", {"group": fd.split(0)}),
    ]  # fmt: skip
    for words, options in wrong:
        with pytest.raises(fd.InvalidArgument, match=words):
            fd.all_reduce(x, **BY_MPI | options)
    with pytest.raises(fd.InvalidArgument, match="no float16"):
        fd.all_reduce(x.astype(np.float16), **BY_MPI)


def bits() -> str:
    sums = b"".join(sum_of_random_numbers(n, "canonical") for n in (5, 300_007))
    return hashlib.sha256(sums).hexdigest()


@pytest.mark.parametrize(
    ("parts", "ranks", "places"),
    [
        ("", 3, [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1)]),
        ("1,1", 2, [(0, 1, 0, 2), (0, 1, 1, 2)]),
        ("2,2", 4, [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
    ],
)
def test_everything_over_mpi(
    spawn: Spawn, mpi: Mpi, parts: str, ranks: int, places: list[tuple[int, ...]]
) -> None:
    found = mpi.run(ranks, everything, env=over(parts))
    assert [place for _, _, place, _ in found] == places
    ways = ["eager", "schedule"] if parts else ["schedule"]
    assert all(paths == ways for paths, _, _, _ in found)
    assert all(size == ranks for _, size, _, _ in found)
    assert {digest for *_, digest in found} == set(spawn(ranks).run(bits)), "shared memory's bits"


@pytest.mark.parametrize("name", mpis.NAMES[1:])
def test_handles_of_the_other_size(spawn: Spawn, name: str) -> None:
    found = mpis.find(name).run(2, everything, env=over("1,1"))
    assert {digest for *_, digest in found} == set(spawn(2).run(bits)), "shared memory's bits"


def connections() -> int:
    """TCP connections of this process."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            mine.add(str(entry.readlink()))
        except OSError:  # the listing's own
            continue
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and f"socket:[{row[9]}]" in mine for row in rows)


def table_of(path: Path, **seconds: float) -> str:
    """A tuning table of this host, of the usual numbers but for these."""
    numbers = _core.tuning.numbers() | seconds
    kept.write(str(path), kept.Kept(kept.kind(), "now", 2, 0.01, 0, {}, numbers))
    return str(path)


def by_communicator() -> tuple[str, str, int]:
    before = connections()
    fd.init(comm=world())
    x = np.ones(100_003)
    over_mpi = os.environ["FARANDOLE_TRANSPORT"] == "auto"
    assert (fd.all_reduce(x, level="fast") == fd.size()).all()
    assert fd.world().last_path == ("mpi" if over_mpi else "schedule"), "by the table"
    if not over_mpi:
        with pytest.raises(fd.InvalidArgument, match="no data go over MPI here"):
            fd.all_reduce(x, **BY_MPI)
    here, across = fd.split(fd.cross_rank()), fd.split(fd.local_rank())
    assert (fd.all_reduce(x, group=here) == fd.local_size()).all()
    within = str(here.last_path)
    assert (fd.all_reduce(x, group=across) == fd.cross_size()).all()
    assert (fd.all_reduce(x) == fd.size()).all()
    assert fd.world().last_path == "schedule", "the bits are promised"
    assert mpi_enabled() == over_mpi
    return within, str(across.last_path), connections() - before


def test_a_communicator_takes_mpi_between_hosts_and_memory_within(mpi: Mpi, tmp_path: Path) -> None:
    most: dict[str, int] = {}
    table = table_of(tmp_path / "table", mpi_round=1e-9, mpi_byte=1e-14)
    for transport in ("auto", "tcp"):
        env = {"FARANDOLE_SPLIT_HOSTS": "2,2", "FARANDOLE_TRANSPORT": transport}
        env["FARANDOLE_TUNING"] = table
        found = mpi.run(4, by_communicator, env=env)
        assert all(across == "schedule" for _, across, _ in found)
        assert all((within == "schedule") == (transport == "tcp") for within, _, _ in found)
        most[transport] = max(sockets for *_, sockets in found)
    # Control is TCP to each other rank, and MPI may have a connection of its own.
    assert most["auto"] <= 5 < most["tcp"], most


def by_parts() -> tuple[int, float]:
    comm = world()
    part = comm.Split(comm.rank % 2, -comm.rank)
    fd.init(comm=part)
    assert (fd.rank(), fd.size()) == (part.rank, part.size)
    total = float(fd.all_reduce(np.array([comm.rank + 1.0]))[0])
    fd.shutdown()
    horovods_init(comm)
    assert (fd.all_reduce(np.ones(5)) == comm.size).all()
    return fd.size(), total


def test_what_mpi_takes_is_measured_and_told(mpi: Mpi, tmp_path: Path) -> None:
    table = table_of(tmp_path / "table")
    before = kept.read(table).seconds
    tune = ["-m", "farandole", "tune", "--mpi", "--output", table]
    done = mpi.start(2, tune, FARANDOLE_SPLIT_HOSTS="1,1")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("measured over MPI, 2 ranks on 2 hosts") == 1
    after = kept.read(table).seconds
    new = {"network_round", "network_byte", "mpi_round", "mpi_byte"}
    assert {name for name in after if after[name] != before[name]} == new
    assert 0 < after["mpi_round"] < 0.1, after
    assert 0 < after["mpi_byte"] < 1e-6, after
    alone = mpi.start(2, tune)
    assert alone.returncode != 0
    assert "all 2 ranks share one" in alone.stdout


def sum_by_hosts() -> float:
    fd.init(comm=world())
    return float(fd.all_reduce(np.ones(100_003))[-1])


@pytest.mark.parametrize("transport", ["auto", "mpi"])
def test_what_is_sealed_does_not_go_over_mpi(mpi: Mpi, transport: str) -> None:
    env = over("1,1") | {"FARANDOLE_TRANSPORT": transport, "FARANDOLE_WIRE": "checked"}
    ended = mpi.call(2, sum_by_hosts, env=env)
    told = [(o.value, o.error) for o in ended.outcomes if o is not None]
    said = ended.text + "".join(o.text for o in ended.outcomes if o is not None)
    assert told == [(2.0, None) if transport == "auto" else (None, "RendezvousError")] * 2, said
    assert "FARANDOLE_WIRE=checked, over TCP alone" in said


def test_split_communicators_are_worlds(mpi: Mpi) -> None:
    assert mpi.run(4, by_parts, env=FORCED) == [(4, 4.0), (4, 6.0)] * 2


def again_and_again() -> None:
    for i in range(20):
        fd.init(comm=world())
        assert (fd.all_reduce(np.full(10_001, i)) == i * fd.size()).all()
        fd.shutdown()


def test_a_communicator_serves_world_after_world(mpi: Mpi) -> None:
    mpi.run(2, again_and_again, env=FORCED)


def digits(file: Path) -> list[str]:
    return [str(ROOT / "examples/digits.py"), "--epochs", "1", "--json", str(file)]


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks over shared memory."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    file = tmp_path_factory.mktemp("digits") / "shm.json"
    harness.launch(2, [sys.executable, *digits(file)])
    losses: list[float] = json.loads(file.read_text())["losses"]
    return losses


def test_digits_train_as_over_shared_memory(mpi: Mpi, curve: list[float], tmp_path: Path) -> None:
    file = tmp_path / "mpi.json"
    done = mpi.start(2, digits(file), **FORCED)
    assert done.returncode == 0, done.stdout
    assert json.loads(file.read_text())["losses"] == curve


# ---- who waits costs little ----


def waits(seconds: float) -> float:
    """The share of a core that a rank takes while it waits."""
    fd.init()
    fd.barrier()
    x = np.ones(3)
    if fd.rank() == 1:
        time.sleep(seconds)
        fd.send(x, 0)
        return 0.0
    time.sleep(0.2)
    wall, spent = time.monotonic(), time.process_time()
    fd.recv(x, 1)
    return (time.process_time() - spent) / (time.monotonic() - wall)


@pytest.mark.parametrize(("parts", "most"), [("", 0.2), ("1,1", 0.2)])
def test_a_parked_rank_asks_mpi_for_little(mpi: Mpi, parts: str, most: float) -> None:
    """Between hosts nothing wakes it, and on a virtual machine each look costs."""
    share = mpi.run(2, waits, 3.0, env=over(parts))[0]
    assert share < most, f"{share:.2%} of a core"


# ---- ends ----


def reduce_for_ever(x: Any, **options: Any) -> None:
    while True:
        fd.all_reduce(x, **options)


def one_is_killed(during: str) -> tuple[str, int | None, float]:
    fd.init()
    x = np.ones(300_007)
    by = BY_MPI if during == "reductions" else {}
    if fd.rank() == 1:
        fd.all_reduce(x, **by)
        if during != "silence":
            for _ in range(20):
                fd.all_reduce(x, async_op=True, **by)
        Path(os.environ["FARANDOLE_TEST_TIME"]).write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fd.PeerLost) as found:
        reduce_for_ever(x, **by)
    died = float(Path(os.environ["FARANDOLE_TEST_TIME"]).read_text())
    return found.value.verdict, found.value.rank, time.monotonic() - died


@pytest.mark.parametrize("during", ["silence", "transfers", "reductions"])
@pytest.mark.parametrize("parts", ["", "1,2"])
def test_a_killed_rank_is_named_by_all_others(
    mpi: Mpi, parts: str, during: str, tmp_path: Path
) -> None:
    env = over(parts) | {"FARANDOLE_TEST_TIME": str(tmp_path / "died")}
    options = mpis.TOLERANT.get(mpi.name)
    ended = mpi.call(3, one_is_killed, during, options=options, env=env)
    assert ended.code != 0
    for o in ended.of_others(1, all_live=options is not None):
        assert o.error is None, o.trace
        verdict, blamed, seconds = o.value
        assert "rank 1 (pid" in verdict
        assert blamed == 1
        assert seconds < 30, "far below every other deadline"


def one_is_killed_early() -> float:
    """Once all have met, and while they connect."""
    began = time.monotonic()
    if world().Get_rank() == 1:
        _mpi_meeting._Line = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
    with pytest.raises(fd.Error, match=r"rank 1 \(pid \d+ on .*\) ended before") as found:
        fd.init()
    assert isinstance(found.value, fd.RendezvousError)
    return time.monotonic() - began


def test_a_rank_that_is_killed_while_ranks_connect_is_named(mpi: Mpi) -> None:
    options = mpis.TOLERANT.get(mpi.name)
    env = FORCED | {"MASTER_ADDR": "127.0.0.1"}  # or they would meet twice
    ended = mpi.call(3, one_is_killed_early, env=env, options=options)
    assert ended.code != 0
    for o in ended.of_others(1, all_live=options is not None):
        assert o.error is None, o.trace
        assert o.value < 10, "far below every other deadline"


def test_nothing_is_left_where_mpiexec_ends_the_job(mpi: Mpi, tmp_path: Path) -> None:
    env = FORCED | {"FARANDOLE_TEST_TIME": str(tmp_path / "died")}
    assert mpi.call(3, one_is_killed, "silence", env=env).code != 0


def one_raises() -> None:
    fd.init()
    fd.all_reduce(np.ones(3))
    if fd.rank() == 1:
        raise ValueError("bad sample")
    fd.all_reduce(np.ones(300_007))


def test_an_exception_ends_the_job(mpi: Mpi) -> None:
    """Nobody waits in MPI_Finalize for the others, though mpiexec lets all live."""
    options = mpis.TOLERANT.get(mpi.name)
    ended = mpi.call(3, one_raises, env=FORCED, options=options)
    assert ended.code != 0
    for o in ended.of_others(1, all_live=options is not None):
        assert (o.error, o.rank) == ("RemoteError", 1), o.trace
        assert "bad sample" in o.verdict


EXITS = """
import sys
import numpy as np
import farandole as fd
fd.init()
fd.all_reduce(np.ones(3))
if fd.rank() == 1: sys.exit(9)
fd.all_reduce(np.ones(300_007))
"""


@pytest.mark.parametrize("by", [[], ["-m", "mpi4py"]], ids=["python", "python -m mpi4py"])
def test_mpiexec_has_the_code_of_the_rank_that_is_the_cause(
    mpi: Mpi, by: list[str], tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(EXITS)
    ended = mpi.start(3, [*by, str(tmp_path / "program.py")], **FORCED)
    assert ended.returncode == 9, ended.stdout


# How a program ends, and mpiexec's code.
ENDS = {
    "at its end": ("", 0),
    "with a code, after it left": ("fd.shutdown(); sys.exit(9)", 9),
    "with a code, by raise": ("if fd.rank() == 1: raise SystemExit(7)\nfd.barrier()", 7),
    "by an exception": ("if fd.rank() == 1: raise ValueError\nfd.barrier()", 1),
    "early": ("if fd.rank() == 0: fd.barrier()", 1),
    "by its own MPI_Finalize": ("from mpi4py import MPI; fd.shutdown(); MPI.Finalize()", 0),
}


@pytest.mark.parametrize("end", ENDS)
def test_mpi_ends_with_the_program(mpi: Mpi, end: str) -> None:
    """MPI is ours to end where the program does not import mpi4py itself."""
    how, code = ENDS[end]
    program = f"import sys\nimport farandole as fd\nfd.init()\nfd.barrier()\n{how}"
    ended = mpi.start(2, ["-c", program], **FORCED)
    assert ended.returncode == code, ended.stdout
    if code == 0:
        assert not ended.stdout


def is_unreachable(who: int) -> None:
    """Rank `who` says that it listens where nobody does."""
    if world().Get_rank() == who:
        with socket.create_server(("127.0.0.1", 0)) as nobody:
            address = _core.tcp_address(nobody.fileno())
        _core.tcp_address = lambda _: address  # type: ignore[assignment]
    fd.init()


@pytest.mark.parametrize("who", [1, 2])
def test_ranks_that_cannot_connect_are_told_to_all(mpi: Mpi, who: int) -> None:
    options = mpis.TOLERANT.get(mpi.name)
    ended = mpi.call(3, is_unreachable, who, env=over("1,1,1"), options=options)
    assert ended.code != 0
    told = [o for o in ended.outcomes if o is not None]
    assert len(told) == 3 or options is None, ended.text
    for o in told:
        assert o.error in ("LinkError", "RendezvousError"), o.trace
        assert f"does not reach rank {who} over TCP: 127.0.0.1:" in o.text
        assert "Connection refused" in o.text


def only_one_has_a_secret(path: str) -> None:
    if world().Get_rank() == 0:
        os.environ["FARANDOLE_SECRET_FILE"] = path
    fd.init()


def test_a_secret_that_one_rank_alone_has_is_named(mpi: Mpi) -> None:
    options = mpis.TOLERANT.get(mpi.name)
    path = harness._secret_file()
    ended = mpi.call(2, only_one_has_a_secret, path, env=over("1,1"), options=options)
    told = [o for o in ended.outcomes if o is not None]
    assert len(told) == 2 or options is None, ended.text
    for o in told:
        assert o.error == "AuthError", o.trace
        assert re.match(r"words of rank [01] have no seal of this job's secret", o.text)


def gives_up_in_the_middle() -> None:
    """Six times: an operation whose bytes are under way, and a rank that gives up. What its ranks
    do with its memory afterwards is theirs alone, and MPI works on."""
    comm = world()
    for i in range(6):
        fd.init(comm=comm)
        ours = np.full(1 << 21, fd.rank() + 1.0)
        by = BY_MPI if i % 2 else {}
        handles = []
        with contextlib.suppress(fd.Error):  # the other one may be faster
            for _ in range(4):
                out = np.empty_like(ours)
                handles.append(fd.all_reduce(ours, out=out, async_op=True, **by))
        if fd.rank() == i % fd.size():
            time.sleep(0.002 * i)
            fd.world().abort("loss is nan")
        for handle in handles:
            with contextlib.suppress(fd.Error):
                handle.wait()
        with pytest.raises(fd.Error, match="loss is nan"):
            fd.all_reduce(ours)
        ours[:] = -1
        fd.shutdown()
        fd.init(comm=comm)
        again = np.full(300_007, fd.rank() + 1.0)
        for by in ({}, BY_MPI):
            assert (fd.all_reduce(again, **by) == fd.size() * (fd.size() + 1) / 2).all()
        fd.shutdown()


def test_memory_comes_back_from_an_operation_that_fails(mpi: Mpi) -> None:
    ended = mpi.call(2, gives_up_in_the_middle, env=FORCED)
    for o in ended.outcomes:
        assert o is not None, ended.text
        assert o.error is None, o.trace


def one_leaves(how: str) -> str:
    fd.init()
    if fd.rank() == 1:
        fd.all_reduce(np.ones(3))
        if how == "exits":
            raise SystemExit(3)
        fd.shutdown()
        return ""
    error = fd.RemoteError if how == "exits" else fd.EarlyExit
    with pytest.raises(error) as found:  # in the second, or for the slower one in the first
        reduce_for_ever(np.ones(3))
    return found.value.verdict


@pytest.mark.parametrize("how", ["shuts down", "exits"])
def test_a_rank_that_leaves_is_named_and_mpiexec_ends_the_job(mpi: Mpi, how: str) -> None:
    ended = mpi.call(3, one_leaves, how, env=over("1,2"))
    assert ended.code != 0
    told = ended.of_others(1, all_live=False)  # the first rank to end ends the others
    assert told, ended.text
    for o in told:
        assert o.error is None, o.trace
        assert "rank 1" in o.value


def finalizes() -> str:
    from mpi4py import MPI

    fd.init()
    fd.all_reduce(np.ones(3))
    MPI.Finalize()
    with pytest.raises((fd.LinkError, fd.RemoteError)) as found:
        fd.all_reduce(np.ones(3))
    fd.shutdown()
    with pytest.raises(fd.RendezvousError, match="finalized"):
        fd.init()
    return str(found.value)


def test_mpi_that_was_finalized_is_said(mpi: Mpi) -> None:
    for verdict in mpi.run(2, finalizes, env=FORCED):
        assert "MPI_Finalize" in verdict
        assert "shutdown()" in verdict


def one_finalizes() -> str:
    from mpi4py import MPI

    fd.init()
    fd.all_reduce(np.ones(3))
    if fd.rank() == 1:
        MPI.Finalize()
    with pytest.raises(fd.RemoteError) as found:
        fd.all_reduce(np.ones(300_000))
    return found.value.verdict


def test_mpi_that_one_rank_finalizes_is_said_to_the_others(mpi: Mpi) -> None:
    ended = mpi.call(3, one_finalizes, env=FORCED)
    assert ended.code != 0
    told = ended.of_others(1, all_live=False)  # the first rank to end ends the others
    assert told, ended.text
    for o in told:
        assert o.error is None, o.trace
        assert "rank 1 ended with MPI_Finalize" in o.value


# ---- what is refused ----


def one_does_not_come(who: int) -> str:
    comm = world()
    if comm.rank == who:
        time.sleep(8 if who == 0 else 4)
        return ""
    with pytest.raises(fd.RendezvousError) as found:
        fd.init(comm=comm, timeout=1)
    return found.value.verdict


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_does_not_come_is_named(mpi: Mpi, who: int) -> None:
    ended = mpi.call(3, one_does_not_come, who, env=FORCED)
    assert ended.code != 0
    told = ended.of_others(who, all_live=False)
    assert told, ended.text
    for o in told:
        assert o.error is None, o.trace
        assert o.value == f"rank {who} of the communicator did not call init() in time"


def wrong_communicators() -> list[str]:
    from mpi4py import MPI

    verdicts = []
    for comm in (MPI.COMM_NULL, MPI.INFO_NULL, [0, 1], "world"):
        with pytest.raises(fd.InvalidArgument) as found:
            fd.init(comm=comm)
        verdicts.append(found.value.verdict)
    for place in ({"rank": 0}, {"size": 2}, {"ranks": [0, 1]}, {"job": "x"}):
        with pytest.raises(fd.InvalidArgument, match="both given"):
            fd.init(comm=MPI.COMM_WORLD, **place)  # type: ignore[arg-type]
    return verdicts


def test_wrong_communicators_are_refused(mpi: Mpi) -> None:
    for verdicts in mpi.run(1, wrong_communicators):
        assert "COMM_NULL" in verdicts[0]
        assert all("communicator of mpi4py" in verdict for verdict in verdicts[1:])


def forced_by_another_launcher() -> str:
    """As each rank of `farandole run` finds itself: an MPI of its own."""
    rank = world().rank
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        os.environ.pop(name, None)
    os.environ |= {"RANK": str(1 - rank), "WORLD_SIZE": "2", "FARANDOLE_RUN_ID": "x"}
    with pytest.raises(fd.RendezvousError) as found:
        fd.init()
    return found.value.verdict


def test_another_order_of_ranks_than_mpis_is_refused(mpi: Mpi) -> None:
    for rank, verdict in enumerate(mpi.run(2, forced_by_another_launcher, env=FORCED)):
        assert f"rank {1 - rank} of 2, but rank {rank} of 2 in MPI_COMM_WORLD" in verdict


def test_info_names_the_communicator(mpi: Mpi) -> None:
    done = mpi.start(2, ["-m", "farandole", "info"], FARANDOLE_TRANSPORT="mpi")
    assert done.returncode == 0, done.stdout
    text = re.sub(r"\s+", " ", done.stdout)  # some mpiexecs give ranks a terminal
    assert len(re.findall(r"started by:? communicator MPI_COMM_WORLD", text)) == 2, text
    assert len(re.findall(r"data over MPI:? yes", text)) == 2, text
    assert len(re.findall(r"threads:? MPI_THREAD_MULTIPLE", text)) == 2, text
    assert len(re.findall(r"operations go on:? also while no thread waits", text)) == 2, text


def test_without_mpi4py_it_is_said_how_to_get_it() -> None:
    program = "import sys; sys.modules['mpi4py'] = None\nimport farandole; farandole.init()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"FARANDOLE_TRANSPORT": "mpi"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "RendezvousError: FARANDOLE_TRANSPORT=mpi takes mpi4py" in done.stderr
    assert "pip install mpi4py" in done.stderr
