"""Where ranks look for the one that receives: at MASTER_PORT, or by the job's name on its host."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from farandole._core import AuthError, Error, RendezvousError
from farandole._meeting.connection import POLITE, Connection

_BACKLOG = 4096  # the kernel takes what it allows (net.core.somaxconn)
_LOOK = 1.0  # seconds between two looks whether somebody has the name and does not listen
_LISTENING, _UNCONNECTED = 1 << 16, "01"  # __SO_ACCEPTCON, SS_UNCONNECTED in the kernel's table


class Place(Protocol):
    """A place where ranks meet. As text: "at 127.0.0.1:29500"."""

    # Whether another world may meet there, or a rank be started in a dead one's stead.
    others_may_come: bool
    advice: str  # where nobody receives there
    advice_to_first: str  # where it cannot be had

    def listen(self) -> list[socket.socket]:
        """Raises OSError where this place cannot be had, EADDRINUSE where another has it."""

    def dial(self) -> Connection:
        """Raises OSError where nobody listens."""

    def admits(self, connection: Connection) -> bool:
        """Whether a client may be one of ours, before it says anything."""

    def is_patient(self, connection: Connection) -> bool:
        """Whether a listener that says nothing yet may take longer."""

    def stranger(self, who: str, connection: Connection, what: str) -> Error:
        """The error if the listener there is none of ours."""


@dataclass(frozen=True)
class MasterPort:
    """Both ends prove that they know the job's secret."""

    address: str
    port: int
    at: Sequence[str] = ()  # addresses at which to receive; none: those of the name above

    others_may_come = True
    advice = "check MASTER_ADDR and MASTER_PORT, and look at rank 0's log"
    advice_to_first = (
        "MASTER_ADDR is an address of rank 0's host, and MASTER_PORT a free port there"
    )

    def __str__(self) -> str:
        return f"at {self.address}:{self.port}"

    def listen(self) -> list[socket.socket]:
        listeners: list[socket.socket] = []
        try:
            for family, where in self._places():
                _listen_too(listeners, family, where)
        except OSError:
            for listener in listeners:
                listener.close()
            raise
        return listeners

    def _places(self) -> list[tuple[int, Any]]:
        found = [
            socket.getaddrinfo(address, self.port, type=socket.SOCK_STREAM)[0]
            for address in self.at or [self.address]
        ]
        return [(family, where) for family, _, _, _, where in found]

    def dial(self) -> Connection:
        """Where nobody listens, the kernel may give this very port to the client, which then
        connects to itself, and keeps others from listening there."""
        found = socket.create_connection((self.address, self.port), timeout=POLITE)
        if found.getsockname() != found.getpeername():
            return Connection(found)
        at_once = struct.pack("ii", 1, 0)  # the port is free again
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
        found.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    def admits(self, _: Connection) -> bool:
        return True

    def is_patient(self, _: Connection) -> bool:
        return False

    def stranger(self, who: str, _: Connection, what: str) -> Error:
        return AuthError(
            f"who listens {self} {what}: it does not know the secret of {who}'s job; give every "
            "rank the same FARANDOLE_SECRET_FILE, and every job a port of its own"
        )


def _listen_too(listeners: list[socket.socket], family: int, where: Any) -> None:
    """Raises OSError where another process has the port, or where the first place cannot be had;
    a further one may be tentative, say."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _open(listener, where)
    except OSError as error:
        listener.close()
        if not listeners or error.errno == errno.EADDRINUSE:
            raise
    else:
        listeners.append(listener)


def _open(listener: socket.socket, where: Any) -> None:
    listener.bind(where)
    listener.listen(_BACKLOG)
    listener.setblocking(False)


class JobsName:
    """An abstract address, which no file system keeps: of this host, and of this user's processes
    alone, as the kernel says."""

    others_may_come = False

    def __init__(self, job: str) -> None:
        name = f"farandole-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:16]}-{job}"
        self._name = name.encode()[:107].decode(errors="ignore")  # so many has an address
        self._next_look = time.monotonic() + _LOOK
        self._is_deaf = False
        self.advice = (
            f"the job is '{job}'; check that all ranks share MASTER_ADDR, MASTER_PORT and "
            "WORLD_SIZE, and look at that rank's log"
        )
        self.advice_to_first = (
            f"another first rank of the job '{job}' is there: end it, or give this job another "
            "MASTER_PORT"
        )

    def __str__(self) -> str:
        return "on this host"

    def listen(self) -> list[socket.socket]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _open(listener, f"\0{self._name}")
        except OSError:
            listener.close()
            raise
        return [listener]

    def dial(self) -> Connection:
        """Without waiting: a full queue is an error, too."""
        found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        found.setblocking(False)
        try:
            found.connect(f"\0{self._name}")
        except OSError as error:
            found.close()
            if isinstance(error, BlockingIOError):
                raise OSError(errno.EAGAIN, "its place is held, and takes nobody in") from error
            self._look_for_the_deaf()
            raise
        connection = Connection(found)
        if not connection.is_of_this_user():
            connection.close()
            raise AuthError("the rank that receives this job's ranks runs as another user")
        return connection

    def _look_for_the_deaf(self) -> None:
        """Looks twice, since a process that has the name listens only a moment later."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK
        was_deaf, self._is_deaf = self._is_deaf, self._is_held_silently()
        if was_deaf and self._is_deaf:
            raise RendezvousError(
                f"somebody holds the place of this job's first rank {self} and does not listen; "
                f"{self.advice}"
            )

    def _is_held_silently(self) -> bool:
        for line in Path("/proc/net/unix").read_text(errors="replace").splitlines():
            if line.endswith(f" @{self._name}"):
                flags, _, state = line.split()[3:6]
                if state == _UNCONNECTED and not int(flags, 16) & _LISTENING:
                    return True
        return False

    def admits(self, connection: Connection) -> bool:
        return connection.is_of_this_user()

    def is_patient(self, connection: Connection) -> bool:
        """Whether the listener's process is stopped, say."""
        return state_of(connection.process()) in ("T", "t", "D")

    def stranger(self, who: str, connection: Connection, what: str) -> Error:
        return RendezvousError(
            f"{who} found process {connection.process()} in the place of this job's first rank "
            f"{self}, and it {what}; {self.advice}"
        )


def state_of(process: int) -> str:
    """The state of a process of this host: a letter of proc(5), "X" if it is gone."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "X"
    return stat.rpartition(")")[2].split()[0]
