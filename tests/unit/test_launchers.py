"""Detection of the launcher that started a process, by its environment variables."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from farandole import _place, cli
from farandole._launch import ranks
from farandole._launchers import LAUNCHERS, VARIABLES, PlaceError, without_launchers

Environment = dict[str, str]

PLAIN = {"RANK": "1", "WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_RANK": "1",
    "PMIX_NAMESPACE": "prterun-host-812@1",
}  # fmt: skip
MPICH = {
    "PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"
}  # fmt: skip
INTEL = MPICH | {"I_MPI_HYDRA_UUID": "73510000-4c2e-a779"}
BATCH = {
    "SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "4",
}  # fmt: skip
SRUN = BATCH | {
    "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "4",
}  # fmt: skip
SHELL = SRUN | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
}  # --pty bash
HOROVOD = {
    "HOROVOD_RANK": "1", "HOROVOD_SIZE": "4", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_LOCAL_SIZE": "4"
}  # fmt: skip
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}

# The environment of rank 1 of 4 on one host, by launcher.
STARTED = {
    "farandole": PLAIN | LOCAL | HOROVOD | {"FARANDOLE_RUN_ID": "ours"},
    "torchrun": PLAIN | LOCAL | {"TORCHELASTIC_RUN_ID": "none", "MASTER_PORT": "29500"},
    "open-mpi": OPEN_MPI,
    "hydra": MPICH,
    "slurm": SRUN,
    "pmi": {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"},
    "horovod": HOROVOD,
    "plain": PLAIN | LOCAL,
}


def key_of(environment: Environment) -> str | None:
    launcher = _place.find(environment).launcher
    return launcher.key if launcher else None


@pytest.mark.parametrize("key", STARTED)
def test_a_launcher_is_found_by_what_it_sets(key: str) -> None:
    found = _place.find(STARTED[key])
    assert found.launcher is not None
    assert (found.launcher.key, *found[1:]) == (key, 1, 4, 1, 4)


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.77.0"}, "slurm"),  # srun --mpi=pmix
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_JOBID": "77.0"}, "slurm"),  # srun --mpi=pmi2
        (PLAIN, "slurm"),  # set by the batch script itself
        (HOROVOD, "slurm"),
        (MPICH, "hydra"),
        (OPEN_MPI, "open-mpi"),
        (PLAIN | {"TORCHELASTIC_RUN_ID": "x"}, "torchrun"),
        (PLAIN | {"FARANDOLE_RUN_ID": "x", "TORCHELASTIC_RUN_ID": "x"}, "farandole"),
    ],
)
def test_of_launchers_that_agree_the_first_counts(more: Environment, key: str) -> None:
    assert key_of(SRUN | more) == key


def test_nobody_started_a_process_without_variables() -> None:
    assert _place.find({}) == _place.Found()
    assert _place.find({"RANK": "", "OMPI_COMM_WORLD_RANK": ""}) == _place.Found()


@pytest.mark.parametrize(
    "environment",
    [
        BATCH,  # the batch script itself
        SRUN | {"SLURM_STEP_ID": "4294967291"},  # as a step
        SRUN | {"SLURM_STEP_ID": "4294967290"},  # salloc's shell
        SHELL,
        SHELL | {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.77.0"},
        SHELL | {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_JOBID": "77.0"},
        {"JOB_COMPLETION_INDEX": "3"},  # a Job of pods that know nothing of each other
        {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"},
        {"TORCHELASTIC_RUN_ID": "x"},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker"}})},
        {"TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}})},
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, "task": {"type": "ps"}}
            )
        },
    ],
)
def test_what_starts_no_ranks_is_no_launcher(environment: Environment) -> None:
    assert key_of(environment) is None
    environment = {k: v for k, v in environment.items() if k != "TORCHELASTIC_RUN_ID"}
    for inner in ("torchrun", "open-mpi", "hydra", "plain"):
        assert key_of(environment | STARTED[inner]) == inner


def tf_config(role: str, index: int, **cluster: list[str]) -> Environment:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})}


PAIRS = {"chief": ["a:1"], "worker": ["a:2", "b:1", "b:2"], "ps": ["c:1"]}
PODS = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "8"}
REPLICAS = PLAIN | {"PET_NODE_RANK": "1", "PET_NNODES": "4"}  # of a PyTorchJob
HOSTS = {"SM_HOSTS": '["algo-2", "algo-1", "algo-10"]', "SM_CURRENT_HOST": "algo-2"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (PODS, ("kubernetes", 2, 8, 0, 1)),
        (REPLICAS, ("pytorch-job", 1, 4, 0, 1)),
        (REPLICAS | LOCAL, ("plain", 1, 4, 1, 4)),
        (REPLICAS | {"WORLD_SIZE": "8"}, ("plain", 1, 8, None, None)),  # nprocPerNode: torchrun's
        (HOSTS, ("sagemaker", 2, 3, 0, 1)),
        (tf_config("chief", 0, **PAIRS), ("tf-config", 0, 4, 0, 2)),
        (tf_config("worker", 2, **PAIRS), ("tf-config", 3, 4, 1, 2)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1"},
         ("slurm", 1, 4, 1, 2)),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2,1(x2)", "SLURM_NODEID": "2"},
         ("slurm", 1, 4, 1, 1)),
    ],
)  # fmt: skip
def test_ranks_on_several_hosts_are_counted(
    environment: Environment, expected: tuple[Any, ...]
) -> None:
    found = _place.find(environment)
    assert found.launcher is not None
    assert (found.launcher.key, *found[1:]) == expected


# An outer and an inner launcher, whose numbers differ.
INSIDE = [
    (SRUN, OPEN_MPI, "open-mpi"),
    (SRUN, MPICH, "hydra"),
    (SRUN, STARTED["torchrun"], "torchrun"),
    (SRUN, STARTED["farandole"], "farandole"),
    (OPEN_MPI, STARTED["torchrun"], "torchrun"),
    (MPICH, STARTED["torchrun"], "torchrun"),
    (PODS, OPEN_MPI, "open-mpi"),
    (PODS, MPICH, "hydra"),
    (PODS, STARTED["torchrun"], "torchrun"),
    (PODS, STARTED["farandole"], "farandole"),
    (PODS, PLAIN, "plain"),
    (REPLICAS, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "2"}, "open-mpi"),
    (REPLICAS, STARTED["torchrun"] | {"RANK": "5", "WORLD_SIZE": "8"}, "torchrun"),
    (HOSTS, MPICH, "hydra"),
    (HOSTS, PLAIN, "plain"),
    (tf_config("worker", 0, worker=["a:1", "b:1"]), STARTED["farandole"], "farandole"),
    (tf_config("worker", 0, worker=["a:1", "b:1"]), SRUN, "slurm"),
]
OTHER = {  # of the outer one
    "SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "2", "PMIX_RANK": "0"
}  # fmt: skip


@pytest.mark.parametrize(("outer", "inner", "key"), INSIDE)
def test_a_launcher_inside_of_another_decides(
    outer: Environment, inner: Environment, key: str
) -> None:
    changed = {name: OTHER.get(name, text) for name, text in outer.items()}
    assert key_of(changed) != key
    assert key_of(changed | inner) == key


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        (OPEN_MPI | PLAIN | {"RANK": "0"}, ["mpiexec of Open MPI says OMPI_COMM_WORLD_RANK=1, "
         "OMPI_COMM_WORLD_SIZE=4", "whoever set RANK and WORLD_SIZE says RANK=0, WORLD_SIZE=4"]),
        (MPICH | HOROVOD | {"HOROVOD_SIZE": "2"}, ["(Hydra) says PMI_RANK=1", "HOROVOD_SIZE=2"]),
        (SRUN | PLAIN | {"WORLD_SIZE": "3"}, ["srun of Slurm says SLURM_PROCID=1, "
         "SLURM_STEP_NUM_TASKS=4", "WORLD_SIZE=3"]),
        (STARTED["farandole"] | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"},
         ["farandole run says RANK=1", "OMPI_COMM_WORLD_RANK=0"]),
        (OPEN_MPI | {"RANK": "0"}, ["OMPI_COMM_WORLD_RANK=1", "says RANK=0;"]),
    ],
)  # fmt: skip
def test_launchers_that_disagree_are_both_named(environment: Environment, words: list[str]) -> None:
    with pytest.raises(PlaceError, match="two launchers disagree") as refused:
        _place.find(environment)
    assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK=one, which is not a number"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "4(y2)"}, "not a list like 2(x3),1"),
        (SRUN | {"SLURM_NODEID": "7"}, "SLURM_NODEID=7, but SLURM_STEP_TASKS_PER_NODE=4 has 1"),
        (HOSTS | {"SM_CURRENT_HOST": "algo-7"}, "algo-7, which SM_HOSTS does not have"),
        (HOSTS | {"SM_HOSTS": "algo-1,algo-2"}, "not a list of hosts in JSON"),
        ({"TF_CONFIG": '{"cluster": 3}'}, "which is not a cluster and a task in JSON"),
        (tf_config("worker", 3, **PAIRS), "the task 'worker' number 3, but its cluster has 3"),
    ],
)
def test_values_that_cannot_be_read_are_named(environment: Environment, words: str) -> None:
    with pytest.raises(PlaceError) as refused:
        _place.find(environment)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "given", "lacking"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "4"}, "PMI_SIZE", "PMI_RANK"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK", "WORLD_SIZE"),
        ({"HOROVOD_SIZE": "1"}, "HOROVOD_SIZE", "HOROVOD_RANK"),
    ],
)
def test_half_a_place_is_said(environment: Environment, given: str, lacking: str) -> None:
    told = _place.half_said(_place.find(environment))
    assert told.startswith(f"{given} is given, but {lacking} is not")
    assert told.endswith(f"set {lacking}, or unset {given}")


# -- the job's name -----------------------------------------------------------------------------


def job(environment: Environment) -> str:
    return _place.job_name(_place.find(environment).launcher, 4, 0, environment)


@pytest.mark.parametrize(
    ("environment", "other"),
    [
        (STARTED["farandole"], {"FARANDOLE_RUN_ID": "another"}),
        (STARTED["torchrun"], {"MASTER_PORT": "29501"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-host-813@1"}),
        (OPEN_MPI, {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:40000"}),  # before Open MPI 5
        (INTEL, {"I_MPI_HYDRA_UUID": "84510000-4c2e-a779"}),
        (SRUN, {"SLURM_JOB_ID": "78"}),
        (SRUN, {"SLURM_STEP_ID": "1"}),
        (SRUN, {"SLURM_RESTART_COUNT": "1"}),
        (STARTED["pmi"], {"PMI_JOBID": "5"}),
        (HOROVOD, {"HOROVOD_GLOO_RENDEZVOUS_PORT": "4321"}),
        (tf_config("worker", 0, **PAIRS), tf_config("worker", 0, worker=["a:7", "b:1"])),
    ],
)
def test_two_jobs_have_two_names(environment: Environment, other: Environment) -> None:
    assert job(environment) == job(dict(environment))
    assert job(environment | other) != job(environment)


def test_ranks_of_one_job_have_one_name() -> None:
    second = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "2", "PMIX_RANK": "2"}
    assert job(OPEN_MPI | second) == job(OPEN_MPI)
    assert job(SRUN | {"SLURM_PROCID": "2", "SLURM_LOCALID": "2"}) == job(SRUN)
    assert job(tf_config("worker", 1, **PAIRS)) == job(tf_config("chief", 0, **PAIRS))


@pytest.mark.parametrize(
    ("environment", "other", "name"),
    [
        (OPEN_MPI, {"PMIX_RANK": "2"}, "prterun-host-812@1"),
        (SRUN, {"SLURM_PROCID": "3", "SLURM_LOCALID": "3"}, "77,0"),
        (SRUN | {"SLURM_HET_JOB_ID": "76"}, {"SLURM_JOB_ID": "78"}, "76,0"),
        (STARTED["torchrun"], {"MASTER_ADDR": "a"}, "none"),
        (STARTED["farandole"], {"MASTER_ADDR": "a"}, "ours"),
        (HOSTS | {"FARANDOLE_RUN_ID": "x"}, {"SM_CURRENT_HOST": "algo-1"}, "x"),
        (PLAIN, {}, ""),
        (MPICH, {}, ""),  # another process on each host
        (INTEL, {}, ""),
    ],
)
def test_what_names_the_job_on_all_hosts(
    environment: Environment, other: Environment, name: str
) -> None:
    for each in (environment, environment | other):
        assert _place.common_id(_place.find(each).launcher, each) == name


def test_a_port_is_one_that_there_is() -> None:
    assert _place.master({"MASTER_PORT": "65535"}) == ("127.0.0.1", 65535)
    assert _place.master({"MASTER_ADDR": "[fd00::1]", "MASTER_PORT": "7"}) == ("fd00::1", 7)
    for environment, said in [
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999, which is no port: these are 1 to 65535"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0, which"),
        (tf_config("worker", 0, worker=["a:70000", "b:1"]), "TF_CONFIG with a:70000, which"),
    ]:
        with pytest.raises(PlaceError, match=said):
            _place.master(environment)


def test_workers_of_a_cluster_meet_at_the_first() -> None:
    worker = tf_config("worker", 2, **PAIRS)
    assert _place.master(worker) == ("a", 1)
    assert _place.master(worker | {"MASTER_ADDR": "m", "MASTER_PORT": "7"}) == ("m", 7)
    assert _place.master(tf_config("ps", 0, **PAIRS)) == ("127.0.0.1", 0)
    with pytest.raises(PlaceError, match="not a cluster of host:port"):
        _place.master(tf_config("worker", 0, worker=["a", "b"]))


NAME = "import os; from farandole import _place; print(_place.job_name(_place.find(os.environ)[0]"
NAME += ", 4, 0, os.environ))"


def test_where_no_variable_names_the_job_its_process_does() -> None:
    """The process must have the name of a launcher. A shell between it and the ranks is skipped."""

    def ask(script: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", script, NAME, sys.executable], env=os.environ | MPICH,
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        return done.stdout.split()

    proxy = (
        "import ctypes, subprocess, sys\n"
        "ctypes.CDLL(None).prctl(15, b'hydra_pmi_proxy', 0, 0, 0)\n"  # PR_SET_NAME
        "rank = [sys.argv[2], '-c', sys.argv[1]]\n"
        "subprocess.run(rank, check=True)\n"
        "subprocess.run(['sh', '-c', '\"$@\"; true', 'sh', *rank], check=True)\n"
    )
    first, second = ask(proxy), ask(proxy)
    assert len(first) == len(second) == 2
    assert first[0] == first[1] != second[0] == second[1]
    parent = proxy.replace("hydra_pmi_proxy", "something")
    alone = ask(parent)
    assert alone[0] != first[0]
    assert alone[0] != alone[1]


# -- ranks that we start ------------------------------------------------------------------------


def test_our_own_ranks_do_not_see_launchers_around_us() -> None:
    around = OPEN_MPI | MPICH | HOROVOD | {"SLURM_JOB_ID": "77", "PATH": "/bin"}
    assert without_launchers(around) == {"SLURM_JOB_ID": "77", "PATH": "/bin"}
    assert without_launchers(SRUN) == SRUN  # in which ours are known to be started


def test_every_exception_names_rows_of_the_table() -> None:
    keys = [row.key for row in LAUNCHERS]
    assert len(set(keys)) == len(keys)
    for row in LAUNCHERS:
        assert set(row.holds) <= set(keys) - {row.key}
        assert not any(row.key in LAUNCHERS[keys.index(held)].holds for held in row.holds)
    assert {"RANK", "SLURM_STEP_ID", "I_MPI_HYDRA_UUID", "SM_HOSTS"} <= VARIABLES


# -- farandole info -----------------------------------------------------------------------------


def told_by_info(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], environment: Environment
) -> dict[str, Any]:
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert cli.main(["info", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)["launcher"]
    return told


def test_info_says_who_started_it_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = told_by_info(monkeypatch, capsys, OPEN_MPI | {"RANK": "1"})
    assert told["started by"] == "mpiexec of Open MPI"
    assert (told["rank"], told["size"], told["local rank"], told["local size"]) == (1, 4, 1, 4)
    assert told["job"] == "prterun-host-812@1"
    assert told["hosts"] == "as ranks find them"
    assert "OMPI_COMM_WORLD_RANK=1" in told["known by"]
    assert "whoever set RANK and WORLD_SIZE" in told["also seen"]
    assert cli.main(["info"]) == 0
    assert "launcher started by: mpiexec of Open MPI" in capsys.readouterr().out.splitlines()


def test_info_shows_a_split(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = told_by_info(monkeypatch, capsys, PLAIN | {"FARANDOLE_SPLIT_HOSTS": "2,2"})
    assert told["hosts"] == "as FARANDOLE_SPLIT_HOSTS=2,2 divides the ranks"


def test_info_says_that_nobody_started_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert told_by_info(monkeypatch, capsys, {})["started by"].startswith("nobody")


@pytest.mark.parametrize(
    ("environment", "words"),
    [({"PMI_RANK": "1"}, "PMI_SIZE is not"), (OPEN_MPI | {"RANK": "0"}, "disagree")],
)
def test_info_says_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: Environment,
    words: str,
) -> None:
    told = told_by_info(monkeypatch, capsys, environment)
    assert list(told) == ["trouble"]
    assert words in told["trouble"]


def test_a_port_is_none_that_a_connection_may_get_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = ranks._first_of_connections()
    found = {ranks.free_port(address) for address in ("", "127.0.0.1", "127.0.0.1")}
    assert all(20_000 <= port < first for port in found)
    with contextlib.suppress(OSError):  # no IPv6 here
        assert ranks.free_port("::1") < first
    monkeypatch.setattr(ranks, "_OURS", range(port := found.pop(), port + 1))
    monkeypatch.setattr(ranks, "_TRIES", 1)
    with socket.create_server(("127.0.0.1", port)):
        assert ranks.free_port("127.0.0.1") != port
    assert ranks.free_port("127.0.0.1") == port
