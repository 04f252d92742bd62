"""Asks a script of the user's which hosts there are now: Horovod's way to query a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable
from contextlib import suppress

from farandole._launch.hosts import share_of
from farandole._launch.job import LaunchError
from farandole._launch.polling import READ

_PAUSE = 1.0  # seconds, from one end to the next beginning
_MOST = 1 << 20  # bytes that it may say


class Discovery:
    """Runs the script again and again, and never waits for it."""

    def __init__(self, script: str, slots: int, timeout: float) -> None:
        """`slots`: of a host without a number; `timeout`: seconds for one run."""
        self._script, self._slots, self._timeout = script, slots, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._said = bytearray()
        self._next = self._deadline = 0.0
        self.trouble = ""  # why the last run is of no use; the hosts stay as they were

    def descriptors(self) -> list[tuple[int, int]]:
        return [(self._fd(), READ)] if self._process is not None else []

    def due(self) -> float:
        return self._deadline if self._process is not None else self._next

    def turn(self, ready: set[int], now: float) -> dict[str, int] | None:
        """The hosts and their slots, when a run has ended well."""
        if self._process is None:
            if now >= self._next:
                self._begin(now)
            return None
        if now >= self._deadline:
            self.close()
            self._rest(now, f"did not end within {self._timeout:g} s")
            return None
        if self._fd() not in ready:
            return None
        if data := os.read(self._fd(), 1 << 16):
            self._said += data[: _MOST - len(self._said)]
            return None
        return self._end(self._process, now)

    def close(self) -> None:
        """Ends a run that is on its way."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and what it has started
            self._reap(self._process)

    def _fd(self) -> int:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def _begin(self, now: float) -> None:
        self._said.clear()
        self._deadline = now + self._timeout
        try:
            self._process = subprocess.Popen(
                [self._script],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            self._rest(now, f"cannot be executed: {error.strerror}")

    def _end(self, process: subprocess.Popen[bytes], now: float) -> dict[str, int] | None:
        code = self._reap(process)
        if code:
            self._rest(now, f"ended with code {code}")
            return None
        try:
            found = hosts_in(self._said.decode().splitlines(), self._slots)
        except (LaunchError, UnicodeDecodeError) as error:
            self._rest(now, str(error))
            return None
        self._rest(now, "")
        return found

    def _reap(self, process: subprocess.Popen[bytes]) -> int:
        """The script's exit code; 0 where somebody has reaped it before us."""
        assert process.stdout is not None
        process.stdout.close()
        self._process = None
        return process.wait()

    def _rest(self, now: float, trouble: str) -> None:
        self._next = now + _PAUSE
        self.trouble = f"--host-discovery-script: {self._script} {trouble}" if trouble else ""


def hosts_in(lines: Iterable[str], slots: int) -> dict[str, int]:
    """'name:slots' or 'name' of each line.

    Raises:
        LaunchError: a line says something else.
    """
    found: dict[str, int] = {}
    for line in lines:
        if text := line.partition("#")[0].strip():
            share = share_of(text, f"said '{text}', which", slots)
            found[share.host] = found.get(share.host, 0) + share.ranks
    return found
