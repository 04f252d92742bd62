"""Finds out which ranks share a host, and how those of several hosts find each other."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farandole import _core, _elastic, _listening, _meeting, _mpi, _mpi_meeting, _place, _secret
from farandole._core import Error, InvalidArgument, RendezvousError
from farandole._host_parts import host_of_each
from farandole._launchers import PlaceError
from farandole._limits import setting
from farandole._meeting import KeyValueStore
from farandole._mpi import Ranks

_INSECURE = (
    "FARANDOLE_INSECURE=1: nobody has proved to be a rank of this job: who reached the place where "
    "they met, or stood between their hosts meanwhile, can be a rank, change data and weights, and "
    "run code as this user; who only listens learns no secret"
)
_HINT_AFTER = 1.0  # seconds, in which ranks of one host come as a rule


@dataclass(frozen=True)
class Measured:
    """The world as its ranks found it."""

    table: list[dict[str, Any]]  # what each rank says of itself
    hosts: list[str]  # of each rank; the same for those that share one
    secret: bytes  # the job's
    listeners: list[socket.socket]  # of this rank's own addresses
    port: _core.MpiPort | None  # where data go over MPI
    job: str  # the same on all ranks
    tuning: str
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    line: _meeting.Line  # to say that this rank cannot connect to the others


@dataclass(frozen=True)
class Among:
    """A world of some of the ranks that were started: this one's number among all, how many were
    started, and the ranks that form the world, in the same words on each."""

    rank: int
    size: int
    ranks: str


def is_split() -> bool:
    """Whether a test divides this host (FARANDOLE_SPLIT_HOSTS)."""
    return bool(os.environ.get("FARANDOLE_SPLIT_HOSTS"))


def meet(
    rank: int, size: int, job: str, address: str, port: int, timeout: float | None,
    tuning: str, agree: str, store: KeyValueStore | None = None, ranks: Ranks | None = None,
    among: Among | None = None, named: str = "",
) -> Measured:  # fmt: skip
    """Sends to all ranks who this one is and where it listens, and receives the same from all.

    Args:
        named: the job, as its ranks on all hosts call it; empty where this one does not know.
        address, port: of rank 0's host (MASTER_ADDR, MASTER_PORT).
        among: where only some of the job's ranks form the world.
        store: where they meet instead, if there is one already.
        ranks: those of a communicator, in which they meet instead.

    Raises:
        RendezvousError: ranks are missing, or do not agree about their world.
        VersionMismatch: they are of two versions.
        AuthError: there is no secret, or another one.
        InvalidArgument: the ranks share no memory, and FARANDOLE_TRANSPORT says that data go over
            shared memory.
    """
    mine = _meeting.who(rank, size)
    meeting = started(rank, range(size), timeout, "" if among is None else among.ranks)
    where = _Where(meeting, _meeting.MasterPort(address, port), job, store, ranks)
    with where.telling(mine):
        secret, is_made_here = _secret.find(may_be_made=ranks is not None)
    where = replace(where, meeting=replace(meeting, secret=secret))
    with where.telling(mine):  # with what proves who says it
        pair = _secret.Pair() if is_made_here else None
        numbers = (rank, size) if among is None else (among.rank, among.size)
        identity = _identity(*numbers)
    before: _meeting.Met | None = None
    first: list[dict[str, Any]] = []  # what all say before they know what the rest takes
    if pair is not None or where.is_to_be_found():
        key = "" if pair is None else pair.key
        words = {"boot": boot_id(), "identity": identity, "key": key}
        before = where.meet_first(mine | words)
        first = before.table
    with where.telling(mine):
        listeners = _listening.listen(where.of_others(first), avoid=port)
        mine |= _words(job, named, agree, listeners, identity)
        if rank == 0:
            mine |= {"world": secrets.token_hex(8), "tuning": tuning}
        if rank == 0 and pair is not None:
            secret = secrets.token_bytes(_secret.BYTES)
            mine["secrets"] = [pair.hidden(secret, w.get("key", "")) for w in first]
    if ranks is not None:
        mine |= _mpi.threads()
    met = where.exchange(mine, before)
    if rank != 0 and pair is not None:
        with _meeting.told(met.line):
            secret = _handed_out(met.table[0].get("secrets", []), rank, pair, first[0])
    measured = _measured(met, rank, secret, listeners, ranks)  # refused by all, if at all
    if rank == 0 and is_made_here and ranks is None and measured.cross_size > 1:
        meeting.warn(_INSECURE)
    return measured


@dataclass(frozen=True)
class _Where:
    """The place where ranks meet: in a communicator, in a store, or at MASTER_PORT."""

    meeting: _meeting.Meeting
    place: _meeting.MasterPort
    job: str
    store: KeyValueStore | None
    ranks: Ranks | None

    def exchange(self, mine: dict[str, Any], before: _meeting.Met | None = None) -> _meeting.Met:
        """Every rank's words. `before`: of ranks that have met here, and meet again."""
        meeting, place, check = self.meeting, self.place, _meeting.objection
        if self.ranks is not None:
            return _mpi_meeting.exchange(self.ranks, meeting, mine, check, before)
        if (store := self.store or _meeting.torchruns(meeting, place)) is not None:
            return _meeting.exchange_in(store, f"farandole/{self.job}", meeting, mine, check)
        if not place.port:
            raise RendezvousError(
                f"{len(meeting.ranks)} ranks may be on several hosts and MASTER_PORT is not set; "
                "set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there"
            )
        place = replace(place, at=_listening.receiving_at(place.address))
        return _meeting.exchange(meeting, place, mine, check)

    def meet_first(self, mine: dict[str, Any]) -> _meeting.Met:
        """Every rank's words, before ranks meet here again."""
        met = self.exchange(mine)
        if self.ranks is None:
            met.line.end(self.meeting.look)
        return met

    @contextmanager
    def telling(self, mine: dict[str, Any]) -> Iterator[None]:
        """Tells the others of an error of the body: they need not wait for this rank. Without the
        secret it only knocks."""
        try:
            with _mpi_meeting.abandoning(self.ranks):
                yield
        except Error as error:
            if self.ranks is None:
                failed = _meeting.told_of(_meeting.could_not_meet(mine, error))
                until = min(self.meeting.until, time.monotonic() + _meeting.FAREWELL)
                with suppress(RuntimeError):  # they may not be there yet, or have failed, too
                    shorter = replace(self.meeting, until=until)
                    replace(self, meeting=shorter).exchange(mine | {"failed": failed})
            raise

    def is_to_be_found(self) -> bool:
        """Whether nobody has told on which side of the network the others are."""
        return self.ranks is not None and not os.environ.get("MASTER_ADDR")

    def of_others(self, table: list[dict[str, Any]]) -> str:
        """A name on the other side of the network."""
        if not self.is_to_be_found():
            return os.environ.get("MASTER_ADDR") or self.place.address
        elsewhere = (words["host"] for words in table if words["boot"] != boot_id())
        return next(elsewhere, "127.0.0.1")


def _handed_out(
    hidden: list[str], rank: int, pair: _secret.Pair, of_rank_0: dict[str, Any]
) -> bytes:
    """The secret that rank 0 has drawn."""
    if len(hidden) <= rank or len(hidden[rank]) != 2 * _secret.BYTES:
        raise RendezvousError(f"rank 0 has handed no secret to rank {rank}")
    return pair.shown(hidden[rank], of_rank_0.get("key", ""))


def started(
    rank: int, ranks: Sequence[int], timeout: float | None, among: str = "",
    look: Callable[[], None] = _elastic.look,
) -> _meeting.Meeting:  # fmt: skip
    """A meeting of these ranks that begins now."""

    def warn(text: str) -> None:
        if setting("FARANDOLE_LOG") != "error":
            print(f"farandole rank {rank}: warning: {text}", file=sys.stderr, flush=True)

    if timeout is None:
        timeout = float(setting("FARANDOLE_START_TIMEOUT"))
    nobodys = secrets.token_bytes(_secret.BYTES)
    after = float(setting("FARANDOLE_WARN_AFTER"))
    until = time.monotonic() + timeout
    return _meeting.Meeting(rank, ranks, until, nobodys, among, warn, after, look)


def _words(
    job: str, named: str, agree: str, listeners: list[socket.socket], identity: str
) -> dict[str, Any]:  # fmt: skip
    return _meeting.alike(agree) | {
        "identity": identity,
        "addresses": b"".join(_core.tcp_address(each.fileno()) for each in listeners).hex(),
        "job": job,
        "named": named,
    }


def _measured(
    met: _meeting.Met, rank: int, secret: bytes, listeners: list[socket.socket], of: Ranks | None
) -> Measured:
    table = met.table
    identities = [words["identity"] for words in table]
    hosts = list(dict.fromkeys(identities))  # numbered in the order of their lowest ranks
    names = _names([table[identities.index(identity)]["host"] for identity in hosts])
    here = [r for r, identity in enumerate(identities) if identity == identities[rank]]
    local_rank = here.index(rank)
    if len(hosts) > 1 and setting("FARANDOLE_TRANSPORT") == "shm":
        raise InvalidArgument(
            f"FARANDOLE_TRANSPORT=shm, and the ranks are on {len(hosts)} hosts, which share no "
            "memory; unset it, and data go over shared memory within hosts alone"
        )
    if len(hosts) == 1:
        for listener in listeners:
            listener.close()
    return Measured(
        table,
        [names[hosts.index(identity)] for identity in identities],
        secret,
        listeners,
        None if of is None else _port(of, table, len(hosts), secret),
        f"{table[0]['job']}:{table[0]['world']}",
        table[0]["tuning"],
        local_rank,
        len(here),
        hosts.index(identities[rank]),
        len(hosts),
        met.line,
    )


def _port(
    ranks: Ranks, table: list[dict[str, Any]], hosts: int, secret: bytes
) -> _core.MpiPort | None:
    """The port for data over MPI: all of them if demanded, else those between hosts if possible.

    Raises:
        RendezvousError: it is demanded, and not possible.
    """
    chosen = setting("FARANDOLE_TRANSPORT")
    if chosen != "mpi" and (chosen != "auto" or hosts == 1):
        return None
    wire = setting("FARANDOLE_WIRE")
    why_not = _mpi.why_not(table) if wire == "plain" else f"FARANDOLE_WIRE={wire}, over TCP alone"
    if why_not is None:
        return _mpi_meeting.open_port(ranks, int(table[0]["world"], 16), secret)
    if chosen == "mpi":
        raise RendezvousError(f"data cannot go over MPI (FARANDOLE_TRANSPORT=mpi): {why_not}")
    if ranks.rank == 0:
        print(f"farandole: data between hosts go over TCP, not MPI: {why_not}", file=sys.stderr)
    return None


def _names(hosts: list[str]) -> list[str]:
    """One for each host: parts of one machine are numbered."""
    count = Counter(hosts)
    seen: Counter[str] = Counter()
    names = []
    for host in hosts:
        names.append(f"{host}#{seen[host]}" if count[host] > 1 else host)
        seen[host] += 1
    return names


# ---- who this is ----


def _identity(rank: int, size: int) -> str:
    """A text that is equal on ranks that can pass each other descriptors, and on no others."""
    parts = [boot_id()]
    parts += [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("user", "pid", "net")]
    parts.append(str(os.getuid()))
    if split := os.environ.get("FARANDOLE_SPLIT_HOSTS"):
        try:
            parts.append(str(host_of_each(split, size)[rank]))
        except ValueError as error:
            raise InvalidArgument(f"FARANDOLE_SPLIT_HOSTS={error}") from error
    return " ".join(parts)


def boot_id() -> str:
    """The boot id of the kernel that runs here."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# ---- where rank 0 is ----


def master() -> tuple[str, int]:
    """Its address, and the port where ranks meet; 0: none is given.

    Raises:
        RendezvousError: they are none.
    """
    try:
        return _place.master(os.environ)
    except PlaceError as error:
        raise RendezvousError(str(error)) from None


class Hint:
    """A rank that was not told how many ranks its host has takes all to be here. It says so while
    it waits for them: at once where MASTER_ADDR is another host, else when they do not come."""

    def __init__(self, found: _place.Found, rank: int, size: int) -> None:
        address, _ = master()
        self._text = ""
        if found.launcher is None or _listening.is_loopback(address):
            return
        elsewhere = _is_elsewhere(address)
        self._text = (
            f"farandole: rank {rank} waits for {size} ranks on this host, since "
            f"{found.launcher.local_size.names[0]} is not set, but MASTER_ADDR={address} is "
            f"{'another' if elsewhere else 'a'} host{'' if elsewhere else ' that others may reach'}"
            "; if ranks are on several hosts, set it to the number of ranks on each"
        )
        self._when = time.monotonic() + (0 if elsewhere else _HINT_AFTER)
        self.look()

    def look(self) -> None:
        """Asked ten times a second."""
        if self._text and time.monotonic() >= self._when:
            print(self._text, file=sys.stderr, flush=True)
            self._text = ""


def _is_elsewhere(address: str) -> bool:
    """Whether an address is none of this host's, as far as it can be known."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(where)
    except OSError as error:
        return error.errno == errno.EADDRNOTAVAIL
    return False
