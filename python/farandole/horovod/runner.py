"""``horovod.run``: `farandole.run` with Horovod's signature."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from farandole._launch.hosts import slots_here
from farandole._launch.job import LaunchError

__all__ = ["run"]

_R = TypeVar("_R")

# Arguments that change nothing here, and why.
_IGNORED = {
    "ssh_port": "ranks start on this host",
    "ssh_identity_file": "ranks start on this host",
    "disable_cache": "nothing about hosts is cached",
    "verbose": "set FARANDOLE_LOG",
    "use_gloo": "farandole has transports of its own",
    "use_mpi": "farandole has transports of its own",
    "mpi_args": "MPI is not used",
    "network_interface": "ranks of one host use shared memory",
    "network_interfaces": "ranks of one host use shared memory",
    "cooldown_range": "the number of ranks is fixed",
    "reset_limit": "the number of ranks is fixed",
}
_FIXED = "a function runs on a fixed number of ranks; 'farandole run' starts elastic jobs"
_ELASTIC = "min_num_proc max_num_proc min_np max_np slots host_discovery_script"
_REFUSED = {
    **dict.fromkeys(_ELASTIC.split(), _FIXED),
    "executable": "ranks run the Python that calls run()",
    "output_filename": "horovodrun's option alone; the ranks' output is shown as it comes",
}


def run(
    func: Callable[..., _R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | os.PathLike[str] | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
) -> list[_R]:
    """Calls ``func(*args, **kwargs)`` on ``num_proc`` ranks of this host; their results by rank.

    Horovod's other arguments are taken: those that change nothing here with a warning that says
    why, those that ask for what is not there with an error.

    Raises:
        ValueError: more ranks than ``hosts`` or ``hostfile`` have slots, other hosts, elastic jobs.
        Exception: what a rank raised, as `farandole.run` tells it.
    """
    given = [name for name, value in locals().items() if value is not None]
    if refused := [name for name in given if name in _REFUSED]:
        raise ValueError(f"{refused[0]} is not supported: {_REFUSED[refused[0]]}")
    if idle := [name for name in given if name in _IGNORED]:
        why = ", ".join(f"{name} ({_IGNORED[name]})" for name in idle)
        warnings.warn(f"horovod.run ignores {why}", stacklevel=2)
    ranks = num_proc if num_proc is not None else np if np is not None else 1
    try:
        here = slots_here(hosts, Path(hostfile) if hostfile is not None else None)
    except LaunchError as error:
        raise ValueError(str(error)) from None
    if here is not None and ranks > here:
        raise ValueError(f"num_proc is {ranks}, but this host has {here} slots")
    from farandole._run import run as run_ranks

    more = {} if start_timeout is None else {"FARANDOLE_START_TIMEOUT": f"{start_timeout:g}"}
    return run_ranks(func, args, kwargs, ranks, env=more | dict(env or {}))
