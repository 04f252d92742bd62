"""The launchers that are known, and the variables in which each tells a rank its place: one table.

Reading it needs nothing else of the package, since the launcher itself does so, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from farandole import _json

Environment = Mapping[str, str]


class PlaceError(ValueError):
    """The environment does not say where this process stands; the message is for the user."""


def whole(environment: Environment, name: str) -> int:
    """A variable's value as a number of 32 bits."""
    try:
        number = int(environment[name])
        if -(2**31) <= number < 2**31:
            return number
    except ValueError:
        pass
    raise _unreadable(environment, name, "a number")


def port(environment: Environment, name: str) -> int:
    """A variable's value as the number of a TCP port."""
    return _port(whole(environment, name), f"{name}={environment[name]}")


def _port(number: int, text: str) -> int:
    if not 1 <= number <= 65535:
        raise PlaceError(f"the environment says {text}, which is no port: these are 1 to 65535")
    return number


def _unreadable(environment: Environment, name: str, what: str) -> PlaceError:
    return PlaceError(f"the environment says {name}={environment[name]}, which is not {what}")


class Value(NamedTuple):
    """A number, and where it comes from."""

    names: tuple[str, ...]  # of variables; the first that is set counts
    read: Callable[[Environment, str], int] = whole

    def name(self, environment: Environment) -> str | None:
        return next((name for name in self.names if environment.get(name)), None)

    def of(self, environment: Environment) -> int | None:
        name = self.name(environment)
        return None if name is None else self.read(environment, name)


def _named(*names: str) -> Value:
    return Value(names)


def _said(number: int) -> Callable[[Environment, str], int]:
    return lambda _environment, _name: number


class Launcher(NamedTuple):
    """One row: a launcher, and what its ranks find in their environment."""

    key: str
    name: str  # for people
    rank: Value
    size: Value
    local_rank: Value
    local_size: Value
    needs: tuple[tuple[str, ...], ...] = ()  # of each group one is set, else it is another's rank
    when: Callable[[Environment], bool] = lambda _: True  # what else makes it recognised
    # The job's name, so that two jobs of one user on one host never meet: variables, or else the
    # nearest process above this one with such a name, or else the parent process.
    job: tuple[str, ...] = ()
    process: tuple[str, ...] = ()
    # The job's name that is equal on all hosts: of each group the first variable that is set.
    common: tuple[tuple[str, ...], ...] = (("FARANDOLE_RUN_ID",),)
    holds: tuple[str, ...] = ()  # launchers that are known to be started inside of it: these win

    def is_seen(self, environment: Environment) -> bool:
        says = self.rank.name(environment) or self.size.name(environment)
        complete = all(any(environment.get(name) for name in group) for group in self.needs)
        return says is not None and complete and self.when(environment)

    @property
    def place(self) -> tuple[Value, Value, Value, Value]:
        return self.rank, self.size, self.local_rank, self.local_size


# ---- what is not simply a number ----

_RESERVED_STEPS = 0xFFFFFFF0  # Slurm's batch script, interactive shell and the like count as steps


def _is_task_of_several(environment: Environment) -> bool:
    """A task of srun, and not the batch script; nor a task alone, which may well be a shell
    (`srun --pty bash`) in which other launchers are started."""
    step = environment["SLURM_STEP_ID"]
    tasks = _SLURM_TASKS.name(environment)
    alone = tasks is not None and environment[tasks] == "1"
    return step.isdecimal() and int(step) < _RESERVED_STEPS and not alone


def _is_pod(environment: Environment) -> bool:
    """A pod of an indexed Job with WORLD_SIZE pods. If RANK is set, that says all by itself."""
    return bool(environment.get("JOB_COMPLETION_INDEX")) and not environment.get("RANK")


def _is_replica(environment: Environment) -> bool:
    """A pod of a PyTorchJob which is one rank: newer operators number the pods for torchrun (PET_),
    too."""
    pods = (environment.get("PET_NODE_RANK"), environment.get("PET_NNODES"))
    ranks = (environment.get("RANK"), environment.get("WORLD_SIZE"))
    return None not in pods and pods == ranks and not environment.get("LOCAL_WORLD_SIZE")


def _tasks_of_this_node(environment: Environment, name: str) -> int:
    """This node's number in a list: '2(x3),1' is 2 on each of three nodes, 1 on the last."""
    counts: list[int] = []
    for part in environment[name].split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise _unreadable(environment, name, "a list like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    node = whole(environment, "SLURM_NODEID") if environment.get("SLURM_NODEID") else 0
    if not 0 <= node < len(counts):
        raise PlaceError(
            f"the environment says SLURM_NODEID={node}, but {name}={environment[name]} has "
            f"{len(counts)} nodes"
        )
    return counts[node]


def _hosts(environment: Environment, name: str) -> list[str]:
    try:
        hosts = _json.read(environment[name])
    except ValueError:
        hosts = None
    if not isinstance(hosts, list):
        raise _unreadable(environment, name, "a list of hosts in JSON")
    return sorted(map(str, hosts))


def _number_of_hosts(environment: Environment, name: str) -> int:
    return len(_hosts(environment, name))


def _number_of_this_host(environment: Environment, name: str) -> int:
    hosts, here = _hosts(environment, "SM_HOSTS"), environment[name]
    if here not in hosts:
        raise PlaceError(f"the environment says {name}={here}, which SM_HOSTS does not have")
    return hosts.index(here)


# TensorFlow's: {"cluster": {"worker": ["host:port", ...], "chief": [...], ...}, "task":
# {"type": "worker", "index": 0}}. Chief and workers train, in this order; the others are something
# else (parameter servers, evaluators).


class _Cluster(NamedTuple):
    addresses: list[str]  # of the tasks that train
    place: int | None  # of this one among them

    @property
    def hosts(self) -> list[str]:
        return [address.rpartition(":")[0] for address in self.addresses]


def _cluster(environment: Environment) -> _Cluster:
    name = "TF_CONFIG"
    try:
        told = _json.read(environment[name])
        tasks = {role: list(told["cluster"].get(role, [])) for role in ("chief", "worker")}
        role, number = told.get("task", {}).get("type"), int(told.get("task", {}).get("index", 0))
        addresses = [str(each) for each in tasks["chief"] + tasks["worker"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise _unreadable(environment, name, "a cluster and a task in JSON") from None
    if role not in tasks:
        return _Cluster(addresses, None)
    if not 0 <= number < len(tasks[role]):
        raise PlaceError(
            f"the environment says {name} with the task '{role}' number {number}, but its cluster "
            f"has {len(tasks[role])} of them"
        )
    return _Cluster(addresses, number + (len(tasks["chief"]) if role == "worker" else 0))


def _is_worker_of_several(environment: Environment) -> bool:
    if "cluster" not in environment["TF_CONFIG"]:  # TensorFlow takes it for one process, too
        return False
    cluster = _cluster(environment)
    return cluster.place is not None and len(cluster.addresses) > 1


def _of_cluster(ask: Callable[[_Cluster, int], int]) -> Value:
    def read(environment: Environment, _name: str) -> int:
        cluster = _cluster(environment)
        assert cluster.place is not None
        return ask(cluster, cluster.place)

    return Value(("TF_CONFIG",), read)


def first_of_cluster(environment: Environment) -> tuple[str, int] | None:
    """The address of rank 0 that TF_CONFIG has, where it says that this is one of several."""
    if not environment.get("TF_CONFIG") or not _is_worker_of_several(environment):
        return None
    address, _, number = _cluster(environment).addresses[0].rpartition(":")
    try:
        return address, _port(int(number), f"TF_CONFIG with {address}:{number}")
    except ValueError as error:
        if isinstance(error, PlaceError):
            raise
        raise _unreadable(environment, "TF_CONFIG", "a cluster of host:port") from None


# ---- the table ----

_PLAIN = (
    _named("RANK"), _named("WORLD_SIZE"), _named("LOCAL_RANK"), _named("LOCAL_WORLD_SIZE")
)  # fmt: skip
_RUN_IDS = ("FARANDOLE_RUN_ID", "TORCHELASTIC_RUN_ID")
_SLURM_TASKS = _named("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_SRUN = ("SLURM_STEP_ID",)  # srun speaks PMI and PMIx, too, also to a shell
_MPI = ("open-mpi", "hydra", "pmi")


def _none_of(*names: str) -> Callable[[Environment], bool]:
    return lambda environment: not any(environment.get(name) for name in names)


# By precedence: where several are seen and agree, the first counts.
LAUNCHERS = (
    Launcher(
        "farandole", "farandole run", *_PLAIN,
        needs=(("FARANDOLE_RUN_ID",),),
        job=("FARANDOLE_RUN_ID",),
    ),
    Launcher(
        "torchrun", "torchrun", *_PLAIN,
        needs=(("TORCHELASTIC_RUN_ID",),),
        job=("TORCHELASTIC_RUN_ID",),
        common=(("TORCHELASTIC_RUN_ID",),),
    ),
    Launcher(
        "open-mpi", "mpiexec of Open MPI",
        _named(_OPEN_MPI[0]), _named(_OPEN_MPI[1]),
        _named("OMPI_COMM_WORLD_LOCAL_RANK"), _named("OMPI_COMM_WORLD_LOCAL_SIZE"),
        # Before Open MPI 5 the namespace is a number of 32 bits, which two jobs may share; the
        # address of their mpiexec they do not.
        job=("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"),
        common=(("PMIX_NAMESPACE",),),
        process=("prterun", "prted", "prte", "orterun", "orted", "mpiexec", "mpirun"),
        holds=("torchrun",),  # mpiexec starts one torchrun on each host
    ),
    Launcher(
        "hydra", "mpiexec of MPICH or Intel MPI (Hydra)",
        _named("PMI_RANK"), _named("PMI_SIZE"), _named(_HYDRA[0]), _named(_HYDRA[1]),
        needs=(_HYDRA,),
        job=("I_MPI_HYDRA_UUID",),  # MPICH has no such variable, but a proxy of each job on a host
        process=("hydra_pmi_proxy",),
        holds=("torchrun",),  # mpiexec starts one torchrun on each host
    ),
    Launcher(
        "slurm", "srun of Slurm",
        _named("SLURM_PROCID"), _SLURM_TASKS,
        _named("SLURM_LOCALID"), Value(("SLURM_STEP_TASKS_PER_NODE",), _tasks_of_this_node),
        needs=(_SRUN,),
        when=_is_task_of_several,
        job=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
        # The parts of a heterogeneous job have numbers of their own.
        common=(("SLURM_HET_JOB_ID", "SLURM_JOB_ID"), ("SLURM_STEP_ID",)),
        # srun starts one launcher on each host: the user's own, or mpiexec's daemons.
        holds=("farandole", "torchrun", "open-mpi", "hydra"),
    ),
    Launcher(
        "pmi", "a launcher that speaks PMI",
        _named("PMI_RANK"), _named("PMI_SIZE"), _named("PMI_LOCAL_RANK"), _named("PMI_LOCAL_SIZE"),
        when=_none_of(*_HYDRA, *_SRUN),
        job=("PMI_JOBID",),
        process=("mpiexec.gforker",),
        holds=("torchrun",),  # it starts one torchrun on each host
    ),
    Launcher(
        "horovod", "Horovod",
        _named("HOROVOD_RANK"), _named("HOROVOD_SIZE"),
        _named("HOROVOD_LOCAL_RANK"), _named("HOROVOD_LOCAL_SIZE"),
        job=_RUN_IDS,
        common=(_RUN_IDS,),
    ),
    Launcher(
        "kubernetes", "an indexed Job of Kubernetes",
        _named("JOB_COMPLETION_INDEX"), _named("WORLD_SIZE"),
        Value(("JOB_COMPLETION_INDEX",), _said(0)), Value(("JOB_COMPLETION_INDEX",), _said(1)),
        # Pods of a Job without a size have nothing to do with each other.
        needs=(("JOB_COMPLETION_INDEX",), ("WORLD_SIZE",)),
        when=_is_pod,
        holds=("farandole", "torchrun", *_MPI, "horovod"),  # a pod is a host, and starts ranks
    ),
    Launcher(
        "pytorch-job", "PyTorchJob of Kubeflow",
        _named("RANK"), _named("WORLD_SIZE"),
        Value(("PET_NNODES",), _said(0)), Value(("PET_NNODES",), _said(1)),
        needs=(("PET_NODE_RANK",), ("PET_NNODES",)),
        when=_is_replica,
        job=_RUN_IDS,
        holds=("farandole", "torchrun", *_MPI, "horovod"),  # a pod is a host, and starts ranks
    ),
    Launcher(
        "plain", "whoever set RANK and WORLD_SIZE", *_PLAIN,
        when=lambda environment: not _is_pod(environment) and not _is_replica(environment),
        job=_RUN_IDS,
        common=(_RUN_IDS,),
    ),
    Launcher(
        "pmix", "a launcher that speaks PMIx",
        # It has no variable for the number of ranks: better an error than worlds of one.
        _named("PMIX_RANK"), _named("WORLD_SIZE"), _named("LOCAL_RANK"), _named("LOCAL_WORLD_SIZE"),
        needs=(("PMIX_RANK",),),
        when=_none_of(*_OPEN_MPI, *_SRUN),
        job=("PMIX_NAMESPACE",),
        common=(("PMIX_NAMESPACE",),),
        holds=("torchrun",),  # it starts one torchrun on each host
    ),
    Launcher(
        "sagemaker", "SageMaker",
        Value(("SM_CURRENT_HOST",), _number_of_this_host), Value(("SM_HOSTS",), _number_of_hosts),
        Value(("SM_CURRENT_HOST",), _said(0)), Value(("SM_HOSTS",), _said(1)),
        # A single host says nothing of ranks: the script is one process, or starts several.
        needs=(("SM_CURRENT_HOST",), ("SM_HOSTS",)),
        when=lambda environment: environment["SM_HOSTS"].count(",") > 0,
        # SageMaker starts the script, or mpiexec or torchrun, on each host.
        holds=("farandole", "torchrun", *_MPI, "horovod", "plain"),
    ),
    Launcher(
        "tf-config", "whoever set TF_CONFIG",
        _of_cluster(lambda _, index: index),
        _of_cluster(lambda cluster, _: len(cluster.addresses)),
        _of_cluster(lambda c, index: c.hosts[:index].count(c.hosts[index])),
        _of_cluster(lambda c, index: c.hosts.count(c.hosts[index])),
        when=_is_worker_of_several,
        # A worker is a host to launchers that start ranks in it.
        holds=("farandole", "torchrun", *_MPI, "slurm", "horovod", "kubernetes", "plain", "pmix",
               "sagemaker"),
    ),
)  # fmt: skip

VARIABLES = frozenset(
    name
    for row in LAUNCHERS
    for names in (*(value.names for value in row.place), row.job, *row.needs)
    for name in names
)

# Launchers set more variables than the table has, and their libraries read them.
_PREFIXES = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_")
_FOREIGN = frozenset(
    name
    for row in LAUNCHERS
    if "farandole" not in row.holds
    for value in row.place
    for name in value.names
)


def without_launchers(environment: Environment) -> dict[str, str]:
    """The environment for ranks of our own: without the places that launchers around us gave to
    this process, for which a rank would take them."""
    return {
        name: text
        for name, text in environment.items()
        if not name.startswith(_PREFIXES) and name not in _FOREIGN
    }
