"""A daemon of MPS, by which processes that share a device run on it at once instead of by turns.

It is a user's own: with folders of its own, and nothing of the device is set. Processes that have
its settings find it; it starts its server for the first of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TOOL = "nvidia-cuda-mps-control"
PLACES = ("/usr/local/nvidia/bin", "/usr/bin")
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
LIMIT = 10  # seconds for it to begin, to answer and to end
LINES = 6  # of a log


class NoDaemon(Exception):
    """Why there is none."""


def find() -> str:
    """The tool; raises NoDaemon."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    if tool := shutil.which(TOOL, path=path):
        return tool
    raise NoDaemon(f"there is no {TOOL}")


class Daemon:
    """A control daemon of MPS; processes find it by `settings`."""

    def __init__(self, tool: str, folder: Path) -> None:
        self._tool, self._pipes, self._logs = tool, folder / "pipe", folder / "log"
        for made in (self._pipes, self._logs):
            made.mkdir()
        self.settings = {PIPES: str(self._pipes), LOGS: str(self._logs)}

    def begin(self) -> None:
        code, said = self._run("-d")
        if code != 0:
            raise NoDaemon(f"{TOOL} -d: {said or f'exit code {code}'}")

    def says(self) -> str:
        """The daemon's servers, and the ends of its logs, which tell whether there were clients."""
        _, said = self._run(asked="get_server_list")
        words = [
            f"{log.name}: {line}"
            for log in sorted(self._logs.glob("*.log"))
            for line in log.read_text(errors="replace").splitlines()[-LINES:]
        ]
        return "\n".join([f"servers: {' '.join(said.split()) or 'none'}", *words])

    def end(self) -> None:
        """Ends the daemon and its servers; kills those that do not end by themselves."""
        held = self._processes()
        self._run(asked="quit")
        _await_ends(held)
        for pid in filter(_runs, held):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _await_ends(held)

    def _processes(self) -> list[int]:
        """The daemon's and its servers'."""
        found: list[int] = []
        with contextlib.suppress(OSError, ValueError):
            found.append(int((self._pipes / f"{TOOL}.pid").read_text()))
            children = Path(f"/proc/{found[0]}/task/{found[0]}/children").read_text()
            found += map(int, children.split())
        return found

    def _run(self, *options: str, asked: str = "") -> tuple[int, str]:
        """Its output goes to a file: a daemon would hold a pipe open."""
        with tempfile.TemporaryFile("w+") as said:
            try:
                code = subprocess.run(
                    [self._tool, *options], input=f"{asked}\n", text=True, stdout=said,
                    stderr=said, env={**os.environ, **self.settings}, timeout=LIMIT, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired:
                return 1, f"not done after {LIMIT} s"
            except OSError as error:
                return 1, str(error)
            said.seek(0)
            return code, said.read().strip()


def _runs(pid: int) -> bool:
    """A process that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _await_ends(pids: list[int]) -> None:
    end = time.monotonic() + LIMIT
    while any(map(_runs, pids)) and time.monotonic() < end:
        time.sleep(0.05)


@contextlib.contextmanager
def daemon() -> Iterator[Daemon]:
    """Raises NoDaemon. However the block ends, none is left."""
    tool = find()
    with tempfile.TemporaryDirectory(prefix="farandole-mps-") as folder:
        started = Daemon(tool, Path(folder))
        try:
            started.begin()
            yield started
        finally:
            started.end()
