"""Where this process stands, as its environment says: who started it, and under which name its
ranks meet."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from farandole._launchers import (
    LAUNCHERS,
    Environment,
    Launcher,
    PlaceError,
    first_of_cluster,
    port,
)


class Found(NamedTuple):
    """The place that the environment gives; None where it says nothing."""

    launcher: Launcher | None = None
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None


def seen(environment: Environment) -> list[Launcher]:
    """All launchers that left a place in the environment, by precedence."""
    return [launcher for launcher in LAUNCHERS if launcher.is_seen(environment)]


def find(environment: Environment) -> Found:
    """The launcher that started this process, and what it says.

    Raises:
        PlaceError: launchers that disagree, or a value that is no number.
    """
    launcher = _innermost(seen(environment), environment)
    if launcher is None:
        return Found()
    return Found(launcher, *(value.of(environment) for value in launcher.place))


def _innermost(visible: Sequence[Launcher], environment: Environment) -> Launcher | None:
    """The first that no other contradicts, unless one is known to be started inside the other."""
    for launcher in visible:
        against = [other for other in visible if _disagree(launcher, other, environment)]
        if any(other.key in launcher.holds for other in against):
            continue
        for other in against:
            if launcher.key not in other.holds:
                raise _contradiction(launcher, other, environment)
        return launcher
    return None


def _disagree(one: Launcher, other: Launcher, environment: Environment) -> bool:
    pairs = ((one.rank, other.rank), (one.size, other.size))
    numbers = [(a.of(environment), b.of(environment)) for a, b in pairs]
    return any(a != b for a, b in numbers if a is not None and b is not None)


def _contradiction(one: Launcher, other: Launcher, environment: Environment) -> PlaceError:
    return PlaceError(
        f"two launchers disagree about this process: {_told(one, environment)}, but "
        f"{_told(other, environment)}; unset the variables of the one that did not start it, or "
        "give rank and size to init()"
    )


def _told(launcher: Launcher, environment: Environment) -> str:
    """'srun of Slurm says SLURM_PROCID=1, SLURM_NTASKS=4'."""
    names = (launcher.rank.name(environment), launcher.size.name(environment))
    values = ", ".join(f"{name}={environment[name]}" for name in names if name)
    return f"{launcher.name} says {values}"


def half_said(found: Found) -> str:
    """The message about what is missing, where only one of rank and size is known."""
    launcher = found.launcher or LAUNCHERS[0]
    given, lacking = launcher.rank.names[0], launcher.size.names[0]
    if found.rank is None:
        given, lacking = lacking, given
    by = f" ({found.launcher.name})" if found.launcher else ""
    return f"{given} is given, but {lacking} is not{by}; set {lacking}, or unset {given}"


def used(launcher: Launcher, environment: Environment) -> dict[str, str]:
    """The variables by which the launcher was recognised and read."""
    names = [name for value in launcher.place if (name := value.name(environment))]
    names += [name for group in (*launcher.needs, launcher.job) for name in group]
    return {name: environment[name] for name in names if environment.get(name)}


# ---- the job's name ----


def job_name(launcher: Launcher | None, size: int, epoch: int, environment: Environment) -> str:
    """The name that the ranks of this job, and of no other, have in common."""

    address, port = master(environment)
    called = job_id(launcher or _NOBODY, environment)
    return ":".join([address, str(port), str(size), called, _restarts(environment), str(epoch)])


def _restarts(environment: Environment) -> str:
    """How often the job was started again, where all ranks know the same: of several torchruns each
    counts its own."""
    names = ["FARANDOLE_RESTART_COUNT"]
    if environment.get("GROUP_WORLD_SIZE", "1") == "1":
        names.append("TORCHELASTIC_RESTART_COUNT")
    return _first(environment, *names)


def master(environment: Environment) -> tuple[str, int]:
    """The address and port where ranks of several hosts meet; 0: none is given."""
    address = _first(environment, "MASTER_ADDR", "HOROVOD_GLOO_RENDEZVOUS_ADDR")
    name = next((name for name in _PORTS if environment.get(name)), None)
    if not address and name is None and (first := first_of_cluster(environment)) is not None:
        return first
    if address.startswith("[") and address.endswith("]"):  # an IPv6 address, as URLs have it
        address = address[1:-1]
    try:
        address.encode("idna")  # as who looks for it will
    except UnicodeError:
        why = f"the environment says that rank 0 is on {address}, which is no host's name"
        raise PlaceError(why) from None
    return address or "127.0.0.1", port(environment, name) if name else 0


def _first(environment: Environment, *names: str) -> str:
    return next((environment[name] for name in names if environment.get(name)), "")


_PORTS = ("MASTER_PORT", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_NOBODY = next(launcher for launcher in LAUNCHERS if launcher.key == "plain")


def common_id(launcher: Launcher | None, environment: Environment) -> str:
    """The job's name that its ranks know on all hosts; empty where there is none."""
    told = (_first(environment, *names) for names in (launcher or _NOBODY).common)
    return ",".join(filter(None, told))


def job_id(launcher: Launcher, environment: Environment) -> str:
    """By what the launcher calls the job, else by the process of it that started this one."""
    told = [environment[name] for name in launcher.job if environment.get(name)]
    if told or not launcher.process:
        return ",".join(told)
    above = list(_processes_above())
    named = [p for p in above if p.name in launcher.process]
    return next((f"{p.pid}@{p.start}" for p in named + above), "")


class _Process(NamedTuple):
    pid: int
    name: str  # its first 15 bytes
    start: str  # in clock ticks since boot: another process of this number began at another time


def _processes_above() -> Iterator[_Process]:
    """The parent, its parent and so on, as far as they may be seen."""
    pid = os.getppid()
    while pid > 0:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        head, _, tail = stat.rpartition(")")
        fields = tail.split()
        yield _Process(pid, head.partition("(")[2], fields[19])
        pid = int(fields[1])
