"""The environment of a rank, and its start."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from farandole._launch.job import LaunchError
from farandole._launch.processes import die_with_parent
from farandole._launchers import without_launchers

_OURS, _TRIES = range(20_000, 32_768), 100  # of ports


class Rendezvous(NamedTuple):
    """Where the ranks of a job meet; the same for all of them."""

    address: str
    port: int
    run_id: str

    @staticmethod
    def on_this_host() -> Rendezvous:
        return Rendezvous("127.0.0.1", free_port("127.0.0.1"), new_run_id())

    def environment(self) -> dict[str, str]:
        return {
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            "FARANDOLE_RUN_ID": self.run_id,
        }


def new_run_id() -> str:
    return os.urandom(16).hex()


def free_port(address: str = "") -> int:
    """A free port, not held for the process that will listen there later. It lies outside the range
    that the kernel gives to connections, one of which could take it meanwhile."""
    first = _first_of_connections()
    for port in random.sample(_OURS, _TRIES):
        with suppress(OSError):  # somebody has it
            if port < first:
                return _bound(address, port)
    return _bound(address, 0)


def _bound(address: str, port: int) -> int:
    at = socket.getaddrinfo(address or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    with socket.socket(at[0]) as probe:
        probe.bind(at[4])
        bound: int = probe.getsockname()[1]
        return bound


def _first_of_connections() -> int:
    with suppress(OSError):
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return _OURS.stop


def describe_exit(exit_code: int) -> str:
    """'exited with code 3' or 'was killed by SIGKILL'."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def shell_code(exit_code: int) -> int:
    """The code a shell gives for it: 128 + n for signal n."""
    return exit_code if exit_code >= 0 else 128 - exit_code


def check_command(command: Sequence[str]) -> None:
    """Fails as a shell does: 127 if there is no such command, 126 if it cannot be executed."""
    name = command[0]
    if shutil.which(name) is not None:
        return
    if "/" in name and Path(name).is_dir():
        raise LaunchError(f"{name} is a directory, not a command", 126)
    if Path(name).is_file():
        if name.endswith(".py"):
            raise LaunchError(f"{name} is not executable; perhaps: python {name}", 126)
        if "/" not in name and os.access(name, os.X_OK):
            raise LaunchError(f"{name} is not in PATH; perhaps: ./{name}", 127)
        raise LaunchError(f"{name}: permission denied (it is not executable)", 126)
    raise LaunchError(f"{name}: command not found", 127)


def shared_environment(ranks: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables that all ranks of a host share, besides where they meet."""
    environment = without_launchers(inherited)
    environment.update(PYTHONUNBUFFERED="1")
    if not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(threads_per_rank(ranks))
    return environment


def rank_environment(rank: int, counts: Sequence[int]) -> dict[str, str]:
    """The variables that tell one rank from another, by PyTorch's and by Horovod's names.

    `counts`: how many ranks each host has; they are numbered host by host.
    """
    host, local = 0, rank
    while local >= counts[host]:
        local -= counts[host]
        host += 1
    peers = [h for h, count in enumerate(counts) if local < count]  # hosts with such a local rank
    place = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "CROSS_RANK": peers.index(host),
        "CROSS_SIZE": len(peers),
        "WORLD_SIZE": sum(counts),
        "LOCAL_WORLD_SIZE": counts[host],
        "NODE_RANK": host,
        "GROUP_RANK": host,
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": sum(counts),
        "HOROVOD_LOCAL_RANK": local,
        "HOROVOD_LOCAL_SIZE": counts[host],
        "HOROVOD_CROSS_RANK": peers.index(host),
        "HOROVOD_CROSS_SIZE": len(peers),
    }
    return {name: str(value) for name, value in place.items()}


def threads_per_rank(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


class Started(NamedTuple):
    """A process of ours; `out` and `err` read what it writes, if that goes to no file."""

    process: subprocess.Popen[bytes]
    out: int = -1
    err: int = -1

    def kill(self) -> None:
        """Kills its session, which it leads even when it has ended itself."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self, patience: float) -> None:
        """Waits that long, then again after SIGTERM; no process of its session is left."""
        for ask in (self.process.terminate, self.kill):
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
                break
            ask()
        self.kill()
        self.process.wait()


def start_rank(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    output: IO[Any] | None = None,
    pass_fds: Sequence[int] = (),
    cpus: Collection[int] = (),
) -> Started:
    """Starts a rank, or a launcher of others, in a session of its own. The kernel kills it when
    this process ends. `output`: a file for what it writes; else two pipes. `cpus`: where it may
    run; empty: as this process.

    Raises:
        LaunchError: it could not be started; nothing of it is left.
    """
    parent = os.getpid()
    pipes: list[tuple[int, int]] = []

    def begin() -> None:
        die_with_parent(parent)
        if cpus:
            os.sched_setaffinity(0, cpus)

    try:
        while output is None and len(pipes) < 2:
            pipes.append(os.pipe())
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output or pipes[0][1],
            stderr=output or pipes[1][1],
            pass_fds=pass_fds,
            start_new_session=True,
            preexec_fn=begin,
        )
    except OSError as error:
        for read, _ in pipes:
            os.close(read)
        reason = f"{name} could not be started: {command[0]}: {error.strerror}"
        if error.errno in (errno.EAGAIN, errno.EMFILE):
            reason += " (more ranks than limits allow? see ulimit -n and -u)"
        raise LaunchError(reason, 126) from error
    finally:
        for _, write in pipes:
            os.close(write)
    return Started(process, *(read for read, _ in pipes))
