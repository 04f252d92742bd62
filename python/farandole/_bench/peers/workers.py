"""The ranks of a peer, which wait to be told what to measure.

Each rank connects to a socket of ours and reads one JSON line at a time::

    to every rank    {"collective": "all_reduce", "bytes": 1048576, "dtype": "float32",
                      "memory": "ours", "options": {}, "hot": false, "warm": 3,
                      "iterations": 100, "keep": what buffers stay for}
    from every rank  {"times": [nanoseconds, …], "wrong": 0, "wall": nanoseconds, …}
                     or {"unable": "MPI has no bfloat16"}

A rank with nothing to do sleeps in the kernel until its line comes, so peers that wait cost the one
that is measured nothing. The end of the socket ends the rank: no process outlives this one.
"""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from farandole._bench.peers.finding import Found
from farandole._bench.peers.hosts import Hosts, command_over
from farandole._bench.peers.table import PeerError
from farandole._launch.job import LaunchError
from farandole._launch.ranks import Started, start_rank

# The peer's Python may be another environment, without farandole: it borrows ours, and no more.
_WORKER = (
    "import sys; sys.path.insert(0, sys.argv[1]); import farandole; del sys.path[0];"
    "from farandole._bench.peers.worker import main; main(sys.argv[2])"
)
_PACKAGE = str(Path(__file__).parents[3])
_START_SECONDS = 60.0
_ANSWER_SECONDS = 120.0
_END_SECONDS = 10.0
_LINE = 64  # bytes of a cache line: each rank's flag has its own


class Workers:
    """The ranks of one peer."""

    def __init__(self, found: Found, launched: Started) -> None:
        self.peer = found.peer
        self.version = ""
        self.cores: list[int | None] = []
        self._launched = launched
        self._lines: list[IO[str]] = []  # of each rank

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

    def accept(self, listener: socket.socket, ranks: int) -> None:
        """Waits until every rank has said who it is."""
        found: dict[int, tuple[IO[str], dict[str, Any]]] = {}
        listener.settimeout(0.2)
        until = time.monotonic() + _START_SECONDS
        while len(found) < ranks:
            if self._launched.process.poll() is not None or time.monotonic() > until:
                raise PeerError(f"{self.peer.label} did not start")
            with suppress(TimeoutError):
                line = _connect(listener)
                self._lines.append(line)
                about = json.loads(line.readline() or "null")
                if about is None:
                    raise PeerError(f"{self.peer.label}: a rank ended while it started")
                found[about["rank"]] = (line, about)
        self._lines = [found[rank][0] for rank in range(ranks)]
        self.version = found[0][1]["version"]
        self.cores = [found[rank][1]["core"] for rank in range(ranks)]

    def end(self) -> None:
        for rank in self._lines:
            with suppress(OSError):
                rank.close()
        self._launched.end(_END_SECONDS)


def _connect(listener: socket.socket) -> IO[str]:
    connection, _ = listener.accept()
    connection.settimeout(_ANSWER_SECONDS)
    line = connection.makefile("rw")
    connection.close()  # the file keeps it
    return line


@contextmanager
def started(found: Found, ranks: int, hosts: Hosts | None = None) -> Iterator[Workers]:
    """Starts a peer's ranks; ends them at the end. PeerError tells their last words."""
    meeting = os.memfd_create("meeting")
    with (
        # By a path, not an abstract name: network namespaces share it.
        tempfile.TemporaryDirectory(prefix="farandole-bench-") as directory,
        socket.socket(socket.AF_UNIX) as listener,
        os.fdopen(meeting, "wb") as shared,
        tempfile.TemporaryFile("w+") as said,
    ):
        folder = Path(directory)
        shared.truncate(ranks * _LINE)
        listener.bind(str(folder / "orders"))
        listener.listen(ranks)
        launcher = found.command(ranks) if hosts is None else command_over(found, hosts, folder)
        own = {
            "BENCH_SOCKET": str(folder / "orders"),
            "BENCH_MEETING": f"/proc/{os.getpid()}/fd/{meeting}",
            **(found.peer.over_network if hosts is not None else {}),
        }
        command = [*launcher, found.python, "-c", _WORKER, _PACKAGE, found.peer.library]
        try:
            launched = start_rank(found.peer.label, command, _environment(found, own), output=said)
        except LaunchError as error:
            raise PeerError(str(error)) from error
        workers = Workers(found, launched)
        try:
            workers.accept(listener, ranks)
            yield workers
        except PeerError as error:
            workers.end()
            raise PeerError(f"{error}{_last_words(said)}") from error
        finally:
            workers.end()


def _environment(found: Found, own: Mapping[str, str]) -> dict[str, str]:
    """The caller's, without what a launcher around us said of this process."""
    launchers = ("OMPI_", "PMI_", "PMIX_", "PRTE_", "HYDRA_")
    mine = {name: text for name, text in os.environ.items() if not name.startswith(launchers)}
    return {**mine, "OMP_NUM_THREADS": "1", **found.environment, **own}


def _last_words(said: IO[str]) -> str:
    """The error of a traceback, or the last lines that have words."""
    said.seek(0)
    lines = [line.strip() for line in said if any(c.isalpha() for c in line)]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    told = dict.fromkeys(errors or lines[-3:])
    return ": " + " / ".join(told)[:500] if told else ""
