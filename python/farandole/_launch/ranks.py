"""What a rank finds in its environment, and starting one."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from farandole._launch.job import LaunchError
from farandole._launch.processes import die_with_parent
from farandole._launchers import without_launchers


class Rank:
    """One started rank. It stays unreaped until the job ends, so its process group's number cannot
    be taken by anybody else while we may still signal it."""

    def __init__(self, number: int, process: subprocess.Popen[bytes]) -> None:
        self.number = number
        self.process = process
        self.exit_code: int | None = None  # negative: minus the signal

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def poll(self) -> bool:
        """Whether the rank ended since the last call. Leaves it a zombie."""
        if not self.alive:
            return False
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        exited = ended.si_code == os.CLD_EXITED
        self.exit_code = ended.si_status if exited else -ended.si_status
        return True

    def signal_group(self, number: signal.Signals) -> None:
        """Signals the rank and what it started in its process group."""
        with suppress(ProcessLookupError, PermissionError):  # all ended, or another user's (setuid)
            os.killpg(self.pid, number)

    def describe_end(self) -> str:
        """'rank 2 (pid 812) was killed by SIGKILL'."""
        return f"rank {self.number} (pid {self.pid}) {describe_exit(self.exit_code or 0)}"


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
    """What all ranks have in common."""
    environment = without_launchers(inherited)
    environment.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_free_port()),
        FARANDOLE_RUN_ID=os.urandom(16).hex(),
        FARANDOLE_RESTART_COUNT="0",
        PYTHONUNBUFFERED="1",
    )
    if not environment.get("OMP_NUM_THREADS"):
        environment["OMP_NUM_THREADS"] = str(threads_per_rank(ranks))
    return environment


def rank_environment(rank: int, ranks: int) -> dict[str, str]:
    """What tells one rank from another, in PyTorch's and in Horovod's words."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "CROSS_RANK": 0,
        "CROSS_SIZE": 1,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "NODE_RANK": 0,
        "GROUP_RANK": 0,
        "HOROVOD_RANK": rank,
        "HOROVOD_SIZE": ranks,
        "HOROVOD_LOCAL_RANK": rank,
        "HOROVOD_LOCAL_SIZE": ranks,
        "HOROVOD_CROSS_RANK": 0,
        "HOROVOD_CROSS_SIZE": 1,
    }
    return {name: str(value) for name, value in place.items()}


def threads_per_rank(ranks: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def start_rank(
    number: int, ranks: int, command: Sequence[str], shared: dict[str, str]
) -> tuple[Rank, tuple[int, int]]:
    """Starts one rank in a session of its own; returns it and its stdout and stderr to read."""
    launcher = os.getpid()
    try:
        out, its_out = os.pipe()
        err, its_err = os.pipe()
        process = subprocess.Popen(
            command,
            env=shared | rank_environment(number, ranks),
            stdin=subprocess.DEVNULL,
            stdout=its_out,
            stderr=its_err,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(launcher),
        )
    except OSError as error:
        reason = f"rank {number} could not be started: {command[0]}: {error.strerror}"
        if error.errno in (errno.EAGAIN, errno.EMFILE):
            reason += " (more ranks than limits allow? see ulimit -n and -u)"
        raise LaunchError(reason, 126) from error
    os.close(its_out)
    os.close(its_err)
    return Rank(number, process), (out, err)


def _free_port() -> int:
    # Not held: to us it is only a name; it is for the user's own init_process_group.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
