"""Measures an unknown kind of host for ``farandole run``, before ranks start: once, and only where
that is worth the wait. Runs in the launcher, so it imports as little.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from farandole._tune import kept

_MOST_TRIES = 3  # of a host that always turns out to be noisy
_MOST_BUSY = 0.2  # of all cores' time
_LOOK_SECONDS = 0.1
_LIMIT_SECONDS = 15.0  # far beyond what it takes


def measure_if_unknown(ranks: int) -> None:
    """Does what `FARANDOLE_TUNING=auto` asks for. Measures this kind of host if it has no table, is
    quiet, and the next job will find the table that this one measures; else does nothing.
    Never fails."""
    in_a_job = bool(os.environ.get("RANK"))
    if in_a_job or not 2 <= ranks <= kept.usable_cores():
        return
    try:
        path = kept.path_here()
    except kept.NotBelieved:
        return
    reason = _why_unknown(path)
    if not reason or _is_passing() or not _is_quiet():
        return
    with _locked(Path(path).parent) as mine:
        if mine:
            _say(f"{reason}; measuring it once, about 2 s (FARANDOLE_TUNING=kept does not)")
            _measure()


def _why_unknown(path: str) -> str:
    """Why this host has no table; empty if it has one, or there is no use in trying."""
    try:
        found = kept.read(path)
    except FileNotFoundError:
        return "this kind of host is new"
    except kept.NotBelieved as error:
        return f"{path} is not used: {error}"
    except OSError:
        return ""
    noisy = found.is_noisy and found.tries < _MOST_TRIES
    return "this host was busy when it was measured" if noisy else ""


def _is_passing() -> bool:
    """Whether this is a machine of continuous integration, which forgets what it learns."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")


def _is_quiet() -> bool:
    """Whether other programs leave the cores alone, at a glance."""
    before = _ticks()
    time.sleep(_LOOK_SECONDS)
    after = _ticks()
    busy, all_of_it = after[0] - before[0], after[1] - before[1]
    return all_of_it > 0 and busy <= _MOST_BUSY * all_of_it


def _ticks() -> tuple[int, int]:
    """(busy, all) of all cores together."""
    with suppress(OSError, ValueError), Path("/proc/stat").open() as file:
        user, nice, system, idle, waiting, *more = map(int, file.readline().split()[1:9])
        busy = user + nice + system + sum(more)
        return busy, busy + idle + waiting
    return 0, 0


@contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Whether it is on us to measure: jobs that start at once would measure each other."""
    import fcntl

    lock = None
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        mine = os.access(directory, os.W_OK)
    except OSError:
        mine = False
    try:
        yield mine
    finally:
        if lock is not None:
            os.close(lock)


def _measure() -> None:
    """Measures in a process that ends with this one, so that this one stays as small as it was."""
    import subprocess

    from farandole._launch.processes import die_with_parent

    command = [sys.executable, "-m", "farandole", "tune", "--first-use"]
    parent = os.getpid()
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace", timeout=_LIMIT_SECONDS, check=False,
            preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        trouble = type(error).__name__
    else:
        trouble = (done.stderr.strip().splitlines() or [""])[-1] if done.returncode else ""
    if trouble:
        _say(f"it could not be measured ({trouble}); FARANDOLE_TUNING=kept does not try")


def _say(line: str) -> None:
    print(f"farandole: {line}", file=sys.stderr, flush=True)
