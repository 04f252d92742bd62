"""The description of a job, as the launcher takes it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from farandole._words import CommandError


class LaunchError(CommandError):
    """The job could not be started."""


class Copies(NamedTuple):
    """Files that get what ranks write, byte for byte."""

    option: str  # that asked for them, for messages
    directory: Path
    names: tuple[str, str]  # of stdout's and stderr's, with {rank}, and {width} of the highest
    overwrite: bool  # else a file that is there already is an error


class Share(NamedTuple):
    """One host's share of a job's ranks."""

    host: str
    ranks: int


LAUNCHERS = ("ssh", "netns", "local")


class Reach(NamedTuple):
    """How the agents of other hosts are started."""

    launcher: str = "ssh"  # one of LAUNCHERS
    python: str = sys.executable  # that starts them
    ssh_port: int | None = None
    ssh_identity: Path | None = None


class Elastic(NamedTuple):
    """The limits of an elastic job, whose ranks may come and go."""

    least: int  # ranks of a world
    most: int
    timeout: float = 600.0  # seconds until there are so many again
    worlds: int | None = None  # after the first one; None: as many as it takes
    cooldown: tuple[float, float] = (1.0, 60.0)  # seconds that a slot rests: at first, at most
    discovery: str = ""  # a script that says which hosts there are
    slots: int = 1  # of a host for which the script gives no number


class Job(NamedTuple):  # a dataclass would import inspect: ranks start that much later
    """One command, started once per rank."""

    command: list[str]
    ranks: int
    prefix: bool = True
    all_output: bool = False  # the progress bars of all ranks, not of rank 0 alone
    colours: tuple[bool, bool] = (False, False)  # on stdout, on stderr
    copies: Copies | None = None
    environment: Mapping[str, str] = MappingProxyType({})  # besides what is inherited
    grace: float = 1.0
    patience: float = 5.0
    hosts: Sequence[Share] = ()  # in order; none: this host alone, without an agent
    reach: Reach | None = None  # how agents are started there
    start_timeout: float = 30.0  # until all of them are ready
    insecure: bool = False  # ranks of several hosts meet without a secret
    binding: str = "none"  # of ranks to processors, one of BINDINGS
    restarts: int = 0  # at most so often, after a failure, from its beginning
    ends_at: float | None = None  # in time.monotonic(); restarts included
    elastic: Elastic | None = None  # else the job ends with the first rank that fails
    slow: float = (
        0.25  # a rank is named if all others wait for it for this share of the time; 0: no
    )
    metrics: socket.socket | None = None  # listens; it serves the counters of all ranks
